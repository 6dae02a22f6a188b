"""Memory of a mesh over time, and that plans fit into it."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa import passes
from alpa.dialects import body, ir, main_function, parse
from alpa.dialects.attributes import read_arguments
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.plan import Plan
from alpa.passes.cost.cluster import Cluster
from alpa.passes.sharding.fold import fold
from alpa.passes.sharding.liveness import is_fused, readers
from alpa.passes.sharding.ops import OpReader
from alpa.passes.solve.sharding.problem import Edge, Problem, Usage

WIDTH, ROWS = 512, 64
MATRIX = 4 * WIDTH * WIDTH


def step(params, momentum, x):
    def loss(params):
        hidden = x
        for w in params:
            hidden = jnp.tanh(hidden @ w)
        return jnp.mean(hidden**2)

    value, grads = jax.value_and_grad(loss)(params)
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, momentum), momentum, value


def partitioned(small_cluster, *, memory: str, layers: int = 2, batches: int = 1) -> str:
    """Cuts stages for much memory and shards with `memory` bytes."""
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * layers
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    text = jax.jit(step, donate_argnums=(0, 1)).lower(params, params, x).as_text()
    text = re.sub(
        rf"(%arg{2 * layers}: tensor<[^>]*>)",
        r'\1 {alpa.role = "batch", alpa.batch_dim = 0 : i64}',
        text,
        count=1,
    ).replace('{jax.result_info = "result[2]"}', '{alpa.result = "mean"}')
    large, small = small_cluster("64GiB"), small_cluster(memory)
    module = passes.run(
        text,
        "simplify-trivial-ops,layer-cluster{num-layers=1},stage-mesh-partition"
        f"{{cluster={large} num-stages=1 num-micro-batches={batches}}}",
    )
    return str(module).replace(str(large), str(small))


def least_and_most(problem: Problem) -> tuple[float, float]:
    """The smallest and the largest possible peak of the buffers, without copies."""
    usages = [usage for usage in problem.usages if len(usage.nodes) == 1]
    ends = range(max(usage.stop for usage in usages))
    return tuple(
        max(sum(f(u.bytes) for u in usages if u.start <= t < u.stop) for t in ends)
        for f in (np.min, np.max)
    )


@pytest.mark.parametrize("batches", [1, 4])
def test_states_activations_and_gradients_are_counted(small_cluster, pose, batches):
    (mesh,) = pose(parse(partitioned(small_cluster, memory="1GiB", batches=batches)))
    least, most = least_and_most(mesh.problem)
    activation = 4 * ROWS * WIDTH
    # two parameters, two moments, gradients, and at most a handful of activations in flight
    assert 6 * MATRIX <= most <= 6 * MATRIX + (4 + 4 * batches) * activation
    assert least == pytest.approx(most / 4, rel=0.01)


def test_a_gathered_copy_is_held_while_it_is_read(small_cluster, pose):
    text = partitioned(small_cluster, memory="1GiB")
    (mesh,) = pose(parse(text))
    module = passes.run(text, "ilp-shard-annotate{intra=zero3}")
    assert min(state_shards(module)) > 1
    pairs = [usage for usage in mesh.problem.usages if len(usage.nodes) == 2]
    # A whole matrix where a sharded one is gathered, nothing where the layouts are the same.
    assert any(usage.bytes.max() == MATRIX and usage.bytes.min() == 0 for usage in pairs)
    peak = planned_peak(module)
    states = 4 * MATRIX / 4
    assert peak >= states + MATRIX


ATTENTION_ROWS, HEADS = 128, 8


def attention(x, query, key, value, out):
    heads = [
        (x @ w.T).reshape(2, ATTENTION_ROWS, HEADS, -1).transpose(0, 2, 1, 3)
        for w in (query, key, value)
    ]
    scores = jax.nn.softmax(heads[0] @ heads[1].transpose(0, 1, 3, 2))
    mixed = (scores @ heads[2]).transpose(0, 2, 1, 3).reshape(2, ATTENTION_ROWS, -1)
    return mixed @ out.T


@pytest.mark.parametrize("kibibytes", [3840, 4000, 4608, 5120])
def test_plans_fit_whatever_the_limit(small_cluster, kibibytes):
    x = jax.ShapeDtypeStruct((2, ATTENTION_ROWS, WIDTH), jnp.float32)
    matrices = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * 4
    text = jax.jit(attention).lower(x, *matrices).as_text()
    cluster = small_cluster(f"{kibibytes}KiB", devices=2)
    module = passes.run(text, f"alpa{{cluster={cluster} num-layers=1 num-stages=1}}")
    peak = planned_peak(module)
    assert 2.5 * MATRIX <= peak <= kibibytes * 1024


def planned_peak(module: ir.Module) -> int:
    plan = Plan.read(main_function(module))
    assert plan is not None
    (peak,) = plan.predicted_peak_bytes
    return peak


def state_shards(module: ir.Module) -> list[int]:
    function = main_function(module)
    found = []
    for value, attributes in zip(body(function).arguments, read_arguments(function), strict=True):
        sharding = MeshTensor.from_type(value.type).sharding
        if attributes.role == "state":
            found.append(2 ** len([axis for dim in sharding.axis_names for axis in dim]))
    return found


def test_less_memory_shards_more_and_stays_within(small_cluster):
    rich = passes.run(
        partitioned(small_cluster, memory="1GiB"), "ilp-shard-annotate{intra=data-parallel}"
    )
    assert set(state_shards(rich)) == {1}
    # 6 MiB: replicated parameters and sharded moments fit, with a layer's gradient
    poor = passes.run(partitioned(small_cluster, memory="6MiB"), "ilp-shard-annotate")
    assert min(state_shards(poor)) > 1
    assert planned_peak(poor) <= 6 * 2**20


def test_too_little_memory_says_how_much_is_needed_where_and_what_helps(small_cluster):
    text = partitioned(small_cluster, memory="1MiB")
    with pytest.raises(ir.MLIRError) as raised:
        passes.run(text, "ilp-shard-annotate")
    message = str(raised.value)
    assert re.search(r"needs at least 1\.\d+ MiB per device on mesh_0, small has 1 MiB", message)
    assert "states" in message
    assert "add devices" in message


def convolutions(kernel, x):
    def loss(kernel):
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.mean(jnp.tanh(y) ** 2)

    return kernel - jax.grad(loss)(kernel)


@pytest.mark.parametrize(("cluster", "expected"), [("h100:1x1", 1), ("cpu:1x1", 0)])
def test_a_kernel_is_copied_where_a_convolution_reads_it_in_another_order(pose, cluster, expected):
    kernel = jax.ShapeDtypeStruct((3, 3, 4096, 1024), jnp.float32)
    x = jax.ShapeDtypeStruct((8, 4, 4, 4096), jnp.float32)
    module = passes.run(
        jax.jit(convolutions).lower(kernel, x).as_text(),
        "simplify-trivial-ops,layer-cluster{num-layers=1},"
        f"stage-mesh-partition{{cluster={cluster} num-stages=1}}",
    )
    (mesh,) = pose(module)
    copies = [held.usage for held in mesh.usages if held.kind == "copies"]
    assert [float(usage.bytes.max()) for usage in copies] == [4.0 * 9 * 4096 * 1024] * expected
    assert all(usage.stop == usage.start + 1 for usage in copies)


FUSED = """
func.func @main(%x: tensor<64x64xf32>, %w: tensor<64x64xf32>) -> tensor<64x64xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  %1 = stablehlo.tanh %0 {alpa.follow = 0 : i64} : tensor<64x64xf32>
  %2 = stablehlo.sqrt %1 {alpa.follow = 0 : i64} : tensor<64x64xf32>
  %3 = stablehlo.dot_general %2, %2, contracting_dims = [1] x [0]
      : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
  return %3 : tensor<64x64xf32>
}
"""


def test_an_element_wise_op_is_fused_into_its_only_element_wise_user():
    module = parse(FUSED)
    block = body(main_function(module))
    ops = OpReader(Cluster.parse("cpu:1x1").device, lambda _: None).ops(block)
    only = readers({block: ops})
    assert [is_fused(op, only) for op in ops[:4]] == [False, True, False, False]


def test_folding_ties_only_nodes_with_equal_bytes():
    costs = (np.zeros(2),) * 4
    usages = tuple(
        Usage(nodes=(v,), bytes=np.array([8.0, 4.0 + (v == 3)]), start=v, stop=v + 2)
        for v in range(4)
    )
    problem = Problem(node_costs=costs, edges=(), usages=usages, memory_limit=20.0)
    folded, node_class = fold(problem)
    assert node_class == [0, 0, 0, 1]
    assert [usage.nodes[0] for usage in folded.usages] == node_class
    assert folded.memory_limit == 20.0


def test_edges_of_the_folded_problem_are_kept():
    problem = Problem(
        node_costs=(np.zeros(2), np.ones(2)), edges=(Edge(0, 1, np.eye(2)),), memory_limit=1.0
    )
    folded, _ = fold(problem)
    assert len(folded.edges) == 1
