"""Arrays of jax that share buffers, of which one is to be donated.

`jax.device_put` keeps a buffer that lies where it is wanted already. Two arrays can so share
buffers on some devices: donating one takes them from the other, and XLA refuses a call that is
given both (with several CPU devices, jaxlib 0.10 ends the process).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import numpy as np

from alpa.runtime.cut_array import CutArray

Buffer = tuple[int, int]
"""The number of a device, and an address there."""


def apart(
    arguments: Sequence[Any], donated: Collection[int], is_own: Callable[[Any], bool]
) -> list[Any]:
    """The arguments, with copies of those that share a buffer with one that is donated.

    `is_own` says of an array that it shares its buffers with no other one of which that is said;
    asking the others for their buffers takes microseconds each.
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
    """What arrays that share a buffer have in common."""
    return array.dtype, array.sharding.shard_shape(array.shape)


def _buffers(array: jax.Array) -> set[Buffer]:
    """The buffers of the array's shards in this process; those without elements share nothing."""
    shards = [shard for shard in array.addressable_shards if shard.data.size]
    return {(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in shards}


def _copy(argument: Any) -> Any:
    return argument.copy() if isinstance(argument, jax.Array) else np.asarray(argument)
