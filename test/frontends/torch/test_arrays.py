from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")
arrays = pytest.importorskip("alpa.torch.arrays", reason="needs the extra torch")


@pytest.mark.parametrize(
    "dtype",
    ["float32", "bfloat16", "float16", "float8_e4m3fn", "int32", "uint8", "bool", "complex64"],
)
@pytest.mark.parametrize("shape", [(2, 3), (), (0, 2)], ids=str)
def test_values_and_types_are_kept(dtype: str, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(int(np.prod(shape))).reshape(shape).to(getattr(torch, dtype))
    array = arrays.to_array(tensor, "x")
    assert array.dtype == jnp.dtype(dtype)
    np.testing.assert_array_equal(array.astype(np.complex64), tensor.to(torch.complex64).numpy())
    again = arrays.to_tensor(array)
    assert again.dtype == tensor.dtype
    assert torch.equal(again.to(torch.complex64), tensor.to(torch.complex64))


def test_arrays_and_tensors_have_memory_of_their_own() -> None:
    tensor = torch.ones(3)
    array = arrays.to_array(tensor, "x")
    tensor.add_(1)
    np.testing.assert_array_equal(array, [1, 1, 1])
    arrays.to_tensor(array).add_(1)
    np.testing.assert_array_equal(array, [1, 1, 1])


def test_a_view_is_copied_in_its_own_order() -> None:
    view = torch.arange(6.0).reshape(2, 3).T[1:]
    np.testing.assert_array_equal(arrays.to_array(view, "x"), view.numpy())


def test_64_bits_become_32_only_for_integers_that_fit() -> None:
    found = arrays.to_array(torch.tensor([3, -1]), "x")
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, [3, -1])
    for value in (torch.tensor(2**40), torch.tensor(0.5, dtype=torch.float64)):
        with pytest.raises(ValueError, match=rf"the weight is {value.dtype}.*jax_enable_x64"):
            arrays.to_array(value, "the weight")


def test_types_that_jax_lacks_are_refused() -> None:
    tensor = torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)
    with pytest.raises(TypeError, match=r"JAX has no type for torch.qint8"):
        arrays.to_array(tensor, "x")
    key = jax.random.key(0)
    with pytest.raises(TypeError):
        arrays.to_tensor(key)
