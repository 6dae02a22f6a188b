"""Without a schedule: what the planner searches, finishes and takes."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import pytest

from alpa import passes
from alpa.dialects import ir, main_function, parse
from alpa.dialects.plan import Plan
from alpa.passes import plan_search
from alpa.passes.alpa import Alpa
from alpa.passes.base import NoRoomError, Pass, Remark
from alpa.passes.candidate import Candidate
from alpa.passes.ilp_shard_annotate import IlpShardAnnotate
from alpa.passes.plan.report import PlanReport
from alpa.passes.plan.table import headlines
from alpa.passes.plan_search import PlanSearch
from alpa.passes.schedules.planned import OTHERS
from alpa.passes.stage_mesh_partition import StageMeshPartition
from alpa.passes.stages.clustered import Clustered
from alpa.passes.stages.merge import Stages
from alpa.passes.stages.overcommitment import Overcommitment
from alpa.passes.tried import Tried, TriedPlan
from alpa.runtime.ahead_of_time.verification import predicted_peaks
from alpa.runtime.exported import exported

WIDTH, LAYERS = 256, 8
FOUR_MESHES = "cluster=cpu:1x4 mesh-shape=1 num-layers=8"


@cache
def chain(*, trains: bool, rows: int = 128, is_tied: bool = False) -> str:
    """A chain of equal matrix products, and a step of their training. If it is tied, the last
    product is with the first weights."""

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in [*params[:-1], params[0]] if is_tied else params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, x)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32)
    if trains:
        text = jax.jit(step, donate_argnums=0).lower(params, x).as_text(debug_info=True)
    else:
        text = jax.jit(loss).lower(params, x).as_text(debug_info=True)
        for shape, role in (
            ("256x256", 'alpa.role = "constant"'),
            ("128x256", 'alpa.role = "batch", alpa.batch_dim = 0 : i64'),
        ):
            argument = rf"(%arg\d+: tensor<{shape}xf32>)( loc\(.*?\))"
            text = re.sub(argument, rf"\1 {{{role}}}\2", text)
    return text.replace("tensor<f32> {jax", 'tensor<f32> {alpa.result = "mean", jax')


def planned(options: str, *, trains: bool = True) -> tuple[PlanReport, tuple[TriedPlan, ...]]:
    """The plan, and what was tried for it."""
    tried: list[Tried] = []
    module = parse(chain(trains=trains))
    alpa = Alpa.from_options(dict(option.split("=") for option in options.split()))
    with module.context, ir.Location.unknown():
        replace(alpa, on_tried=tried.append).drive(
            module, lambda *_: None, lambda step, *its: step.run(*its)
        )
    return PlanReport.of(module), tried[-1].plans


def seconds_under(schedule: str) -> float:
    module = passes.run(
        chain(trains=True), f"alpa{{{FOUR_MESHES} num-micro-batches=4 schedule={schedule}}}"
    )
    found = Plan.read(main_function(module))
    assert found is not None
    return found.predicted_step_seconds


def test_a_plan_that_is_faster_than_1f1b_is_taken() -> None:
    report, tried = planned(f"{FOUR_MESHES} num-micro-batches=4")
    finished = {it.schedule: it.predicted_step_seconds for it in tried if it.predicted_step_seconds}
    assert report.schedule in finished
    assert report.predicted_step_seconds == min(finished.values())
    assert report.predicted_step_seconds == seconds_under(report.schedule)
    assert report.predicted_step_seconds < finished["1f1b"] == seconds_under("1f1b")
    # DualPipeV does not admit four micro-batches of eight stages.
    refused = {it.schedule: it.reason for it in tried if it.outcome == "infeasible"}
    assert "needs at least as many micro-batches as stages, 8" in refused["dualpipe-v"]
    assert {it.schedule for it in tried} == {"1f1b", "gpipe", *OTHERS}


def test_schedules_whose_cuts_are_all_slower_are_not_searched_to_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Here nothing but half of the step of 1F1B is of use."""
    monkeypatch.setattr(plan_search, "USELESS", 0.5)
    report, tried = planned(f"{FOUR_MESHES} num-micro-batches=4")
    assert report.schedule == "1f1b"
    assert report.runner_up == ""
    assert [it.schedule for it in tried if it.predicted_step_seconds] == ["1f1b"]
    bounded = [it for it in tried if it.outcome == "pruned"]
    assert {"gpipe", "zb-h1", "zb-v", "interleaved-1f1b"} <= {it.schedule for it in bounded}
    for it in bounded:
        assert it.estimated_step_seconds is None
        (bound,) = re.findall(r"each cut is estimated to take at least ([\d.]+) s", it.reason)
        assert float(bound) >= 0.5 * report.predicted_step_seconds


@pytest.mark.parametrize("share", [0.5, 0.95])
def test_stages_that_exceed_the_memory_are_taken_where_no_others_fit(
    monkeypatch: pytest.MonkeyPatch, share: float
) -> None:
    """Others are estimated at this share of the seconds; half of them ends the first attempt, and
    makes another."""
    expected, _ = planned(f"{FOUR_MESHES} num-micro-batches=4 schedule=1f1b")
    cut = Overcommitment.cut

    def cut_more(
        self: Overcommitment, program: Clustered, find: Callable[[Clustered], Stages]
    ) -> Stages:
        found = cut(self, program, find)
        self.within = share * expected.predicted_step_seconds
        return found

    def refused(self: PlanSearch, *_: object) -> Candidate:
        raise NoRoomError(main_function(self.layers), "no room", missing=0.0)

    monkeypatch.setattr(Overcommitment, "cut", cut_more)
    monkeypatch.setattr(PlanSearch, "_fitting", refused)
    report, _ = planned(f"{FOUR_MESHES} num-micro-batches=4 schedule=1f1b")
    assert report.predicted_step_seconds == expected.predicted_step_seconds


def test_a_plan_names_the_schedule_that_comes_second() -> None:
    report, tried = planned(f"{FOUR_MESHES} num-micro-batches=4")
    others = {
        it.predicted_step_seconds or it.estimated_step_seconds: it
        for it in tried
        if it.outcome in ("slower", "pruned") and it.schedule != report.schedule
    }
    assert report.runner_up_seconds == min(others)
    assert report.runner_up == others[report.runner_up_seconds].schedule
    second = others[report.runner_up_seconds]
    assert report.runner_up_is_estimated == (second.outcome == "pruned")


@pytest.mark.parametrize(
    ("is_estimated", "text"),
    [
        (False, "its plan takes 3 s, 50% longer"),
        (True, "its stages are estimated at 3 s, those of zb-v at 2.5 s"),
    ],
)
def test_by_how_much_a_schedule_loses_is_said(is_estimated: bool, text: str) -> None:
    report, _ = planned(f"{FOUR_MESHES} num-micro-batches=4")
    report = replace(
        report,
        schedule="zb-v",
        estimated_step_seconds=2.5,
        predicted_step_seconds=2.0,
        runner_up="zb-h1",
        runner_up_seconds=3.0,
        runner_up_is_estimated=is_estimated,
    )
    assert f"schedules: zb-h1 comes second; {text}" in list(headlines(report))


@pytest.mark.parametrize(("batches", "trains"), [(1, True), (4, False)])
def test_where_all_schedules_are_the_same_only_the_first_ones_are_planned(
    batches: int, trains: bool
) -> None:
    options = f"{FOUR_MESHES} num-micro-batches={batches}"
    report, tried = planned(options, trains=trains)
    assert report.schedule == "1f1b"
    assert {it.schedule for it in tried} <= {"1f1b", "gpipe"}
    assert report.runner_up == ""


@pytest.mark.parametrize("remat", ["none", "layer"])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "v-half", "dualpipe-v"])
def test_memory_is_estimated_as_it_is_planned(schedule: str, remat: str) -> None:
    """With split backwards, too: by the cut, by the shardings, and by the step's instructions."""
    batches = 8 if schedule == "dualpipe-v" else 4
    options = (
        f"cluster=cpu:1x2 mesh-shape=1 num-layers=8 num-micro-batches={batches} "
        f"schedule={schedule} remat={remat}"
    )
    cut: list[Plan | None] = []

    def run_pass(step: Pass, module: ir.Module, remark: Remark) -> None:
        step.run(module, remark)
        if isinstance(step, StageMeshPartition):
            cut.append(Plan.read(main_function(module)))

    whole = parse(chain(trains=True, rows=2048))
    alpa = Alpa.from_options(dict(option.split("=") for option in options.split()))
    with whole.context, ir.Location.unknown():
        alpa.drive(whole, lambda *_: None, run_pass)
    plan, estimate = Plan.read(main_function(whole)), cut[-1]
    assert plan is not None
    assert estimate is not None
    real = predicted_peaks(exported(whole))
    assert len(real) == len(plan.predicted_peak_bytes) > 1
    for before, planned_bytes, instructed in zip(
        estimate.predicted_peak_bytes, plan.predicted_peak_bytes, real.values(), strict=True
    ):
        assert 0.95 < before / planned_bytes < 1.5
        assert 0.99 < planned_bytes / instructed < 1.5
        if schedule == "zb-h1":  # Where meshes have several stages, their peaks are added up.
            assert before == pytest.approx(planned_bytes, rel=0.1)


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize("schedule", ["zb-h1", "zb-v", "dualpipe-v", "interleaved-1f1b"])
def test_seconds_are_estimated_as_they_are_planned(schedule: str, is_tied: bool) -> None:
    """The parts of backwards take what they take, and tied weights cross meshes one after the
    other, or not at all."""
    options = (
        "cluster=cpu:1x2 mesh-shape=1 num-layers=8 num-micro-batches=4 remat=layer "
        f"schedule={schedule}"
    )
    module = passes.run(chain(trains=True, rows=32, is_tied=is_tied), f"alpa{{{options}}}")
    plan = Plan.read(main_function(module))
    assert plan is not None
    assert plan.estimated_step_seconds == pytest.approx(plan.predicted_step_seconds, rel=0.03)


def test_schedules_with_equal_lists_are_finished_once() -> None:
    """On two meshes, V-Half and V-Min are ZB-V."""
    _, tried = planned("cluster=cpu:1x2 mesh-shape=1 num-layers=8 num-micro-batches=4")
    equal = [it for it in tried if it.schedule in ("zb-v", "v-half", "v-min")]
    assert len({it.estimated_step_seconds for it in equal}) == 1
    assert [it.schedule for it in equal if it.predicted_step_seconds is not None] == ["zb-v"]


def test_no_more_than_all_memory_is_reserved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages that never fit end in their own error, not in one about the reserve. They are the same
    with less memory, so they are finished once."""
    refused: list[ir.Module] = []

    def run(self: IlpShardAnnotate, module: ir.Module, remark: Remark) -> None:
        refused.append(module)
        raise NoRoomError(main_function(module), "needs more", missing=0.4)

    monkeypatch.setattr(IlpShardAnnotate, "run", run)
    with pytest.raises(NoRoomError, match=r"^needs more$"):
        planned(f"{FOUR_MESHES} num-micro-batches=8 schedule=1f1b")
    assert len(refused) == 1


def test_more_stages_than_devices_are_those_of_other_schedules() -> None:
    """1F1B has one stage per mesh; without a schedule, those with several are left."""
    options = "cluster=cpu:1x2 num-layers=8 num-micro-batches=4 num-stages=4 processes=0"
    module = passes.run(chain(trains=True), f"alpa{{{options}}}")
    plan = Plan.read(main_function(module))
    assert plan is not None
    assert plan.schedule not in ("1f1b", "gpipe")
    report = PlanReport.of(module)
    assert len(report.meshes) == 2
    for more in (" schedule=1f1b", " num-micro-batches=1"):
        text = f"alpa{{{options.replace(' num-micro-batches=4', '')}{more}}}"
        with pytest.raises(ir.MLIRError, match="num-stages can be at most 2"):
            passes.run(chain(trains=True), text)
