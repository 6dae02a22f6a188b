"""Functions of JAX that have PyTorch's gradients where a function has a kink.

There, JAX and torchax choose another gradient, or compute 0 / 0: of `abs` at 0, or of a norm of
zeros. Zeros are common: initial biases, padding, results of ReLU.
Where a branch that is not taken overflows, its gradient would be 0 * inf; it gets other numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch

from alpa.torch.arrays import array_dtype
from alpa.torch.registry import torchax_function


def absolute(x: Any) -> Any:
    """The gradient at 0 is 0; JAX has 1."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.abs(x)
    return x * jax.lax.stop_gradient(jnp.sign(x))


def clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    """The gradient at the bounds is 1; JAX has 1 / 2."""
    if jnp.issubdtype(x.dtype, jnp.floating):
        # As in PyTorch, a bound without dimensions does not change the type.
        low, high = (
            jnp.asarray(one, x.dtype) if one is not None and jnp.ndim(one) == 0 else one
            for one in (low, high)
        )
    dtype = jnp.result_type(*[one for one in (x, low, high) if one is not None])
    x = x.astype(dtype)
    if low is not None:
        x = jnp.where(x < low, low, x)
    if high is not None:
        x = jnp.where(x > high, high, x)
    return x.astype(dtype)


def clamp_max(x: Any, high: Any) -> Any:
    return clamp(x, None, high)


def hardtanh(x: Any, low: float = -1, high: float = 1) -> Any:
    """The gradient at the bounds is 0; JAX has 1 / 2. `relu6` is this function."""
    return jnp.where(x <= low, low, jnp.where(x >= high, high, x)).astype(x.dtype)


def hardsigmoid(x: Any) -> Any:
    """The gradient at the bounds is 0."""
    return (hardtanh(_wide(x) + 3, 0, 6) / 6).astype(x.dtype)


def hardswish(x: Any) -> Any:
    """The gradient is 0 at the lower bound, and 1 at the upper one, also of infinity."""
    wide = _wide(x)
    inner = jnp.where(jnp.isinf(wide), 0, wide)
    curved = inner * (inner + 3) / 6
    return jnp.where(x <= -3, 0, jnp.where(x >= 3, wide, curved)).astype(x.dtype)


def softplus(x: Any, beta: float = 1, threshold: float = 20) -> Any:
    """The gradient above the threshold is 1, also where exp(x) overflows."""
    wide = _wide(x)
    is_linear = wide * beta > threshold
    curved = jnp.log1p(jnp.exp(jnp.where(is_linear, 0, wide) * beta)) / beta
    return jnp.where(is_linear, wide, curved).astype(x.dtype)


def mish(x: Any) -> Any:
    wide = _wide(x)
    return (wide * jnp.tanh(softplus(wide))).astype(x.dtype)


def elu(x: Any, alpha: float = 1, scale: float = 1, input_scale: float = 1) -> Any:
    """The gradient of positive numbers is finite, also where exp(x) overflows."""
    wide = _wide(x)
    curved = _expm1(jnp.where(x > 0, 0, wide) * input_scale) * alpha
    return (jnp.where(x > 0, wide, curved) * scale).astype(x.dtype)


@jax.custom_jvp
def _expm1(x: Any) -> Any:
    """`exp(x) - 1`. JAX computes the derivative as `expm1(x) + 1`, which cancels."""
    return jnp.expm1(x)


_expm1.defjvps(lambda tangent, _, x: tangent * jnp.exp(x))


def celu(x: Any, alpha: float = 1) -> Any:
    return elu(x, alpha, 1, 1 / alpha)


def selu(x: Any) -> Any:
    return elu(x, 1.6732632423543772848170429916717, 1.0507009873554804934193349852946)


def safe_softmax(x: Any, dim: int, dtype: Any = None) -> Any:
    """The softmax of nothing but -inf is 0, and so is its gradient."""
    if dtype is not None:
        x = x.astype(array_dtype(dtype))
    is_masked = (x == -jnp.inf).all(dim, keepdims=True)
    return jnp.where(is_masked, 0, jax.nn.softmax(jnp.where(is_masked, 0, x), dim))


def binary_cross_entropy(x: Any, target: Any, weight: Any = None, reduction: int = 1) -> Any:
    """The gradient at 0 and 1, where the logarithms are clamped to -100, is finite."""
    losses = _binary_cross_entropy(x, target)
    if weight is not None:
        losses = losses * weight
    return (losses, losses.mean(), losses.sum())[reduction]


@jax.custom_jvp
def _binary_cross_entropy(x: Any, target: Any) -> Any:
    yes, no = jnp.maximum(jnp.log(x), -100), jnp.maximum(jnp.log1p(-x), -100)
    return -(target * yes + (1 - target) * no)


@_binary_cross_entropy.defjvp
def _(primals: Any, tangents: Any) -> Any:
    x, target = primals
    change, of_target = tangents
    yes, no = jnp.maximum(jnp.log(x), -100), jnp.maximum(jnp.log1p(-x), -100)
    slope = (x - target) / jnp.maximum((1 - x) * x, 1e-12)
    return _binary_cross_entropy(x, target), slope * change + (no - yes) * of_target


def leaky_relu(x: Any, slope: float = 0.01) -> Any:
    """The gradient at 0 is the slope; torchax has 1."""
    return jnp.where(x > 0, x, x * slope)


def fmax(x: Any, y: Any) -> Any:
    """The larger elements, or those that are not NaN; torchax has no gradient."""
    return jnp.where((x >= y) | jnp.isnan(y), x, y)


def fmin(x: Any, y: Any) -> Any:
    """The smaller elements, or those that are not NaN; torchax has no gradient."""
    return jnp.where((x <= y) | jnp.isnan(y), x, y)


def sinc(x: Any) -> Any:
    """sin(pi x) / (pi x); the gradient at 0 is 0, where torchax has NaN."""
    result = jnp.sinc(_wide(x))
    return result.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else result


def power(x: Any, y: Any) -> Any:
    """The gradient of `x**0` is 0; torchax has NaN at 0."""
    compute = torchax_function(torch.ops.aten.pow)
    if isinstance(x, int | float):
        return compute(x, y)
    if isinstance(y, int | float):
        if y == 0:
            return compute(jax.lax.stop_gradient(x), y)
        if isinstance(y, float) and jnp.issubdtype(x.dtype, jnp.floating):
            return compute(_wide(x), y).astype(x.dtype)  # 16 bits would round `y`, too.
        return compute(x, y)
    # The second mask keeps NaN out of gradients of gradients.
    constant = jnp.where(x == 0, 1, jax.lax.stop_gradient(x))
    return compute(jnp.where(y == 0, constant, x), y)


def arctan2(y: Any, x: Any) -> Any:
    """The gradient of the angle of (0, 0) is 0; JAX has NaN."""
    is_origin = (y == 0) & (x == 0)
    angle = torchax_function(torch.ops.aten.atan2)(y, jnp.where(is_origin, 1, x))
    at_origin = torchax_function(torch.ops.aten.atan2)(
        *(jax.lax.stop_gradient(one) for one in (y, x))
    )
    return jnp.where(is_origin, at_origin, angle)


def copysign(x: Any, y: Any) -> Any:
    """The gradient at 0 is 0."""
    signed = torchax_function(torch.ops.aten.copysign)(x, y)
    return jnp.where(x == 0, jax.lax.stop_gradient(signed), signed)


def vector_norm(
    x: Any,
    order: float = 2,
    dim: Sequence[int] | int | None = None,
    keepdim: bool = False,
    *,
    dtype: Any = None,
) -> Any:
    """The gradient of a norm of zeros is 0; torchax has NaN, or 1 for order 1."""
    if dtype is not None:
        x = x.astype(array_dtype(dtype))
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        return torchax_function(torch.ops.aten.linalg_vector_norm)(x, order, dim, keepdim)
    # Squares of 16 bits overflow.
    return _norm(_wide(x), order, _axes(dim), keepdim).astype(x.dtype)


def _norm(x: Any, order: float, axes: Any, keepdim: bool) -> Any:
    if order == 0:
        return (x != 0).astype(x.dtype).sum(axes, keepdims=keepdim)
    sizes = absolute(x)
    if order == float("inf"):
        return sizes.max(axes, keepdims=keepdim)
    if order == -float("inf"):
        return sizes.min(axes, keepdims=keepdim)
    if order == 1:
        return sizes.sum(axes, keepdims=keepdim)
    if order == 2:
        return _root((x * x).sum(axes, keepdims=keepdim), 0.5)
    some = x != 0
    powers = jnp.where(some, jnp.where(some, sizes, 1) ** order, 0 if order > 0 else jnp.inf)
    return _root(powers.sum(axes, keepdims=keepdim), 1 / order)


def distances(x: Any, y: Any, order: float = 2, mode: int | None = None) -> Any:
    """The distances of all rows; the gradient of the distance of equal rows is 0."""
    return vector_norm(x[..., :, None, :] - y[..., None, :, :], order, -1)


def own_distances(x: Any, order: float = 2) -> Any:
    """The distances of all pairs of rows, in the order of PyTorch."""
    first, second = jnp.triu_indices(len(x), 1)
    return vector_norm(x[first] - x[second], order, -1)


def distance(x: Any, y: Any, order: float = 2) -> Any:
    """The norm of a difference."""
    return vector_norm(x - y, order)


def deviation(
    x: Any,
    dim: Sequence[int] | int | None = None,
    *,
    correction: float | None = None,
    keepdim: bool = False,
) -> Any:
    """The gradient of the standard deviation of equal elements is 0; JAX has NaN."""
    ddof: Any = 1 if correction is None else correction
    # Variances of 16 bits overflow.
    found = _root(jnp.var(_wide(x), _axes(dim), ddof=ddof, keepdims=keepdim), 0.5)
    return found.astype(jnp.finfo(x.dtype).dtype)


def _wide(x: Any) -> Any:
    """`x` in at least 32 bits: as PyTorch, functions of 16 bits round only their results."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _axes(dim: Sequence[int] | int | None) -> Any:
    """Dimensions as JAX's axes: an empty list is all of them."""
    return (tuple(dim) or None) if isinstance(dim, Sequence) else dim


def _root(x: Any, power: float) -> Any:
    """A power of a sum that is 0 only where all elements are, with the gradient 0 there."""
    some = x != 0
    safe = jnp.where(some, x, 1)
    root = jnp.sqrt(safe) if power == 0.5 else safe**power
    return jnp.where(some, root, 0 if power > 0 else jnp.inf).astype(x.dtype)


SUBGRADIENTS: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.abs: absolute,
    torch.ops.aten.clamp: clamp,
    torch.ops.aten.clamp_min: clamp,
    torch.ops.aten.clamp_max: clamp_max,
    torch.ops.aten.hardtanh: hardtanh,
    torch.ops.aten.hardsigmoid: hardsigmoid,
    torch.ops.aten.hardswish: hardswish,
    torch.ops.aten.softplus: softplus,
    torch.ops.aten.mish: mish,
    torch.ops.aten.elu: elu,
    torch.ops.aten.celu: celu,
    torch.ops.aten.selu: selu,
    torch.ops.aten._safe_softmax: safe_softmax,
    torch.ops.aten.binary_cross_entropy: binary_cross_entropy,
    torch.ops.aten.leaky_relu: leaky_relu,
    torch.ops.aten.fmax: fmax,
    torch.ops.aten.fmin: fmin,
    torch.ops.aten.sinc: sinc,
    torch.ops.aten.pow: power,
    torch.ops.aten.atan2: arctan2,
    torch.ops.aten.copysign: copysign,
    torch.ops.aten.linalg_vector_norm: vector_norm,
    torch.ops.aten._cdist_forward: distances,
    torch.ops.aten._pdist_forward: own_distances,
    torch.ops.aten.dist: distance,
    torch.ops.aten.std: deviation,
}

WHOLE = {
    torch.ops.aten._safe_softmax.default,
    torch.ops.aten.binary_cross_entropy.default,
    torch.ops.aten.celu.default,
    torch.ops.aten.elu.default,
    torch.ops.aten.hardsigmoid.default,
    torch.ops.aten.hardswish.default,
    torch.ops.aten.mish.default,
    torch.ops.aten.selu.default,
    torch.ops.aten.softplus.default,
    torch.ops.aten.sinc.default,
    torch.ops.aten.std.correction,
}
"""Ops that are not decomposed, because their parts have other gradients."""
