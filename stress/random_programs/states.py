"""State of a step besides parameters and optimizer state: metrics, averages, old values."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stress.random_programs.layers import INDICES
from stress.random_programs.truth import Truth

Params = Any


@dataclass(frozen=True, kw_only=True)
class Values:
    """The inputs of new states; `outputs` are [batch, length, width], f32 or wider."""

    loss: Any
    grads: Any
    old: Params
    new: Params
    outputs: Any
    indices: Any


@dataclass(frozen=True, kw_only=True)
class State:
    """`initial(params, width, is_wide)` makes numpy arrays, `update(state, values)` the new ones.

    States with `jumps` depend on the order of numbers that may differ in their last bits.
    """

    truth: Truth
    initial: Callable[[Params, int, bool], Any]
    update: Callable[[Any, Values], Any]
    jumps: bool = False


def _number(value: float) -> Callable[[Params, int, bool], Any]:
    return lambda _, __, is_wide: np.asarray(value, np.float64 if is_wide else np.float32)


def _integer(_: Params, __: int, is_wide: bool) -> Any:
    return np.asarray(2**40 if is_wide else 2**20, np.int64 if is_wide else np.int32)


def _vector(_: Params, width: int, is_wide: bool) -> Any:
    return np.linspace(-0.2, 0.2, width).astype(np.float64 if is_wide else np.float32)


def _averaged(s: Any, x: Any) -> Any:
    return (0.9 * s + 0.1 * x).astype(s.dtype)


def _mean(s: Any, v: Values) -> Any:
    """A total and a count, as in the metrics of a training loop."""
    return {"total": s["total"] + v.loss.astype(s["total"].dtype), "count": s["count"] + 1}


def _history(s: Any, v: Values) -> Any:
    row = v.loss.astype(s["rows"].dtype)
    rows = jax.lax.dynamic_update_index_in_dim(s["rows"], row, s["next"] % 4, 0)
    return {"rows": rows, "next": s["next"] + 1}


def _words(s: Any, v: Values) -> Any:
    """A 64-bit number in two words, which looks like a random key."""
    low = s[0] + np.uint32(v.indices.shape[1])
    return jnp.stack([low, s[1] + (low < s[0]).astype(jnp.uint32)])


def _histogram(s: Any, v: Values) -> Any:
    return s.at[v.indices.reshape(-1)].add(1)


def _one_hot_counts(s: Any, v: Values) -> Any:
    return s + jax.nn.one_hot(v.indices, INDICES, dtype=s.dtype).sum((0, 1), dtype=s.dtype)


def _moments(s: Any, v: Values) -> Any:
    first, second = v.outputs.mean((0, 1)), (v.outputs**2).mean((0, 1))
    return {
        "first": _averaged(s["first"], first),
        "second": _averaged(s["second"], second),
        "deviation": jnp.sqrt(jnp.abs(second - first**2) + 0.1).astype(s["deviation"].dtype),
    }


def _counts(_: Params, __: int, ___: bool) -> Any:
    return np.zeros(INDICES, np.int32)


_E, _M = Truth.EXACT, Truth.MIXED

STATES: Mapping[str, State] = {
    "steps": State(truth=_E, initial=_integer, update=lambda s, _: s + 1),
    "mean loss": State(
        truth=_E,
        initial=lambda p, w, is_wide: {
            "total": _number(0)(p, w, is_wide),
            "count": np.int32(0),
        },
        update=_mean,
    ),
    "average loss": State(
        truth=_E, initial=_number(1), update=lambda s, v: _averaged(s, v.loss.astype(s.dtype))
    ),
    "best loss": State(
        truth=_E, initial=_number(9), update=lambda s, v: jnp.minimum(s, v.loss.astype(s.dtype))
    ),
    "samples": State(
        truth=_E, initial=_integer, update=lambda s, v: s + np.int32(v.indices.shape[0])
    ),
    "counted": State(
        truth=_E,
        initial=_integer,
        update=lambda s, v: s + (v.indices % 3 == 0).sum(dtype=s.dtype),
    ),
    "histogram": State(truth=_E, initial=_counts, update=_histogram),
    "one-hot counts": State(truth=_E, initial=_counts, update=_one_hot_counts),
    "old parameters": State(
        truth=_E, initial=lambda p, _, __: jax.tree.map(np.copy, p), update=lambda _, v: v.old
    ),
    "previous gradients": State(
        truth=_E,
        initial=lambda p, _, __: jax.tree.map(np.zeros_like, p),
        update=lambda s, v: jax.tree.map(lambda a, g: g.astype(a.dtype), s, v.grads),
    ),
    "history": State(
        truth=_E,
        initial=lambda _, __, is_wide: {
            "rows": np.zeros(4, np.float64 if is_wide else np.float32),
            "next": np.int32(0),
        },
        update=_history,
    ),
    "words": State(
        truth=_E,
        initial=lambda _, __, ___: np.array([2**32 - 3, 7], np.uint32),
        update=_words,
    ),
    "flag": State(
        truth=_E, initial=lambda _, __, ___: np.bool_(False), update=lambda s, v: s | (v.loss > -9)
    ),
    "byte": State(
        truth=_E, initial=lambda _, __, ___: np.uint8(255), update=lambda s, _: s + np.uint8(1)
    ),
    "mean output": State(
        truth=_E,
        initial=_vector,
        update=lambda s, v: _averaged(s, v.outputs.mean((0, 1)).astype(s.dtype)),
    ),
    "moments": State(
        truth=_E,
        initial=lambda p, w, is_wide: {
            name: _vector(p, w, is_wide) for name in ("first", "second", "deviation")
        },
        update=_moments,
    ),
    "total output": State(
        truth=_E,
        initial=_vector,
        update=lambda s, v: s + v.outputs.mean(1).sum(0).astype(s.dtype),
    ),
    "variance": State(
        truth=_M,
        initial=_vector,
        update=lambda s, v: _averaged(s, v.outputs.var((0, 1)).astype(s.dtype)),
    ),
    "largest output": State(
        truth=_M,
        initial=_number(-9),
        update=lambda s, v: jnp.maximum(s, v.outputs.max().astype(s.dtype)),
    ),
    "last sample": State(
        truth=_M,
        initial=_vector,
        update=lambda s, v: v.outputs[-1].mean(0).astype(s.dtype),
    ),
    "queue": State(
        truth=_M,
        initial=lambda p, w, is_wide: np.tile(_vector(p, w, is_wide), (3, 1)),
        update=lambda s, v: jnp.concatenate([v.outputs.mean(1).astype(s.dtype), s])[:3],
    ),
    "median": State(
        truth=_M,
        initial=_number(0),
        update=lambda s, v: _averaged(s, jnp.median(v.outputs.mean((1, 2))).astype(s.dtype)),
        jumps=True,
    ),
}
"""By name. `EXACT` states advance once per step, for any number of micro-batches."""
