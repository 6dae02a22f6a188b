"""Copies JAX arrays that share buffers if one of them is to be donated.

`jax.device_put` keeps a buffer that is already in place, so two arrays can share buffers on some
devices. Donating one deletes the other's buffers, and XLA refuses a call with both. With several
CPU devices, jaxlib 0.10 crashes the process.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from alpa.runtime.cut_array import CutArray

Buffer = tuple[int, int]
"""The number of a device, and an address on it."""


def apart(
    arguments: Sequence[Any], donated: Collection[int], is_own: Callable[[Any], bool]
) -> list[Any]:
    """Returns the arguments, with copies of those that share a buffer with a donated one.

    `is_own` says that an array shares its buffers with no other such array. Reading the buffers of
    other arrays takes microseconds each.
    """
    given = list(arguments)
    if not donated:
        return given
    arrays = [_arrays(argument) for argument in given]
    kinds = {_kind(it) for them in arrays for it in them if not is_own(it)}
    if not kinds:
        return given
    taken: set[Buffer] = set()
    for number in sorted(range(len(given)), key=lambda n: n not in donated):
        buffers = {buffer for it in arrays[number] if _kind(it) in kinds for buffer in _buffers(it)}
        if buffers & taken:
            given[number] = _copy(given[number])
        elif number in donated:
            taken |= buffers
    return given


def _arrays(argument: Any) -> list[jax.Array]:
    parts = argument.parts.values() if isinstance(argument, CutArray) else [argument]
    return [part for part in parts if isinstance(part, jax.Array)]


def _kind(array: jax.Array) -> Any:
    """The properties that arrays with a common buffer share."""
    return array.dtype, array.sharding.shard_shape(array.shape)


def _buffers(array: jax.Array) -> set[Buffer]:
    """The buffers of the array's shards in this process, except those without elements."""
    shards = [shard for shard in array.addressable_shards if shard.data.size]
    return {(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in shards}


def _copy(argument: Any) -> Any:
    return argument.copy() if isinstance(argument, jax.Array) else np.asarray(argument)
