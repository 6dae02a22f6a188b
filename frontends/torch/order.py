"""Functions of JAX for the order of elements, whose gradients are those of their indices.

torchax takes the elements and their indices, or the elements and their gradients, from several of
equal elements. Here, the gradient goes to the element that the index names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from alpa.torch.registry import torchax_function


def sort(
    x: Any, dim: int = -1, descending: bool = False, *, stable: bool | None = None
) -> tuple[Any, Any]:
    """Equal elements keep their order, and NaN is the largest, as in PyTorch."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int32)
    pair = x, _positions(x, dim)
    if descending:
        pair = tuple(jnp.flip(one, dim) for one in pair)
    pair = jax.lax.sort(pair, dimension=dim % x.ndim, is_stable=True, num_keys=1)
    if descending:
        pair = tuple(jnp.flip(one, dim) for one in pair)
    values, indices = pair
    return values, indices


def topk(
    x: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True
) -> tuple[Any, Any]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int32)
    if largest:
        values, indices = jax.lax.top_k(jnp.moveaxis(x, dim, -1), k)
        return jnp.moveaxis(values, -1, dim), jnp.moveaxis(indices, -1, dim)
    values, indices = (jax.lax.slice_in_dim(one, 0, k, axis=dim) for one in sort(x, dim))
    return values, indices


def kthvalue(x: Any, k: int, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    return _ranked(x, k - 1, dim, keepdim)


def median(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """NaN if an element is NaN."""
    if dim is None:
        return _of_all(median, x)
    numbers = _count_numbers(x, dim)
    size = x.shape[dim] if x.ndim else 1
    return _ranked(x, jnp.where(numbers < size, numbers, (size - 1) // 2), dim, keepdim)


def nanmedian(x: Any, dim: int | None = None, keepdim: bool = False) -> Any:
    """NaN does not count."""
    if dim is None:
        return _of_all(nanmedian, x)
    return _ranked(x, jnp.maximum(_count_numbers(x, dim) - 1, 0) // 2, dim, keepdim)


def mode(x: Any, dim: int = -1, keepdim: bool = False) -> tuple[Any, Any]:
    """The last of the most frequent elements."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int32)
    value, _ = jax.scipy.stats.mode(jax.lax.stop_gradient(x), axis=dim % x.ndim, keepdims=True)
    positions = _positions(x, dim)
    last = jnp.where(x == value, positions, 0).max(dim, keepdims=True)
    return _chosen((x, positions), positions == last, dim, keepdim)


def cummax(x: Any, dim: int) -> tuple[Any, Any]:
    """The last of equal elements."""
    return _cumulative(jnp.greater, x, dim)


def cummin(x: Any, dim: int) -> tuple[Any, Any]:
    """As `cummax`."""
    return _cumulative(jnp.less, x, dim)


def largest(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """The first of equal elements along a dimension; of all elements, as JAX."""
    return _extreme(torch.ops.aten.max, jnp.argmax, x, dim, keepdim)


def smallest(x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """As `largest`."""
    return _extreme(torch.ops.aten.min, jnp.argmin, x, dim, keepdim)


def _extreme(op: Any, index_of: Callable[..., Any], x: Any, dim: Any, keepdim: bool) -> Any:
    if dim is None:
        return torchax_function(op)(x)
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int32)
    positions = _positions(x, dim)
    return _chosen((x, positions), positions == index_of(x, dim, keepdims=True), dim, keepdim)


def _cumulative(is_better: Callable[..., Any], x: Any, dim: int) -> tuple[Any, Any]:
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int32)

    def best(before: tuple[Any, Any], after: tuple[Any, Any]) -> tuple[Any, Any]:
        old, new = before[0], after[0]
        keep = is_better(old, new) | ((old != old) & (new == new))  # NaN stays.
        return jnp.where(keep, old, new), jnp.where(keep, before[1], after[1])

    return jax.lax.associative_scan(best, (x, _positions(x, dim)), axis=dim % x.ndim)


def _of_all(function: Callable[..., Any], x: Any) -> Any:
    """A median of all elements. Equal elements share its gradient."""
    x = x.reshape(-1)
    value, _ = function(jax.lax.stop_gradient(x), 0)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return value
    same = (x == value) | ((x != x) & (value != value))
    return jnp.where(same, x, -jnp.inf).max()


def _count_numbers(x: Any, dim: int) -> Any:
    """The number of elements that are not NaN."""
    return (x == x).sum(dim, keepdims=True) if x.ndim else 1


def _ranked(x: Any, rank: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """The elements of a rank, and their indices."""
    if x.ndim == 0:
        return x, jnp.zeros((), jnp.int32)
    return _chosen(sort(x, dim), _positions(x, dim) == rank, dim, keepdim)


def _chosen(pair: tuple[Any, Any], mask: Any, dim: int, keepdim: bool) -> tuple[Any, Any]:
    """The one element of each row that a mask names; masks are sharded as the elements are."""
    values, indices = (
        jnp.where(mask, one, 0).sum(dim, keepdims=keepdim).astype(one.dtype) for one in pair
    )
    return values, indices


def _positions(x: Any, dim: int) -> Any:
    return jax.lax.broadcasted_iota(jnp.int32, x.shape, dim % x.ndim)


ORDER: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.sort: sort,
    torch.ops.aten.topk: topk,
    torch.ops.aten.kthvalue: kthvalue,
    torch.ops.aten.median: median,
    torch.ops.aten.nanmedian: nanmedian,
    torch.ops.aten.mode: mode,
    torch.ops.aten.cummax: cummax,
    torch.ops.aten.cummin: cummin,
    torch.ops.aten.max: largest,
    torch.ops.aten.min: smallest,
}
