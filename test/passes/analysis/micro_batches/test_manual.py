"""What is claimed of `shard_map`s over 2x2 devices, held against what they compute."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

from alpa.passes.analysis.micro_batches.relation import Relation

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


def ring(x: Any, w: Any) -> Any:
    """Each device of t has some columns of x and the rows of w for all of them, which go round."""

    def local(x: Any, w: Any) -> Any:
        def trip(n: Any, carried: Any) -> Any:
            total, block = carried
            first = (lax.axis_index("t") - n) % 2 * block.shape[1]
            rows = lax.dynamic_slice_in_dim(w, first, block.shape[1])
            return total + jnp.tanh(block) @ rows, lax.ppermute(block, "t", [(0, 1), (1, 0)])

        start = lax.pcast(jnp.zeros((len(x), w.shape[1])), ("d", "t"), to="varying")
        return lax.fori_loop(0, 2, trip, (start, x))[0]

    return on_shards(local, (P("d", "t"), P(None, "t")), P("d", "t"))(x, w)


def trips(x: Any) -> Any:
    """The sum of a device's samples, some of which are added in each trip."""
    start = lax.pcast(jnp.zeros(x.shape[1]), "d", to="varying")
    return lax.fori_loop(0, 3, lambda n, total: total + (n * x).sum(0), start)


def handed_on(x: Any) -> Any:
    """The number of the device reaches the samples in the third trip."""

    def trip(_: Any, carried: Any) -> Any:
        x, first, second = carried
        return x * first, second, 1.0 + lax.axis_index("d")

    ones = lax.pcast((1.0, 1.0), "d", to="varying")
    return lax.fori_loop(0, 3, trip, (x, *ones))[0]


def loss(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda w, x: jnp.mean(function(x, w) ** 2)


@dataclass(frozen=True)
class Case:
    function: Callable[..., Any]
    arguments: str
    kind: str
    """of the result"""


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
    # Loops and branches.
    "a loop over samples": Case(
        both(lambda x: lax.fori_loop(0, 2, lambda _, c: c * 2 + x, x)), "x", "rows"
    ),
    "a ring of columns": Case(ring, "xw", "rows"),
    "gradients of a ring": Case(jax.grad(loss(ring)), "wx", "sum"),
    "gradients of a ring by samples": Case(jax.grad(loss(ring), argnums=1), "wx", "rows"),
    "gradients of a recomputed ring": Case(jax.grad(loss(jax.checkpoint(ring))), "wx", "sum"),
    "a loop in a loop": Case(
        both(
            lambda x: lax.fori_loop(
                0, 2, lambda _, c: lax.fori_loop(0, 3, lambda i, d: d * i + c, jnp.tanh(c)), x
            )
        ),
        "x",
        "rows",
    ),
    "a sum over trips": Case(on_shards(lambda x: lax.psum(trips(x), "d"), P("d"), P()), "x", "sum"),
    "a sum in each trip": Case(
        on_shards(
            lambda x: lax.fori_loop(
                0, 3, lambda i, c: c + lax.psum((i * x).sum(0), "d"), jnp.zeros(6)
            ),
            P("d"),
            P(),
        ),
        "x",
        "sum",
    ),
    "a branch of the parameters": Case(
        on_shards(
            lambda x, w: lax.cond(w.sum() > 0, lambda: x * 2, lambda: jnp.tanh(x)),
            (P("d"), P()),
            P("d"),
        ),
        "xw",
        "rows",
    ),
    "a branch of the device's columns": Case(
        on_shards(
            lambda y: lax.cond(lax.axis_index("t") > 0, lambda: y * 2, lambda: jnp.tanh(y)),
            P("d", "t"),
            P("d", "t"),
        ),
        "y",
        "rows",
    ),
    "sums of each device over trips": Case(both(lambda x: trips(x)[None]), "x", "mixed"),
    "functions of sums in trips": Case(
        on_shards(lambda x: lax.psum(jnp.tanh(trips(x)), "d"), P("d"), P()), "x", "mixed"
    ),
    "a device's number that trips hand on": Case(both(handed_on), "x", "mixed"),
    "as many trips as the device's number": Case(
        both(lambda x: lax.fori_loop(0, 1 + lax.axis_index("d"), lambda _, c: c * 2 + x, x)),
        "x",
        "mixed",
    ),
    "as many trips as the samples say": Case(
        both(lambda x: lax.while_loop(lambda c: c.sum() < 99, lambda c: c + x**2, x)), "x", "mixed"
    ),
    "a branch of the device's samples": Case(
        both(lambda x: lax.cond(lax.axis_index("d") > 0, lambda: x * 2, lambda: x)), "x", "mixed"
    ),
    "a branch with the device's number": Case(
        both(
            lambda x: (
                x
                * lax.cond(
                    jnp.sin(3.0) > 0,
                    lambda: 1.0 + lax.axis_index("d"),
                    lambda: lax.pcast(0.5, "d", to="varying"),
                )
            )
        ),
        "x",
        "mixed",
    ),
    "samples passed on in trips": Case(
        both(
            lambda x: lax.fori_loop(
                0, 2, lambda _, c: x * lax.ppermute(c, "d", [(0, 1), (1, 0)]), x
            )
        ),
        "x",
        "mixed",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_claims(check: Callable[..., Any], program: type, name: str) -> None:
    case = CASES[name]
    arguments = tuple(VALUES[letter] for letter in case.arguments)
    dims = tuple(DIMS[letter] for letter in case.arguments)
    one = program(function=case.function, arguments=arguments, dims=dims)
    (claim,) = check(one, NUMBER).results
    assert claim.kind == case.kind
    ((whole, *parts),) = computed(one)
    if not claim.is_mixed:
        hold(claim, whole, parts)
        return
    # Nothing that could be claimed is true.
    assert all(
        made.shape != whole.shape or not np.allclose(made * scale, whole, atol=1e-5)
        for made in (jnp.concatenate(parts), sum(parts), parts[0])
        for scale in (1, 1 / NUMBER)
    )


def computed(one: Any) -> list[tuple[Any, ...]]:
    """Each result of the whole batch, with those of the micro-batches."""
    step = jax.jit(one.function)
    runs = [step(*arguments) for arguments in (one.arguments, *one.parts(NUMBER))]
    return list(zip(*map(jax.tree.leaves, runs), strict=True))


def hold(claim: Relation, whole: Any, parts: Sequence[Any]) -> None:
    """Holds a claim against numbers."""
    joined = {
        "rows": lambda: jnp.concatenate(parts, axis=claim.dim),
        "sum": lambda: sum(parts),
        "same": lambda: parts[0],
    }
    scaled = joined[claim.kind]() * float(NUMBER) ** claim.power
    np.testing.assert_allclose(scaled, whole, rtol=1e-4, atol=1e-5)


def random_ops(seed: int, depth: int, values: Any, *, together: bool = True) -> Any:
    """What random ops make of samples and two vectors on each device, in loops and branches too.

    In a branch, which not all devices may take `together`, they do not send.
    """
    random = np.random.default_rng(seed)
    rows, total, other = values

    def inner(seed: int, *, together: bool) -> Callable[..., Any]:
        return lambda values: random_ops(seed, depth + 1, values, together=together)

    for _ in range(random.integers(2, 6)):
        seeds = [int(it) for it in random.integers(1 << 30, size=2)]
        number = (1 + lax.axis_index(random.choice(["d", "t", "t"]))).astype(jnp.float32)
        match int(random.integers(17 if depth < 2 else 12)):
            case 0:
                rows = jnp.tanh(rows)
            case 1:
                rows = rows * other
            case 2 if together:
                rows = rows + lax.ppermute(rows, "t", [(0, 1), (1, 0)])
            case 3:
                rows = rows * number
            case 4 | 11:
                total = total + rows.sum(0)
            case 5 if together:
                total = lax.psum(total, "d")
            case 6:
                total = total + 2 * other
            case 7:
                total, other = other, total
            case 8:
                other = jnp.sin(other)
            case 9:
                other = other * number
            case 10 if together:
                total = lax.ppermute(total, "d", [(0, 1), (1, 0)])
            case 12 | 13 | 14:
                trip = inner(seeds[0], together=together)
                rows, total, other = lax.fori_loop(
                    0, 3, lambda _, values, trip=trip: trip(values), (rows, total, other)
                )
            case 15 | 16:
                first = (number - 1.5, other[0])[random.integers(2)]
                branches = [inner(it, together=False) for it in seeds]
                rows, total, other = lax.cond(first > 0, *branches, (rows, total, other))
            case _:
                rows = rows - 0.5 * rows
    return rows, total, other


@pytest.mark.parametrize(
    "seed", [*range(10), *(pytest.param(n, marks=pytest.mark.slow) for n in range(10, 200))]
)
def test_random_bodies(check: Callable[..., Any], program: type, seed: int) -> None:
    """Whatever is claimed of random bodies is true."""

    def local(x: Any, w: Any) -> Any:
        rows, total, other = random_ops(seed, 0, (x, 0 * w[0], w[0]))
        return rows, lax.psum(total, "d"), other

    outputs = P("d", "t"), P("t"), P(("d", "t"))
    function = on_shards(local, (P("d"), P()), outputs, check_vma=False)
    one = program(function=function, arguments=(VALUES["y"], VALUES["w"]), dims=(0, None))
    for claim, (whole, *parts) in zip(check(one, NUMBER).results, computed(one), strict=True):
        if not claim.is_mixed:
            hold(claim, whole, parts)
