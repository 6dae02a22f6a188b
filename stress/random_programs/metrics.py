"""What a random program may return besides its outputs and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp

from stress.random_programs.truth import Truth


@dataclass(frozen=True, kw_only=True)
class Metric:
    """`apply(outputs, loss, params)`: outputs are [batch, length, width], f32 or wider.

    Inference has no loss (`of_training`). Metrics with `jumps` depend on the order of close
    numbers.
    """

    truth: Truth
    apply: Callable[[Any, Any, Any], Any]
    of_training: bool = False
    jumps: bool = False


def _deviation(y: Any, _: Any, __: Any) -> Any:
    return jnp.sqrt(jnp.abs((y * y).mean(0) - y.mean(0) ** 2) + 0.1)


METRICS: Mapping[str, Metric] = {
    "perplexity": Metric(
        truth=Truth.EXACT, apply=lambda _, loss, __: jnp.exp(loss / 4), of_training=True
    ),
    "root of squares": Metric(
        truth=Truth.EXACT, apply=lambda y, _, __: jnp.sqrt((y * y).mean() + 0.1)
    ),
    "deviation by moments": Metric(truth=Truth.EXACT, apply=_deviation),
    "mean sample": Metric(truth=Truth.EXACT, apply=lambda y, _, __: y.mean(0)),
    "size": Metric(truth=Truth.EXACT, apply=lambda y, _, __: jnp.asarray(y.shape[0], jnp.int32)),
    "old parameters": Metric(truth=Truth.EXACT, apply=lambda _, __, params: params),
    "norms": Metric(truth=Truth.EXACT, apply=lambda y, _, __: (y * y).mean((1, 2))),
    "time-major": Metric(truth=Truth.EXACT, apply=lambda y, _, __: jnp.swapaxes(y, 0, 1)),
    "means and norms": Metric(
        truth=Truth.EXACT,
        apply=lambda y, _, __: {"mean": y.mean(), "rows": jnp.tanh(y).mean(1)},
    ),
    "spread": Metric(truth=Truth.MIXED, apply=lambda y, _, __: y.mean(1).std(0)),
    "order": Metric(
        truth=Truth.MIXED, apply=lambda y, _, __: jnp.argsort(y.mean((1, 2))), jumps=True
    ),
    "products": Metric(truth=Truth.MIXED, apply=lambda y, _, __: y.mean(1) @ y.mean(1).T),
    "largest": Metric(truth=Truth.MIXED, apply=lambda y, _, __: y.max()),
    "centred": Metric(truth=Truth.MIXED, apply=lambda y, _, __: jnp.tanh(y - y.mean(0))),
    "first sample": Metric(truth=Truth.MIXED, apply=lambda y, _, __: y[0]),
}
