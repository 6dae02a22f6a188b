"""Costs of classes of layers, and the stage search that uses them, on tiny training steps."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa.passes
from alpa.dialects import body, ir, main_function
from alpa.dialects.attributes import read_arguments, read_results
from alpa.dialects.mpmd_types import MeshTensor, Origin
from alpa.dialects.plan import Plan, Schedule, read_meshes, read_solver_reports
from alpa.passes.analysis.graph import Graph, type_bytes
from alpa.passes.base import PassError
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh, all_reduce
from alpa.passes.sharding.baselines import Intra
from alpa.passes.sharding.copies import STORAGE_WEIGHT
from alpa.passes.solve.stages import placement, stage_dp
from alpa.passes.stage_mesh_partition import StageMeshPartition
from alpa.passes.stages.boundary import Boundary, boundary_of
from alpa.passes.stages.candidates import PRICES, Candidate, candidate_of, stage_problem
from alpa.passes.stages.class_costs import ClassCosts, Costs
from alpa.passes.stages.class_problem import ClassProblem, ClassSolver, Submesh
from alpa.passes.stages.costing import Costing, LayerCosts, Question
from alpa.passes.stages.layer_classes import LayerClasses, layer_classes
from alpa.passes.stages.mesh_candidates import HOPELESS, MeshCandidates, OneDevice
from alpa.passes.stages.policy import logical_shapes
from alpa.passes.stages.remat import Remat
from alpa.passes.workers import Workers, _Call
from alpa.tools import zoo

NUM_LAYERS = 4
PLAN = Plan(num_micro_batches=4, schedule="1f1b")
CLUSTER = "cpu:2x2"
T = TypeVar("T")


@dataclass(frozen=True)
class Clustered:
    module: ir.Module
    graph: Graph
    classes: LayerClasses
    solver: ClassSolver

    @property
    def boundary(self) -> Boundary:
        function = main_function(self.module)
        arguments, results = read_arguments(function), read_results(function)
        return boundary_of(self.graph, arguments, results, NUM_LAYERS)


def skipping_loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """Equal layers with tied ends; the last layer reads the first one's result."""
    h = first = jnp.tanh(x @ params[0])
    for w in params[1:]:
        h = jnp.tanh(h @ w)
    return jnp.mean(((h + first) @ params[0].T - x) ** 2)


def straight_loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
    """Equal layers that read only their neighbours."""
    h = x
    for w in params:
        h = jnp.tanh(h @ w)
    return jnp.mean(h**2)


def straight_step() -> str:
    return lowered(straight_loss)


def skipping_step() -> str:
    return lowered(skipping_loss)


def lowered(loss_of: Callable[[list[jax.Array], jax.Array], jax.Array]) -> str:
    def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        loss, grads = jax.value_and_grad(loss_of)(params, x)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], loss

    params = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 5
    batch = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    text = jax.jit(step, donate_argnums=0).lower(params, batch).as_text()
    return text.replace(
        "tensor<f32> {jax.result_info", 'tensor<f32> {alpa.result = "mean", jax.result_info'
    )


def gpt_step() -> str:
    return zoo.get("gpt-tiny").lower(micro_batch_size=4)


@pytest.fixture(
    scope="module", params=[pytest.param(gpt_step, marks=pytest.mark.slow), skipping_step]
)
def clustered(request: pytest.FixtureRequest) -> Iterator[Clustered]:
    with costs_of(request.param()) as found:
        yield found


@contextmanager
def costs_of(text: str, intra: Intra = "auto", cluster: str = CLUSTER) -> Generator[Clustered]:
    pipeline = f"simplify-trivial-ops,layer-cluster{{num-layers={NUM_LAYERS}}}"
    module = alpa.passes.run(text, pipeline)
    function = main_function(module)
    graph, machine = Graph.of(body(function)), Cluster.parse(cluster)
    arguments, results = read_arguments(function), read_results(function)
    with module.context:
        classes = layer_classes(graph, arguments, results, NUM_LAYERS, machine, PLAN)
        solver = ClassSolver(classes=classes, cluster=machine, plan=PLAN, intra=intra)
        yield Clustered(module, graph, classes, solver)


def test_every_layer_is_in_one_class_whose_program_is_valid(clustered: Clustered) -> None:
    classes = clustered.classes
    members = [layer for one in classes.classes for layer in one.layers]
    assert sorted(members) == list(range(NUM_LAYERS))
    for number, one in enumerate(classes.classes):
        assert all(classes.class_of[layer] == number for layer in one.layers)
    assert classes.module.operation.verify()


def test_links_are_all_that_layers_read_from_one_another(clustered: Clustered) -> None:
    graph = clustered.graph
    layers = [Origin.of(op).layer for op in graph.ops]
    read = {
        (layers[graph.producer[v]], layers[o], v)
        for o, operands in enumerate(graph.operands)
        for v in operands
        if v >= graph.num_arguments
        and None not in (layers[o], layers[graph.producer[v]])
        and layers[o] != layers[graph.producer[v]]
    }
    pairs = [pair for found in clustered.classes.links.values() for pair in found]
    assert {(producer, reader) for producer, reader, _ in read} == set(pairs)
    # A value that two parts of a layer read is two links.
    assert len(read) <= len(pairs)


def test_equal_layers_are_one_class(clustered: Clustered) -> None:
    # The layers of the MLP are all equal, but for the ends.
    sizes = sorted(len(one.layers) for one in clustered.classes.classes)
    assert sizes in ([1, 1, 1, 1], [1, 1, 2])


def test_nothing_undercuts_the_work_of_one_device(
    clustered: Clustered, costed: Callable[..., list[Candidate]]
) -> None:
    problem = clustered.solver.pose(1, 1, (1,))
    (costs,) = problem.solve(())
    work = problem.work(costs)
    valid = np.triu_indices(NUM_LAYERS)
    for hosts, devices in ((1, 2), (2, 2)):
        for option in costed(clustered.solver, hosts, devices, logical_shapes(hosts, devices, 2)):
            shape = option.submesh[2]
            least = candidate_of(clustered.solver, work.split(shape), option.submesh)
            for name in ("seconds", "update", "fixed_bytes", "activation_bytes"):
                real, bound = getattr(option, name)[valid], getattr(least, name)[valid]
                assert (real >= bound * (1 - 1e-6)).all(), name


def test_nothing_undercuts_bounds_where_little_work_is_fast(
    costed: Callable[..., list[Candidate]], tmp_path: Path
) -> None:
    """As on CPU devices, whose caches hold small operands."""
    file = tmp_path / "cluster.toml"
    file.write_text(
        """\
hosts = 1
devices_per_host = 4
[device]
name = "CPU"
memory = "16GiB"
peak_flops = { f32 = 1e9 }
memory_bandwidth = 1e12
[device.efficiency]
matrix = { f32 = [[1e4, 1.0], [1e6, 0.5], [4e6, 0.1]] }
memory = [[1e4, 1.0], [1e6, 0.1]]
[intra_host]
bandwidth = 1e12
latency = 1e-9
[inter_host]
bandwidth = 1e12
latency = 1e-9
"""
    )
    with costs_of(straight_step(), cluster=str(file)) as found:
        work = Costing(solver=found.solver).work
        (option, *_) = costed(found.solver, 1, 4, [(4,)])
        least = candidate_of(found.solver, work.split((4,)), (1, 4, (4,)))
        (whole,) = found.solver.pose(1, 1, (1,)).solve(())
    assert option.seconds[0, -1] >= least.seconds[0, -1] * (1 - 1e-6)
    # An even split of the costs on one device is no bound.
    assert option.seconds[0, -1] < costs_sum(found, whole) / 4


def test_work_is_split_as_far_as_dimensions_can_be_cut(clustered: Clustered) -> None:
    problem = clustered.solver.pose(1, 1, (1,))
    (costs,) = problem.solve(())
    work = problem.work(costs)
    whole, halved, padded, prime = (
        candidate_of(clustered.solver, work.split((n,)), (1, n, (n,))).seconds[0, -1]
        for n in (1, 2, 7, 10007)
    )
    assert whole == pytest.approx(costs_sum(clustered, costs))
    assert halved == pytest.approx(whole / 2, rel=0.02)
    # No dimension of these programs is a multiple of seven: shards are padded.
    assert whole / 7 < padded < whole / 5
    # None has more elements than this axis has devices.
    assert prime >= 0.9 * whole


def costs_sum(clustered: Clustered, costs: ClassCosts) -> float:
    return float(costs.by_class[:2, clustered.classes.class_of].sum())


def test_a_price_on_memory_gives_less_memory(
    clustered: Clustered, costed: Callable[..., list[Candidate]]
) -> None:
    (shape,) = logical_shapes(1, 2, 2)
    free, *_, dear = costed(clustered.solver, 1, 2, [shape])
    all_layers = (0, NUM_LAYERS - 1)
    kept = PLAN.num_micro_batches
    held = [o.fixed_bytes[all_layers] + kept * o.activation_bytes[all_layers] for o in (free, dear)]
    assert held[1] <= held[0]
    assert dear.seconds[all_layers] >= free.seconds[all_layers] * (1 - 1e-2)


def test_costing_what_is_used_finds_what_costing_all_does(
    clustered: Clustered, costed: Callable[..., list[Candidate]]
) -> None:
    cluster = Cluster.parse(CLUSTER)
    boundary = clustered.boundary
    options: list[Candidate] = [
        option
        for hosts, devices in placement.submeshes(cluster.hosts, cluster.devices_per_host)
        for option in costed(clustered.solver, hosts, devices, logical_shapes(hosts, devices, 2))
    ]
    whole = stage_dp.solve(
        stage_problem(options, [0] * len(options), boundary, [cluster], [None], PLAN)
    )
    pipeline = f"stage-mesh-partition{{cluster={CLUSTER} num-micro-batches=4 schedule=1f1b}}"
    planned = alpa.passes.run(str(clustered.module), pipeline)
    plan = Plan.read(main_function(planned))
    assert plan is not None
    assert plan.predicted_step_seconds == pytest.approx(whole.objective, rel=1e-9)
    assert len(read_meshes(main_function(planned))) == len(whole.stages)


class Beside(Workers):
    """Says that there is a process, and runs all calls here."""

    def __init__(self) -> None:
        super().__init__(1)

    def _begin(self, call: _Call[T]) -> Future[T]:
        call.take()
        call.run()
        return call


def test_a_process_is_asked_ahead_and_the_cut_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is known of other meshes changes neither the cut nor its bound."""
    layers = alpa.passes.run(
        skipping_step(), f"simplify-trivial-ops,layer-cluster{{num-layers={NUM_LAYERS}}}"
    )
    asked: list[tuple[str, Submesh]] = []
    begin = Costing._begin

    def begin_asked(self: Costing, workers: Workers, what: Question, *args: Any) -> Any:
        if not self.knows(what, args[0]):
            asked.append((what, args[0]))
        return begin(self, workers, what, *args)

    monkeypatch.setattr(Costing, "_begin", begin_asked)
    found: list[tuple[str, set[tuple[str, Submesh]]]] = []
    for workers in (Workers(0), Beside()):
        monkeypatch.setattr(Costing, "where", lambda *_, workers=workers: workers)
        asked.clear()
        cut = "stage-mesh-partition{cluster=cpu:4x4 num-micro-batches=4 schedule=1f1b}"
        found.append((str(alpa.passes.run(str(layers), cut)), {*asked}))
    (alone, needed), (ahead, more) = found
    assert alone == ahead
    assert needed < more


def test_one_stage_costs_what_its_own_program_does(
    clustered: Clustered, costed: Callable[..., list[Candidate]]
) -> None:
    options = f"cluster={CLUSTER} num-micro-batches=4 num-stages=1 schedule=1f1b"
    planned = alpa.passes.run(
        str(clustered.module),
        f"stage-mesh-partition{{{options}}},place-gradient-reductions,ilp-shard-annotate",
    )
    (report,) = read_solver_reports(main_function(planned))
    (mesh,) = read_meshes(main_function(planned))
    free, *_ = costed(clustered.solver, 2, 2, [mesh.logical_shape])
    last = (0, NUM_LAYERS - 1)
    composed = PLAN.num_micro_batches * free.seconds[last] + free.update[last]
    # Both problems are small enough for the optimum, and with ties between equal layers it is the
    # same one here: no layer reads a value in two layouts.
    assert report.status == "optimal"
    expected = report.objective - storage_seconds(planned)
    assert composed == pytest.approx(expected, abs=tied_seconds(mesh.logical_shape))


def tied_seconds(shape: tuple[int, ...]) -> float:
    """What a reduction of the tied matrix's gradient takes at most.

    Layers that are costed one by one count it for each use, their common program only once. If no
    use leaves partial sums, this program reshards one gradient to add it to the other.
    """
    mesh = LogicalMesh.of(Cluster.parse(CLUSTER), 2, 2, shape)
    return float(all_reduce(mesh, (0, 1), 4.0 * 128 * 128))


def storage_seconds(module: ir.Module) -> float:
    """The cost that breaks ties between layouts of arguments in a mesh's problem. It is no time."""
    function = main_function(module)
    (mesh,) = read_meshes(function)
    sizes = dict(enumerate(mesh.logical_shape))
    total = 0.0
    for argument in body(function).arguments:
        tensor = MeshTensor.from_type(argument.type)
        assert tensor.sharding is not None
        axes = [int(a.removeprefix("axis")) for dim in tensor.sharding.axis_names for a in dim]
        shards = prod(sizes[axis] for axis in axes)
        total += type_bytes(tensor.type) / shards
    return STORAGE_WEIGHT * total / Cluster.parse(CLUSTER).device.memory_bandwidth


def planned(
    num_stages: int | Literal["auto"], remarks: list[str], failing: Sequence[tuple[int, int]]
) -> ir.Module:
    """Stages of the tied step, where no class has a plan on submeshes of these shapes."""

    class Failing(ClassSolver):
        def pose(self, hosts: int, devices: int, shape: tuple[int, ...]) -> ClassProblem:
            if (hosts, devices) in failing:
                raise TimeoutError("no choice was found")
            return super().pose(hosts, devices, shape)

    cut = StageMeshPartition(
        cluster="cpu:1x4", num_stages=num_stages, num_micro_batches=4, costs=LayerCosts(Failing)
    )
    pipeline = f"simplify-trivial-ops,layer-cluster{{num-layers={NUM_LAYERS}}}"
    module = alpa.passes.run(skipping_step(), pipeline)
    with module.context, ir.Location.unknown():
        cut.run(module, lambda _, message: remarks.append(message))
    return module


@pytest.mark.parametrize("failing", [[(1, 4)], [(1, 2), (1, 4)]])
def test_a_submesh_whose_solver_runs_out_of_time_is_left_out(
    failing: list[tuple[int, int]],
) -> None:
    remarks: list[str] = []
    function = main_function(planned("auto", remarks, failing))
    assert max(len(mesh.devices) for mesh in read_meshes(function)) < 4
    plan = Plan.read(function)
    assert plan is not None
    assert plan.dropped
    assert {one.reason for one in plan.dropped} == {"no choice was found"}
    assert "a submesh of 1x4 devices seen as 2x2" in {one.what for one in plan.dropped}
    said = [f"{one.what} is left out of the search: {one.reason}" for one in plan.dropped]
    assert remarks == said


@pytest.mark.parametrize("step", [straight_step, skipping_step])
def test_no_cut_has_a_smaller_t_than_the_bound(step: Callable[[], str]) -> None:
    layers = alpa.passes.run(
        step(), f"simplify-trivial-ops,layer-cluster{{num-layers={NUM_LAYERS}}}"
    )
    found: dict[str, Plan] = {}
    for restricted in (
        "",
        "num-stages=1",
        "num-stages=2",
        "num-stages=4",
        "remat=layer",
        "mesh-shape=2",
    ):
        options = f"cluster=cpu:1x4 num-micro-batches=4 schedule=1f1b {restricted}"
        cut = alpa.passes.run(str(layers), f"stage-mesh-partition{{{options}}}")
        plan = Plan.read(main_function(cut))
        assert plan is not None
        found[restricted] = plan
    bound, best = found[""].estimated_step_bound, found[""].estimated_step_seconds
    assert 0 < bound < best
    for plan in found.values():
        assert bound * (1 - 1e-9) <= plan.estimated_step_bound <= plan.estimated_step_seconds
        if plan.estimated_step_seconds > plan.estimated_step_bound:  # there was a choice
            assert best <= plan.estimated_step_seconds * (1 + 1e-9)


def test_if_no_submesh_has_a_plan_the_error_says_why() -> None:
    message = r"no plan on their submesh \(infinite time\); 1x2: no choice was found"
    with pytest.raises(PassError, match=message):
        planned(2, [], [(1, 2)])


def test_layers_that_have_no_plan_on_one_device() -> None:
    message = "the layers cannot be planned on one device: no choice was found"
    with pytest.raises(PassError, match=message):
        planned("auto", [], [(1, 1)])


@pytest.mark.parametrize(
    ("intra", "step"),
    [
        *((intra, straight_step) for intra in ("data-parallel", "zero2", "zero3")),
        *((intra, straight_step) for intra in ("megatron", "none")),
        # Another layer's update reads the sum of a gradient, so devices add up first.
        ("data-parallel", skipping_step),
    ],
)
def test_a_baseline_costs_what_its_own_program_does(
    intra: Intra, step: Callable[[], str], costed: Callable[..., list[Candidate]]
) -> None:
    shape = "4x1" if intra == "megatron" else "2x2"
    options = f"cluster={CLUSTER} num-micro-batches=4 mesh-shape={shape} schedule=1f1b"
    with costs_of(step(), intra) as found:
        free, *_ = costed(found.solver, 2, 2, [tuple(map(int, shape.split("x")))])
        planned = alpa.passes.run(
            str(found.module),
            f"stage-mesh-partition{{{options}}},place-gradient-reductions,ilp-shard-annotate{{intra={intra}}}",
        )
    (report,) = read_solver_reports(main_function(planned))
    last = (0, NUM_LAYERS - 1)
    composed = PLAN.num_micro_batches * free.seconds[last] + free.update[last]
    # With a baseline's restrictions one optimum remains, which both problems are small enough to
    # reach.
    assert report.status == "optimal"
    excess = composed + storage_seconds(planned) - report.objective
    if step is skipping_step:
        assert 0 < excess < tied_seconds((2, 2))
    else:
        assert excess == pytest.approx(0, abs=1e-9 * report.objective)


def test_the_cut_of_a_baseline_is_by_its_costs() -> None:
    """Devices that all do the same gain nothing, so there are as many stages as possible."""
    clustered = f"simplify-trivial-ops,layer-cluster{{num-layers={NUM_LAYERS}}}"
    stages: dict[str, int] = {}
    for intra in ("none", "data-parallel"):
        options = f"cluster=cpu:1x4 num-micro-batches=4 schedule=1f1b intra={intra}"
        module = alpa.passes.run(straight_step(), f"{clustered},stage-mesh-partition{{{options}}}")
        stages[intra] = len(read_meshes(main_function(module)))
    assert stages == {"none": 4, "data-parallel": 2}


def test_what_crosses_between_stages() -> None:
    """The transfers of the tied step.

    Per micro-batch: h, which is also the first layer's result, and their gradients. Once per step:
    the gradient of the tied matrix to the first layer, and its new value back.
    """
    with costs_of(skipping_step()) as found:
        boundary = found.boundary
    activation, matrix = 64 * 128 * 4, 128 * 128 * 4
    assert (boundary.bytes[:, 1:] % activation == 0).all()
    assert (boundary.values[:, 0] == 0).all()
    assert (boundary.values[:, 1:] >= 1).all()
    size, values = boundary.once_from_outside
    assert values[0, NUM_LAYERS - 1] == 0
    for cut in range(1, NUM_LAYERS):
        assert values[0, cut - 1] == values[cut, NUM_LAYERS - 1] == 1
        assert size[0, cut - 1] == size[cut, NUM_LAYERS - 1] == matrix


def test_rematerialised_layers_may_be_of_other_classes() -> None:
    """Each class reads its own costs: another program's costs take the place of one class's."""
    with costs_of(straight_step()) as plain, costs_of(skipping_step()) as again:
        assert plain.classes.links.keys() - again.classes.links.keys()
        costings = [Costing(solver=plain.solver), Costing(solver=again.solver)]
        one = OneDevice(
            kind=0,
            costing_of=costings.__getitem__,
            known=lambda _: None,
            plan=plain.solver.plan,
            may_rematerialise=True,
            workers=Workers(0),
        )
        mesh = MeshCandidates(one=one, number=0, submesh=(1, 2, (2,)))
        for _ in range(4):
            before = mesh.candidates()
            assert mesh.candidates() is before  # made once
            mesh.begin(remat=True)
            mesh.finish()
            assert mesh.candidates() is not before
        assert replace(mesh, is_only=True).candidates() != mesh.candidates()
        found = mesh.candidates()[-1]
        *_, costs = again.solver.pose(1, 2, (2,)).solve(PRICES)
    expected = candidate_of(again.solver, costs, (1, 2, (2,)))
    assert found.remat == 1
    for name in ("seconds", "update", "state_bytes", "activation_bytes", "exchanged_bytes"):
        np.testing.assert_allclose(getattr(found, name), getattr(expected, name), err_msg=name)


@pytest.mark.parametrize("remat", ["none", "layer"])
@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
@pytest.mark.parametrize("step", [straight_step, skipping_step])
def test_stages_hold_what_they_were_cut_for(
    step: Callable[[], str], schedule: Schedule, remat: Remat
) -> None:
    """On one device there is nothing to shard, so that the two passes count the same plan. The
    estimate leaves out what a stage receives once per step. It counts as if they were held at the
    peak: a forward value from the stages before, which may be gone when the backward part runs,
    and a second version of each gradient for them."""
    module = alpa.passes.run(
        step(),
        f"simplify-trivial-ops,layer-cluster{{num-layers={NUM_LAYERS}}},stage-mesh-partition"
        f"{{cluster=cpu:1x4 mesh-shape=1 num-stages=4 num-micro-batches=6 schedule={schedule} "
        f"remat={remat}}}",
    )
    estimates = peaks(module)
    held = peaks(alpa.passes.run(module, "ilp-shard-annotate"))
    with costs_of(step()) as found:
        boundary = found.boundary
    for layer, (estimate, real) in enumerate(zip(estimates, held, strict=True)):
        once, exchanged = (
            boundary.once_from_outside[0, layer, layer],
            boundary.bytes[:, layer].sum(),
        )
        assert real - once <= estimate <= real + exchanged


def peaks(module: ir.Module) -> tuple[int, ...]:
    plan = Plan.read(main_function(module))
    assert plan is not None
    return plan.predicted_peak_bytes


def test_a_mesh_is_hopeless_beside_an_even_split_of_all_that_one_device_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also of the starts of kernels, though no mesh splits them: beside a bound that has them whole
    too much would count as worth a search."""
    asked: list[float] = []

    def begin(_: Costing, workers: Workers, submesh: Submesh, enough: float) -> Callable[[], Costs]:
        asked.append(enough)
        return list

    monkeypatch.setattr(Costing, "begin", begin)
    v100s = Cluster.parse("v100-16gb:1x2")
    cluster = replace(v100s, device=replace(v100s.device, launch=1.0))
    with costs_of(straight_step()) as plain:
        solver = replace(plain.solver, cluster=cluster)
        one = OneDevice(
            kind=0,
            costing_of=lambda _: costing,
            known=lambda _: None,
            plan=solver.plan,
            may_rematerialise=False,
            workers=Workers(0),
        )
        costing = Costing(solver=solver)
        mesh = MeshCandidates(one=one, number=0, submesh=(1, 2, (2,)))
        for _ in range(2):  # bounds, then costs
            mesh.begin(remat=False)
            mesh.finish()
        runs, whole = solver.plan.num_micro_batches, one.candidate
        seconds = float(runs * whole.seconds[0, -1] + whole.update[0, -1])
        split = one.split(False, (2,), None).by_class[:3]
        assert split.sum() > 0.9 * costing.work.costs.by_class[:3].sum()
    assert asked == [HOPELESS * seconds / 2]
