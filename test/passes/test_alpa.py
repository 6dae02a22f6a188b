"""The pipeline `alpa`: the candidates that it plans, and the one that it keeps."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa import passes
from alpa.dialects import func, ir, main_function, parse
from alpa.dialects.plan import Plan, Schedule, read_meshes
from alpa.passes import import_hlo
from alpa.passes.alpa import STEPS, Alpa, fingerprint, planned_for
from alpa.passes.analysis import input_checks
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.base import NotFasterError, Pass, PassError, Remark
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import Link
from alpa.passes.layer_cluster import LayerCluster
from alpa.passes.plan_search import OtherSchedules
from alpa.passes.solve.stages import stage_dp
from alpa.passes.solve.stages.problem import Problem, Solution
from alpa.passes.stage_mesh_partition import StageMeshPartition
from alpa.passes.stages.boundary import Boundary
from alpa.passes.stages.class_problem import ClassProblem, ClassSolver
from alpa.passes.stages.clustered import even_seconds
from alpa.passes.stages.costing import LayerCosts
from alpa.passes.stages.merge import Stages

WIDTH, LAYERS = 128, 6


def lowered(
    activation: Callable[[jax.Array], jax.Array],
    rows: int,
    width: int = WIDTH,
    layers: int = LAYERS,
) -> str:
    """A training step of a chain of matrix products."""

    def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(params: list[jax.Array]) -> jax.Array:
            h = x
            for w in params:
                h = activation(h @ w)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    params = [jax.ShapeDtypeStruct((width, width), jnp.float32)] * layers
    x = jax.ShapeDtypeStruct((rows, width), jnp.float32)
    text = jax.jit(step, donate_argnums=0).lower(params, x).as_text(debug_info=True)
    return text.replace("tensor<f32> {jax", 'tensor<f32> {alpa.result = "mean", jax')


@pytest.fixture(scope="module")
def program() -> str:
    return lowered(jnp.tanh, rows=64)


class Run:
    """A run of the pipeline: the number of runs of each pass, the remarks, and the plan."""

    def __init__(self, text: str, options: str) -> None:
        self.passes: Counter[str] = Counter()
        self.remarks: list[str] = []
        self.failed: list[PassError] = []
        self.module = parse(text)
        passes.run(
            self.module,
            f"alpa{{{options}}}",
            on_remark=lambda _, message: self.remarks.append(message),
            on_error=self.failed.append,
            on_pass=self._count,
        )

    @contextmanager
    def _count(self, name: str) -> Generator[None]:
        self.passes[name] += 1
        yield

    @property
    def plan(self) -> Plan:
        found = Plan.read(main_function(self.module))
        assert found is not None
        return found


TWO = "cluster=cpu:1x2 num-layers=2 num-stages=2 num-micro-batches=4"


def test_every_pass_gets_the_options_that_it_has() -> None:
    alpa = Alpa.from_options({"cluster": "cpu:1x2", "intra": "zero2", "num-layers": "3"})
    made = [*alpa.to_layers, alpa.cut, *alpa.to_plan]
    assert [type(one) for one in made] == list(STEPS)
    for one in made:
        for name, value in {"cluster": "cpu:1x2", "intra": "zero2", "num_layers": 3}.items():
            assert getattr(one, name, value) == value
    names = {name for kind in STEPS for name in kind.options()}
    assert Alpa.options().keys() == names | {"schedule", "faster-than"}


def test_options_of_one_name_mean_the_same_in_all_passes() -> None:
    for name, option in Alpa.options().items():
        if name == "schedule":
            continue
        own = [kind.options()[name] for kind in STEPS if name in kind.options()]
        assert len({repr((it.type, it.default)) for it in [option, *own]}) == 1, name


def test_a_plan_has_the_hash_of_its_program(program: str) -> None:
    source = parse(program)
    assert planned_for(source) is None
    run = Run(program, "cluster=cpu:1x1 num-layers=1")
    assert planned_for(run.module) == fingerprint(source)
    assert planned_for(run.module) != fingerprint(run.module)


def test_with_one_micro_batch_gpipe_is_not_planned(program: str) -> None:
    run = Run(program, "cluster=cpu:1x2 num-layers=2 num-stages=2")
    assert (run.passes["stage-mesh-partition"], run.plan.schedule) == (1, "1f1b")


def test_with_one_mesh_gpipe_is_not_planned(program: str) -> None:
    run = Run(program, "cluster=cpu:1x2 num-layers=2 num-stages=1 num-micro-batches=4")
    assert (run.passes["stage-mesh-partition"], run.plan.schedule) == (1, "1f1b")


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_schedule_that_is_asked_for_is_taken(program: str, schedule: Schedule) -> None:
    run = Run(program, f"{TWO} schedule={schedule}")
    assert (run.passes["stage-mesh-partition"], run.plan.schedule) == (1, schedule)


@pytest.mark.parametrize(("share", "taken"), [(0.5, "gpipe"), (1.5, "1f1b")])
def test_gpipe_is_finished_only_if_its_stages_are_faster(
    program: str, share: float, taken: str
) -> None:
    passes_run: Counter[str] = Counter()

    def faster_or_slower(step: Pass, module: ir.Module, remark: Remark) -> None:
        step.run(module, remark)
        passes_run[step.name] += 1
        if isinstance(step, OtherSchedules):
            stages = step.found["gpipe"]
            assert isinstance(stages, Stages)
            step.found.clear()
            step.found["gpipe"] = replace(stages, seconds=share * stages.seconds)

    module = parse(program)
    with module.context, ir.Location.unknown():
        options(TWO).drive(module, lambda *_: None, faster_or_slower)
    assert len(read_meshes(main_function(module))) == 2
    assert passes_run["layer-cluster"] == 1
    finished = 2 if taken == "gpipe" else 1
    assert passes_run["stage-mesh-partition"] == 1 + finished  # one for all other schedules
    assert passes_run["ilp-shard-annotate"] == finished
    found = Plan.read(main_function(module))
    assert found is not None
    if taken == "1f1b":
        assert found.schedule == taken


def options(text: str) -> Alpa:
    """The planner with options as a pipeline has them."""
    return Alpa.from_options(dict(option.split("=") for option in text.split()))


def test_shapes_are_checked_once(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def checked(module: ir.Module, *, is_checked: bool = False) -> func.FuncOp:
        asked.append(is_checked)
        return check_input(module, is_checked=is_checked)

    for step in STEPS:
        module = sys.modules[step.__module__]
        if hasattr(module, "check_input"):
            monkeypatch.setattr(module, "check_input", checked)

    def checked_types(module: ir.Module) -> tuple[func.FuncOp, set[ir.Type]]:
        asked.append(False)
        return input_checks.checked_types(module)

    monkeypatch.setattr(import_hlo, "checked_types", checked_types)
    Run(program, TWO)
    assert asked.count(False) == 1
    assert asked.count(True) >= len(STEPS) - 2


def test_each_mesh_is_costed_once_for_all_cuts(program: str) -> None:
    posed: Counter[tuple[int, int, tuple[int, ...]]] = Counter()

    class Counted(ClassSolver):
        def pose(self, hosts: int, devices: int, shape: tuple[int, ...]) -> ClassProblem:
            posed[hosts, devices, shape] += 1
            return super().pose(hosts, devices, shape)

    cuts: list[str] = []

    def run(step: Pass, module: ir.Module, remark: Remark) -> None:
        cuts.extend([step.schedule] if isinstance(step, StageMeshPartition) else [])
        step.run(module, remark)

    alpa = options(f"{TWO.replace('1x2', '1x4')} remat=none processes=0")
    alpa = replace(alpa, cut=replace(alpa.cut, costs=LayerCosts(Counted)))
    module = parse(program)
    with module.context, ir.Location.unknown():
        alpa.drive(module, lambda *_: None, run)
    assert cuts[0] == "1f1b"
    assert len(cuts) > 1
    assert posed == {(1, 1, (1,)): 1, (1, 2, (2,)): 1}


def test_a_later_cut_begins_with_what_is_known(
    program: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    solved: list[Problem] = []

    def counted(problem: Problem) -> Solution:
        solved.append(problem)
        return solve(problem)

    solve = stage_dp.solve
    monkeypatch.setattr(stage_dp, "solve", counted)
    layers = passes.run(program, "simplify-trivial-ops,layer-cluster{num-layers=4}")
    counts: list[int] = []
    seconds: list[float] = []
    for costs in (shared := LayerCosts(), shared, LayerCosts()):
        cut = StageMeshPartition(
            cluster="cpu:1x4", num_micro_batches=4, schedule="1f1b", processes=0, costs=costs
        )
        module = parse(str(layers))
        solved.clear()
        with module.context, ir.Location.unknown():
            cut.run(module, lambda *_: None)
        counts.append(len(solved))
        found = Plan.read(main_function(module))
        assert found is not None
        seconds.append(found.estimated_step_seconds)
    assert counts[0] == counts[2] > counts[1] == 2  # one for the bound, one for the cut
    assert seconds[0] == seconds[1] == seconds[2]


@pytest.mark.parametrize(
    ("text", "stages", "least"),
    [
        ("cluster=cpu:2x8", 1, 1),
        ("cluster=cpu:2x8 meshes-over-hosts=false", 1, 2),
        ("cluster=cpu:2x8 mesh-shape=1", 16, 16),
        ("cluster=cpu:2x8 mesh-shape=2x2", 4, 4),
        ("cluster=cpu:2x8 mesh-shape=2x2 schedule=zb-v", 8, 8),
        ("cluster=cpu:1x2 mesh-shape=2x2", 1, 1),
        ("cluster=cpu:2x8 num-stages=5", 5, 5),
        # A mesh may stay without layers.
        ("cluster=cpu:1x8 meshes=0-3:4,4-7:2x2", 2, 1),
    ],
)
def test_layers_are_cut_for_as_many_stages_as_the_options_fix(
    text: str, stages: int, least: int
) -> None:
    found: list[tuple[int, int]] = []

    def run(step: Pass, module: ir.Module, remark: Remark) -> None:
        if isinstance(step, LayerCluster):
            found.append((step.stages, step.least))
            raise PassError(main_function(module), "enough")

    module = parse("func.func public @main() { return }")
    with module.context, ir.Location.unknown(), pytest.raises(PassError, match="enough"):
        options(text).drive(module, lambda *_: None, run)
    assert found == [(stages, least)]


TIGHT = "num-layers=6 num-micro-batches=6 schedule=gpipe mesh-shape=1"


@pytest.fixture(scope="module")
def attention() -> str:
    """A program whose stages need more memory than estimates without cotangents say."""
    return lowered(jax.nn.softmax, rows=256)


@pytest.mark.usefixtures("low_estimates")
def test_stages_that_do_not_fit_are_cut_again(
    attention: str, small_cluster: Callable[..., Path]
) -> None:
    run = Run(attention, f"cluster={small_cluster('4200KiB', devices=2)} {TIGHT}")
    assert max(run.plan.predicted_peak_bytes) <= 4200 * 1024
    said = "needs at least 4.12 MiB per device on mesh_0, small has 4.1 MiB: stages are cut again"
    assert [message.rpartition(" with reserve=")[0] for message in run.remarks] == [said, said]
    first, second = (float(message.rpartition("=")[2]) for message in run.remarks)
    assert 1.9 * first <= second


@pytest.mark.usefixtures("low_estimates")
def test_where_no_cut_fits_the_first_answer_is_given(
    attention: str, small_cluster: Callable[..., Path]
) -> None:
    with pytest.raises(ir.MLIRError) as raised:
        Run(attention, f"cluster={small_cluster('3390KiB', devices=2)} {TIGHT}")
    (diagnostic,) = raised.value.error_diagnostics
    said = diagnostic.message
    assert "needs at least 3.38 MiB per device on mesh_0, small has 3.31 MiB" in said
    assert "with a larger reserve" in said


def test_a_program_that_fits_is_cut_once(
    attention: str, small_cluster: Callable[..., Path]
) -> None:
    assert not Run(attention, f"cluster={small_cluster('4300KiB', devices=2)} {TIGHT}").remarks


def test_the_bound_is_the_compute_split_evenly(program: str) -> None:
    to_layers = "combine-micro-batches,simplify-trivial-ops,split-loops,layer-cluster"
    layers = passes.run(program, to_layers)
    two, four = (Cluster.parse(f"cpu:1x{n}") for n in (2, 4))
    once = even_seconds(main_function(layers), two, 1)
    assert even_seconds(main_function(layers), four, 1) == pytest.approx(once / 2)
    assert once < even_seconds(main_function(layers), two, 2) < 2 * once  # the update runs once
    step_seconds = Run(program, "cluster=cpu:1x2").plan.predicted_step_seconds
    assert once <= step_seconds


def test_no_plan_is_faster_than_the_bound(program: str) -> None:
    options = "cluster=cpu:1x2 num-layers=2"
    failed: list[PassError] = []
    with pytest.raises(
        ir.MLIRError, match=r"no plan is predicted to be faster than 1e-06 s: the compute alone"
    ):
        passes.run(program, f"alpa{{{options} faster-than=1e-6}}", on_error=failed.append)
    (error,) = failed
    assert isinstance(error, NotFasterError)
    step_seconds = Run(program, options).plan.predicted_step_seconds
    assert 1e-6 < error.bound <= step_seconds
    assert Run(program, f"{options} faster-than={2 * step_seconds!r}").plan


def test_an_error_inside_is_at_its_op(program: str) -> None:
    with pytest.raises(ir.MLIRError) as raised:
        passes.run(program, "alpa{cluster=cpu:1x2 num-layers=2 num-stages=3}")
    (diagnostic,) = raised.value.error_diagnostics
    assert diagnostic.message.startswith("cannot make 3 stages of 2 layer(s)")
    with pytest.raises(ir.MLIRError, match="stage-mesh-partition: option 'meshes' holds"):
        passes.run(program, "alpa{cluster=cpu:1x2 meshes=0-9:10}")
    with pytest.raises(ir.MLIRError, match="no cluster to plan for"):
        passes.run(program, "alpa{mesh-shape=1}")


def test_hundreds_of_hosts(program: str) -> None:
    run = Run(program, "cluster=h100:256x8 num-layers=6 num-micro-batches=4 schedule=1f1b")
    assert sum(len(mesh.devices) for mesh in read_meshes(main_function(run.module))) == 2048
    (dropped,) = run.plan.dropped
    assert dropped.what.startswith("every submesh but 4x8, 8x8, 12x8, 16x8, ")
    assert dropped.what.endswith(", 256x8")
    assert dropped.reason == "a cluster of 256 hosts has too many to try all"
    assert f"{dropped.what} is left out of the search: {dropped.reason}" in run.remarks


def test_hundreds_of_hosts_and_meshes_of_a_shape(program: str) -> None:
    run = Run(program, "cluster=h100:260x8 num-layers=5 num-micro-batches=4 mesh-shape=52x8")
    assert [mesh.logical_shape for mesh in read_meshes(main_function(run.module))] == [(52, 8)] * 5
    assert not run.plan.dropped


def test_states_that_are_not_donated_are_held_twice_unless_asked(
    small_cluster: Callable[..., Path],
) -> None:
    def step(w: jax.Array, m: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        loss, g = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        m = 0.9 * m + g
        return w - 0.1 * m, m, loss

    shapes = (256, 256), (256, 256), (8, 256)
    text = jax.jit(step).lower(*map(jnp.zeros, shapes)).as_text()
    given = f"alpa{{cluster={small_cluster('1MiB', devices=1)} num-layers=1 donate-states="
    with pytest.raises(ir.MLIRError, match=r"donate-states=true overwrites these"):
        passes.run(text, f"{given}false}}")
    passes.run(text, f"{given}true}}")


@pytest.mark.parametrize("cluster", ["h100:4x1", "h100:1x4+h100:1x2"])
def test_stages_do_not_hide_what_crosses_between_hosts(cluster: str) -> None:
    """A GPU takes values from another host no faster than from its own: 2.7 GB/s."""
    text = lowered(jnp.tanh, rows=64, width=4096, layers=4)
    options = f"cluster={cluster} num-layers=4 num-micro-batches=8 processes=0"
    free, alone = (Run(text, f"{options}{more}").plan for more in ("", " num-stages=1"))
    assert free.predicted_step_seconds <= alone.predicted_step_seconds


def test_one_stage_is_tried_where_transfers_take_longer_than_estimated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = lowered(jnp.tanh, rows=64, width=4096, layers=4)
    options = "cluster=h100:4x1 num-layers=4 num-micro-batches=8 schedule=1f1b processes=0"
    alone = Run(text, f"{options} num-stages=1").plan

    def nothing(self: Boundary, cluster: Cluster, hosts: int, devices: int, *_: Link) -> np.ndarray:
        return np.zeros((*self.bytes.shape, 2))

    monkeypatch.setattr(Boundary, "seconds", nothing)
    found = Run(text, options)
    assert found.passes["stage-mesh-partition"] == 2
    assert len(read_meshes(main_function(found.module))) == 1
    assert found.plan.predicted_step_seconds == alone.predicted_step_seconds
    fixed = Run(text, f"{options} num-stages=2")
    assert fixed.passes["stage-mesh-partition"] == 1
    assert fixed.plan.predicted_step_seconds > alone.predicted_step_seconds


def test_equal_meshes_are_tried_where_transfers_take_longer_than_estimated() -> None:
    """One host is faster than stages on 4 and 8 hosts, and than one stage on all of them."""
    text = lowered(jnp.tanh, rows=1024, width=4096, layers=6)
    options = "cluster=h100:12x8 num-layers=6 num-micro-batches=4 schedule=1f1b processes=0"
    found = Run(text, options)
    assert found.passes["stage-mesh-partition"] == 3
    meshes = read_meshes(main_function(found.module))
    assert len({len(mesh.devices) for mesh in meshes}) == 1
    assert len({host for mesh in meshes for host in mesh.hosts}) < 12
    alone = Run(text, f"{options} num-stages=1").plan
    assert found.plan.predicted_step_seconds < 0.9 * alone.predicted_step_seconds
    assert found.plan.estimated_step_bound <= alone.estimated_step_bound


def test_one_host_is_taken_where_several_are_slower() -> None:
    """64 rows are not split over 3 hosts, so these only repeat one another's work."""
    text = lowered(jnp.tanh, rows=64, width=128, layers=2)
    options = "num-layers=2 num-micro-batches=2 schedule=1f1b processes=0"
    found, one = (Run(text, f"cluster=h100:{hosts}x1 {options}") for hosts in (3, 1))
    (mesh,) = read_meshes(main_function(found.module))
    assert mesh.hosts == (0,)
    assert found.plan.predicted_step_seconds == one.plan.predicted_step_seconds
    fixed = Run(text, f"cluster=h100:3x1 {options} num-stages=1")
    (mesh,) = read_meshes(main_function(fixed.module))
    assert mesh.hosts == (0, 1, 2)
