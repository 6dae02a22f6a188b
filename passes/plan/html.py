"""A plan as a small HTML table, for notebooks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from alpa.passes.pipelines.diagnostics import printable
from alpa.passes.plan.limits import limits
from alpa.passes.plan.report import PlanReport
from alpa.passes.plan.table import headlines, stage_rows, stage_units


def plan_html(report: PlanReport) -> str:
    """The stages of a plan with their seconds and memory, and what limits it."""
    first, *others = headlines(report)
    columns, *rows = stage_rows(report)
    title, *reasons = limits(report)
    return "\n".join(
        (
            "<div>",
            f"<p><b>{_text(first)}</b></p>",
            "<table>",
            f"<caption>{_text(stage_units(report))}</caption>",
            f"<thead>{_row('th', columns)}</thead>",
            f"<tbody>{''.join(_row('td', row) for row in rows)}</tbody>",
            "</table>",
            f"<p>{_text(title)}</p>",
            _list(reasons),
            f"<details><summary>the search</summary>{_list(others)}</details>" if others else "",
            "</div>",
        )
    )


def _row(tag: str, cells: Sequence[str]) -> str:
    return f"<tr>{''.join(f'<{tag}>{_text(cell)}</{tag}>' for cell in cells)}</tr>"


def _list(lines: Iterable[str]) -> str:
    return f"<ul>{''.join(f'<li>{_text(line.strip())}</li>' for line in lines)}</ul>"


def _text(text: str) -> str:
    """Text without markup and control characters: names in a program come from others."""
    return escape(printable(text))
