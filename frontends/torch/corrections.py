"""Functions of JAX for ops that torchax computes differently from PyTorch.

They have the arguments of their ops, and say what torchax's functions lack.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torchax.ops import jaten


def convolution(
    x: Any,
    weight: Any,
    bias: Any,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> Any:
    """torchax mixes the channels of a transposed convolution's groups."""
    if not transposed or groups == 1:
        return _torchax(torch.ops.aten.convolution)(
            x, weight, bias, stride, padding, dilation, transposed, output_padding, groups
        )
    of_all, of_group, *window = weight.shape
    # lax.conv has the channels of one group first, and those of all results behind them.
    split = weight.reshape(groups, of_all // groups, of_group, *window).swapaxes(0, 1)
    filters = split.reshape(of_all // groups, groups * of_group, *window)
    low = [d * (size - 1) - p for d, size, p in zip(dilation, window, padding, strict=True)]
    space = "0123"[: len(window)]
    result = jax.lax.conv_general_dilated(
        x,
        jnp.flip(filters, range(2, filters.ndim)),
        window_strides=[1] * len(window),
        padding=[(one, one + more) for one, more in zip(low, output_padding, strict=True)],
        lhs_dilation=stride,
        rhs_dilation=dilation,
        dimension_numbers=(f"NC{space}", f"IO{space}", f"NC{space}"),
        feature_group_count=groups,
    )
    return result if bias is None else result + bias.reshape(-1, *[1] * len(window))


def avg_pool(
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Any:
    """torchax divides windows over the edge by other numbers if `ceil_mode` adds several."""
    stride = [*(stride or kernel)]
    padding = [*padding] * (len(kernel) // len(padding))
    sizes = x.shape[-len(kernel) :]
    edges, counts = [], []
    for size, width, step, pad in zip(sizes, kernel, stride, padding, strict=True):
        free = size + 2 * pad - width
        number = (-(-free // step) if ceil_mode else free // step) + 1
        if (number - 1) * step >= size + pad:
            number -= 1  # A window must begin in the tensor or the padding before it.
        first = np.arange(number) * step - pad
        last = np.minimum(first + width, size + pad)
        if not count_include_pad:
            first, last = np.maximum(first, 0), np.minimum(last, size)
        edges.append((pad, (number - 1) * step + width - size - pad))
        counts.append(last - first)
    outer = [1] * (x.ndim - len(kernel))
    wide = jnp.promote_types(x.dtype, jnp.float32)  # PyTorch adds up 16 bits in 32.
    sums = jax.lax.reduce_window(
        x.astype(wide),
        np.zeros((), wide),
        jax.lax.add,
        (*outer, *kernel),
        (*outer, *stride),
        [(0, 0)] * len(outer) + edges,
    )
    divisors = functools.reduce(np.multiply.outer, counts) if divisor is None else divisor
    return (sums / jnp.asarray(divisors, wide)).astype(x.dtype)


def embedding(
    weight: Any, indices: Any, padding: int = -1, by_frequency: bool = False, sparse: bool = False
) -> Any:
    """torchax does not scale gradients by the frequency of indices."""
    rows = _torchax(torch.ops.aten.embedding)(weight, indices, padding)
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
    """torchax ignores weights and padding, and needs to know the offsets."""
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


def _torchax(op: Any) -> Callable[..., Any]:
    return jaten.ops_registry.all_aten_ops[op].func


_MEAN, _MAX = 1, 2

CORRECTIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.convolution: convolution,
    torch.ops.aten.avg_pool1d: avg_pool,
    torch.ops.aten.avg_pool2d: avg_pool,
    torch.ops.aten.avg_pool3d: avg_pool,
    torch.ops.aten.embedding: embedding,
    torch.ops.aten._embedding_bag: embedding_bag,
    torch.ops.aten._embedding_bag_forward_only: embedding_bag,
}
