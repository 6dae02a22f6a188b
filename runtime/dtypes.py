"""The numpy dtypes of MLIR element types."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

_DTYPES: dict[str, Any] = {
    "i1": np.bool_,
    "bf16": jnp.bfloat16,
    "f8E4M3FN": jnp.float8_e4m3fn,
    "f8E5M2": jnp.float8_e5m2,
    "f8E4M3B11FNUZ": jnp.float8_e4m3b11fnuz,
    "f8E4M3FNUZ": jnp.float8_e4m3fnuz,
    "f8E5M2FNUZ": jnp.float8_e5m2fnuz,
    "f8E3M4": jnp.float8_e3m4,
    "f8E4M3": jnp.float8_e4m3,
    "f8E8M0FNU": jnp.float8_e8m0fnu,
    "f4E2M1FN": jnp.float4_e2m1fn,
    "i2": jnp.int2,
    "ui2": jnp.uint2,
    "i4": jnp.int4,
    "ui4": jnp.uint4,
    "complex<f32>": np.complex64,
    "complex<f64>": np.complex128,
    **{f"f{bits}": np.dtype(f"float{bits}") for bits in (16, 32, 64)},
    **{f"i{bits}": np.dtype(f"int{bits}") for bits in (8, 16, 32, 64)},
    **{f"ui{bits}": np.dtype(f"uint{bits}") for bits in (8, 16, 32, 64)},
}


def numpy_dtype(element_type: str) -> np.dtype[Any]:
    """The numpy dtype of an MLIR element type. Raises ValueError if there is none."""
    if element_type not in _DTYPES:
        raise ValueError(f"arrays of element type {element_type} are not supported")
    return np.dtype(_DTYPES[element_type])


def is_integer(dtype: np.dtype[Any]) -> bool:
    """Whether a type holds integers, also of 2 or 4 bits, which numpy does not count among them."""
    return jnp.issubdtype(dtype, jnp.integer)


def is_exact(dtype: np.dtype[Any]) -> bool:
    """Whether a type holds integers or truth values, which are not rounded."""
    return dtype.kind == "b" or is_integer(dtype)
