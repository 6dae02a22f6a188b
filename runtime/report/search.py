"""The section of the search: its time, what was tried and left out, and what is proven."""

from __future__ import annotations

from collections.abc import Iterator

from alpa.passes.cost.device import seconds_text
from alpa.passes.plan.text import percent
from alpa.runtime.micro_batches import Attempt
from alpa.runtime.report.candidates import candidates
from alpa.runtime.report.content import Content
from alpa.runtime.report.markup import Cell, Html, element, number, section, source, table


def search(content: Content) -> Html:
    """The section."""
    return section(
        "search",
        "How the search went",
        *_stages(content),
        *candidates(content),
        *_solver(content),
        *_attempts(content),
        *_left_out(content),
        _phases(content),
    )


def _stages(content: Content) -> Iterator[Html]:
    it = content.numbers
    estimate, least = it.estimated_step_seconds, it.estimated_step_bound
    if not estimate:
        return
    words: list[Cell] = ["The stages were cut at an estimate of "]
    words.append(number("estimated_step_seconds", estimate, seconds_text(estimate)))
    if least:
        words.append("; no cut of these layers is estimated below ")
        words.append(number("estimated_step_bound", least, seconds_text(least)))
    yield element("p", *words, ".")


def _solver(content: Content) -> Iterator[Html]:
    it = content.numbers.solver
    if it is None:
        return
    header = ["mesh", "problem", "status", "variables", "seconds per step", "lower bound", "gap"]
    rows: list[list[Cell]] = []
    for index, mesh in enumerate(it.meshes):
        entry = f"solver.meshes.{index}"
        rows.append(
            [
                mesh.mesh,
                mesh.problem,
                number(f"{entry}.status", mesh.status, mesh.status),
                number(f"{entry}.variables", mesh.variables, f"{mesh.variables:,}"),
                number(f"{entry}.objective", mesh.objective, seconds_text(mesh.objective)),
                number(f"{entry}.bound", mesh.bound, seconds_text(mesh.bound)),
                number(f"{entry}.gap", mesh.gap, percent(mesh.gap)),
            ]
        )
    rows.append(
        [
            "all",
            "",
            number("solver.status", it.status, it.status),
            number("solver.variables", it.variables, f"{it.variables:,}"),
            number("solver.objective", it.objective, seconds_text(it.objective)),
            number("solver.bound", it.bound, seconds_text(it.bound)),
            number("solver.gap", it.gap, percent(it.gap)),
        ]
    )
    caption = "What is proven about the shardings; a folded problem shards equal layers alike"
    yield table(header, rows, caption=caption, left=(0, 1, 2))


def _attempts(content: Content) -> Iterator[Html]:
    if len(content.attempts) < 2:
        return
    ordered = sorted(content.attempts, key=lambda attempt: attempt.num_micro_batches)
    taken = content.numbers.num_micro_batches
    rows = [
        [
            f"{it.num_micro_batches} (taken)"
            if it.num_micro_batches == taken
            else str(it.num_micro_batches),
            _outcome(it),
        ]
        for it in ordered
    ]
    yield table(["micro-batches", "outcome"], rows, caption="Numbers of micro-batches", long=(1,))


def _outcome(attempt: Attempt) -> str:
    if attempt.seconds is not None:
        return f"planned: a step takes {seconds_text(attempt.seconds)}"
    if attempt.problem is not None:
        return f"not possible: {attempt.problem.diagnostics[0].message}"
    return f"pruned: takes at least {seconds_text(attempt.bound or 0.0)}"


def _left_out(content: Content) -> Iterator[Html]:
    dropped = content.numbers.dropped
    if dropped:
        rows = [
            [number(f"dropped.{n}.what", it.what, it.what), it.reason]
            for n, it in enumerate(dropped)
        ]
        yield table(["left out", "reason"], rows, caption="Left out of the search", long=(0, 1))
    else:
        yield element("p", "No solver ran out of time or failed.")
    if content.remarks:
        items = (
            element("li", source(it.place, content.name), f" {it.message}")
            for it in content.remarks
        )
        yield element("h3", "Remarks of the passes")
        yield element("ul", *items, class_="limits")


def _phases(content: Content) -> Html:
    it = content.numbers
    longest = max(it.phases.values(), default=0.0) or 1.0
    rows: list[list[Cell]] = [
        [
            name,
            number(f"phases.{name}", seconds, seconds_text(seconds)),
            element(
                "div",
                element("span", class_="meter", style=f"width:{100 * seconds / longest:.1f}%"),
                class_="track",
                aria_hidden="true",
            ),
        ]
        for name, seconds in it.phases.items()
    ]
    total = number("search_seconds", it.search_seconds, seconds_text(it.search_seconds))
    rows.append(["all", total, ""])
    header = ["phase", "seconds", ""]
    return table(header, rows, caption="Where the time of the search went", left=(0, 2))
