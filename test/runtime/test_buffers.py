"""Arrays that share buffers may be arguments of one call that donates one of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import alpa
from alpa.dialects.attributes import Slice
from alpa.runtime.buffers import Kind, apart, kind_of
from alpa.runtime.cut_array import CutArray


def pointers(array: jax.Array) -> set[int]:
    return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}


def on_two_devices(array: jax.Array) -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",))
    return jax.device_put(array, NamedSharding(mesh, PartitionSpec()))


def sharing() -> tuple[jax.Array, jax.Array]:
    """An array, and a second array on more devices that shares its buffer."""
    one = jnp.arange(1024.0)
    two = on_two_devices(one)
    assert pointers(one) & pointers(two)
    return one, two


def unknown(arrays: Sequence[Any]) -> list[Kind | None]:
    return [None] * len(arrays)


@pytest.mark.parametrize("donated", [{0}, {1}, {0, 1}])
def test_one_of_them_is_copied(donated: set[int]) -> None:
    one, two = sharing()
    alone = jnp.ones(1024)
    found = apart([one, two, alone, 2.0], donated, unknown)
    assert not pointers(found[0]) & pointers(found[1])
    assert found[min(donated)] is (one, two)[min(donated)]
    np.testing.assert_array_equal(found[0], one)
    np.testing.assert_array_equal(found[1], two)
    assert found[2:] == [alone, 2.0]


def test_nothing_is_copied_where_nothing_is_donated_or_all_is_known() -> None:
    one, two = sharing()
    assert apart([one, two], set(), unknown) == [one, two]
    assert apart([one, two], {0}, lambda arrays: list(map(kind_of, arrays))) == [one, two]


def test_a_known_array_is_copied_where_another_shares_its_buffer() -> None:
    one, two = sharing()
    found = apart(
        [one, two], {1}, lambda arrays: [kind_of(it) if it is one else None for it in arrays]
    )
    assert found[1] is two
    np.testing.assert_array_equal(found[0], one)
    assert not pointers(found[0]) & pointers(found[1])


def test_parts_of_a_cut_array() -> None:
    one, two = sharing()
    cut = CutArray({Slice(0, 0, 1024): two})
    found = apart([one, cut], {0}, unknown)
    assert found[0] is one
    np.testing.assert_array_equal(found[1], one)
    assert not pointers(found[0]) & pointers(found[1])


def test_a_step_takes_them() -> None:
    """Plain JAX rejects this, and aborts the process on several CPU devices."""

    def step(w: Any, ema: Any) -> Any:
        return w + 1, 0.5 * ema + 0.5 * w

    update = alpa.parallelize(step, cluster="cpu:1x2", state_argnums=(0, 1), donate_argnums=(0, 1))
    one, two = sharing()
    expected = step(np.asarray(one), np.asarray(one))
    found = update(two, one)
    for array, it in zip(found, expected, strict=True):
        np.testing.assert_allclose(array, it, rtol=1e-6)
    again = update(*found)
    np.testing.assert_allclose(again[0], expected[0] + 1, rtol=1e-6)
