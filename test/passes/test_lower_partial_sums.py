"""Gradients accumulated as partial sums equal plain JAX's, and communicate once per step."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa import passes, runtime
from alpa.dialects import body, main_function, parse
from alpa.dialects.attributes import read_part
from alpa.dialects.mpmd_types import MeshTensor
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
    assert "all-reduce" not in backward.hlo_text()
    assert "all-reduce" in update.hlo_text()
