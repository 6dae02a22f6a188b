"""Optimizers of random programs, and Optax wrappers around them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax


def _schedule() -> Any:
    return optax.cosine_decay_schedule(0.1, 50)


# 16 bits cannot represent the 1e-8 that adaptive optimizers add to roots by default.
OPTIMIZERS: Mapping[str, Callable[[], Any]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "nesterov": lambda: optax.sgd(0.1, momentum=0.9, nesterov=True),
    "scheduled": lambda: optax.sgd(_schedule(), momentum=0.5),
    "clipped": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.sgd(0.1)),
    "adam": lambda: optax.adam(1e-2, eps=1e-3),
    "adamw-clipped": lambda: optax.chain(
        optax.clip_by_global_norm(0.5), optax.adamw(1e-2, eps=1e-3, weight_decay=0.01)
    ),
    "rmsprop": lambda: optax.rmsprop(1e-2, eps=1e-3),
    "adagrad": lambda: optax.adagrad(1e-2, eps=1e-3),
    "lamb": lambda: optax.lamb(1e-2, eps=1e-3),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4, eps=1e-3),
}


def _masked(inner: Any) -> Any:
    """Leaves parameters with one dimension unchanged."""
    return optax.masked(inner, lambda params: jax.tree.map(lambda w: w.ndim > 1, params))


def _by_rank(inner: Any) -> Any:
    def labels(params: Any) -> Any:
        return jax.tree.map(lambda w: "matrix" if w.ndim > 1 else "vector", params)

    return optax.multi_transform({"matrix": inner, "vector": optax.sgd(0.01)}, labels)


WRAPPERS: Mapping[str, Callable[[Any], Any]] = {
    "none": lambda inner: inner,
    "apply if finite": lambda inner: optax.apply_if_finite(inner, 2),
    # In the widest available type: 32 bits, unless 64 are enabled.
    "every second step": lambda inner: optax.MultiSteps(
        inner, 2, accumulator_dtype=float
    ).gradient_transformation(),
    "ema": lambda inner: optax.chain(optax.ema(0.5), inner),
    "injected": lambda inner: optax.chain(
        inner, optax.inject_hyperparams(optax.scale)(step_size=lambda count: 1 / (1 + count))
    ),
    "masked": _masked,
    "by rank": _by_rank,
    "flattened": optax.flatten,
    "centralised": lambda inner: optax.chain(optax.centralize(), inner),
    "zeroed nans": lambda inner: optax.chain(optax.zero_nans(), inner),
}
"""Wrappers around an optimizer."""
