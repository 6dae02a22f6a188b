"""Losses of a batch, computed from those of its samples.

`values` are f32 or wider, [batch, length], not negative; `z` is [batch, width], `indices` the
integers of the samples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stress.random_programs.truth import Truth


@dataclass(frozen=True, kw_only=True)
class Loss:
    """`apply(values, z, indices)` is a scalar; losses with `jumps` sort or select by size.

    A loss that is not `linear` divides by values of all samples, or is another function of their
    sum. Its gradients have a factor that those of a further loss do not have.
    """

    truth: Truth
    apply: Callable[[Any, Any, Any], Any]
    jumps: bool = False
    linear: bool = True


def _mask(indices: Any, length: int) -> Any:
    return indices[:, np.arange(length, dtype=np.int32) % indices.shape[1]] % 3 > 0


def _masked(values: Any, _: Any, indices: Any) -> Any:
    mask = _mask(indices, values.shape[1]).astype(values.dtype)
    return (values * mask).sum() / jnp.maximum(mask.sum(), 1)


def _masked_where(values: Any, _: Any, indices: Any) -> Any:
    mask = _mask(indices, values.shape[1])
    return jnp.where(mask, values, 0).sum() / (1 + mask.sum())


def _weighted(values: Any, _: Any, indices: Any) -> Any:
    weights = 1 + indices[:, 0].astype(values.dtype)
    return (weights * values.mean(1)).sum() / weights.sum()


def _of_masked_samples(values: Any, _: Any, indices: Any) -> Any:
    own = _mask(indices, values.shape[1]).astype(values.dtype)
    return ((values * own).sum(1) / (1 + own.sum(1))).mean()


def _root(values: Any, _: Any, __: Any) -> Any:
    return jnp.sqrt(values.mean() + 0.1)


def _logarithm(values: Any, _: Any, __: Any) -> Any:
    return jnp.log1p(values.mean())


def _ratio(values: Any, z: Any, _: Any) -> Any:
    return values.mean() / (1 + (z * z).mean())


def _over_root_of_size(values: Any, _: Any, __: Any) -> Any:
    return values.mean(1).sum() / np.sqrt(values.shape[0])


def _two_parts(values: Any, z: Any, _: Any) -> Any:
    return values.mean() + 0.1 * jnp.sin(z).mean()


def _sum(values: Any, _: Any, __: Any) -> Any:
    return values.sum() / (values.shape[0] * values.shape[1])


def _scanned(values: Any, _: Any, __: Any) -> Any:
    def one(total: Any, column: Any) -> tuple[Any, None]:
        return total + column.mean(), None

    zero = jnp.zeros((), values.dtype)
    return jax.lax.scan(one, zero, values.T)[0] / values.shape[1]


def _contrastive(values: Any, z: Any, _: Any) -> Any:
    z = z * jax.lax.rsqrt((z * z).mean(1, keepdims=True) + 0.1)
    scores = jax.nn.log_softmax(z @ z.T / z.shape[1])
    return values.mean() - jnp.diagonal(scores).mean()


def _pairs(values: Any, z: Any, _: Any) -> Any:
    return values.mean() + 0.1 * ((z[:, None] - z[None]) ** 2).mean()


def _softmax(values: Any, _: Any, __: Any) -> Any:
    each = values.mean(1)
    return (jax.nn.softmax(each) * each).sum()


def _advantage(values: Any, z: Any, _: Any) -> Any:
    each = jax.lax.stop_gradient(values.mean(1))
    each = (each - each.mean()) / (each.std() + 0.1)
    return values.mean() + 0.1 * (each * z.mean(1)).mean()


def _neighbours(values: Any, z: Any, _: Any) -> Any:
    return values.mean() + 0.1 * ((z[1:] - z[:-1]) ** 2).mean()


def _sorted(values: Any, _: Any, __: Any) -> Any:
    each = jnp.sort(values.mean(1))
    return (each * jnp.arange(1, each.shape[0] + 1)).mean() / each.shape[0]


def _hardest(values: Any, _: Any, __: Any) -> Any:
    return jax.lax.top_k(values.mean(1), max(1, values.shape[0] // 2))[0].mean()


LOSSES: Mapping[str, Loss] = {
    "mean": Loss(truth=Truth.EXACT, apply=lambda values, _, __: values.mean()),
    "sum over the size": Loss(truth=Truth.EXACT, apply=_sum),
    "masked": Loss(truth=Truth.EXACT, apply=_masked, linear=False),
    "masked by where": Loss(truth=Truth.EXACT, apply=_masked_where, linear=False),
    "weighted": Loss(truth=Truth.EXACT, apply=_weighted, linear=False),
    "masked by sample": Loss(truth=Truth.EXACT, apply=_of_masked_samples),
    "two parts": Loss(truth=Truth.EXACT, apply=_two_parts),
    "scanned": Loss(truth=Truth.EXACT, apply=_scanned),
    "root of the mean": Loss(truth=Truth.EXACT, apply=_root, linear=False),
    "logarithm of the mean": Loss(truth=Truth.EXACT, apply=_logarithm, linear=False),
    "ratio of means": Loss(truth=Truth.EITHER, apply=_ratio),
    "over the root of the size": Loss(truth=Truth.EITHER, apply=_over_root_of_size),
    "contrastive": Loss(truth=Truth.MIXED, apply=_contrastive),
    "pairs of samples": Loss(truth=Truth.MIXED, apply=_pairs),
    "softmax over the batch": Loss(truth=Truth.MIXED, apply=_softmax),
    "normalised advantage": Loss(truth=Truth.MIXED, apply=_advantage),
    "standard deviation": Loss(
        truth=Truth.MIXED, apply=lambda v, _, __: jnp.sqrt(v.mean(1).var() + 0.1)
    ),
    "neighbouring samples": Loss(truth=Truth.MIXED, apply=_neighbours),
    "sorted samples": Loss(truth=Truth.MIXED, apply=_sorted, jumps=True),
    "hardest samples": Loss(truth=Truth.MIXED, apply=_hardest, jumps=True),
    "largest sample": Loss(truth=Truth.MIXED, apply=lambda v, _, __: v.mean(1).max(), jumps=True),
    "median sample": Loss(
        truth=Truth.MIXED, apply=lambda v, _, __: jnp.median(v.mean(1)), jumps=True
    ),
}
