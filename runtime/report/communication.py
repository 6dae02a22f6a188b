"""The section of the communication: the costliest collectives and transfers."""

from __future__ import annotations

from collections.abc import Sequence

from alpa.passes.cost.device import seconds_text, size_text
from alpa.passes.plan.communication import Communication
from alpa.passes.plan.text import percent
from alpa.runtime.report.content import Content
from alpa.runtime.report.markup import Cell, Html, breakable, element, section, source, table

_SHOWN = 20


def communication(content: Content) -> Html:
    """The section."""
    entries = content.communications.entries
    collectives = [it for it in entries if not it.is_transfer]
    transfers = [it for it in entries if it.is_transfer]
    return section(
        "communication",
        "The costliest collectives and transfers",
        element(
            "p",
            "Seconds are those of a step, added up over its micro-batches; where the compiler "
            "combines small collectives, each has its share. The source is the line of the op in "
            "the program that was planned.",
        ),
        _table(content, collectives, "collective"),
        _table(content, transfers, "transfer"),
    )


def _table(content: Content, its: Sequence[Communication], noun: str) -> Html:
    step = content.numbers.predicted_step_seconds
    total = sum(it.seconds for it in its)
    if not its:
        return element("p", f"The step has no {noun}s.")
    has_axes = any(it.axes for it in its)
    words = ["kind", "mesh", "part", *(["axes"] if has_axes else []), "op", "source"]
    header = [*words, "bytes", "count", "seconds", "share"]
    rows: list[list[Cell]] = []
    for it in its[:_SHOWN]:
        mesh = f"{it.source} to {it.target}" if it.is_transfer else it.source
        share = it.seconds / step if step else 0.0
        rows.append(
            [
                it.kind,
                mesh,
                it.part or "-",
                *(["+".join(it.axes) or "-"] if has_axes else []),
                breakable(it.op or "-"),
                source(it.place, content.name),
                element("data", size_text(it.bytes), value=str(it.bytes)),
                str(it.count),
                element("data", seconds_text(it.seconds), value=repr(it.seconds)),
                percent(share),
            ]
        )
    shown = f"; the costliest {_SHOWN} of {len(its)} entries" if len(its) > _SHOWN else ""
    caption = f"{noun.capitalize()}s: {seconds_text(total)} on all meshes together{shown}"
    count = len(words)
    return table(header, rows, caption=caption, left=range(count), long=(count - 2, count - 1))
