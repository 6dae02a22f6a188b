"""What a step returns of a state that is cut between meshes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa.dialects.attributes import Slice
from alpa.runtime.cut_array import CutArray, part_of

WHOLE = np.arange(24.0, dtype=np.float32).reshape(2, 6, 2)
FIRST, SECOND = Slice(1, 0, 2), Slice(1, 2, 6)


def cut() -> CutArray:
    devices = jax.devices()
    return CutArray(
        {
            SECOND: jax.device_put(WHOLE[:, 2:], devices[1]),
            FIRST: jax.device_put(WHOLE[:, :2], devices[0]),
        }
    )


def test_it_is_the_array_that_its_parts_make() -> None:
    array = cut()
    assert (array.shape, array.ndim, array.dtype) == (WHOLE.shape, 3, WHOLE.dtype)
    np.testing.assert_array_equal(np.asarray(array), WHOLE)
    np.testing.assert_array_equal(np.asarray(array, np.float64), WHOLE.astype(np.float64))
    np.testing.assert_array_equal(jnp.asarray(array) + 1, WHOLE + 1)
    assert jax.block_until_ready(array) is array
    with pytest.raises(ValueError, match="fetched by copying"):
        np.asarray(array, copy=False)


def test_a_step_takes_its_parts_as_they_are() -> None:
    array = cut()
    assert part_of(array, SECOND) is array.parts[SECOND]


@pytest.mark.parametrize("whole", [WHOLE, jnp.asarray(WHOLE), cut])
def test_any_array_has_any_part(whole: object) -> None:
    array = cut() if whole is cut else whole
    np.testing.assert_array_equal(part_of(array, Slice(1, 1, 4)), WHOLE[:, 1:4])


def test_it_knows_that_a_part_was_donated() -> None:
    array = cut()
    assert not array.is_deleted()
    array.parts[FIRST].delete()
    assert array.is_deleted()


def test_functions_of_numpy_take_it_and_jitted_ones_say_what_they_want() -> None:
    array = cut()
    np.testing.assert_array_equal(np.sum(array, axis=1), WHOLE.sum(axis=1))
    np.testing.assert_array_equal(jnp.concatenate([array, array]), np.concatenate([WHOLE, WHOLE]))
    np.testing.assert_array_equal(jnp.reshape(array, -1), WHOLE.reshape(-1))
    np.testing.assert_array_equal(jnp.sum(jnp.asarray(array)), WHOLE.sum())
    with pytest.raises((ValueError, TypeError), match=r"__jax_array__|not a valid JAX"):
        jnp.sum(array)  # where this begins to work, the class says too little of itself
