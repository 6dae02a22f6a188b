"""Cuts for schedules of several stages per mesh."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

import alpa.passes
from alpa.dialects import ir, main_function, parse
from alpa.dialects.plan import Plan, read_meshes
from alpa.passes.base import NotFasterError
from alpa.passes.plan.instructions import write_script
from alpa.passes.plan.reader import read_planned
from alpa.passes.stage_mesh_partition import StageMeshPartition
from alpa.runtime.script_checks import verify
from alpa.tools import zoo


@cache
def layers() -> str:
    """A training step of eight equal layers."""
    text = zoo.get("gpt-tiny", optimizer="sgd", num_layers=8).lower(1)
    return str(alpa.passes.run(text, "simplify-trivial-ops,layer-cluster{num-layers=8}"))


def cut(options: str) -> ir.Module:
    return alpa.passes.run(layers(), f"stage-mesh-partition{{{options}}}")


def stages_of(module: ir.Module) -> list[tuple[str, int | None, int]]:
    """Of each forward its mesh, its stage and the number of its layers."""
    forwards = (it for it in read_planned(module).fragments if it.part == "forward")
    return [(it.mesh, it.stage, len(it.origins)) for it in forwards]


def test_stages_lie_on_meshes_as_the_schedule_says() -> None:
    options = "cluster=cpu:1x2 mesh-shape=1 num-micro-batches=4 num-stages=4"
    for schedule, meshes in (("interleaved-1f1b", "0101"), ("v-half", "0110")):
        module = cut(f"{options} schedule={schedule}")
        expected = [(f"mesh_{mesh}", stage, 2) for stage, mesh in enumerate(meshes)]
        assert stages_of(module) == expected
        devices = [mesh.devices for mesh in read_meshes(main_function(module))]
        assert devices == [(0,), (1,)]
        verify(write_script(read_planned(module)))


def test_the_number_of_stages_per_mesh_is_part_of_the_schedule() -> None:
    options = "cluster=cpu:1x2 mesh-shape=1 num-micro-batches=4"
    module = cut(f"{options} schedule=interleaved-1f1b:4")
    assert stages_of(module) == [(f"mesh_{stage % 2}", stage, 1) for stage in range(8)]


def test_numbers_of_meshes_and_shapes_are_compared_by_the_simulated_schedule() -> None:
    options = "cluster=cpu:1x4 num-micro-batches=4 schedule=zb-v"
    found = Plan.read(main_function(cut(options)))
    assert found is not None
    each: list[float] = []
    for shape in ("1", "2", "2x2"):
        plan = Plan.read(main_function(cut(f"{options} mesh-shape={shape}")))
        assert plan is not None
        each.append(plan.estimated_step_seconds)
    assert found.estimated_step_seconds == min(each)
    # No bound of all cuts is known.
    assert found.estimated_step_bound == 0


@pytest.mark.parametrize("schedule", ["1f1b", "zb-v"])
def test_a_bound_of_the_step_ends_the_search(schedule: str) -> None:
    options = {"cluster": "cpu:1x4", "num-micro-batches": "4", "schedule": schedule}
    step = StageMeshPartition.from_options(options)
    module = parse(layers())
    with module.context, ir.Location.unknown():
        replace(step, within=1.0).run(module.operation.clone().opview, lambda *_: None)
        with pytest.raises(NotFasterError, match="each cut is estimated to take at least") as error:
            replace(step, within=1e-6).run(module, lambda *_: None)
    assert error.value.bound >= 1e-6


def test_memory_of_a_mesh_is_that_of_its_stages() -> None:
    options = "cluster=cpu:1x2 mesh-shape=1 num-micro-batches=4 remat=none"
    alone = Plan.read(main_function(cut(f"{options} num-stages=2 schedule=gpipe")))
    shared = Plan.read(main_function(cut(f"{options} num-stages=4 schedule=interleaved-1f1b")))
    assert alone is not None
    assert shared is not None
    # Under GPipe a mesh keeps four micro-batches of its layers, here four and three at most, beside
    # the same state.
    for mine, its in zip(shared.predicted_peak_bytes, alone.predicted_peak_bytes, strict=True):
        assert 0.5 * its < mine <= 1.1 * its


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("num-stages=3", "so num-stages can be 2, 4 here, not 3"),
        ("num-stages=4 num-micro-batches=3 schedule=dualpipe-v", "as many micro-batches as stages"),
        ("mesh-shape=4", "the 2 devices cannot be cut into such meshes of the asked shape"),
        ("meshes=0,1", "so meshes=0,1 is not possible; leave out meshes or the schedule"),
        ("fixed-stages=0-3:1x1", "so fixed-stages=0-3:1x1 is not possible"),
        ("schedule=interleaved-1f1b:16", "32 stages need as many layers, and the program has 8"),
    ],
)
def test_what_a_schedule_does_not_admit(options: str, message: str) -> None:
    given = dict(pair.split("=") for pair in f"schedule=zb-v {options}".split())
    text = " ".join("=".join(pair) for pair in given.items())
    with pytest.raises(ir.MLIRError, match=message):
        cut(f"cluster=cpu:1x2 {text}")
