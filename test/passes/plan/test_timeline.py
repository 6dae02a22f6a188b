"""The timeline of a step: it ends when the plan says so, and each mesh always does something."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

from alpa.dialects import ir
from alpa.passes.plan.communication import Communications
from alpa.passes.plan.data import Program
from alpa.passes.plan.timeline import Timeline


@pytest.fixture(scope="module")
def timeline(two_stages: ir.Module, program: Program) -> Timeline:
    return Timeline.of(program, Communications.of(two_stages, program).fragment_seconds)


def test_it_ends_when_the_plan_says(timeline: Timeline, program: Program) -> None:
    assert timeline.seconds == program.plan.predicted_step_seconds > 0
    assert max(span.end for span in timeline.spans) == timeline.seconds


def test_the_spans_of_a_mesh_follow_one_another(timeline: Timeline, program: Program) -> None:
    for mesh in program.meshes:
        spans = list(timeline.on(mesh.name))
        assert spans[0].start == 0.0
        assert spans[-1].end == timeline.seconds
        assert all(one.end == other.start for one, other in pairwise(spans))


def test_every_micro_batch_runs_once(timeline: Timeline, program: Program) -> None:
    for mesh in program.meshes:
        for activity in ("forward", "backward"):
            runs = [span for span in timeline.on(mesh.name) if span.activity == activity]
            assert [span.micro_batch for span in runs] == [0, 1, 2]
            assert all(span.collective_seconds <= span.seconds for span in runs)


def test_transfers_are_where_they_arrive(timeline: Timeline, program: Program) -> None:
    arriving = [span for span in timeline.spans if span.activity == "transfer"]
    assert {(span.name, span.mesh) for span in arriving} == {
        ("mesh_0", "mesh_1"),
        ("mesh_1", "mesh_0"),
    }
    assert {span.bytes for span in arriving} == {8 * 64 * 4}
    # The second stage waits for the first micro-batch, and the first stage for its gradient.
    first = [next(iter(timeline.on(mesh.name))).activity for mesh in program.meshes]
    assert first == ["forward", "bubble"]


def test_the_call_of_a_step_comes_last(program: Program, tmp_path: Path) -> None:
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(
        'hosts = 1\ndevices_per_host = 4\n[device]\nname = "d"\nmemory = "1GiB"\n'
        "peak_flops = { f32 = 1e12 }\nmemory_bandwidth = 1e11\nstep = { start = 0.25 }\n"
        "[intra_host]\nbandwidth = 1e10\nlatency = 1e-6\n"
        "[inter_host]\nbandwidth = 1e10\nlatency = 1e-6\n"
    )
    called = replace(program, plan=replace(program.plan, cluster=str(cluster)))
    found = Timeline.of(called, [0.0] * len(program.fragments))
    assert found.seconds == program.plan.predicted_step_seconds + 0.25
    for mesh in program.meshes:
        last = list(found.on(mesh.name))[-1]
        assert (last.activity, last.seconds) == ("call", 0.25)
