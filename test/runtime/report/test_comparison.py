"""The page of a comparison, and the section of what forced choices cost."""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from alpa import passes
from alpa.passes.plan.report import PlanReport
from alpa.runtime.questions.compare import PlanComparison, compare
from alpa.runtime.report.comparison import comparison_page
from alpa.runtime.report.page import page
from test.runtime.questions.test_compare import PROGRAM

NAMES = ("a <b>.json", "c.json")


@pytest.fixture(scope="module")
def plans() -> list[dict[str, Any]]:
    options = ("cpu:1x4 num-stages=1", "cpu:1x2 num-stages=2 num-micro-batches=1 schedule=gpipe")
    pipelines = (f"alpa{{cluster={it} num-layers=2}}" for it in options)
    return [json.loads(PlanReport.of(passes.run(PROGRAM, it)).to_json()) for it in pipelines]


@pytest.fixture(scope="module")
def comparison(plans: list[dict[str, Any]]) -> PlanComparison:
    return compare(plans[0], plans[1], NAMES)


def test_numbers_equal_those_of_the_json(
    plans: list[dict[str, Any]], comparison: PlanComparison, parsed: Any
) -> None:
    shown = Counter[str]()
    for attributes in type(parsed)(comparison_page(comparison)).all("data"):
        if "data-entry" in attributes:
            entry = attributes["data-entry"]
            assert attributes["value"] == str(plans[int(attributes["data-plan"])][entry])
            shown[entry] += 1
    assert shown == {"cluster": 2, "schedule": 2, "predicted_step_seconds": 2}


def test_it_says_what_the_terminal_says(comparison: PlanComparison) -> None:
    html = comparison_page(comparison)
    cells = [re.sub("<[^>]*>", "", it) for it in re.findall(r"<t[dh]\b[^>]*>(.*?)</t[dh]>", html)]
    for row in comparison.rows:
        at = cells.index(row.name)
        assert cells[at + 1 : at + 4] == [*row.texts, row.text]
    assert len(comparison.stages) == 2
    assert [stages for stages, _, _ in comparison.strategies] == ["stage 0", "stage 0", "stage 1"]
    for stages, name, strategy in comparison.strategies:
        assert f"{stages} of {name.replace('<b>', '&lt;b&gt;')}: {strategy}" in html
    assert "<b>" not in html


def test_bars_are_as_long_as_the_steps(comparison: PlanComparison, parsed: Any) -> None:
    bars = [it for it in type(parsed)(comparison_page(comparison)).all("div") if "style" in it]
    widths = [float(re.findall(r"width:([\d.]+)%", it["style"])[0]) for it in bars]
    (step,) = (it for it in comparison.rows if it.entry == "predicted_step_seconds")
    assert widths == pytest.approx([100 * it / max(step.values) for it in step.values], abs=0.01)


def test_it_needs_no_bokeh_and_no_network(comparison: PlanComparison, parsed: Any) -> None:
    html = comparison_page(comparison)
    assert len(html) < 30_000
    assert not re.search(r"https?://|@import|url\(", html)
    (script,) = type(parsed)(html).scripts
    assert "theme" in script


def test_a_plan_and_itself(plans: list[dict[str, Any]]) -> None:
    html = comparison_page(compare(plans[0], plans[0], NAMES))
    assert "The stages are the same." in html


def test_forced_choices_have_a_section(
    report: Any, comparison: PlanComparison, parsed: Any
) -> None:
    def sections(text: str) -> list[str]:
        return [it["id"] for it in type(parsed)(text).all("section")]

    text = page(replace(report.content, forced=comparison))
    assert sections(text)[:2] == ["limits", "forced"]
    assert "forced" not in sections(report.text)
    assert '<a href="#forced">' in text
