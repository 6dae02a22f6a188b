"""What the search tried: candidates of stages, and plans, each with its outcome."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alpa.passes.cost.device import seconds_text
from alpa.passes.plan.text import percent
from alpa.passes.tried import Tried, TriedPlan
from alpa.runtime.report.content import Content
from alpa.runtime.report.markup import Cell, Html, details, element, number, table

_OPEN = 24
"""The most submeshes whose table is open."""
_STEPS = ("estimated_step_seconds", "predicted_step_seconds")
_COUNTS = {
    "num_costed": "were costed",
    "num_pruned": "were pruned",
    "num_infeasible": "have no plan",
    "num_dropped": "were dropped",
}


def candidates(content: Content) -> Iterator[Html]:
    """The counts, and a table of the submeshes and one of the plans."""
    tried = content.numbers.tried
    if tried is None:
        yield element("p", "The plan was read from a file, which does not say what was tried.")
        return
    if tried.submeshes:
        yield element("p", *_counts(tried))
        rows = _submeshes(tried)
        yield rows if len(tried.submeshes) <= _OPEN else details("The submeshes", rows)
    yield _plans(tried)


def _counts(tried: Tried) -> Iterator[Cell]:
    many = tried.num_candidates
    yield number("tried.num_candidates", many, f"{many:,}")
    yield " stage candidates were considered: intervals of layers on a submesh in a logical shape"
    for at, (name, words) in enumerate(_COUNTS.items()):
        value = getattr(tried, name)
        yield "; " if at == 0 else ", "
        yield number(f"tried.{name}", value, f"{value:,}")
        yield f" {words}"
    yield "."


def _submeshes(tried: Tried) -> Html:
    devices = {it.device for it in tried.submeshes}
    rows: list[list[Cell]] = []
    for n, it in enumerate(tried.submeshes):
        entry = f"tried.submeshes.{n}"
        of = f" of {it.device}" if len(devices) > 1 else ""
        rows.append(
            [
                f"{it.hosts}x{it.devices}{of}",
                "x".join(map(str, it.logical_shape)),
                number(f"{entry}.num_candidates", it.num_candidates, f"{it.num_candidates:,}"),
                number(f"{entry}.outcome", it.outcome, it.outcome),
                it.reason,
            ]
        )
    header = ["submesh", "logical shape", "candidates", "outcome", "reason"]
    caption = "Submeshes (hosts x devices) on which stages were considered"
    return _table(header, rows, caption, left=(0, 1, 3))


def _plans(tried: Tried) -> Html:
    rows: list[list[Cell]] = []
    for n, it in enumerate(tried.plans):
        entry = f"tried.plans.{n}"
        rows.append(
            [
                number(f"{entry}.schedule", it.schedule, it.schedule),
                number(f"{entry}.remat", it.remat, it.remat),
                number(f"{entry}.reserve", it.reserve, _reserve(it.reserve)),
                *(_seconds(f"{entry}.{name}", getattr(it, name)) for name in _STEPS),
                number(f"{entry}.outcome", it.outcome, it.outcome),
                _reason(it),
            ]
        )
    header = ["schedule", "remat", "memory reserve", "estimated step", "predicted step"]
    header += ["outcome", "reason"]
    return _table(header, rows, "Plans that were tried", left=(0, 1, 5))


def _table(header: list[str], rows: list[list[Cell]], caption: str, left: Sequence[int]) -> Html:
    """A table whose last column has reasons, which is left out if there are none."""
    if not any(row[-1] for row in rows):
        header, rows = header[:-1], [row[:-1] for row in rows]
    return table(header, rows, caption=caption, left=left, long=(max(left) + 1,))


def _reserve(share: float) -> str:
    if not share:
        return "none"
    return f"-{percent(-share)}" if share < 0 else percent(share)


def _seconds(entry: str, seconds: float | None) -> Html:
    return number(entry, seconds, "-" if seconds is None else seconds_text(seconds))


def _reason(it: TriedPlan) -> str:
    if it.outcome == "pruned" and not it.reason:
        return "its estimate is not below the step of a finished plan"
    return it.reason
