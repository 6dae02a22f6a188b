"""Ops between the blocks of a random program, and whether they mix samples.

An insertion maps [batch, length, width] to the same shape. Those that sort or select by size have
`jumps`: numbers that differ in their last bits may come out in another order, which is rare in 32
bits and common in 16.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from stress.random_programs.layers import Inputs, Params, Size
from stress.random_programs.noise import Noise
from stress.random_programs.truth import Truth

Apply = Callable[[Params, Any, Inputs, Noise], Any]


@dataclass(frozen=True, kw_only=True)
class Insertion:
    """`apply(params, x, inputs, noise)`; `shapes` are its parameters' shapes for an input size."""

    name: str
    truth: Truth
    apply: Apply
    kinds: frozenset[str] = frozenset()
    shapes: Callable[[Size], Mapping[str, tuple[int, ...]]] = field(default=lambda _: {})
    jumps: bool = False
    draws: bool = False
    """whether it draws random numbers"""
    reads: frozenset[str] = frozenset()
    """the inputs that it reads besides indices and flag"""


def wide(x: Any) -> Any:
    """Values in at least 32 bits."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _scale(size: Size) -> Mapping[str, tuple[int, ...]]:
    return {"scale": (size[1],)}


def _square(size: Size) -> Mapping[str, tuple[int, ...]]:
    return {"w": (size[1], size[1])}


# Sample by sample.


def _fft(p: Params, x: Any, _: Inputs, __: Noise) -> Any:
    spectrum = jnp.fft.rfft(wide(x), axis=1)
    damped = spectrum * (0.9 ** np.arange(spectrum.shape[1], dtype=np.float32))[None, :, None]
    return x + (jnp.fft.irfft(damped, x.shape[1], axis=1) * p["scale"]).astype(x.dtype)


def _fft_power(p: Params, x: Any, _: Inputs, __: Noise) -> Any:
    spectrum = jnp.fft.fft(wide(x), axis=2)
    power = spectrum.real**2 + spectrum.imag**2
    return x + (jnp.tanh(power / x.shape[2]) * p["scale"]).astype(x.dtype)


def _gram(x: Any) -> Any:
    y = wide(x)
    return jnp.einsum("bsw,btw->bst", y, y) / x.shape[2] + jnp.eye(x.shape[1], dtype=y.dtype)


def _cholesky(p: Params, x: Any, _: Inputs, __: Noise) -> Any:
    root = jnp.linalg.cholesky(_gram(x))
    return x + (0.3 * root @ wide(x) * p["scale"]).astype(x.dtype)


def _solve(p: Params, x: Any, _: Inputs, __: Noise) -> Any:
    return x + (jnp.linalg.solve(_gram(x), wide(x)) * p["scale"]).astype(x.dtype)


def _triangular(p: Params, x: Any, _: Inputs, __: Noise) -> Any:
    matrix = jnp.tril(wide(p["w"])) * 0.3 + jnp.eye(x.shape[2], dtype=wide(x).dtype)
    rows = jnp.swapaxes(wide(x), 1, 2)
    solved = jax.vmap(lambda b: jax.scipy.linalg.solve_triangular(matrix, b, lower=True))(rows)
    return x + 0.3 * jnp.swapaxes(solved, 1, 2).astype(x.dtype)


def _sort(p: Params, x: Any, _: Inputs, __: Noise) -> Any:
    return x + jnp.sort(x, axis=2) * p["scale"]


def _rank(p: Params, x: Any, _: Inputs, __: Noise) -> Any:
    order = jnp.argsort(jax.lax.stop_gradient(x), axis=1)
    return x + jnp.take_along_axis(x, order, axis=1) * p["scale"]


def _top_k(p: Params, x: Any, _: Inputs, __: Noise) -> Any:
    values, places = jax.lax.top_k(x, 2)
    chosen = jax.nn.one_hot(places, x.shape[2], dtype=x.dtype)
    return x + jnp.einsum("bsk,bskw->bsw", values, chosen) * p["scale"]


def _nested_scan(p: Params, x: Any, _: Inputs, __: Noise) -> Any:
    def inner(y: Any, row: Any) -> tuple[Any, Any]:
        y = y + 0.3 * jnp.tanh(y * row)
        return y, y.mean(-1, keepdims=True)

    def outer(y: Any, table: Any) -> tuple[Any, Any]:
        y, means = jax.lax.scan(inner, y, table)
        return y, means.mean(0)

    y, means = jax.lax.scan(outer, x, p["rows"])
    return y + means.mean(0)


def _while(_: Params, x: Any, inputs: Inputs, __: Noise) -> Any:
    """Loops as often as the flag says; reverse mode cannot differentiate it."""

    def one(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        i, y = carry
        return i + 1, y + 0.2 * jnp.sin(y)

    fixed = jax.lax.stop_gradient(x)
    return x + 0.3 * jax.lax.while_loop(lambda c: c[0] <= inputs.flag, one, (0, fixed))[1]


def _while_of_samples(_: Params, x: Any, inputs: Inputs, __: Noise) -> Any:
    """Loops as often as each sample says."""

    def one(carry: tuple[Any, Any]) -> tuple[Any, Any]:
        i, y = carry
        return i + 1, y + 0.2 * jnp.sin(y)

    def each(y: Any, index: Any) -> Any:
        return jax.lax.while_loop(lambda c: c[0] < index % 4, one, (0, y))[1]

    return x + 0.3 * jax.vmap(each)(jax.lax.stop_gradient(x), inputs.indices[:, 0])


def _bytes(p: Params, x: Any, inputs: Inputs, _: Noise) -> Any:
    values = inputs.bytes.astype(x.dtype) / 128 - 1
    return x + values[:, :1, None] * p["scale"]


def _mask(p: Params, x: Any, inputs: Inputs, _: Noise) -> Any:
    return jnp.where(inputs.mask[:, :1, None], x, x * p["scale"])


def _vmapped(p: Params, x: Any, _: Inputs, __: Noise) -> Any:
    return jax.vmap(lambda y: y + 0.3 * jnp.tanh(y @ p["w"]))(x)


def _mapped(p: Params, x: Any, _: Inputs, __: Noise) -> Any:
    return jax.lax.map(lambda y: y + 0.3 * jnp.tanh(y @ p["w"]), x)


def _noise_of_samples(_: Params, x: Any, __: Inputs, noise: Noise) -> Any:
    return x + (0.3 * noise.of_samples(0, x.shape)).astype(x.dtype)


def _shared_noise(_: Params, x: Any, __: Inputs, noise: Noise) -> Any:
    # No batch can have its shape.
    drawn = noise.shared_by_samples(1, (1, x.shape[2]))
    return x + (0.3 * drawn).astype(x.dtype)


# Over the samples.


def _batch_norm(p: Params, x: Any, _: Inputs, __: Noise) -> Any:
    y = wide(x)
    y = (y - y.mean((0, 1))) * jax.lax.rsqrt(y.var((0, 1)) + 0.1)
    return y.astype(x.dtype) * p["scale"]


def _centred(_: Params, x: Any, __: Inputs, ___: Noise) -> Any:
    return x - 0.5 * x.mean(0)


def _batch_attention(_: Params, x: Any, __: Inputs, ___: Noise) -> Any:
    z = wide(x).mean(1)
    mixed = jax.nn.softmax(z @ z.T) @ z
    return x + 0.3 * mixed[:, None].astype(x.dtype)


def _roll(_: Params, x: Any, __: Inputs, ___: Noise) -> Any:
    return x + 0.3 * jnp.roll(x, 1, axis=0)


def _reversed(_: Params, x: Any, __: Inputs, ___: Noise) -> Any:
    return x + 0.3 * x[::-1]


def _cumulative(_: Params, x: Any, __: Inputs, ___: Noise) -> Any:
    return x + 0.1 * jnp.cumsum(x, axis=0)


def _sorted(_: Params, x: Any, __: Inputs, ___: Noise) -> Any:
    return x + 0.3 * jnp.sort(x, axis=0)


def _largest(_: Params, x: Any, __: Inputs, ___: Noise) -> Any:
    return x - 0.3 * x.max(0)


def _shuffled(_: Params, x: Any, __: Inputs, noise: Noise) -> Any:
    return x + 0.3 * x[noise.permutation(x.shape[0])]


def _capacity(_: Params, x: Any, inputs: Inputs, __: Noise) -> Any:
    expert = jax.nn.one_hot(inputs.indices[:, 0] % 2, 2, dtype=jnp.int32)
    rank = (jnp.cumsum(expert, axis=0) * expert).sum(1)
    return jnp.where((rank <= x.shape[0] // 4 + 1)[:, None, None], x, 0.5 * x)


def _counted(_: Params, x: Any, inputs: Inputs, __: Noise) -> Any:
    counts = jnp.zeros(16, jnp.int32).at[inputs.indices.reshape(-1)].add(1)
    here = counts[inputs.indices[:, 0]].astype(x.dtype)
    return x * (1 + 0.1 * here)[:, None, None]


def _batch_scan(_: Params, x: Any, __: Inputs, ___: Noise) -> Any:
    def one(h: Any, y: Any) -> tuple[Any, Any]:
        h = 0.5 * h + y
        return h, h

    return jax.lax.scan(one, jnp.zeros_like(x[0]), x)[1]


def _numbered(_: Params, x: Any, __: Inputs, ___: Noise) -> Any:
    numbers = jnp.arange(x.shape[0], dtype=jnp.float32) / 8
    return x + numbers[:, None, None].astype(x.dtype)


def _by_size(_: Params, x: Any, __: Inputs, ___: Noise) -> Any:
    return x * (1 + 1 / x.shape[0])


def _scans(size: Size) -> Mapping[str, tuple[int, ...]]:
    return {"rows": (2, 3, size[1])}


_E, _M = Truth.EXACT, Truth.MIXED

INSERTIONS: tuple[Insertion, ...] = (
    Insertion(name="fft", truth=_E, apply=_fft, kinds=frozenset({"fft"}), shapes=_scale),
    Insertion(name="fft power", truth=_E, apply=_fft_power, kinds=frozenset({"fft"}),
              shapes=_scale),
    Insertion(name="cholesky", truth=_E, apply=_cholesky, kinds=frozenset({"linear algebra"}),
              shapes=_scale),
    Insertion(name="solve", truth=_E, apply=_solve, kinds=frozenset({"linear algebra"}),
              shapes=_scale),
    Insertion(name="triangular solve", truth=_E, apply=_triangular,
              kinds=frozenset({"linear algebra"}), shapes=_square),
    Insertion(name="sort", truth=_E, apply=_sort, kinds=frozenset({"sort"}), shapes=_scale,
              jumps=True),
    Insertion(name="rank", truth=_E, apply=_rank, kinds=frozenset({"sort"}), shapes=_scale,
              jumps=True),
    Insertion(name="top-k", truth=_E, apply=_top_k, kinds=frozenset({"sort"}), shapes=_scale,
              jumps=True),
    Insertion(name="nested scans", truth=_E, apply=_nested_scan,
              kinds=frozenset({"scan", "nested scan"}), shapes=_scans),
    Insertion(name="while", truth=_E, apply=_while, kinds=frozenset({"while"})),
    Insertion(name="while of samples", truth=Truth.EITHER, apply=_while_of_samples,
              kinds=frozenset({"while"})),
    Insertion(name="uint8", truth=_E, apply=_bytes, kinds=frozenset({"integers"}), shapes=_scale,
              reads=frozenset({"bytes"})),
    Insertion(name="bool", truth=_E, apply=_mask, kinds=frozenset({"integers"}), shapes=_scale,
              reads=frozenset({"mask"})),
    Insertion(name="vmap", truth=_E, apply=_vmapped, kinds=frozenset({"dot"}), shapes=_square),
    Insertion(name="map over samples", truth=Truth.EITHER, apply=_mapped,
              kinds=frozenset({"scan", "dot"}), shapes=_square),
    Insertion(name="noise", truth=Truth.NOISE, apply=_noise_of_samples, draws=True),
    Insertion(name="shared noise", truth=_E, apply=_shared_noise, draws=True),
    Insertion(name="batch norm", truth=_M, apply=_batch_norm, shapes=_scale),
    Insertion(name="mean over the batch", truth=_M, apply=_centred),
    Insertion(name="attention over the batch", truth=_M, apply=_batch_attention),
    Insertion(name="roll along the batch", truth=_M, apply=_roll),
    Insertion(name="reversed batch", truth=_M, apply=_reversed),
    Insertion(name="cumsum along the batch", truth=_M, apply=_cumulative),
    Insertion(name="sort along the batch", truth=_M, apply=_sorted, jumps=True),
    Insertion(name="max over the batch", truth=_M, apply=_largest, jumps=True),
    Insertion(name="shuffled batch", truth=_M, apply=_shuffled, draws=True),
    Insertion(name="capacity of the batch", truth=_M, apply=_capacity),
    Insertion(name="counts of the batch", truth=_M, apply=_counted),
    Insertion(name="scan over samples", truth=_M, apply=_batch_scan),
    Insertion(name="numbered samples", truth=Truth.EITHER, apply=_numbered),
    Insertion(name="scaled by the batch's size", truth=Truth.EITHER, apply=_by_size),
)  # fmt: skip
"""All insertions; those with the same label are equally frequent."""
