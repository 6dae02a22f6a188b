"""What was chosen, what else was possible, and what that would cost: plain data and its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from alpa.passes.cost.device import seconds_text, size_text
from alpa.passes.plan.text import aligned, percent


class QuestionError(ValueError):
    """A question is about nothing that the plan has."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another choice, with the rest of the plan solved again around it.

    Seconds of a step and bytes are those of the plan with the choice. Without a plan, `refused`
    says why.
    """

    choice: str
    step_seconds: float | None = None
    objective: float | None = None
    """seconds of a step on the mesh, which its shardings minimise; None for stages"""
    sent_bytes: int | None = None
    """by each device of the mesh in the collectives of a step"""
    peak_bytes: int | None = None
    """predicted for a device of the mesh; for stages, the largest of all meshes"""
    changes: tuple[str, ...] = ()
    """what else is chosen differently, largest first"""
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """Why a plan has a sharding or a stage; `str` is a text for a terminal."""

    subject: str
    chosen: Alternative
    alternatives: tuple[Alternative, ...]
    """those with a plan first, the fastest first"""
    notes: tuple[str, ...]
    """what limits the choice: memory, divisibility, the program's own shardings, proofs"""

    def __str__(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield self.subject
        yield f"  chosen: {self.chosen.choice}"
        yield from (f"  {note}" for note in self.notes)
        possible = [it for it in self.alternatives if not it.refused]
        if possible:
            yield ""
            yield from self._table([self.chosen, *possible])
            for it in possible:
                if it.changes:
                    yield f"  {it.choice} also changes {'; '.join(it.changes)}"
        refused = [it for it in self.alternatives if it.refused]
        if refused:
            yield ""
            yield "not possible"
            yield from (f"  {it.choice}: {it.refused}" for it in refused)

    def _table(self, rows: list[Alternative]) -> Iterator[str]:
        head = ["choice", "step", "difference", "on its mesh", "sent", "peak"]
        texts = [head, *(self._row(it) for it in rows)]
        used = [n for n in range(len(head)) if any(row[n] for row in texts[1:])]
        yield from aligned([[row[n] for n in used] for row in texts], left=(0,))
        yield "(step: predicted seconds; bytes per device: sent in a step's collectives, peak)"

    def _row(self, it: Alternative) -> list[str]:
        base = self.chosen.step_seconds
        more = ""
        if it is not self.chosen and it.step_seconds is not None and base:
            share = it.step_seconds / base - 1
            more = f"{'+' if share >= 0 else '-'}{percent(abs(share))}"
        return [
            it.choice,
            "" if it.step_seconds is None else seconds_text(it.step_seconds),
            more,
            "" if it.objective is None else seconds_text(it.objective),
            "" if it.sent_bytes is None else size_text(it.sent_bytes),
            "" if it.peak_bytes is None else size_text(it.peak_bytes),
        ]
