"""What is claimed of `shard_map`s over 2x2 devices, held against what they compute."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

NUMBER = 2
"""of micro-batches"""
RANDOM = np.random.default_rng(0)
VALUES = {
    "x": RANDOM.normal(size=(16, 6)).astype(np.float32),
    "y": RANDOM.normal(size=(16, 4)).astype(np.float32),
    "w": RANDOM.normal(size=(6, 4)).astype(np.float32),
}
DIMS = {"x": 0, "y": 0, "w": None}
"""The dimension of the samples."""


def on_shards(local: Callable[..., Any], inputs: Any, outputs: Any, **options: Any) -> Any:
    devices = jax.devices()[:4]
    mesh = jax.make_mesh((2, 2), ("d", "t"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    return jax.shard_map(local, mesh=mesh, in_specs=inputs, out_specs=outputs, **options)


def mlp(x: Any, w: Any) -> Any:
    """Columns of w on each device of t, then a sum of their products."""

    def local(x: Any, w: Any) -> Any:
        return lax.psum(jnp.tanh(x @ w) @ w.T, "t")

    return on_shards(local, (P("d"), P(None, "t")), P("d"))(x, w)


def fully_sharded(x: Any, w: Any) -> Any:
    def local(x: Any, w: Any) -> Any:
        return jnp.tanh(x @ lax.all_gather(w, "d", tiled=True))

    return on_shards(local, (P("d"), P("d")), P("d"))(x, w)


def loss(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: jnp.mean(function(x, w) ** 2)


@dataclass(frozen=True)
class Case:
    function: Callable[..., Any]
    arguments: str
    kinds: str
    """of the results"""


both = partial(on_shards, inputs=P("d"), outputs=P("d"))
CASES = {
    "rows": Case(on_shards(lambda x, w: jnp.tanh(x @ w), (P("d"), P()), P("d")), "xw", "rows"),
    "columns": Case(on_shards(jnp.dot, (P("d"), P(None, "t")), P("d", "t")), "xw", "rows"),
    "products added up": Case(
        on_shards(lambda x, w: lax.psum(x @ w, "t"), (P("d", "t"), P("t")), P("d")), "xw", "rows"
    ),
    "samples that are not split": Case(
        on_shards(lambda x, w: lax.psum(x @ w, "t"), (P(None, "t"), P("t")), P()), "xw", "rows"
    ),
    "columns gathered": Case(
        both(lambda x: lax.all_gather(x * 2, "t", axis=1, tiled=True), check_vma=False),
        "x",
        "rows",
    ),
    "columns exchanged": Case(
        on_shards(
            lambda x: lax.all_to_all(x[None], "t", 2, 0, tiled=True).sum(0),
            P("d"),
            P("d", "t"),
            check_vma=False,
        ),
        "y",
        "rows",
    ),
    "columns passed on": Case(
        on_shards(lambda y: lax.ppermute(y, "t", [(0, 1), (1, 0)]), P("d", "t"), P("d", "t")),
        "y",
        "rows",
    ),
    "a sum": Case(on_shards(lambda x: lax.psum(x.sum(0), "d"), P("d"), P()), "x", "sum"),
    "a sum in shards": Case(
        on_shards(lambda x: lax.psum_scatter(x.sum(0), "d", tiled=True), P("d"), P("d")),
        "x",
        "sum",
    ),
    "a number of the device's columns": Case(
        on_shards(lambda y: y * (1 + lax.axis_index("t")), P("d", "t"), P("d", "t")), "y", "rows"
    ),
    "gradients": Case(jax.grad(loss(mlp)), "wx", "sum"),
    "gradients by samples": Case(jax.grad(loss(mlp), argnums=1), "wx", "rows"),
    "gradients of recomputed rows": Case(jax.grad(loss(jax.checkpoint(mlp))), "wx", "sum"),
    "gradients of shards": Case(jax.grad(loss(fully_sharded)), "wx", "sum"),
    "parameters alone": Case(on_shards(lambda w: lax.psum(w, "d"), P("d"), P()), "w", "same"),
    # What depends on which device has which samples.
    "a number of the device's samples": Case(
        both(lambda x: x * (1 + lax.axis_index("d"))), "x", "mixed"
    ),
    "sums of each device": Case(both(lambda x: x.sum(0, keepdims=True)), "x", "mixed"),
    "sums of each device gathered": Case(
        on_shards(lambda x: lax.all_gather(x.sum(0), "d"), P("d"), P(), check_vma=False),
        "x",
        "mixed",
    ),
    "sums of functions of sums": Case(
        on_shards(lambda x: lax.psum(jnp.tanh(x.sum(0)), "d"), P("d"), P()), "x", "mixed"
    ),
    "samples by a sum of all": Case(both(lambda x: x * lax.psum(x.sum(), "d")), "x", "mixed"),
    "samples of several devices": Case(both(lambda x: lax.psum(x, "d") + x), "x", "mixed"),
    "samples passed on": Case(
        both(lambda x: x * lax.ppermute(x, "d", [(0, 1), (1, 0)])), "x", "mixed"
    ),
    "samples gathered": Case(
        on_shards(lambda x: lax.all_gather(x, "t", tiled=True), P("d"), P("d"), check_vma=False),
        "x",
        "mixed",
    ),
    "other parameters on each device": Case(
        on_shards(lambda x, w: x[:, :3] @ w, (P("d"), P("d")), P("d")), "xw", "mixed"
    ),
    "samples split in two ways": Case(
        on_shards(lambda x, y: x[:, :4] * y, (P("d"), P("t")), P(), check_vma=False),
        "xy",
        "mixed",
    ),
    "rows put together in another way": Case(
        on_shards(lambda x: x, P(("d", "t")), P(("t", "d"))), "x", "mixed"
    ),
    "rows in blocks": Case(
        on_shards(lambda x: x * (1 + lax.axis_index("t")), P("d"), P(("d", "t"))), "x", "mixed"
    ),
    "a loop over samples": Case(
        both(lambda x: lax.fori_loop(0, 2, lambda _, c: c * 2 + x, x)), "x", "mixed"
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_claims(check: Callable[..., Any], program: type, name: str) -> None:
    case = CASES[name]
    arguments = tuple(VALUES[letter] for letter in case.arguments)
    dims = tuple(DIMS[letter] for letter in case.arguments)
    one = program(function=case.function, arguments=arguments, dims=dims)
    found = check(one, NUMBER).results
    assert [it.kind for it in found] == case.kinds.split()
    step = jax.jit(case.function)
    (whole,) = jax.tree.leaves(step(*arguments))
    parts = [jax.tree.leaves(step(*part))[0] for part in one.parts(NUMBER)]
    (claim,) = found
    joined = {
        "rows": lambda: jnp.concatenate(parts, axis=claim.dim),
        "sum": lambda: sum(parts),
        "same": lambda: parts[0],
    }
    if claim.is_mixed and name != "a loop over samples":
        # Nothing that could be claimed is true.
        assert all(
            made.shape != whole.shape or not np.allclose(made * scale, whole, atol=1e-5)
            for made in (jnp.concatenate(parts), sum(parts), parts[0])
            for scale in (1, 1 / NUMBER)
        )
    if claim.is_mixed:
        return
    scaled = joined[claim.kind]() * float(NUMBER) ** claim.power
    np.testing.assert_allclose(scaled, whole, rtol=1e-4, atol=1e-5)
