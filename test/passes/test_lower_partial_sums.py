"""Gradients accumulated as partial sums equal plain JAX's, and communicate once per step."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from alpa import passes, runtime
from alpa.dialects import body, main_function, parse, separate
from alpa.dialects.attributes import read_part
from alpa.dialects.mpmd_types import MeshTensor
from alpa.runtime.pjrt import compile_module
from alpa.runtime.reference import compare

BATCHES, ROWS = 4, 64


def dense(params, x):
    (w, b), v = params
    return jnp.mean((jnp.tanh(x @ w + b) @ v) ** 2)


def convolution(params, x):
    image = x.reshape(-1, 3, 3, 7)
    out = jax.lax.conv_general_dilated(
        image, params[0], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return jnp.mean((out + params[1]) ** 2)


def embedding(params, x):
    rows = (jnp.abs(x) * 1000).astype(jnp.int32) % 31
    return jnp.mean(jnp.tanh(params[0][rows] * params[1]) ** 2)


def tied(params, x):
    w, v = params
    return jnp.mean((jnp.tanh(x @ w) @ w @ v) ** 2)


def one_number(params, x):
    w, scale = params
    return jnp.mean((scale * jnp.tanh(x @ w)) ** 2)


def numbers(params, x):
    """The gradient of one of them is a sum of two."""
    w, scale, shift = params
    return jnp.mean((scale * jnp.tanh(x @ w + shift) + shift) ** 2)


PROGRAMS = {
    "dense": (dense, (((63, 31), (31,)), (31, 9))),
    "convolution": (convolution, ((3, 3, 7, 5), (5,))),
    "embedding": (embedding, ((31, 15), (15,))),
    "tied": (tied, ((63, 63), (63, 9))),
    "one number": (one_number, ((63, 31), ())),
    "numbers": (numbers, ((63, 31), (), ())),
}


def is_shape(tree) -> bool:
    return isinstance(tree, tuple) and all(isinstance(size, int) for size in tree)


def planned_step(loss, shapes, small_cluster, rng):
    """The planned module of a step of SGD at micro-batch size, the step and its arguments."""

    def step(params, x):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), value

    params = jax.tree.map(
        lambda shape: rng.normal(size=shape).astype(np.float32), shapes, is_leaf=is_shape
    )
    x = rng.normal(size=(ROWS * BATCHES, 63)).astype(np.float32)
    text = jax.jit(step, donate_argnums=0).lower(params, x[:ROWS]).as_text()
    module = parse(text)
    count = len(jax.tree.leaves(params))
    # Roles are inferred where they are unique; the batch and the loss state theirs.
    text = re.sub(
        rf"(%arg{count}: tensor<[^>]*>)( {{)?",
        lambda m: (
            m[1] + ' {alpa.role = "batch", alpa.batch_dim = 0 : i64' + (", " if m[2] else "}")
        ),
        str(module),
        count=1,
    )
    text = text.replace('{jax.result_info = "result[1]"}', '{alpa.result = "mean"}')
    # Only the batch divides evenly: data parallelism, over slow links.
    cluster = small_cluster(flops=1e8, memory_bandwidth=1e9, bandwidth=1e8)
    pipeline = f"alpa{{cluster={cluster} num-layers=1 num-stages=1 num-micro-batches={BATCHES}}}"
    return passes.run(text, pipeline), jax.jit(step), (params, x)


@pytest.mark.parametrize("name", PROGRAMS)
def test_unreduced_gradients_equal_plain_jax(name, small_cluster):
    loss, shapes = PROGRAMS[name]
    module, step, arguments = planned_step(loss, shapes, small_cluster, np.random.default_rng(0))
    function = main_function(module)
    (backward,) = (
        op
        for op in body(function).operations
        if "alpa.part" in op.attributes and read_part(op) == "backward"
    )
    tensors = [MeshTensor.from_type(value.type) for value in backward.results]
    assert any(tensor.sharding is not None and tensor.sharding.unreduced for tensor in tensors)
    executable = runtime.load(module)
    results = [np.asarray(r) for r in executable(*jax.tree.leaves(arguments))]
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(step(*arguments))]
    assert [row for row in compare(results, expected) if not row.ok] == []
    (backward,) = (s for name, s in executable.stages.items() if name.endswith("backward"))
    (update,) = (s for name, s in executable.stages.items() if name.endswith("update"))
    # Of the loss, in the forward part of the merged stage.
    assert re.findall(r"= (\S+) all-reduce\(", backward.hlo_text()) == ["f32[]"]
    assert "all-reduce" in update.hlo_text()


UPDATE = """
!g = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>,
                       sharding=<@mesh_0, [{}, {"c"}], unreduced={"a", "b"}>>
!w = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>, sharding=<@mesh_0, [DIMS]>>
module {
  sdy.mesh @mesh_0 = <["a"=2, "b"=2, "c"=2]>
  func.func public @main(%g: !g) -> !w attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2, "b"=2, "c"=2]>>>} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%g)
        {alpa.module = @m, alpa.part = "update"} (%a: tensor<8x8xf32>) {
      mpmd.return %a : tensor<8x8xf32>
    } : (!g) -> !w
    return %0 : !w
  }
  module @m {
    sdy.mesh @mesh_0 = <["a"=2, "b"=2, "c"=2]>
    func.func public @main(%g: tensor<8x8xf32> {
        sdy.sharding = #sdy.sharding<@mesh_0, [{}, {"c"}], unreduced={"a", "b"}>})
        -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [DIMS]>}) {
      %0 = sdy.sharding_constraint %g <@mesh_0, [DIMS]>
        {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [DIMS]>]>} : tensor<8x8xf32>
      return %0 : tensor<8x8xf32>
    }
  }
}
"""


@pytest.mark.parametrize(
    ("dims", "spec"),
    [
        ('{"a"}, {"c", "b"}', ("a", ("c", "b"))),  # one axis for each dimension
        ('{"b"}, {"c", "a"}', ("b", ("c", "a"))),
        ('{"b", "a"}, {"c"}', (("b", "a"), "c")),  # both for one
        ('{"b"}, {"c"}', ("b", "c")),  # one is left for an all-reduce
        ('{}, {"c"}', (None, "c")),
        ('{"c"}, {"b"}', ("c", "b")),  # more than a cut
    ],
)
def test_parts_add_up_in_every_layout(dims, spec):
    module = passes.run(UPDATE.replace("DIMS", dims), "lower-partial-sums,constrain-shardings")
    nested = separate(module.body.operations[-1])
    mesh = jax.make_mesh((2, 2, 2), ("a", "b", "c"), axis_types=(jax.sharding.AxisType.Auto,) * 3)
    parts = np.random.default_rng(0).normal(size=(4, 8, 8)).astype(np.float32)
    place = NamedSharding(mesh, PartitionSpec(("a", "b"), None, "c"))
    want = NamedSharding(mesh, PartitionSpec(*spec))
    compiled = compile_module(nested, jax.devices(), [((8, 8), want)])
    (got,) = compiled([jax.device_put(parts, place)])
    np.testing.assert_allclose(np.asarray(got), parts.sum(axis=0), rtol=1e-5, atol=1e-6)
