"""Functions of JAX for ops that draw random numbers, where torchax has none with a key.

`env` has the keys of a call.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch


def exponential(x: Any, rate: float = 1, *, generator: None = None, env: Any) -> Any:
    """Is never 0, as in PyTorch: `gumbel_softmax` takes the logarithm."""
    return (-jnp.log(_uniform(x, env)) / rate).astype(x.dtype)


def cauchy(x: Any, median: float = 0, scale: float = 1, *, generator: None = None, env: Any) -> Any:
    drawn = jax.random.cauchy(env.get_and_rotate_prng_key(), x.shape, _wide(x))
    return (median + scale * drawn).astype(x.dtype)


def normal(x: Any, mean: float = 0, std: float = 1, *, generator: None = None, env: Any) -> Any:
    drawn = jax.random.normal(env.get_and_rotate_prng_key(), x.shape, _wide(x))
    return (mean + std * drawn).astype(x.dtype)


def rrelu(
    x: Any,
    noise: Any,
    low: float = 1 / 8,
    high: float = 1 / 3,
    training: bool = False,
    generator: None = None,
    *,
    env: Any,
) -> tuple[Any, Any]:
    """The result, and the slopes: those of positive numbers are 1."""
    if not training:
        return jnp.where(x > 0, x, x * ((low + high) / 2)), noise
    slopes = low + (high - low) * _uniform(x, env)
    slopes = jnp.where(x > 0, 1, slopes).astype(x.dtype)
    return x * slopes, slopes


def _uniform(x: Any, env: Any) -> Any:
    """Numbers between 0 and 1, without both."""
    dtype = _wide(x)
    return jax.random.uniform(
        env.get_and_rotate_prng_key(), x.shape, dtype, minval=jnp.finfo(dtype).tiny
    )


def _wide(x: Any) -> Any:
    return jnp.promote_types(x.dtype, jnp.float32)


RANDOM: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.exponential: exponential,
    torch.ops.aten.cauchy: cauchy,
    torch.ops.aten.normal_functional: normal,
    torch.ops.aten.rrelu_with_noise_functional: rrelu,
}
