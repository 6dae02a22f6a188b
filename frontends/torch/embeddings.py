"""Functions of JAX for embeddings, and for sums, means and maxima of bags of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

from alpa.torch.registry import torchax_function

_MEAN, _MAX = 1, 2


def embedding(
    weight: Any, indices: Any, padding: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Any:
    """The rows of a table at indices; `by_frequency` divides a row's gradient by its count.

    torchax does not divide.
    """
    rows = torchax_function(torch.ops.aten.embedding)(weight, indices, padding)
    if not by_frequency:
        return rows
    counts = jnp.zeros(len(weight), rows.dtype).at[indices].add(1)[indices]
    kept = jax.lax.stop_gradient(rows)
    return kept + (rows - kept) / counts[..., None]


def embedding_bag(
    weight: Any,
    indices: Any,
    offsets: Any,
    by_frequency: bool = False,
    mode: int = 0,
    sparse: bool = False,
    weights: Any = None,
    include_last_offset: bool = False,
    padding: int = -1,
) -> tuple[Any, Any, Any, Any]:
    """The sum, mean or maximum of each bag of rows, each row's bag, and the sizes of the bags.

    torchax ignores weights and padding, and needs to know the offsets.
    """
    width = len(indices) // max(len(offsets), 1)
    even = [width * n for n in range(len(offsets))]
    is_even = isinstance(offsets, list) and offsets == even and len(indices) == width * len(even)
    if is_even and width and not include_last_offset:
        # Bags of one size: each is a row, so that bags can be in different micro-batches.
        rows = embedding(weight, indices, padding, by_frequency)
        return _even_bags(rows, indices != padding, len(offsets), mode, weights)
    offsets = jnp.asarray(offsets)
    bags = len(offsets) - include_last_offset
    bag = jnp.searchsorted(offsets, jnp.arange(len(indices)), side="right") - 1
    rows = embedding(weight, indices, padding, by_frequency)
    if weights is not None:
        rows = rows * weights[:, None]
    # Rows out of all bags are dropped.
    bag = jnp.where(indices == padding, bags, bag)
    sizes = jnp.zeros(bags, jnp.int32).at[bag].add(1, mode="drop")
    if mode == _MAX:
        least = jnp.full((bags, rows.shape[1]), -jnp.inf, rows.dtype)
        largest = least.at[bag].max(rows, mode="drop")
        result = jnp.where(sizes[:, None] > 0, largest, 0)
    else:
        result = jnp.zeros((bags, rows.shape[1]), rows.dtype).at[bag].add(rows, mode="drop")
        if mode == _MEAN:
            result = result / jnp.maximum(sizes, 1)[:, None].astype(rows.dtype)
    return result, bag, sizes, jnp.zeros((), jnp.int32)


def _even_bags(rows: Any, counts: Any, bags: int, mode: int, weights: Any) -> tuple[Any, ...]:
    """The results of `embedding_bag` for bags of equal size; `counts` masks the rows that count."""
    width = len(rows) // bags
    if weights is not None:
        rows = rows * weights[:, None]
    rows, counts = rows.reshape(bags, width, -1), counts.reshape(bags, width)
    sizes = counts.sum(1, dtype=jnp.int32)
    if mode == _MAX:
        largest = jnp.where(counts[..., None], rows, -jnp.inf).max(1)
        result = jnp.where(sizes[:, None] > 0, largest, 0)
    else:
        result = jnp.where(counts[..., None], rows, 0).sum(1)
        if mode == _MEAN:
            result = result / jnp.maximum(sizes, 1)[:, None].astype(rows.dtype)
    bag = jnp.where(counts, jnp.arange(bags)[:, None], bags).reshape(-1)
    return result, bag, sizes, jnp.zeros((), jnp.int32)


EMBEDDINGS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.embedding: embedding,
    torch.ops.aten._embedding_bag: embedding_bag,
    torch.ops.aten._embedding_bag_forward_only: embedding_bag,
}
