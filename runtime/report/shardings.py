"""The section of the shardings: how each layer's tensors are cut, as in figure 12 of the paper."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from math import prod
from typing import Any

from bokeh.models import ColumnDataSource, FixedTicker, HoverTool, Label, PlainText
from bokeh.plotting import figure

from alpa.passes.cost.device import size_text
from alpa.passes.plan.layer_shardings import Block, Contraction, ShardedTensor, StageShardings, Use
from alpa.passes.plan.text import count_text, ranges_text
from alpa.runtime.report.content import Content
from alpa.runtime.report.figures import AXES, GREY, SEVERAL_AXES, drawn, new_figure, without_lines
from alpa.runtime.report.markup import (
    Cell,
    Html,
    breakable,
    details,
    element,
    joined,
    section,
    source,
    table,
)

_ROWS: tuple[Use, ...] = ("activation", "parameter", "input")
"""From below."""
_MOST = 8
"""The most parts of a dimension that are drawn."""
_LETTERS = 13
"""Of a column's name."""
_WIDTH, _HEIGHT = 0.86, 0.8


def shardings(content: Content) -> Html:
    """The section."""
    return section(
        "shardings",
        "How each layer is sharded",
        element(
            "p",
            "Each column is a matrix product or a convolution of the forward part, with its "
            "inputs, its parameter and the activation that it makes. The tiles are the parts of a "
            "tensor: cut across by its first dimensions, and lengthwise by its last ones. The "
            "colour is the mesh axis that cuts it; a grey tensor is whole on every device. "
            "Columns that repeat, such as those of equal layers, are shown once.",
        ),
        *(_stage(content, number, one) for number, one in enumerate(content.shardings)),
    )


def _stage(content: Content, figure_number: int, one: StageShardings) -> Html:
    """Stages that are alike."""
    stages = {mesh.name: number for number, mesh in enumerate(content.numbers.meshes)}
    program = content.name
    numbers = [stages[mesh] for mesh in one.meshes]
    title = f"{'stage' if len(numbers) == 1 else 'stages'} {ranges_text(numbers)}"
    colors = {name: AXES[at % len(AXES)] for at, (name, _) in enumerate(one.axes)}
    real = [(name, size) for name, size in one.axes if size > 1]
    key = [(colors[name], f"{name}: {count_text(size, 'device')}") for name, size in real]
    if len(real) > 1:
        key.append((SEVERAL_AXES, "several axes"))
    key.append((GREY, "whole on every device"))
    swatches = (
        element("li", element("span", class_="swatch", style=f"background:{color}"), text)
        for color, text in key
    )
    if not one.blocks:
        words = element("p", "no matrix product and no convolution")
        return element("div", element("h3", title), words)
    count = sum(len(block.contractions) for block in one.blocks)
    return element(
        "div",
        element("h3", title),
        element("ul", *swatches, class_="key"),
        drawn(
            f"shardings-{figure_number}",
            _figure(one, colors),
            f"Shardings of {title}: {count_text(count, 'column')}; the table below has them",
        ),
        details(f"Shardings of {title} as a table", _table(one, colors, program)),
    )


def _figure(one: StageShardings, colors: Mapping[str, str]) -> figure:
    sizes = dict(one.axes)
    count = sum(len(block.contractions) for block in one.blocks)
    spaces = len(one.blocks) - 1
    wide = max(8.0, count + 0.5 * spaces)
    made = new_figure(
        270,
        x_range=(-0.55, wide - 0.45),
        y_range=(-0.55, 2.95),
        tools="xpan,xwheel_zoom,reset,save",
        active_scroll=None,
    )
    made.yaxis.ticker = [0, 1, 2]
    made.yaxis.major_label_overrides = dict(enumerate(_ROWS))
    without_lines(made)
    columns: dict[str, Any] = {
        name: []
        for name in ("x", "y", "width", "height", "color", "op", "use", "shape", "held", "place")
    }
    ticks: dict[float | str, Any] = {}
    at = 0.0
    for block in one.blocks:
        if spaces or block.repeats > 1:
            _title(made, block, at)
        for contraction in block.contractions:
            ticks[at] = PlainText(text=_short(contraction))
            for row, x, width, tensor in _placed(contraction, at):
                for tile in _tiles(tensor, (x, row), (width, _HEIGHT), sizes):
                    cells = (
                        *tile,
                        _color(tensor, colors),
                        contraction.name,
                        tensor.use,
                        tensor.in_words + _partial(tensor),
                        size_text(tensor.local_bytes),
                        str(contraction.place),
                    )
                    for column, cell in zip(columns.values(), cells, strict=True):
                        column.append(cell)
            at += 1
        at += 0.5
    made.xaxis.ticker = FixedTicker(ticks=[float(at) for at in ticks])
    made.xaxis.major_label_overrides = ticks
    made.xaxis.major_label_orientation = 0.0 if count <= 12 else 0.9
    tiles = made.rect(
        x="x",
        y="y",
        width="width",
        height="height",
        fill_color="color",
        line_color=None,
        border_radius=2,  # pyright: ignore[reportArgumentType] - its stubs want a property
        source=ColumnDataSource(columns),
    )
    tips = [
        ("op", "@op"),
        ("tensor", "@use"),
        ("sizes / axes", "@shape"),
        ("on a device", "@held"),
        ("source", "@place"),
    ]
    made.add_tools(HoverTool(renderers=[tiles], tooltips=tips, visible=False))
    return made


def _title(made: figure, block: Block, at: float) -> None:
    """Writes how often a block comes over its first column."""
    text = f"{block.repeats} times" if block.repeats > 1 else "once"
    label = Label(x=at - _WIDTH / 2, y=2.55, text=text, text_font_size="12px")
    made.add_layout(label)


def _short(contraction: Contraction) -> str:
    text = contraction.name.rpartition("/")[0].rpartition("/")[2] or contraction.op
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 1]}…"


def _placed(
    contraction: Contraction, at: float
) -> Iterator[tuple[int, float, float, ShardedTensor]]:
    """The row, the middle, the width and the tensor; two of one kind share the place of one."""
    for row, use in enumerate(_ROWS):
        tensors = [tensor for tensor in contraction.tensors if tensor.use == use]
        width = _WIDTH / max(1, len(tensors))
        for number, tensor in enumerate(tensors):
            gap = 0.04 if len(tensors) > 1 else 0.0
            middle = at - _WIDTH / 2 + (number + 0.5) * width
            yield row, middle, width - gap, tensor


def _tiles(
    tensor: ShardedTensor,
    middle: tuple[float, float],
    size: tuple[float, float],
    axes: Mapping[str, int],
) -> Iterator[tuple[float, float, float, float]]:
    """The middle and the size of each part."""
    half = max(1, len(tensor.dims) // 2)
    down, across = (
        min(_MOST, prod(axes[axis] for dim in dims for axis in dim))
        for dims in (tensor.dims[:half], tensor.dims[half:])
    )
    (x, y), (width, height) = middle, size
    gap = 0.03
    for row in range(down):
        for column in range(across):
            yield (
                x - width / 2 + (column + 0.5) * width / across,
                y - height / 2 + (row + 0.5) * height / down,
                width / across - (gap if across > 1 else 0.0),
                height / down - (gap if down > 1 else 0.0),
            )


def _color(tensor: ShardedTensor, colors: Mapping[str, str]) -> str:
    used = list(dict.fromkeys(axis for dim in tensor.dims for axis in dim))
    if not used:
        return GREY
    return colors[used[0]] if len(used) == 1 else SEVERAL_AXES


def _partial(tensor: ShardedTensor) -> str:
    if not tensor.unreduced:
        return ""
    return f", parts of a sum over {' and '.join(tensor.unreduced)}"


def _table(one: StageShardings, colors: Mapping[str, str], program: str) -> Html:
    rows: list[list[Cell]] = []
    for block in one.blocks:
        for contraction in block.contractions:
            cells = (
                joined(
                    (_chips(tensor, colors) for tensor in contraction.tensors if tensor.use == use),
                    ", ",
                )
                for use in reversed(_ROWS)
            )
            times = str(block.repeats)
            rows.append(
                [breakable(contraction.name), *cells, times, source(contraction.place, program)]
            )
    header = ["op", "input", "parameter", "activation", "times", "source"]
    return table(
        header,
        rows,
        caption="Sizes, with the axes that cut them",
        left=range(4),
        long=(0, 1, 2, 3, 5),
    )


def _chips(tensor: ShardedTensor, colors: Mapping[str, str]) -> Html:
    """The sizes of a tensor, each with the axes that cut it."""

    def chips(axes: Iterable[str]) -> Html:
        return joined(
            element("span", axis, class_="chip", style=f"background:{colors[axis]}")
            for axis in axes
        )

    dims = (
        Html(f"{size}{chips(axes)}") for size, axes in zip(tensor.shape, tensor.dims, strict=True)
    )
    return Html(f"{joined(dims, ' x ') or 'scalar'}{_partial(tensor)}")
