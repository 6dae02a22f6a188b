"""Ways in which a random step takes its gradients: once, in loops and branches, several times.

A way maps a loss with auxiliary results, `loss(params, batch) -> loss, aux`, to
`(loss, aux), gradients`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from stress.random_programs.truth import Truth

Loss = Callable[[Any, Any], Any]
Both = Callable[..., Callable[..., Any]]
"""`jax.value_and_grad`, or Alpa's."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """A loss, the place to differentiate it, and the number that selects branches."""

    loss: Loss
    params: Any
    batch: Any
    flag: Any
    value_and_grad: Both

    def at(self, params: Any) -> Any:
        """Loss, auxiliary results and gradients at some parameters."""
        return self.value_and_grad(self.loss, has_aux=True)(params, self.batch)

    def scaled(self, factor: Any) -> Any:
        """The same for the loss times a factor."""

        def loss(params: Any, batch: Any) -> Any:
            value, aux = self.loss(params, batch)
            return value * factor.astype(value.dtype), aux

        return self.value_and_grad(loss, has_aux=True)(self.params, self.batch)


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to take gradients. The micro-batch must be divisible by `parts`; `alone` limits the way
    to programs that compute samples separately, without noise."""

    truth: Truth
    apply: Callable[[Problem], Any]
    parts: int = 1
    alone: bool = False
    loops: bool = False
    """whether the loss is computed inside a loop or a branch"""
    jumps: bool = False
    """whether a difference in the last bits can become large"""


def _moved(params: Any, step: Any, factor: float) -> Any:
    return jax.tree.map(lambda w, g: (w + factor * g).astype(w.dtype), params, step)


def _factors(problem: Problem) -> Any:
    return 0.5 + 0.25 * (jnp.arange(2) + problem.flag % 2)


def _scan(problem: Problem) -> Any:
    """Sums the gradients of several losses in a loop."""
    both, grads = problem.at(problem.params)

    def one(total: Any, factor: Any) -> tuple[Any, None]:
        return _moved(total, problem.scaled(factor)[1], 1), None

    total = jax.lax.scan(one, jax.tree.map(jnp.zeros_like, grads), _factors(problem))[0]
    return both, jax.tree.map(jnp.add, grads, total)


def _only_scan(problem: Problem) -> Any:
    """The only gradients are in a loop."""

    def one(total: Any, factor: Any) -> tuple[Any, Any]:
        both, grads = problem.scaled(factor)
        return _moved(total, grads, 1), both

    zero = jax.tree.map(jnp.zeros_like, problem.params)
    total, (loss, aux) = jax.lax.scan(one, zero, _factors(problem))
    return (loss.sum().astype(loss.dtype), jax.tree.map(lambda a: a[0], aux)), total


def _map(problem: Problem) -> Any:
    """Maps the gradient over factors of the loss."""
    (loss, aux), grads = jax.lax.map(problem.scaled, _factors(problem))
    grads = jax.tree.map(lambda g: g.sum(0).astype(g.dtype), grads)
    return (loss[0], jax.tree.map(lambda a: a[0], aux)), grads


def _cond(problem: Problem) -> Any:
    return jax.lax.cond(
        problem.flag > 2,
        lambda: problem.at(problem.params),
        lambda: problem.scaled(jnp.asarray(0.5, jnp.float32)),
    )


def _two(problem: Problem) -> Any:
    """Two losses with separate gradients, before either is applied."""
    both, grads = problem.at(problem.params)

    def second(params: Any, batch: Any) -> Any:
        _, (outputs, _) = problem.loss(params, batch)
        return 0.1 * jnp.mean(outputs.astype(jnp.promote_types(outputs.dtype, jnp.float32)) ** 2)

    other = problem.value_and_grad(second)(problem.params, problem.batch)[1]
    return both, _moved(grads, other, 1)


def _by_sample(problem: Problem) -> Any:
    """Each sample's gradients, clipped by their norm, then averaged (DP-SGD)."""

    def each(sample: Any) -> Any:
        return problem.value_and_grad(problem.loss, has_aux=True)(
            problem.params, jax.tree.map(lambda a: a[None], sample)
        )

    (loss, (outputs, running)), grads = jax.vmap(each)(problem.batch)
    squares = [
        jnp.sum(
            g.astype(jnp.promote_types(g.dtype, jnp.float32)).reshape(g.shape[0], -1) ** 2, axis=1
        )
        for g in jax.tree.leaves(grads)
    ]
    scale = jax.lax.rsqrt(1 + sum(squares))

    def mean(g: Any) -> Any:
        factor = scale.astype(g.dtype).reshape(-1, *[1] * (g.ndim - 1))
        return (g * factor).mean(0)

    outputs = outputs.reshape(-1, *outputs.shape[2:])
    return (loss.mean(), (outputs, running)), jax.tree.map(mean, grads)


def _curved(problem: Problem) -> Any:
    """Adds the Hessian's product with a fixed direction."""
    both, grads = problem.at(problem.params)

    def gradient(params: Any) -> Any:
        return jax.grad(lambda p: problem.loss(p, problem.batch)[0])(params)

    direction = jax.tree.map(lambda w: jnp.full_like(w, 0.05), problem.params)
    return both, _moved(grads, jax.jvp(gradient, (problem.params,), (direction,))[1], 1)


def _accumulated(problem: Problem, cut: Callable[[Any], Any], joined: Callable[[Any], Any]) -> Any:
    """The user's own loop over two parts of the batch."""
    both = problem.value_and_grad(problem.loss, has_aux=True)

    def one(total: Any, part: Any) -> tuple[Any, Any]:
        (loss, aux), grads = both(problem.params, part)
        return _moved(total, grads, 0.5), (loss, aux[0])

    zero = jax.tree.map(jnp.zeros_like, problem.params)
    grads, (losses, outputs) = jax.lax.scan(one, zero, jax.tree.map(cut, problem.batch))
    return (losses.mean().astype(losses.dtype), (joined(outputs), None)), grads


def _accumulated_blocks(problem: Problem) -> Any:
    return _accumulated(
        problem,
        lambda a: a.reshape(2, -1, *a.shape[1:]),
        lambda a: a.reshape(-1, *a.shape[2:]),
    )


def _accumulated_strides(problem: Problem) -> Any:
    return _accumulated(
        problem,
        lambda a: a.reshape(-1, 2, *a.shape[1:]).swapaxes(0, 1),
        lambda a: a.swapaxes(0, 1).reshape(-1, *a.shape[2:]),
    )


def _sharpness(problem: Problem) -> Any:
    """SAM: the gradients at parameters that gradients have moved."""
    _, grads = problem.at(problem.params)
    return problem.at(_moved(problem.params, grads, 0.05))


def _inner_loop(problem: Problem) -> Any:
    """Two steps on the same batch, as in PPO; the gradients are the change of the parameters."""

    def one(_: Any, params: Any) -> Any:
        return _moved(params, problem.at(params)[1], -0.05)

    both, _ = problem.at(problem.params)
    end = jax.lax.fori_loop(0, 2, one, problem.params)
    return both, jax.tree.map(lambda a, b: (a - b) * 10, problem.params, end)


def _line_search(problem: Problem) -> Any:
    """Halves the gradients until a step with them makes the loss smaller."""
    both, grads = problem.at(problem.params)

    def worse(factor: Any) -> Any:
        moved = jax.tree.map(lambda w, g: w - (factor * g).astype(w.dtype), problem.params, grads)
        return (problem.loss(moved, problem.batch)[0] > both[0]) & (factor > 0.1)

    factor = jax.lax.while_loop(worse, lambda f: f / 2, jnp.float32(1))
    return both, jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)


def _in_turn(problem: Problem) -> Any:
    """Gradients of one part after the other part was updated, as in GANs."""
    both, grads = problem.at(problem.params)
    first = sorted(problem.params)[0]
    part = {first: _moved(problem.params[first], grads[first], -0.1)}
    _, other = problem.at({**problem.params, **part})
    return both, {**other, first: grads[first]}


def _plain(problem: Problem) -> Any:
    return problem.at(problem.params)


_E = Truth.EXACT

WAYS: Mapping[str, Way] = {
    "once": Way(truth=_E, apply=_plain),
    "also in a scan": Way(truth=_E, apply=_scan, loops=True),
    "in a scan": Way(truth=_E, apply=_only_scan, loops=True),
    "in a map": Way(truth=_E, apply=_map, loops=True),
    "in a branch": Way(truth=_E, apply=_cond, loops=True),
    "of two losses": Way(truth=_E, apply=_two),
    "by sample": Way(truth=Truth.EITHER, apply=_by_sample, alone=True),
    "with curvature": Way(truth=_E, apply=_curved),
    "accumulated in blocks": Way(
        truth=Truth.EITHER, apply=_accumulated_blocks, parts=2, alone=True
    ),
    "accumulated in strides": Way(
        truth=Truth.EITHER, apply=_accumulated_strides, parts=2, alone=True
    ),
    "sharpness-aware": Way(truth=Truth.MIXED, apply=_sharpness),
    "in an inner loop": Way(truth=Truth.MIXED, apply=_inner_loop, loops=True, jumps=True),
    "line search": Way(truth=Truth.MIXED, apply=_line_search, loops=True, jumps=True),
    "in turn": Way(truth=Truth.MIXED, apply=_in_turn),
}
