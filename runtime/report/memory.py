"""The section of the memory: what a device of each mesh holds during the step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from bokeh.models import ColumnDataSource, HoverTool, Span
from bokeh.plotting import figure

from alpa.passes.cost.device import seconds_text, size_text
from alpa.passes.plan.attribute import cluster_here
from alpa.passes.plan.memory_over_time import KINDS, Kind, MeshMemory
from alpa.passes.plan.text import count_text, percent
from alpa.runtime.report.content import Content
from alpa.runtime.report.figures import Unit, count_bytes, drawn, new_figure
from alpa.runtime.report.markup import Cell, Html, details, element, number, section, table

_COLORS: Mapping[Kind, str] = {
    "parameters": "#4c7fd0",
    "optimizer state": "#8d6cc9",
    "gradients": "#46a37c",
    "activations": "#e6a23c",
    "inputs": "#8b95a3",
    "temporaries": "#d9697e",
}


@dataclass(frozen=True)
class _Line:
    """A horizontal line of a figure, and what it is."""

    words: str
    dash: str
    color: str


_CAPACITY = _Line("memory of a device", "solid", "#d9485f")
_SEARCH = _Line("counted by the search", "dashed", "#7d8794")
_SHOWN = 4
"""Meshes whose figures are open."""
_DRAWN = 16
"""Meshes with a figure."""


def memory(content: Content) -> Html:
    """The section."""
    figures = [_mesh(content, n, one) for n, one in enumerate(content.memory[:_DRAWN])]
    rest, left = figures[_SHOWN:], len(content.memory) - len(figures)
    title = count_text(len(rest), "other mesh", "other meshes")
    if left:
        title += f"; {count_text(left, 'more is', 'more are')} in the table only"
    return section(
        "memory",
        "Memory of a device over the step",
        element(
            "p",
            "What exists follows from the instructions of the step and the modules that are "
            "compiled, in XLA's order of ops. The dashed line is what the search counted for the "
            "mesh when it chose the shardings: it takes the ops in program order, and forward, "
            "backward and update apart.",
        ),
        *_too_large(content),
        _table(content),
        _key(content),
        element("div", *figures[:_SHOWN], class_="pairs"),
        *([details(title, element("div", *rest, class_="pairs"))] if rest else []),
    )


def _too_large(content: Content) -> Iterator[Html]:
    """A warning, if more is predicted than a device has."""
    meshes = [
        one.mesh
        for n, one in enumerate(content.memory)
        if (capacity := _capacity(content, n)) is not None and one.peak > capacity
    ]
    if meshes:
        yield element(
            "p",
            f"By the prediction for the compiled modules, {' and '.join(meshes)} may need more "
            "memory than a device has. ",
            element("code", "alpa-plan --verify"),
            " compiles them and says whether they fit; ",
            element("code", "--verify=repair"),
            " plans again with less memory if they do not.",
            class_="warning",
        )


def _key(content: Content) -> Html:
    """The colours."""
    kinds: list[Kind] = [
        kind for kind in KINDS if any(any(one.bytes[kind]) for one in content.memory)
    ]
    swatches = (
        element("li", element("span", class_="swatch", style=f"background:{_COLORS[it]}"), it)
        for it in reversed(kinds)
    )
    capacities = [_shown_capacity(content, n, it) for n, it in enumerate(content.memory)]
    planned = [_planned(content, n) for n in range(len(content.memory))]
    lines = (
        element(
            "li",
            element("span", class_="line", style=f"border-top:2px {one.dash} {one.color}"),
            one.words,
        )
        for one, sizes in ((_CAPACITY, capacities), (_SEARCH, planned))
        if any(sizes)
    )
    return element("ul", *swatches, *lines, class_="key")


def _mesh(content: Content, index: int, one: MeshMemory) -> Html:
    planned = _planned(content, index)
    capacity = _capacity(content, index)
    title = f"{one.mesh}: at most {size_text(one.peak)}"
    if capacity:
        title += f", {percent(one.peak / capacity)} of {size_text(capacity)}"
    end = content.timeline.seconds
    unit = Unit.of(end)
    shown = _shown_capacity(content, index, one)
    top = 1.08 * max(one.peak, planned or 0, shown or 0)
    made = new_figure(
        270,
        x_range=(0.0, end / unit.size),
        y_range=(0.0, top),
        tools="xpan,xwheel_zoom,reset,save",
        active_scroll=None,
        x_axis_label=f"time ({unit.name})",
    )
    count_bytes(made.yaxis)
    source = _source(one, unit, end)
    for kind in KINDS:
        if any(one.bytes[kind]):
            made.varea_step(
                x="time",
                y1=f"{kind} from",
                y2=f"{kind} to",
                step_mode="after",
                source=source,
                fill_color=_COLORS[kind],
                fill_alpha=0.9,
            )
    made.step(x="time", y="total", mode="after", source=source, line_color="#5f6b7a", line_width=1)
    areas = made.quad(left="time", right="until", bottom=0.0, top=top, source=source, alpha=0.0)
    tips = [("time", "@when"), ("in all", "@total_text")]
    tips += [(kind, f"@{{{kind}}}") for kind in KINDS if any(one.bytes[kind])]
    hover = HoverTool(renderers=[areas], tooltips=tips, point_policy="follow_mouse", visible=False)
    made.add_tools(hover)
    if planned:
        _line(made, planned, _SEARCH)
    if shown:
        _line(made, shown, _CAPACITY)
    label = f"Memory of a device of {title}; the table above has its parts"
    return element("div", element("h3", title), drawn(f"memory-{index}", made, label))


def _line(made: figure, size: int, line: _Line) -> None:
    """A horizontal line."""
    made.add_layout(
        Span(
            location=size,
            dimension="width",
            line_color=line.color,
            line_dash=line.dash,
            line_width=2,
        )
    )


def _source(one: MeshMemory, unit: Unit, end: float) -> ColumnDataSource:
    """The layers of bytes over time, up to the end of the step."""
    times = [*one.seconds, end]
    columns: dict[str, Any] = {"time": np.array(times) / unit.size}
    columns["until"] = np.append(columns["time"][1:], columns["time"][-1])
    below = np.zeros(len(times))
    for kind in KINDS:
        held = np.array([*one.bytes[kind], one.bytes[kind][-1]], dtype=float)
        columns[f"{kind} from"] = below
        below = below + held
        columns[f"{kind} to"] = below
        columns[kind] = [size_text(size) for size in held]
    columns["total"] = below
    columns["total_text"] = [size_text(size) for size in below]
    columns["when"] = [seconds_text(time) for time in times]
    return ColumnDataSource(columns)


def _planned(content: Content, index: int) -> int | None:
    peaks = content.numbers.predicted_peak_bytes
    return peaks[index] if index < len(peaks) else None


def _capacity(content: Content, index: int) -> int | None:
    cluster = cluster_here(content.numbers.cluster)
    hosts = content.numbers.meshes[index].hosts
    return None if cluster is None else cluster.of(hosts).device.memory


def _shown_capacity(content: Content, index: int, one: MeshMemory) -> int | None:
    """The memory of a device, if the figure has it: a much larger one would flatten the rest."""
    capacity = _capacity(content, index)
    most = max(one.peak, _planned(content, index) or 0)
    return capacity if capacity is not None and most > 0.4 * capacity else None


def _table(content: Content) -> Html:
    header = ["mesh", "at the fullest time", *KINDS, "when", "counted by the search", "capacity"]
    return table(header, _rows(content), caption="Bytes per device at the fullest time of the step")


def _rows(content: Content) -> Iterator[list[Cell]]:
    for index, one in enumerate(content.memory):
        at = one.fullest
        planned, capacity = _planned(content, index), _capacity(content, index)
        counted = "-"
        if planned is not None:
            counted = number(f"predicted_peak_bytes.{index}", planned, size_text(planned))
        yield [
            one.mesh,
            element("data", size_text(one.peak), value=str(one.peak), class_="peak"),
            *(size_text(one.bytes[kind][at]) for kind in KINDS),
            seconds_text(one.seconds[at]),
            counted,
            "-" if capacity is None else size_text(capacity),
        ]
