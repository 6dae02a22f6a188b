"""Tensors of PyTorch as arrays of JAX, and back. Each has its own memory."""

from __future__ import annotations

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torchax.ops.mappings import j2t_dtype, t2j_dtype


def array_dtype(dtype: torch.dtype) -> np.dtype:
    """The type that JAX's arrays of a type of PyTorch have: without 64 bits unless JAX has them.

    Raises:
        TypeError: JAX has no such type.
    """
    try:
        return np.dtype(jax.dtypes.canonicalize_dtype(_full_dtype(dtype)))
    except RuntimeError:
        raise TypeError(
            f"JAX has no type for {dtype}; convert such tensors before from_module, for example "
            "with module.float()"
        ) from None


def tensor_dtype(dtype: np.dtype) -> torch.dtype:
    """The type of PyTorch for a type of JAX.

    Raises:
        TypeError: PyTorch has no such type.
    """
    try:
        return cast(torch.dtype, j2t_dtype(dtype))
    except RuntimeError:
        raise TypeError(f"PyTorch has no type for arrays of {dtype}") from None


def to_array(tensor: torch.Tensor, name: str) -> jax.Array:
    """Copies a tensor into an array of JAX.

    Raises:
        TypeError: JAX has no such type.
        ValueError: the type has 64 bits, and JAX has 32, but for integers that fit into 32; `name`
            says which tensor.
    """
    kept = array_dtype(tensor.dtype)
    flat = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous().reshape(-1)
    # By bytes, because NumPy lacks bfloat16 and the types of 8 bits.
    given = flat.view(torch.uint8).numpy().view(_full_dtype(tensor.dtype)).reshape(tensor.shape)
    values = given.astype(kept)
    is_same = kept == given.dtype or (kept.kind in "iu" and np.array_equal(values, given))
    if not is_same:
        raise ValueError(
            f"{name} is {tensor.dtype}, and JAX has {kept} instead; convert it, for example with "
            'module.float(), or call jax.config.update("jax_enable_x64", True)'
        )
    return jnp.array(values)


def to_tensor(array: Any) -> torch.Tensor:
    """Copies an array into a tensor of PyTorch on the CPU.

    Raises:
        TypeError: PyTorch has no such type.
    """
    values = np.array(jax.device_get(array), order="C")
    flat = torch.from_numpy(values.reshape(-1).view(np.uint8))
    return flat.view(tensor_dtype(values.dtype)).reshape(values.shape)


def _full_dtype(dtype: torch.dtype) -> np.dtype:
    """The type of JAX with as many bits."""
    return np.dtype(cast(Any, t2j_dtype(dtype)))
