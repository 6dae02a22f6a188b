"""Causal functions of a sequence, as models write them."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

TOKENS, SIZE = 6, 4
Function = Callable[[jax.Array, jax.Array], jax.Array]
"""of [2, TOKENS, SIZE] and weights of [SIZE, SIZE]"""


def tril() -> jax.Array:
    return jnp.tril(jnp.ones((TOKENS, TOKENS), bool))


def attend(x: jax.Array, w: jax.Array, scores: Callable[[jax.Array], jax.Array]) -> jax.Array:
    weights = jax.nn.softmax(scores(jnp.einsum("bqd,bkd->bqk", x, x @ w)))
    return jnp.einsum("bqk,bkd->bqd", weights, x)


def masked(low: float) -> Function:
    return lambda x, w: attend(x, w, lambda s: jnp.where(tril(), s, low))


def added(x: jax.Array, w: jax.Array) -> jax.Array:
    return attend(x, w, lambda s: s + jnp.where(tril(), 0.0, -1e9))


def by_iota(x: jax.Array, w: jax.Array) -> jax.Array:
    places = jnp.arange(TOKENS)
    return attend(x, w, lambda s: jnp.where(places[:, None] >= places[None], s, -jnp.inf))


def keys_first(x: jax.Array, w: jax.Array) -> jax.Array:
    scores = jnp.einsum("bkd,bqd->bkq", x @ w, x)
    scores = jnp.where(tril().T, scores, -jnp.inf)
    return jnp.einsum("bkd,bkq->bqd", x, jax.nn.softmax(scores, axis=1))


def windowed(x: jax.Array, w: jax.Array) -> jax.Array:
    near = tril() & ~jnp.tril(jnp.ones((TOKENS, TOKENS), bool), -3)
    return attend(x, w, lambda s: jnp.where(near, s, -1e30))


def linear(x: jax.Array, w: jax.Array) -> jax.Array:
    scores = jnp.einsum("bqd,bkd->bqk", x, x @ w) * tril()
    return jnp.einsum("bqk,bkd->bqd", scores, x)


def pointwise(x: jax.Array, w: jax.Array) -> jax.Array:
    place = jnp.arange(TOKENS, dtype=x.dtype)[:, None]
    return jax.nn.gelu(x @ w + jnp.sin(place)) / (1 + jnp.abs(x).sum(-1, keepdims=True))


def segments(x: jax.Array, w: jax.Array) -> jax.Array:
    segment = jnp.round(x[..., 0])
    same = segment[:, :, None] == segment[:, None, :]
    return attend(x, w, lambda s: jnp.where(tril() & same, s, -1e30))


def experts(x: jax.Array, w: jax.Array) -> jax.Array:
    best = jnp.argmax(x @ w, axis=-1)
    return w[best] + jnp.take_along_axis(x, best[..., None], axis=-1)


def constant(x: jax.Array, w: jax.Array) -> jax.Array:
    mask = np.tril(np.ones((TOKENS, TOKENS), bool))
    return attend(x, w, lambda s: jnp.where(mask, s, -1e9))


CAUSAL = {
    "constant": constant,
    "-inf": masked(-jnp.inf),
    "-1e9": masked(-1e9),
    "least of f16": masked(-65504.0),
    "added": added,
    "iota": by_iota,
    "keys first": keys_first,
    "window": windowed,
    "linear": linear,
    "pointwise": pointwise,
    "segments": segments,
    "experts": experts,
}
