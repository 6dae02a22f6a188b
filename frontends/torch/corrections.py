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
    """torchax's has no gradient if windows are dilated, and takes other indices of equal values."""
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
    return _torchax(torch.ops.aten.max_pool2d_with_indices)(
        x, kernel, stride, padding, dilation, ceil_mode
    )[0], indices


def adaptive_max_pool(x: Any, output_size: Sequence[int]) -> tuple[Any, Any]:
    """torchax has none."""
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


def resize(
    kernel: Callable[[np.ndarray], np.ndarray],
    x: Any,
    output_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
) -> Any:
    """torchax's `antialias` fails. The filter `kernel` spans several elements of larger sizes."""
    dtype = x.dtype
    wide = jnp.promote_types(dtype, jnp.float32)
    sizes = [*zip((-2, -1), output_size, scales or (None, None), strict=True)]
    for axis, size, scale in reversed(sizes):
        if size == x.shape[axis]:
            continue
        step = x.shape[axis] / size if scale is None else 1 / scale
        if align_corners:
            step = (x.shape[axis] - 1) / (size - 1) if size > 1 else 0.0
        centers = step * (np.arange(size) + 0.5)
        distances = np.abs(np.arange(x.shape[axis]) + 0.5 - centers[:, None])
        weights = kernel(distances / max(step, 1.0))
        weights = jnp.asarray(weights / weights.sum(1, keepdims=True), wide)
        contracted = jnp.tensordot(x.astype(wide), weights, ((axis,), (1,)), precision="highest")
        x = jnp.moveaxis(contracted, -1, axis)
        if jnp.issubdtype(dtype, jnp.integer):
            # PyTorch rounds after each dimension.
            x = jnp.clip(jnp.round(x), jnp.iinfo(dtype).min, jnp.iinfo(dtype).max).astype(dtype)
    return x.astype(dtype)


def _linear(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - x, 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    near, far = (1.5 * x - 2.5) * x * x + 1, ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _lanczos(x: np.ndarray) -> np.ndarray:
    return np.where(x < 3, np.sinc(x) * np.sinc(x / 3), 0)


def group_norm(
    x: Any, weight: Any, bias: Any, n: int, c: int, size: int, groups: int, epsilon: float
) -> tuple[Any, Any, Any]:
    """torchax computes 16 bits in 16, whose squares overflow, and groups in a loop."""
    split = x.reshape(n, groups, c // groups * size).astype(jnp.promote_types(x.dtype, jnp.float32))
    mean = split.mean(2, keepdims=True)
    scale = jax.lax.rsqrt(split.var(2, keepdims=True) + epsilon)
    result = ((split - mean) * scale).reshape(x.shape)
    across = (c, *[1] * (x.ndim - 2))
    if weight is not None:
        result = result * weight.reshape(across)
    if bias is not None:
        result = result + bias.reshape(across)
    return result.astype(x.dtype), mean[..., 0].astype(x.dtype), scale[..., 0].astype(x.dtype)


def multilabel_margin_loss(x: Any, target: Any, reduction: int) -> tuple[Any, Any]:
    """PyTorch's decomposition counts what stands behind the first -1 as targets."""
    is_given = jnp.cumprod(target >= 0, -1).astype(bool)
    labels = jnp.where(is_given, target, 0)
    classes = x.shape[-1]
    is_target = ((labels[..., None] == jnp.arange(classes)) & is_given[..., None]).any(-2)
    margins = 1 - jnp.take_along_axis(x, labels, -1)[..., None] + x[..., None, :]
    counts = is_given[..., None] & ~is_target[..., None, :]
    losses = jnp.where(counts & (margins > 0), margins, 0).sum((-2, -1)) / classes
    result = (losses, losses.mean(), losses.sum())[reduction]
    return result, is_target.astype(x.dtype)


def repeat_interleave(repeats: Any, *, output_size: int | None = None) -> Any:
    """torchax's has no `output_size`, without which the shape of the result is unknown."""
    numbers = jnp.arange(len(repeats), dtype=repeats.dtype)
    return jnp.repeat(numbers, repeats, total_repeat_length=output_size)


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
    """The results of `embedding_bag` for bags of equal numbers of rows, of which some count."""
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


def _torchax(op: Any) -> Callable[..., Any]:
    return jaten.ops_registry.all_aten_ops[op].func


_MEAN, _MAX = 1, 2

UNDECOMPOSED = {torch.ops.aten.multilabel_margin_loss_forward.default}
"""Ops whose decomposition in PyTorch is wrong."""

CORRECTIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.convolution: convolution,
    torch.ops.aten.avg_pool1d: avg_pool,
    torch.ops.aten.avg_pool2d: avg_pool,
    torch.ops.aten.avg_pool3d: avg_pool,
    torch.ops.aten.max_pool2d_with_indices: max_pool,
    torch.ops.aten.max_pool3d_with_indices: max_pool,
    torch.ops.aten.adaptive_max_pool2d: adaptive_max_pool,
    torch.ops.aten.adaptive_max_pool3d: adaptive_max_pool,
    torch.ops.aten._upsample_bilinear2d_aa: functools.partial(resize, _linear),
    torch.ops.aten._upsample_bicubic2d_aa: functools.partial(resize, _cubic),
    torch.ops.aten._upsample_lanczos2d_aa: functools.partial(resize, _lanczos),
    torch.ops.aten.native_group_norm: group_norm,
    torch.ops.aten.multilabel_margin_loss_forward: multilabel_margin_loss,
    torch.ops.aten.repeat_interleave: repeat_interleave,
    torch.ops.aten.embedding: embedding,
    torch.ops.aten._embedding_bag: embedding_bag,
    torch.ops.aten._embedding_bag_forward_only: embedding_bag,
}
