"""How two plans differ: a page of its own, and a section where choices of the plan were forced."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from alpa.passes.cost.device import seconds_text
from alpa.runtime.questions.compare import (
    NOTE,
    PARTS,
    SHARED_PARTS,
    STAGE_COLUMNS,
    Difference,
    PlanComparison,
)
from alpa.runtime.report.document import document
from alpa.runtime.report.markup import Cell, Html, element, section, table

# Comparing needs no jax, which takes a second to import.
if TYPE_CHECKING:
    from alpa.runtime.report.content import Content

_COLORS: dict[str, str] = {
    **dict(zip(PARTS, ("compute", "bubble", "transfer"), strict=True)),
    **dict(zip(SHARED_PARTS, ("compute", "transfer"), strict=True)),
}
"""The class of each part of a step in the styles."""


def comparison_page(it: PlanComparison) -> str:
    """The page of a comparison as text. It has no figures, so it needs no Bokeh."""
    first, second = it.names
    return document(
        f"{second} against {first}",
        {
            "differences": ("Differences", _differences(it)),
            "stages": ("Stages", section("stages", "Stages that differ", *_stages(it))),
        },
        "Written by Alpa.",
    )


def forced(content: Content) -> Html:
    """The section of a plan with forced choices: what they cost."""
    it = content.forced
    assert it is not None, "the page has the section where choices were forced"
    return section("forced", "What the forced choices cost", *_parts(it), *_stages(it))


def _differences(it: PlanComparison) -> Html:
    return section("differences", "What each difference is worth", *_parts(it))


def _parts(it: PlanComparison) -> Iterator[Html]:
    """The steps as bars, and a table of all differences."""
    yield from _bars(it)
    rows = (
        [
            element("span", row.name, class_="indented") if row.is_part else row.name,
            *(_value(row, plan) for plan in (0, 1)),
            row.text,
        ]
        for row in it.rows
    )
    yield table(["", *it.names, "difference"], rows, caption=NOTE.capitalize())


def _value(row: Difference, plan: int) -> Cell:
    """A value, with the entry of PLAN.json and the number of the plan that have it."""
    text, value = row.texts[plan], row.values[plan]
    if row.unit == "text" and not row.entry:
        return text
    given = {"data_entry": row.entry, "data_plan": str(plan)} if row.entry else {}
    return element("data", text, value=str(value), **given)


def _bars(it: PlanComparison) -> Iterator[Html]:
    """What a step of each plan is spent on; the longer step is as wide as the page."""
    parts = [row for row in it.rows if row.is_part]
    sums = [sum(max(row.values[plan], 0.0) for row in parts) for plan in (0, 1)]
    longest = max(sums)
    if not longest:
        return
    yield element("h3", "The predicted step")
    steps = next(row for row in it.rows if row.entry == "predicted_step_seconds")
    for plan, name in enumerate(it.names):
        bar = element(
            "div",
            *_shares(parts, plan),
            class_="bar",
            aria_hidden="true",
            style=f"width:{100 * sums[plan] / longest:.2f}%",
        )
        yield element("div", f"{name}: {steps.texts[plan]}", class_="over-bar")
        yield bar
    swatches = (
        element("li", element("span", class_=f"swatch {_COLORS[row.name]}"), row.name)
        for row in parts
    )
    yield element("ul", *swatches, class_="key")


def _shares(parts: Sequence[Difference], plan: int) -> Iterator[Html]:
    for row in parts:
        seconds = max(row.values[plan], 0.0)
        if seconds:
            title = f"{row.name}: {seconds_text(seconds)}"
            color, style = _COLORS[row.name], f"flex-grow:{seconds!r}"
            yield element("span", class_=f"part {color}", style=style, title=title)


def _stages(it: PlanComparison) -> Iterator[Html]:
    if not it.stages:
        yield element("p", "The stages are the same.")
        return
    rows = [
        [stage.numbers, name, *stage.texts]
        for pair in it.stages
        for name, stage in zip(it.names, pair, strict=True)
        if stage is not None
    ]
    header = ["stage", "plan", *STAGE_COLUMNS]
    caption = "Seconds per micro-batch, of the update per step; bytes per device"
    yield table(header, rows, caption=caption, left=range(5), long=(1,))
    if it.strategies:
        items = (
            element("li", f"{stages} of {name}: {strategy}")
            for stages, name, strategy in it.strategies
        )
        yield element("ul", *items, class_="limits")
