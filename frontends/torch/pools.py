"""Functions of JAX for pools, with the windows, indices and gradients of PyTorch."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from alpa.torch.registry import torchax_function


def avg_pool(
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor: int | None = None,
) -> Any:
    """The averages of windows.

    torchax divides windows over the edge by other numbers if `ceil_mode` adds several.
    """
    stride = [*(stride or kernel)]
    padding = [*padding] * (len(kernel) // len(padding))
    sizes = x.shape[-len(kernel) :]
    edges, counts = [], []
    for size, width, step, pad in zip(sizes, kernel, stride, padding, strict=True):
        number = _windows(size, width, step, pad, ceil_mode)
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


def max_pool(
    x: Any,
    kernel: Sequence[int],
    stride: Sequence[int] = (),
    padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,),
    ceil_mode: bool = False,
) -> tuple[Any, Any]:
    """The largest elements of windows, and their indices.

    torchax has no gradient for dilated windows, and takes other indices of equal values.
    """
    dims = len(kernel)
    stride = [*(stride or kernel)]
    padding, dilation = ([*one] * (dims // len(one)) for one in (padding, dilation))
    windows = []
    for size, width, step, pad, apart in zip(
        x.shape[-dims:], kernel, stride, padding, dilation, strict=True
    ):
        first = np.arange(_windows(size, (width - 1) * apart + 1, step, pad, ceil_mode)) * step
        windows.append(first[:, None] - pad + np.arange(width) * apart)
    values, indices = _largest(x, windows)
    if any(one > 1 for one in dilation):
        return values, indices
    # A window that is not dilated is one op.
    return torchax_function(torch.ops.aten.max_pool2d_with_indices)(
        x, kernel, stride, padding, dilation, ceil_mode
    )[0], indices


def adaptive_max_pool(x: Any, output_size: Sequence[int]) -> tuple[Any, Any]:
    """The largest elements of `output_size` windows, and their indices.

    torchax lacks this op.
    """
    sizes = x.shape[-len(output_size) :]
    if all(size % number == 0 for size, number in zip(sizes, output_size, strict=True)):
        return max_pool(x, [a // b for a, b in zip(sizes, output_size, strict=True)])
    windows = []
    for size, number in zip(sizes, output_size, strict=True):
        first, last = (np.arange(number) + end for end in (0, 1))
        first, last = first * size // number, -(-last * size // number)
        inside = first[:, None] + np.arange(max(last - first))
        windows.append(np.where(inside < last[:, None], inside, -1))
    return _largest(x, windows)


def _largest(x: Any, windows: Sequence[np.ndarray]) -> tuple[Any, Any]:
    """The largest elements of windows, and their indices among the elements of the last dimensions.

    As in PyTorch, the first of equal elements counts, and the last NaN.

    Args:
        x: an array.
        windows: for each of the last dimensions, the positions of each window, in order. Those out
            of the array do not count.
    """
    sizes = x.shape[-len(windows) :]
    indices = jnp.arange(np.prod(sizes, dtype=int)).reshape(sizes)
    indices = jnp.broadcast_to(indices, x.shape)
    # The last dimension first: the first row with the largest element is then that of all.
    for axis in range(x.ndim - 1, x.ndim - 1 - len(windows), -1):
        positions = windows[axis - x.ndim]
        across = [1] * (x.ndim - 1 - axis)
        best: tuple[Any, Any, Any] | None = None
        for column in positions.T:
            inside = ((column >= 0) & (column < x.shape[axis])).reshape(-1, *across)
            value, index = (_taken(one, column, axis) for one in (x, indices))
            if best is None:
                best = value, index, inside
                continue
            is_larger = value > best[0]
            if jnp.issubdtype(x.dtype, jnp.floating):
                is_larger = is_larger | jnp.isnan(value)
            better = inside & (is_larger | ~best[2])
            best = (
                jnp.where(better, value, best[0]),
                jnp.where(better, index, best[1]),
                inside | best[2],
            )
        assert best is not None
        x, indices, _ = best
    return x, indices


def _taken(x: Any, positions: np.ndarray, axis: int) -> Any:
    """The elements at positions, and any elements for positions out of the array."""
    number, size = len(positions), x.shape[axis]
    step = int(positions[1] - positions[0]) if number > 1 else 1
    if step < 1 or (np.diff(positions) != step).any():
        return jnp.take(x, np.clip(positions, 0, size - 1), axis)
    low, high = max(0, -int(positions[0])), max(0, int(positions[-1]) - size + 1)
    pads = [(low, high) if n == axis else (0, 0) for n in range(x.ndim)]
    first = int(positions[0]) + low
    last = first + (number - 1) * step + 1
    return jax.lax.slice_in_dim(jnp.pad(x, pads), first, last, step, axis)


def _windows(size: int, width: int, step: int, pad: int, ceil_mode: bool) -> int:
    """The number of a pool's windows."""
    free = size + 2 * pad - width
    number = (-(-free // step) if ceil_mode else free // step) + 1
    # A window must begin in the tensor or the padding before it.
    return number - 1 if (number - 1) * step >= size + pad else number


POOLS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.avg_pool1d: avg_pool,
    torch.ops.aten.avg_pool2d: avg_pool,
    torch.ops.aten.avg_pool3d: avg_pool,
    torch.ops.aten.max_pool2d_with_indices: max_pool,
    torch.ops.aten.max_pool3d_with_indices: max_pool,
    torch.ops.aten.adaptive_max_pool2d: adaptive_max_pool,
    torch.ops.aten.adaptive_max_pool3d: adaptive_max_pool,
}
