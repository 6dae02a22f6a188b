"""What a search says of the candidates and plans that it tried."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from alpa.dialects import ir, main_function, parse
from alpa.dialects.plan import Plan, read_meshes
from alpa.passes.alpa import Alpa
from alpa.passes.base import Pass, PassError, Remark
from alpa.passes.plan_search import OtherSchedules
from alpa.passes.schedules.planned import OTHERS
from alpa.passes.stages.class_problem import ClassProblem, ClassSolver
from alpa.passes.stages.costing import LayerCosts
from alpa.passes.stages.merge import Stages
from alpa.passes.tried import Tried
from test.passes.test_alpa import TIGHT, TWO, lowered

NO_CHOICE = "no choice was found"
REFUSED = "no rule"


@pytest.fixture(scope="module")
def program() -> str:
    return lowered(jnp.tanh, rows=64)


class Failing(ClassSolver):
    """Has no plan on two devices, and no time for four."""

    def pose(self, hosts: int, devices: int, shape: tuple[int, ...]) -> ClassProblem:
        if devices == 2:
            raise PassError(ir.Location.unknown(self.classes.module.context), REFUSED)
        if devices == 4:
            raise TimeoutError(NO_CHOICE)
        return super().pose(hosts, devices, shape)


def tried(
    program: str,
    options: str,
    solver: type[ClassSolver] = ClassSolver,
    run: Callable[[Pass, ir.Module, Remark], None] = lambda step, *its: step.run(*its),
) -> tuple[Tried, ir.Module]:
    """What was tried, and the plan."""
    alpa = Alpa.from_options(dict(option.split("=") for option in options.split()))
    found = list[Tried]()
    cut = replace(alpa.cut, costs=LayerCosts(solver))
    module = parse(program)
    with module.context, ir.Location.unknown():
        replace(alpa, cut=cut, on_tried=found.append).drive(module, lambda *_: None, run)
    (one,) = found
    assert [it.outcome for it in one.plans].count("taken") == 1
    return one, module


def test_the_fastest_plan_is_taken(program: str) -> None:
    found, module = tried(program, TWO)
    plan = Plan.read(main_function(module))
    assert plan is not None
    assert [it.schedule for it in found.plans] == ["1f1b", *OTHERS]
    (taken,) = (it for it in found.plans if it.outcome == "taken")
    assert taken.schedule == plan.schedule
    assert taken.estimated_step_seconds == plan.estimated_step_seconds
    finished = [it.predicted_step_seconds for it in found.plans if it.predicted_step_seconds]
    assert taken.predicted_step_seconds == plan.predicted_step_seconds == min(finished)


@pytest.mark.parametrize(("share", "outcome"), [(0.5, "slower"), (1.5, "pruned")])
def test_a_cut_that_is_no_faster_is_not_finished(program: str, share: float, outcome: str) -> None:
    """Of gpipe, whose estimate is changed to `share` of it, and whose step takes 2 seconds."""

    def run(step: Pass, module: ir.Module, remark: Remark) -> None:
        step.run(module, remark)
        if isinstance(step, OtherSchedules):
            stages = step.found["gpipe"]
            assert isinstance(stages, Stages)
            step.found.clear()
            step.found["gpipe"] = replace(stages, seconds=share * stages.seconds)
            return
        plan = Plan.read(main_function(module))
        if plan is not None and plan.schedule == "gpipe":
            replace(plan, predicted_step_seconds=2.0).write(main_function(module))

    found, _ = tried(program, TWO, run=run)
    assert [it.outcome for it in found.plans] == ["taken", outcome]
    other = found.plans[1]
    assert other.predicted_step_seconds == (2.0 if outcome == "slower" else None)


@pytest.mark.usefixtures("low_estimates")
def test_cuts_that_do_not_fit(small_cluster: Callable[..., Path]) -> None:
    text = lowered(jax.nn.softmax, rows=256)
    found, _ = tried(text, f"cluster={small_cluster('4200KiB', devices=2)} {TIGHT}")
    assert [it.outcome for it in found.plans] == ["infeasible", "infeasible", "taken"]
    assert all("needs at least 4.12 MiB" in it.reason for it in found.plans[:2])
    reserves = [it.reserve for it in found.plans]
    assert reserves[0] == 0 < reserves[1] < reserves[2]


def test_submeshes_without_costs(program: str) -> None:
    found, module = tried(program, "cluster=cpu:1x4 num-layers=4 processes=0", Failing)
    assert {len(mesh.devices) for mesh in read_meshes(main_function(module))} == {1}
    of = {(it.hosts * it.devices, it.outcome, it.reason) for it in found.submeshes}
    assert of == {(1, "costed", ""), (2, "infeasible", REFUSED), (4, "dropped", NO_CHOICE)}
    intervals = 4 * 5 // 2
    assert {it.num_candidates for it in found.submeshes} == {intervals}
    assert found.num_candidates == len(found.submeshes) * intervals
    assert (found.num_costed, found.num_pruned) == (intervals, 0)
    assert (found.num_infeasible, found.num_dropped) == (intervals, intervals)


def test_submeshes_that_bounds_rule_out(program: str) -> None:
    """Two stages of one device each on two devices: the mesh of both is never asked for."""
    found, _ = tried(program, f"{TWO} processes=0")
    outcomes = {it.devices: (it.outcome, it.reason) for it in found.submeshes}
    assert outcomes[1] == ("costed", "")
    assert outcomes[2][0] == "pruned"
    assert found.num_pruned == 3


def test_one_mesh_needs_no_costs(program: str) -> None:
    found, _ = tried(program, "cluster=cpu:1x4 num-layers=2 num-stages=1")
    assert [(it.devices, it.outcome) for it in found.submeshes] == [(4, "only")]
    assert found.num_costed == found.num_pruned == 0
