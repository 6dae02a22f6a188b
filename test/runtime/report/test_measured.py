"""A measured step in the report: read from a trace, and compared with the plan."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from alpa.runtime.report import ReportError
from alpa.runtime.report.content import Content
from alpa.runtime.report.measured_step import MeasuredStep
from alpa.runtime.report.page import page
from alpa.runtime.trace import Span, Trace, WorkerSpans

ROWS = {"transfer": "receive from {}", "call": "arguments"}
MOVE = ((0, 0), (1, 0))


def trace_of(content: Content, factor: float, path: Path) -> Path:
    """A trace of one step that takes so many times what was predicted."""
    workers: list[WorkerSpans] = []
    for mesh in content.numbers.meshes:
        spans = [
            Span(
                row=ROWS.get(span.activity, "{}").format(span.name),
                kind="receive" if span.activity == "transfer" else "compute",
                begin=factor * span.start,
                end=factor * span.end,
                micro_batch=span.micro_batch,
            )
            for span in content.compiled.on(mesh.name)
            if span.activity != "bubble"
        ]
        worker = WorkerSpans(
            name=f"{mesh.name} on host 0",
            mesh=mesh.name,
            begin=0.0,
            end=factor * content.compiled.seconds,
            spans=tuple(spans),
        )
        workers.append(worker)
    trace = Trace()
    trace.add(workers)
    trace.write(path)
    return path


def test_a_trace_of_the_predicted_step(report: Any, parsed: Any, tmp_path: Path) -> None:
    path = trace_of(report.content, 2.0, tmp_path / "step.json")
    step = MeasuredStep.read(path)
    assert step.steps == 1
    assert step.workers == ("mesh_0 on host 0", "mesh_1 on host 0")
    assert step.timeline.seconds == pytest.approx(2 * report.content.compiled.seconds)
    for worker, mesh in zip(step.workers, ("mesh_0", "mesh_1"), strict=True):
        mine, predicted = (
            [it for it in timeline.on(name) if it.activity != "call"]
            for timeline, name in (
                (step.timeline, worker),
                (report.content.compiled, mesh),
            )
        )
        kinds = [it.activity for it in mine]
        assert kinds == [it.activity for it in predicted]
        assert [it.seconds for it in mine] == pytest.approx([2 * it.seconds for it in predicted])
    text = page(replace(report.content, measured=step))
    ratios = re.findall(r"<td>(\d+\.\d\d)</td></tr>", text)
    assert len(ratios) > 4
    assert set(ratios) == {"2.00"}
    sections = type(parsed)(text).all("section")
    assert "measured" in [it["id"] for it in sections]


def test_a_receive_waits_for_its_sender(tmp_path: Path) -> None:
    sent = Span(row="send to b", kind="send", begin=3.0, end=3.5, micro_batch=0, move=MOVE)
    got = Span(row="receive from a", kind="receive", begin=1.0, end=4.0, micro_batch=0, move=MOVE)
    trace = Trace()
    for shift in (0.0, 10.0, 20.0):  # The last one is the longest.
        workers = [
            WorkerSpans(name=name, mesh=name, begin=shift, end=shift + 6, spans=tuple(spans))
            for name, spans in (
                (
                    "a",
                    [
                        moved(Span(row="f.forward", kind="compute", begin=0, end=3), shift),
                        moved(sent, shift),
                    ],
                ),
                (
                    "b",
                    [
                        moved(got, shift),
                        moved(
                            Span(row="g.forward", kind="compute", begin=4, end=5 + shift / 10),
                            shift,
                        ),
                    ],
                ),
            )
        ]
        trace.add(workers)
    trace.write(tmp_path / "step.json")
    step = MeasuredStep.read(tmp_path / "step.json")
    assert (step.steps, step.timeline.seconds) == (3, pytest.approx(6.0))
    found = [(it.activity, round(it.start, 6), round(it.end, 6)) for it in step.timeline.on("b")]
    assert found == [("bubble", 0.0, 3.0), ("transfer", 3.0, 4.0), ("forward", 4.0, 6.0)]


def moved(span: Span, seconds: float) -> Span:
    return replace(span, begin=span.begin + seconds, end=span.end + seconds)


@pytest.mark.parametrize(
    "text", ["", "{}", '{"traceEvents": []}', '{"traceEvents": [{"ph": "X"}]}']
)
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text(text)
    with pytest.raises(ReportError, match=r"other\.json is not the trace of a step"):
        MeasuredStep.read(path)


def test_a_trace_of_another_plan_is_refused(report: Any, tmp_path: Path) -> None:
    path = trace_of(report.content, 1.0, tmp_path / "step.json")
    text = path.read_text().replace("mesh_1 on host 0", "mesh_7 on host 0")
    path.write_text(text)
    assert json.loads(text)
    with pytest.raises(
        ReportError, match="it has mesh_0, mesh_7, and this plan has mesh_0, mesh_1"
    ):
        Content.of(report.planned.module, report.content.numbers, "x", trace=path)
