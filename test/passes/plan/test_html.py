"""A plan in a notebook: its stages as a table of HTML, with all names escaped."""

from __future__ import annotations

from dataclasses import replace
from xml.etree import ElementTree

import pytest

from alpa import passes
from alpa.passes.plan.html import plan_html
from alpa.passes.plan.limits import limits
from alpa.passes.plan.report import PlanReport
from alpa.passes.plan.table import headlines, stage_rows

PROGRAM = """\
func.func public @main(%w: tensor<64x64xf32>, %x: tensor<8x64xf32>) -> tensor<8x64xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
  %1 = stablehlo.tanh %0 : tensor<8x64xf32>
  %2 = stablehlo.dot_general %1, %w, contracting_dims = [1] x [0]
    : (tensor<8x64xf32>, tensor<64x64xf32>) -> tensor<8x64xf32>
  return %2 : tensor<8x64xf32>
}
"""


@pytest.fixture(scope="module")
def report() -> PlanReport:
    return PlanReport.of(passes.run(PROGRAM, "alpa{cluster=cpu:1x2 num-stages=2 num-layers=2}"))


def cells(html: str) -> list[list[str]]:
    rows = ElementTree.fromstring(html).iter("tr")
    return [[cell.text or "" for cell in row] for row in rows]


def test_the_stages_and_what_limits_them(report: PlanReport) -> None:
    html = plan_html(report)
    assert cells(html) == stage_rows(report)
    assert len(cells(html)) == 3
    said = [item.text for item in ElementTree.fromstring(html).iter("li")]
    first, *others = headlines(report)
    assert ElementTree.fromstring(html).findtext("p/b") == first
    assert said == [line.strip() for line in limits(report)][1:] + others


def test_names_are_text(report: PlanReport) -> None:
    first, last = report.meshes
    html = plan_html(replace(report, meshes=(replace(first, name="<script>&\x1b[2J"), last)))
    assert "<script>" not in html
    assert cells(html)[1][1] == "<script>&\\x1b[2J"
