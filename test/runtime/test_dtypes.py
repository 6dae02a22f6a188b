from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import alpa
from alpa.runtime.dtypes import numpy_dtype


@pytest.mark.parametrize(
    ("element_type", "dtype"),
    [("f32", np.float32), ("i1", np.bool_), ("ui8", np.uint8), ("bf16", ml_dtypes.bfloat16)],
)
def test_element_types(element_type: str, dtype: type) -> None:
    assert numpy_dtype(element_type) == np.dtype(dtype)


def test_unknown_element_types_are_refused() -> None:
    with pytest.raises(ValueError, match="element type f9 are not supported"):
        numpy_dtype("f9")


@pytest.mark.parametrize("name", ["int2", "uint2", "int4", "uint4", "float4_e2m1fn", "float8_e3m4"])
def test_arrays_of_narrow_types_equal_plain_jax(name: str) -> None:
    dtype = getattr(jnp, name)

    def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden = (x.astype(jnp.float32) @ w.astype(jnp.float32)).astype(dtype)
        alpa.mark_layer_boundary()
        return hidden, (hidden.astype(jnp.float32) @ w.astype(jnp.float32)).astype(dtype)

    w, x = (jnp.asarray(np.eye(8) + shift, dtype) for shift in (0, 1))
    run = alpa.parallelize(step, cluster="cpu:1x4", mesh_shape="2")
    for found, expected in zip(run(w, x), jax.jit(step)(w, x), strict=True):
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found), np.asarray(expected))
