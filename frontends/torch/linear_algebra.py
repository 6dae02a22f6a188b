"""Functions of JAX for ops of `torch.linalg`, with PyTorch's arguments and gradients.

None checks values: of a singular matrix, results are not finite. Factors that only PyTorch's
backward reads are None.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch


def inverse(x: Any, check_errors: bool = False) -> tuple[Any, Any]:
    return jnp.linalg.inv(x), _no_errors(x)


def determinant(x: Any) -> tuple[Any, None, None]:
    """torchax has none."""
    return jnp.linalg.det(x), None, None


def solve(
    a: Any, b: Any, left: bool = True, check_errors: bool = False
) -> tuple[Any, None, None, Any]:
    """torchax's has other results, and takes square right sides for vectors."""
    are_vectors = b.ndim == 1 or b.shape == a.shape[:-1]
    if are_vectors:
        b = b[..., None]
    if left:
        result = jnp.linalg.solve(a, b)
    else:
        result = jnp.linalg.solve(a.mT, b.mT).mT
    return result[..., 0] if are_vectors else result, None, None, _no_errors(a)


def cholesky(x: Any, upper: bool = False) -> Any:
    """The gradient is symmetric; that of torchax is triangular."""
    transposed = x.conj().mT
    if upper:
        read = jnp.triu(x) + jnp.tril(transposed, -1)
    else:
        read = jnp.tril(x) + jnp.triu(transposed, 1)
    mean = (x + transposed) / 2
    # The value is that of one triangle, and the gradient that of the mean.
    symmetric = mean + jax.lax.stop_gradient(read - mean)
    lower = jax.lax.linalg.cholesky(symmetric, symmetrize_input=False)
    return lower.conj().mT if upper else lower


def cholesky_with_errors(
    x: Any, upper: bool = False, check_errors: bool = False
) -> tuple[Any, Any]:
    return cholesky(x, upper), _no_errors(x)


def cholesky_solve(b: Any, factor: Any, upper: bool = False) -> Any:
    """torchax transposes batches, too."""
    shape = jnp.broadcast_shapes(b.shape[:-2], factor.shape[:-2])
    b, factor = (jnp.broadcast_to(one, shape + one.shape[-2:]) for one in (b, factor))
    return jax.scipy.linalg.cho_solve((factor, not upper), b)


def cholesky_inverse(factor: Any, upper: bool = False) -> Any:
    """torchax reads both triangles, and takes an upper one for a lower one."""
    return cholesky_solve(jnp.eye(factor.shape[-1], dtype=factor.dtype), factor, upper)


def _no_errors(x: Any) -> Any:
    return jnp.zeros(x.shape[:-2], jnp.int32)


LINEAR_ALGEBRA: dict[Any, Callable[..., Any]] = {
    torch.ops.aten.linalg_inv_ex: inverse,
    torch.ops.aten._linalg_det: determinant,
    torch.ops.aten._linalg_solve_ex: solve,
    torch.ops.aten.cholesky: cholesky,
    torch.ops.aten.linalg_cholesky_ex: cholesky_with_errors,
    torch.ops.aten.cholesky_solve: cholesky_solve,
    torch.ops.aten.cholesky_inverse: cholesky_inverse,
}
