"""Costs of layer classes, computed in processes of their own."""

from __future__ import annotations

import pickle
import time
from collections.abc import Iterator
from dataclasses import replace
from math import inf
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa.passes
from alpa.dialects import body, ir, main_function
from alpa.dialects.attributes import read_arguments, read_results
from alpa.dialects.plan import Plan
from alpa.dialects.sharding import ShardingRule
from alpa.passes.analysis.graph import Graph
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.sharding.rules import CUSTOM_CALL_RULES, register_sharding_rule, rule_of
from alpa.passes.solve.sharding import bound
from alpa.passes.solve.sharding.problem import InfeasibleError
from alpa.passes.stages.candidates import PRICES
from alpa.passes.stages.class_problem import ClassProblem, ClassSolver
from alpa.passes.stages.costing import Costing, NoPlanError
from alpa.passes.stages.layer_classes import LayerClasses, fragment_blocks, layer_classes
from alpa.passes.stages.remat import rematerialised
from alpa.passes.workers import Workers
from alpa.tools import zoo

NUM_LAYERS = 3
PLAN = Plan(num_micro_batches=1, schedule="1f1b")
ROWS = ShardingRule(
    factor_sizes=(64, 128),
    operands=(((0,), (1,)),),
    results=(((0,), (1,)),),
    reduction=frozenset(),
    need_replication=frozenset({1}),
    permutation=frozenset(),
)


def program() -> str:
    """Three products, each followed by a user's custom call."""

    def forward(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w in params:
            x = jnp.tanh(x @ w)
        return x

    params = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * NUM_LAYERS
    batch = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    text = jax.jit(forward).lower(params, batch).as_text()
    kernel = "stablehlo.custom_call @kernel("
    return "\n".join(
        line.replace("stablehlo.tanh ", kernel).replace(
            " : tensor<64x128xf32>", ") : (tensor<64x128xf32>) -> tensor<64x128xf32>"
        )
        if "stablehlo.tanh" in line
        else line
        for line in text.splitlines()
    )


def solver_of(
    program: str | ir.Module, cluster: Cluster, num_layers: int = NUM_LAYERS
) -> ClassSolver:
    pipeline = f"simplify-trivial-ops,layer-cluster{{num-layers={num_layers}}}"
    module = alpa.passes.run(program, pipeline)
    function = main_function(module)
    arguments, results = read_arguments(function), read_results(function)
    with module.context:
        graph = Graph.of(body(function))
        classes = layer_classes(graph, arguments, results, num_layers, cluster, PLAN)
    return ClassSolver(classes=classes, cluster=cluster, plan=PLAN)


@pytest.fixture(scope="module")
def solver() -> Iterator[ClassSolver]:
    register_sharding_rule("kernel", ROWS)
    try:
        found = solver_of(program(), Cluster.parse("cpu:1x4"))
        with found.classes.module.context:
            yield found
    finally:
        CUSTOM_CALL_RULES.pop("kernel", None)


@pytest.fixture(scope="module")
def training() -> Iterator[ClassSolver]:
    step = zoo.get("gpt-tiny", num_layers=NUM_LAYERS).lower(4)
    found = solver_of(step, Cluster.parse("cpu:1x4"))
    with found.classes.module.context:
        yield found


def with_memory(solver: ClassSolver, memory: int) -> ClassSolver:
    cluster = solver.cluster
    device = replace(cluster.device, memory=memory)
    return replace(solver, cluster=replace(cluster, device=device))


def test_memory_has_no_price_where_there_is_enough(solver: ClassSolver) -> None:
    costing, mesh = Costing(solver=solver), (1, 4, (2, 2))
    (fastest,) = costing.begin(Workers(0), mesh, inf)()
    peaks = costing.candidate(fastest, mesh)
    held = peaks.fixed_bytes + PLAN.num_micro_batches * peaks.activation_bytes
    most = float(held[np.triu_indices(NUM_LAYERS)].max())
    few, enough = with_memory(solver, int(most)), with_memory(solver, 2 * int(most + 1))
    assert len(Costing(solver=few).begin(Workers(0), mesh, inf)()) == 1 + len(PRICES)
    assert len(Costing(solver=enough).begin(Workers(0), mesh, inf)()) == 1


def test_what_holds_least_is_known_where_no_price_is(solver: ClassSolver) -> None:
    """A mesh that is too slow has one sharding, which holds all states on each device."""
    costing, mesh = Costing(solver=with_memory(solver, 1 << 14)), (1, 4, (2, 2))
    (slow,) = costing.begin(Workers(0), mesh, 1e-12)()
    least = costing.begin_least(Workers(0), mesh)()
    held = [costing.candidate(costs, mesh).fixed_bytes[0, -1] for costs in (slow, least)]
    assert held[1] < 0.9 * held[0]


def test_a_process_finds_the_same_costs_as_this_one(solver: ClassSolver) -> None:
    """The custom call's rule is registered in this process only."""
    solver = with_memory(solver, 1 << 14)
    with Workers(1) as workers:
        there = Costing(solver=solver).begin(workers, (1, 4, (2, 2)), inf)()
    here = Costing(solver=solver).begin(Workers(0), (1, 4, (2, 2)), inf)()
    assert len(here) == len(there) == 1 + len(PRICES)
    for mine, other in zip(here, there, strict=True):
        np.testing.assert_array_equal(mine.by_class, other.by_class)
        assert mine.links == other.links


class Refusing(ClassSolver):
    """No op can be on any mesh."""

    def pose(self, hosts: int, devices: int, shape: tuple[int, ...]) -> ClassProblem:
        raise alpa.passes.PassError(ir.Location.unknown(self.classes.module.context), "no")


def test_an_op_that_cannot_be_on_a_mesh_is_an_answer(solver: ClassSolver) -> None:
    refusing = Refusing(classes=solver.classes, cluster=solver.cluster, plan=solver.plan)
    costing = Costing(solver=refusing)
    for _ in range(2):  # found and kept
        with pytest.raises(NoPlanError, match="no"):
            costing.begin(Workers(0), (1, 4, (2, 2)), inf)()


def test_classes_can_be_sent(solver: ClassSolver) -> None:
    classes = solver.classes
    again = pickle.loads(pickle.dumps(classes))
    assert str(again.module) == str(classes.module)
    assert "sdy.sharding_rule" in str(again.module)
    assert (again.class_of, again.links) == (classes.class_of, classes.links)
    for one, same in zip(classes.classes, again.classes, strict=True):
        assert str(one.function) == str(same.function)
        for name in ("layers", "boundary", "kept", "stays", "totals"):
            assert getattr(one, name) == getattr(same, name)


def test_a_mesh_on_which_all_take_too_long_is_not_searched(solver: ClassSolver) -> None:
    problem = solver.pose(1, 4, (2, 2))
    assert len(problem.solve(PRICES, 1e-12)) == 1


@pytest.mark.parametrize("shape", [(4,), (2, 2), (4, 1)])
def test_runs_take_no_less_than_their_bounds(training: ClassSolver, shape: tuple[int, ...]) -> None:
    problem = training.pose(1, 4, shape)
    close = np.zeros(len(training.classes.classes))
    forward, both = (
        problem.least_seconds("forward", close),
        problem.least_seconds("backward", close),
    )
    assert np.all(both > 1.5 * forward)
    found = training.pose(1, 4, shape).solve(PRICES)
    for costs in found:
        assert np.all(costs.by_class[0] >= (1 - 1e-9) * forward)
        assert np.all(costs.by_class[:2].sum(axis=0) >= (1 - 1e-9) * both)
    np.testing.assert_allclose(both, found[0].by_class[:2].sum(axis=0), rtol=0.15)


def test_no_less_is_bound_to_be_taken_where_nothing_is_sent(solver: ClassSolver) -> None:
    """Where the batch is split, as it is at best."""
    least = solver.pose(1, 4, (4,)).least_seconds("forward", np.zeros(len(solver.classes.classes)))
    (fastest,) = solver.pose(1, 4, (4,)).solve(())
    np.testing.assert_allclose(least, fastest.by_class[0], rtol=0.05)


def test_a_class_without_a_backward_part_is_bounded_once(
    solver: ClassSolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, close = solver.pose(1, 4, (4,)), np.zeros(len(solver.classes.classes))
    forward = problem.least_seconds("forward", close)
    monkeypatch.delattr(bound, "least")
    np.testing.assert_array_equal(problem.least_seconds("backward", close), forward)


def test_a_problem_is_the_same_after_its_bounds(training: ClassSolver) -> None:
    bounded = training.pose(1, 4, (2, 2))
    close = np.zeros(len(training.classes.classes))
    bounded.least_seconds("forward", close)
    bounded.least_seconds("backward", close)
    for mine, other in zip(
        bounded.solve(PRICES), training.pose(1, 4, (2, 2)).solve(PRICES), strict=True
    ):
        np.testing.assert_array_equal(mine.by_class, other.by_class)


@pytest.mark.parametrize("count", [0, 1])
def test_meshes_are_bounded_before_they_are_costed(training: ClassSolver, count: int) -> None:
    solver = replace(training)  # without what other tests have posed
    costing, mesh = Costing(solver=solver), (1, 4, (2, 2))
    even = costing.work.split((2, 2)).by_class[:2]
    with Workers(count) as workers:
        found = costing.begin_bound(workers, mesh, even)()
        assert costing.begin_bound(workers, mesh, even)() is found  # kept
        assert mesh in solver.posed or count  # for the costs
        costs = costing.begin(workers, mesh, inf)()
        assert costing.begin(workers, mesh, inf)() is costs
    both = costs[0].by_class[:2].sum(axis=0)
    assert np.all(found.seconds >= even.sum(axis=0))
    assert np.all(found.seconds <= (1 + 1e-9) * both)
    np.testing.assert_allclose(found.seconds, both, rtol=0.15)


def test_what_nobody_waited_for_is_asked_once_more_only_if_it_was_lost(
    training: ClassSolver,
) -> None:
    costing, mesh = Costing(solver=replace(training)), (1, 4, (2, 2))
    even = costing.work.split((2, 2)).by_class[:2]
    with Workers(1) as workers:
        costing.begin_bound(workers, mesh, even)
        assert not costing.knows("bound", mesh)
        begun = costing._begun["bound", mesh]
        found = costing.begin_bound(workers, mesh, even)()
        assert found is begun.result().found
        assert costing.knows("bound", mesh)
        workers.submit(time.sleep, 60)
        costing.begin(workers, mesh, inf)
        workers.drop()
        assert costing._begun["costs", mesh].done()
        costs = costing.begin(workers, mesh, inf)()
    assert np.all(found.seconds <= (1 + 1e-9) * costs[0].by_class[:2].sum(axis=0))


def test_what_has_no_answer_is_asked_once(
    training: ClassSolver, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def infeasible(_: object, what: str, *__: object) -> Any:
        asked.append(what)
        raise InfeasibleError((0,))

    monkeypatch.setattr("alpa.passes.stages.costing._answer", infeasible)
    costing, mesh = Costing(solver=replace(training)), (1, 4, (2, 2))
    costing.begin(Workers(0), mesh, inf)
    with pytest.raises(InfeasibleError):
        costing.begin(Workers(0), mesh, inf)()
    assert asked == ["costs"]


def test_a_process_poses_ahead_what_is_asked_first(training: ClassSolver) -> None:
    solver = replace(training)  # without what other tests have posed
    costing, mesh = Costing(solver=solver), (1, 4, (2, 2))
    even = costing.work.split((2, 2)).by_class[:2]
    with Workers(1) as workers:
        costing.prepare(workers, [mesh, (1, 4, (4,))])
        found = costing.begin_bound(workers, mesh, even)()
        assert mesh not in solver.posed  # The process that has posed it answers.
        (fastest, *_) = costing.begin(workers, mesh, inf)()
        assert mesh not in solver.posed
    expected = Costing(solver=solver).begin_bound(Workers(0), mesh, even)()
    np.testing.assert_array_equal(found.seconds, expected.seconds)
    np.testing.assert_array_equal(fastest.by_class, training.pose(*mesh).solve(PRICES)[0].by_class)


def test_no_mesh_splits_the_starts_of_kernels(training: ClassSolver) -> None:
    cluster, found = Cluster.parse("v100-16gb:1x4"), list[tuple[np.ndarray, np.ndarray]]()
    for launch in (0.0, 1.0):
        device = replace(cluster.device, launch=launch)
        solver = replace(training, cluster=replace(cluster, device=device))
        work = Costing(solver=solver).work
        whole, split = work.costs.by_class[:3], work.split((2, 2)).by_class[:3]
        (fastest,) = solver.pose(1, 4, (2, 2)).solve(())
        assert np.all(split <= (1 + 1e-9) * fastest.by_class[:3])
        found.append((whole, split))
    (whole, split), (whole_with_starts, split_with_starts) = found
    starts = whole_with_starts - whole
    assert np.all(starts >= 1)  # seconds, as each part has kernels
    np.testing.assert_allclose(split_with_starts - split, starts, rtol=1e-9)


def test_only_forward_runs_are_bounded_on_a_slow_mesh(training: ClassSolver) -> None:
    solver = replace(training)  # without what other tests have posed
    costing, mesh = Costing(solver=solver), (1, 4, (2, 2))
    forward, backward = costing.work.split((2, 2)).by_class[:2]
    even = np.array([1e-9 * forward, backward])  # All meshes are slow beside it.
    found = costing.begin_bound(Workers(0), mesh, even)()
    assert mesh in solver.posed  # It is not posed anew if its costs are asked for.
    least = training.pose(*mesh).least_seconds("forward", np.zeros(len(forward)))
    np.testing.assert_allclose(found.seconds - backward, least, rtol=1e-9)


@pytest.fixture
def checkpointed() -> Iterator[tuple[ClassSolver, ClassSolver]]:
    """Two layers as they are and rematerialised, the first of which does so itself."""

    def block(w: jax.Array, x: jax.Array) -> jax.Array:
        return x + jnp.tanh(jnp.sin(jnp.tanh(x @ w)) @ w)

    def loss(params: list[jax.Array], x: jax.Array) -> jax.Array:
        return jnp.sum(block(params[1], jax.checkpoint(block)(params[0], x)) ** 2)

    def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * 2
    batch = jax.ShapeDtypeStruct((64, 128), jnp.float32)
    text = jax.jit(step, donate_argnums=0).lower(params, batch).as_text()
    module = alpa.passes.run(text, "simplify-trivial-ops,layer-cluster{num-layers=2}")
    function, cluster = main_function(module), Cluster.parse("cpu:1x4")
    arguments, results = read_arguments(function), read_results(function)
    with module.context:
        again = rematerialised(function)
        classes, others = (
            layer_classes(Graph.of(body(of)), arguments, results, 2, cluster, PLAN)
            for of in (function, main_function(again))
        )
        plain = ClassSolver(classes=classes, cluster=cluster, plan=PLAN)
        yield plain, replace(plain, classes=others, before=plain)


def test_classes_that_stay_as_they_are_are_posed_once(
    checkpointed: tuple[ClassSolver, ClassSolver],
) -> None:
    (plain, again), mesh, close = checkpointed, (1, 4, (2, 2)), np.zeros(2)
    assert again.twins == [0, None]
    alone = replace(again, before=None)
    assert alone.twins == [None, None]
    Costing(solver=plain).begin(Workers(0), mesh, inf)()
    first, second = again.pose(*mesh).posings
    assert first is plain.posed[mesh].posings[0]
    assert second not in plain.posed[mesh].posings
    least, whole = again.pose(*mesh), again.pose(*mesh)
    expected = alone.pose(*mesh)
    for part in ("forward", "backward"):
        np.testing.assert_array_equal(
            least.least_seconds(part, close), expected.least_seconds(part, close)
        )
    for mine, other in zip(whole.solve(PRICES), expected.solve(PRICES), strict=True):
        np.testing.assert_array_equal(mine.by_class, other.by_class)
        assert (mine.links, mine.exchanged) == (other.links, other.exchanged)


def test_processes_pose_classes_that_stay_once(
    checkpointed: tuple[ClassSolver, ClassSolver],
) -> None:
    (plain, again), mesh = checkpointed, (1, 4, (2, 2))
    expected = Costing(solver=replace(again, before=None)).begin(Workers(0), mesh, inf)()
    with Workers(1) as workers:
        before = Costing(solver=plain)
        before.begin(workers, mesh, inf)()
        found = Costing(solver=again, before=before).begin(workers, mesh, inf)()
    for mine, other in zip(found, expected, strict=True):
        np.testing.assert_array_equal(mine.by_class, other.by_class)
    sent = pickle.dumps(replace(again, before=None))
    copy: ClassSolver = pickle.loads(sent)
    assert copy.classes.module.context is plain.classes.module.context
    copy = copy.behind(plain)
    Costing(solver=plain).begin(Workers(0), mesh, inf)()
    (known, _), (first, second) = plain.posed[mesh].posings, copy.pose(*mesh).posings
    assert first is known
    assert second.problem.graph.cache is known.problem.graph.cache


def test_a_baseline_shares_no_problems(checkpointed: tuple[ClassSolver, ClassSolver]) -> None:
    plain, again = (replace(it, intra="zero3") for it in checkpointed)
    again = replace(again, before=plain)
    Costing(solver=plain).begin(Workers(0), (1, 4, (4,)), inf)()
    known = plain.posed[1, 4, (4,)].posings
    assert not any(posing in known for posing in again.pose(1, 4, (4,)).posings)


def test_a_solver_keeps_few_problems(training: ClassSolver) -> None:
    solver = replace(training)
    problem = solver.pose(1, 4, (4,))
    for hosts in range(1, 9):
        solver.keep((hosts, 1, (hosts,)), problem, is_solved=hosts == 5, is_slow=hosts == 7)
    assert [hosts for hosts, _, _ in solver.posed] == [7, 5, 1, 2, 3, 4, 6, 8]
    solver.keep((9, 1, (9,)), problem, is_solved=False)
    assert [hosts for hosts, _, _ in solver.posed] == [5, 1, 2, 3, 4, 6, 8, 9]


def test_costs_on_a_mesh_are_found_once_for_classes_and_stages(solver: ClassSolver) -> None:
    """A plan names the axes of its meshes."""
    stage = LogicalMesh.of(solver.cluster, 1, 4, (2, 2), ("axis0", "axis1"))
    shared = solver.classes.shared
    whole = shared.graph(stage, solver.cluster, shared.reader(solver.cluster.device, rule_of))
    for posing in solver.pose(1, 4, (2, 2)).posings:
        assert posing.problem.graph.cache is whole.cache
    for posing in solver.pose(1, 2, (2,)).posings:
        assert posing.problem.graph.cache is not whole.cache


def test_layers_of_as_many_ops_are_equal_if_their_ops_are() -> None:
    def forward(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for w, activation in zip(params, activations, strict=True):
            x = activation(x @ w)
        return x

    activations = (jnp.tanh, jnp.tanh, jnp.sin, jnp.tanh, jnp.tanh)
    params = [jax.ShapeDtypeStruct((128, 128), jnp.float32)] * len(activations)
    text = jax.jit(forward).lower(params, jax.ShapeDtypeStruct((64, 128), jnp.float32)).as_text()
    solver = solver_of(text, Cluster.parse("cpu:1x4"), len(activations))
    assert solver.classes.class_of == (0, 1, 2, 1, 3)


def test_processes_are_given_the_work_of_ops(solver: ClassSolver) -> None:
    classes, device = solver.classes, solver.cluster.device
    (reader, *_), (block, *_) = classes.readers(device), fragment_blocks(classes.classes[0])
    known = classes.known_works(device)
    copy: LayerClasses = pickle.loads(pickle.dumps(classes))
    with copy.module.context:
        copy.take_works(device, known)
        copy.read(device)
        assert copy.known_works(device) == known
        (mine, *_), (other, *_) = copy.readers(device), fragment_blocks(copy.classes[0])
        assert [op.work for op in mine.ops(other)] == [op.work for op in reader.ops(block)]
