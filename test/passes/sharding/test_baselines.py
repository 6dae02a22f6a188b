"""The paper's baselines: their shardings of arguments, their costs, and equal numbers."""

from __future__ import annotations

import re
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alpa import passes, runtime
from alpa.dialects import body, ir, main_function, walk
from alpa.dialects.attributes import read_arguments, read_part
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.plan import read_solver_reports
from alpa.dialects.sharding import Sharding, op_shardings
from alpa.runtime.reference import compare

BASELINES = [
    "data-parallel",
    "zero2",
    "zero3",
    "heuristic",
    "megatron",
    "megatron-zero2",
    "none",
]
PARTITION = (
    "simplify-trivial-ops,layer-cluster{{num-layers={stages}}},"
    "stage-mesh-partition{{cluster=cpu:2x2 num-stages={stages} num-micro-batches={batches}}}"
)
ROWS, WIDTH = 64, 32
OPTIMIZER = optax.adam(1e-3)


def step(params, state, x, y):
    def loss(params):
        hidden = x
        for w, b in params:
            hidden = jnp.tanh(hidden @ w + b)
        return jnp.mean((hidden - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = OPTIMIZER.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def arguments(batches: int):
    rng = np.random.default_rng(0)
    params = [
        (
            rng.normal(size=(WIDTH, WIDTH)).astype(np.float32),
            rng.normal(size=(WIDTH,)).astype(np.float32),
        )
        for _ in range(2)
    ]
    x, y = rng.normal(size=(2, ROWS * batches, WIDTH)).astype(np.float32)
    return params, jax.tree.map(np.asarray, OPTIMIZER.init(params)), x, y


@cache
def lowered() -> str:
    params, state, x, y = arguments(1)
    text = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, x, y).as_text()
    count = len(jax.tree.leaves((params, state)))
    for number in (count, count + 1):
        text = re.sub(
            rf"(%arg{number}: tensor<[^>]*>)",
            r'\1 {alpa.role = "batch", alpa.batch_dim = 0 : i64}',
            text,
            count=1,
        )
    return text.replace('{jax.result_info = "result[2]"}', '{alpa.result = "mean"}')


def planned(intra: str, *, stages: int = 1, batches: int = 2) -> ir.Module:
    module = passes.run(lowered(), PARTITION.format(stages=stages, batches=batches))
    return passes.run(module, f"place-gradient-reductions,ilp-shard-annotate{{intra={intra}}}")


def shards(module: ir.Module) -> dict[str, set[int]]:
    """The number of parts of matrices that are parameters, optimizer states and batches."""
    function = main_function(module)
    sizes = {"axis0": 2, "axis1": 2}
    found: dict[str, set[int]] = {"parameter": set(), "optimizer": set(), "batch": set()}
    for value, attributes in zip(body(function).arguments, read_arguments(function), strict=True):
        tensor = MeshTensor.from_type(value.type)
        if tensor.type.rank != 2:
            continue
        axes = [axis for dim in tensor.sharding.axis_names for axis in dim]
        number = attributes.input
        kind = "batch" if attributes.role == "batch" else "optimizer" if number > 4 else "parameter"
        found[kind].add(int(np.prod([sizes[axis] for axis in axes])))
    return found


def test_data_parallelism_splits_the_batch_alone():
    module = planned("data-parallel")
    assert shards(module) == {"parameter": {1}, "optimizer": {1}, "batch": {4}}
    (backward,) = (
        op
        for op in body(main_function(module)).operations
        if "alpa.part" in op.attributes and read_part(op) == "backward"
    )
    gradients = [sharding_of(value) for value in backward.results]
    assert len(gradients) == len(jax.tree.leaves(arguments(1)[0]))
    for gradient in gradients:
        assert {axis.name for axis in gradient.unreduced} == {"axis0", "axis1"}


def sharding_of(value: ir.Value) -> Sharding:
    sharding = MeshTensor.from_type(value.type).sharding
    assert sharding is not None
    return sharding


def test_zero2_splits_optimizer_states_as_well():
    assert shards(planned("zero2")) == {"parameter": {1}, "optimizer": {4}, "batch": {4}}


def test_zero3_splits_parameters_as_well():
    assert shards(planned("zero3")) == {"parameter": {4}, "optimizer": {4}, "batch": {4}}


def test_megatron_splits_the_batch_along_the_first_axis_and_never_the_states():
    module = planned("megatron")
    found = shards(module)
    assert found["batch"] <= {2, 4}
    function = main_function(module)
    states = [
        sharding_of(value)
        for value, attributes in zip(
            body(function).arguments, read_arguments(function), strict=True
        )
        if attributes.role == "state"
    ]
    params, state, _, _ = arguments(1)
    assert len(states) == len(jax.tree.leaves((params, state)))
    assert not any("axis0" in dim for sharding in states for dim in sharding.axis_names)


def test_megatron_with_zero2_splits_optimizer_states_along_the_first_axis_as_well():
    module = planned("megatron-zero2")
    function = main_function(module)
    on_first: dict[str, set[bool]] = {"parameter": set(), "optimizer": set()}
    for value, attributes in zip(body(function).arguments, read_arguments(function), strict=True):
        if attributes.role == "state":
            split = any("axis0" in dim for dim in sharding_of(value).axis_names)
            on_first["optimizer" if attributes.input >= 4 else "parameter"].add(split)
    assert on_first["parameter"] == {False}
    assert True in on_first["optimizer"]
    assert objective(module) <= objective(planned("megatron")) * (1 + 1e-9)


def test_the_heuristic_cuts_every_matrix_along_one_dimension():
    assert shards(planned("heuristic")) == {"parameter": {4}, "optimizer": {4}, "batch": {4}}


def test_without_parallelism_nothing_is_cut():
    module = planned("none")
    block = body(main_function(module))
    fragments = [op for op in block.operations if "alpa.part" in op.attributes]
    assert [read_part(op) for op in fragments] == ["forward", "backward", "update"]
    values = [*block.arguments, *(result for op in fragments for result in op.results)]
    inside = [op_shardings(op) or () for op in fragments for op in walk(body(op))]
    assert sum(map(len, inside)) > 100
    for sharding in [*map(sharding_of, values), *(one for many in inside for one in many)]:
        assert not any(sharding.dims)
        assert not sharding.unreduced


def objective(module: ir.Module) -> float:
    (report,) = read_solver_reports(main_function(module))
    return report.objective


@pytest.mark.parametrize("batches", [1, 4])
def test_no_baseline_beats_the_whole_search(batches):
    auto, *others = (objective(planned(it, batches=batches)) for it in ["auto", *BASELINES])
    assert all(auto <= other * (1 + 1e-9) for other in others)
    assert max(others) > auto


@pytest.mark.parametrize("intra", BASELINES)
def test_baselines_compute_what_plain_jax_computes(intra):
    batches = 2
    module = planned(intra, stages=2, batches=batches)
    module = passes.run(module, "insert-cross-mesh-reshard,export-stages")
    given = arguments(batches)
    results = [np.asarray(r) for r in runtime.load(module)(*jax.tree.leaves(given))]
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(step)(*given))]
    # new moments are gradients, up to a factor; Adam's parameters amplify noise
    count = len(jax.tree.leaves(given[0]))
    assert [row for row in compare(results[count:], expected[count:]) if not row.ok] == []
    for result, reference, old in zip(results, expected, jax.tree.leaves(given[0]), strict=False):
        assert np.abs(result - reference).max() <= 1e-4 * np.abs(reference).max()
        assert not np.allclose(result, old, atol=1e-6)
