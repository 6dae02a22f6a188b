"""The page of a report: its numbers, its size, and what it loads."""

from __future__ import annotations

import importlib.util
import json
import operator
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import bokeh
import pytest

from alpa.passes.pipelines.diagnostics import Diagnostic, Place
from alpa.passes.plan.layer_shardings import Block
from alpa.passes.plan.report import PlanReport
from alpa.runtime.report import ReportError, check_can_draw, write_report
from alpa.runtime.report.content import Content
from alpa.runtime.report.figures import AXES, SEVERAL_AXES, STAGES
from alpa.runtime.report.page import page
from test.runtime.report.pages import checked_entries

BOKEH = Path(bokeh.__file__).parent / "server/static/js/bokeh.min.js"


def test_numbers_equal_those_of_the_json(report: Any, parsed: Any) -> None:
    plan = json.loads(report.content.numbers.to_json())
    shown = checked_entries(parsed, plan)
    assert shown["predicted_step_seconds"] == 2
    assert {f"predicted_peak_bytes.{mesh}" for mesh in (0, 1)} <= shown.keys()
    assert {f"phases.{name}" for name in plan["phases"]} <= shown.keys()
    assert {f"stages.{n}.forward_seconds" for n in (0, 1)} <= shown.keys()
    assert {"solver.objective", "solver.bound", "solver.gap", "search_seconds"} <= shown.keys()
    counts = ("candidates", "costed", "pruned", "infeasible", "dropped")
    assert {f"tried.num_{name}" for name in counts} <= shown.keys()
    assert {f"tried.plans.{n}.outcome" for n in range(len(plan["tried"]["plans"]))} <= shown.keys()
    submeshes = {name for name in shown if re.fullmatch(r"tried\.submeshes\.\d+\.outcome", name)}
    assert len(submeshes) == len(plan["tried"]["submeshes"]) > 1


def test_the_timeline_ends_with_the_predicted_step(report: Any) -> None:
    content = report.content
    assert content.timeline.seconds == content.numbers.predicted_step_seconds
    total = sum(span.seconds for span in content.timeline.spans)
    assert total == pytest.approx(2 * content.timeline.seconds)


def test_the_largest_memory_is_that_of_the_figures(report: Any, parsed: Any) -> None:
    peaks = [int(it["value"]) for it in parsed.all("data") if it.get("class") == "peak"]
    assert peaks == [one.peak for one in report.content.memory]
    # The search counts the parts of a stage apart, so it comes near and is not equal.
    assert peaks == pytest.approx(report.content.numbers.predicted_peak_bytes, rel=0.15)


def test_shares_of_the_time_add_up(parsed: Any) -> None:
    shares = [float(it["data-share"].split()[1]) for it in parsed.all("li") if "data-share" in it]
    assert sum(shares) == pytest.approx(1.0)
    assert len(shares) >= 4


def test_every_section_is_there_once(parsed: Any) -> None:
    sections = [it["id"] for it in parsed.all("section")]
    links = [it["href"] for it in parsed.all("a") if it.get("class") != "skip"]
    assert links == [f"#{name}" for name in sections]
    names = [it["id"] for _, it in parsed.elements if "id" in it]
    assert len(names) == len(set(names))


def test_it_needs_no_network(report: Any, parsed: Any) -> None:
    for _, attributes in parsed.elements:
        for name in ("src", "href", "srcset", "action"):
            assert not re.match(r"(https?:)?//", attributes.get(name) or "")
    mine = report.text.replace(BOKEH.read_text(encoding="utf-8"), "")
    assert len(mine) < len(report.text) - 10**6
    assert not re.search(r"https?://|@import|url\(", mine)


def test_it_is_small(report: Any) -> None:
    figures = sum(len(it) for it in re.findall(r'class="figure">(.*?)</script>', report.text))
    assert len(report.text) - figures < 1_500_000
    assert figures < 500_000


def test_figures_have_words_for_screen_readers(parsed: Any) -> None:
    drawings = [it for it in parsed.all("div") if it.get("class") == "drawing"]
    assert len(drawings) >= 5
    assert all(it["role"] == "group" and it["aria-label"] for it in drawings)
    assert all(json.loads(it)["target_id"] for it in parsed.scripts if it.startswith("{"))


def test_each_row_has_a_header(report: Any) -> None:
    rows = re.findall(r"<tr>(.*?)</tr>", report.text)
    assert len(rows) > 40
    for row in rows:
        assert re.match(r'<th scope="(row|col)"', row)
        assert row.count('<th scope="row"') == ("<td" in row)


@pytest.mark.parametrize("color", [*STAGES, *AXES, SEVERAL_AXES])
def test_white_words_on_a_color_are_readable(color: str) -> None:
    """By the contrast of WCAG, which is 3 at least for large or bold words and for shapes."""
    parts = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = (it / 12.92 if it <= 0.03928 else ((it + 0.055) / 1.055) ** 2.4 for it in parts)
    luminance = sum(map(operator.mul, (0.2126, 0.7152, 0.0722), linear))
    assert 1.05 / (luminance + 0.05) >= 4


def test_modules_that_need_more_memory_than_there_is_are_named(report: Any) -> None:
    warning = "may need more memory than a device has"
    assert warning not in report.text
    numbers = replace(report.content.numbers, cluster="cpu:2x4,memory=1MiB")
    assert f"mesh_0 and mesh_1 {warning}" in page(replace(report.content, numbers=numbers))


def named(content: Content, name: str) -> Content:
    """The content with a name wherever a program can put one."""
    place = Place(name, 1, 1)
    (first, *shardings) = content.shardings
    block = first.blocks[0]
    contraction = replace(block.contractions[0], name=f"{name}/{name}/{name}", place=place)
    block = Block(contractions=(contraction,), repeats=2)
    stage = replace(content.numbers.stages[0], layers=(name,))
    numbers = replace(content.numbers, stages=(stage, *content.numbers.stages[1:]))
    entries = [replace(it, op=name, place=place) for it in content.communications.entries]
    spans = [replace(span, name=name) for span in content.timeline.spans]
    return replace(
        content,
        name=name,
        numbers=numbers,
        shardings=(replace(first, blocks=(block,)), *shardings),
        communications=replace(content.communications, entries=tuple(entries)),
        timeline=replace(content.timeline, spans=tuple(spans)),
        remarks=(Diagnostic("remark", place, name),),
    )


def test_names_are_text(report: Any, parsed: Any) -> None:
    name = "$$</script><script>alert(1)</script><img src=x onerror=alert(2)>&quot;\x1b[31m$$"
    text = page(named(report.content, name))
    found = type(parsed)(text)
    assert [tag for tag, _ in found.elements].count("script") == len(parsed.scripts)
    assert not found.all("img")
    assert "<script>alert" not in text
    assert "\x1b" not in text
    # Figures have it as it is, in JSON.
    assert any("alert(1)" in script for script in found.scripts if script.startswith("{"))


def test_a_missing_bokeh_says_what_to_install(
    report: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "bokeh", None)
    assert importlib.util.find_spec("bokeh") is None
    with pytest.raises(ReportError, match=r"pip install 'alpa-mlir\[report\]'"):
        check_can_draw()
    with pytest.raises(ReportError, match="bokeh, which is not installed"):
        write_report(tmp_path / "plan.html", report.content)
    assert not list(tmp_path.iterdir())


def test_a_cluster_file_that_is_gone(report: Any, tmp_path: Path) -> None:
    """Then the memory of devices is unknown, and the hosts are those of the meshes."""
    gone = str(tmp_path / "gone.toml")
    unknown: PlanReport = replace(report.content.numbers, cluster=gone, memory_bytes=None)
    text = page(replace(report.content, numbers=unknown))
    assert "of 16 GiB" not in text.replace(BOKEH.read_text(encoding="utf-8"), "")
