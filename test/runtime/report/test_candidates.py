"""What the report says of the candidates of the search."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from alpa.passes.tried import Tried, TriedSubmesh
from alpa.runtime.report.candidates import candidates


def text(report: Any, tried: Tried | None) -> str:
    content = report.content
    numbers = replace(content.numbers, tried=tried)
    return "".join(candidates(replace(content, numbers=numbers)))


def words(html: str) -> str:
    return re.sub(r"<[^>]*>", "", html)


def submesh(**given: Any) -> TriedSubmesh:
    usual: dict[str, Any] = {"hosts": 1, "devices": 4, "logical_shape": (2, 2), "device": "H100"}
    return TriedSubmesh(**usual | given)


def test_counts_and_reasons(report: Any) -> None:
    submeshes = (
        submesh(num_candidates=1000, outcome="costed"),
        submesh(num_candidates=20, outcome="pruned", reason="a bound"),
        submesh(num_candidates=3, outcome="dropped", reason="no <time>"),
    )
    html = text(report, Tried(submeshes=submeshes, plans=report.planned.tried.plans))
    said = words(html)
    assert "1,023 stage candidates were considered" in said
    assert "1,000 were costed, 20 were pruned, 0 have no plan, 3 were dropped." in said
    assert "no &lt;time&gt;" in html
    assert "H100" not in said
    assert [one in said for one in ("Plans that were tried", "taken")] == [True, True]


def test_devices_have_names_if_there_are_several_kinds(report: Any) -> None:
    kinds = ("H100", "A100")
    submeshes = tuple(submesh(device=it, num_candidates=1, outcome="costed") for it in kinds)
    said = words(text(report, Tried(submeshes=submeshes, plans=())))
    assert "1x4 of H100" in said
    assert "1x4 of A100" in said


def test_many_submeshes_are_closed(report: Any) -> None:
    one = submesh(num_candidates=1, outcome="costed")
    plans = report.planned.tried.plans
    assert "<details>" not in text(report, Tried(submeshes=(one,) * 24, plans=plans))
    assert "<details>" in text(report, Tried(submeshes=(one,) * 25, plans=plans))


def test_one_mesh(report: Any) -> None:
    one = submesh(num_candidates=10, outcome="only", reason="every cut uses it")
    said = words(text(report, Tried(submeshes=(one,), plans=())))
    assert "10 stage candidates were considered" in said
    assert "every cut uses it" in said


def test_a_plan_from_a_file(report: Any) -> None:
    assert "does not say what was tried" in words(text(report, None))
