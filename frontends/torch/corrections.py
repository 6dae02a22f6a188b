"""Functions of JAX for ops that torchax computes differently from PyTorch.

Each has the arguments and results of its op; its docstring says what torchax's function lacks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax.extend import source_info_util

from alpa.torch.registry import torchax_function


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
    """A convolution, also transposed and with groups.

    torchax mixes the channels of a transposed convolution's groups.
    """
    if not transposed or groups == 1:
        return torchax_function(torch.ops.aten.convolution)(
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


def resize(
    kernel: Callable[[np.ndarray], np.ndarray],
    x: Any,
    output_size: Sequence[int],
    align_corners: bool,
    *scales: float | None,
) -> Any:
    """Images resized with antialiasing: the filter widens where the size shrinks.

    torchax's `antialias` fails.

    Args:
        kernel: the weight of an element by its distance, in elements of the smaller size.
        x: an array whose last two dimensions are resized.
        output_size: their new sizes.
        align_corners: the first and last elements keep their places.
        scales: the factors of the sizes, where they are given.
    """
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
    """The group norm, and the mean and the reciprocal standard deviation of each group.

    torchax computes squares of 16 bits in 16, where they overflow, and groups in a loop.
    """
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
    """The multilabel margin loss, and a mask of the target classes.

    PyTorch's decomposition counts labels behind the first -1 as targets.
    """
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
    """The numbers from 0, the n-th of them `repeats[n]` times.

    torchax lacks `output_size`; without it, the shape of the result is unknown.
    """
    numbers = jnp.arange(len(repeats), dtype=repeats.dtype)
    return jnp.repeat(numbers, repeats, total_repeat_length=output_size)


def scatter(x: Any, dim: int, index: Any, source: Any) -> Any:
    """Elements of an array replaced, along a dimension, by those of a source.

    The gradient of torchax's numbers all elements of the source, those of all samples, to find the
    ones that were replaced by others. PyTorch's takes them to be at different places.
    """
    array, index, source = map(jnp.atleast_1d, (x, index, source))
    places = [jax.lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(index.ndim)]
    places[dim] = index
    read = source[tuple(map(slice, index.shape))]
    return array.at[tuple(places)].set(read, unique_indices=True).reshape(x.shape)


UNDECOMPOSED = {torch.ops.aten.multilabel_margin_loss_forward.default}
"""Ops whose decomposition in PyTorch is wrong."""


def scatter_reduce(
    x: Any, dim: int, index: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """Elements of `source` combined where `index` says, along a dimension.

    JAX has no gradient of products at places that may be the same.

    Raises:
        NotImplementedError: a product is differentiated. The error names the line.
    """
    if reduce == "prod":
        # Without the name of the frame, which is none of the user's.
        place = source_info_util.summarize(source_info_util.current()).partition(" (")[0]
        x, source = (_without_gradient(place, one) for one in (x, source))
    compute = torchax_function(torch.ops.aten.scatter_reduce)
    return compute(x, dim, index, source, reduce, include_self=include_self)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _without_gradient(place: str, x: Any) -> Any:
    """The same array; it cannot be differentiated."""
    return x


@_without_gradient.defjvp
def _refuse(place: str, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        f"{place}: JAX has no gradient of scatter_reduce with 'prod'; pass tensors without a "
        "gradient (detach), or, if they are positive, compute exp of a scatter_reduce of their log "
        "with 'sum'"
    )


CORRECTIONS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.convolution: convolution,
    torch.ops.aten._upsample_bilinear2d_aa: functools.partial(resize, _linear),
    torch.ops.aten._upsample_bicubic2d_aa: functools.partial(resize, _cubic),
    torch.ops.aten._upsample_lanczos2d_aa: functools.partial(resize, _lanczos),
    torch.ops.aten.native_group_norm: group_norm,
    torch.ops.aten.multilabel_margin_loss_forward: multilabel_margin_loss,
    torch.ops.aten.repeat_interleave: repeat_interleave,
    torch.ops.aten.scatter.src: scatter,
    torch.ops.aten.scatter_reduce: scatter_reduce,
}
