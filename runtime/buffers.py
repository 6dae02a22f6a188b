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


Kind = tuple[Any, tuple[int, ...]]
"""The properties that arrays with a common buffer share."""


def apart(
    arguments: Sequence[Any],
    donated: Collection[int],
    own_kinds: Callable[[Sequence[Any]], Sequence[Kind | None]],
) -> list[Any]:
    """Returns the arguments, with copies of those that share a buffer with a donated one.

    `own_kinds` gives the kinds of arrays that share their buffers with no other such array, and
    None for others. Reading the buffers of an array takes microseconds, and so does finding its
    kind.
    """
    given = list(arguments)
    if not donated:
        return given
    kinds = own_kinds(given)
    others = [it for n, kind in enumerate(kinds) if kind is None for it in _arrays(given[n])]
    strange = {
        kind_of(it) for it, kind in zip(others, own_kinds(others), strict=True) if kind is None
    }
    if not strange:
        return given
    taken: set[Buffer] = set()
    for number in sorted(range(len(given)), key=lambda n: n not in donated):
        kind = kinds[number]
        if kind is not None and kind not in strange:
            continue
        shared = (it for it in _arrays(given[number]) if kind_of(it) in strange)
        buffers = {buffer for it in shared for buffer in _buffers(it)}
        if buffers & taken:
            given[number] = _copy(given[number])
        elif number in donated:
            taken |= buffers
    return given


def kind_of(array: jax.Array) -> Kind:
    """An array's kind."""
    return array.dtype, array.sharding.shard_shape(array.shape)


def _arrays(argument: Any) -> list[jax.Array]:
    parts = argument.parts.values() if isinstance(argument, CutArray) else [argument]
    return [part for part in parts if isinstance(part, jax.Array)]


def _buffers(array: jax.Array) -> set[Buffer]:
    """The buffers of the array's shards in this process, except those without elements."""
    shards = [shard for shard in array.addressable_shards if shard.data.size]
    return {(shard.device.id, shard.data.unsafe_buffer_pointer()) for shard in shards}


def _copy(argument: Any) -> Any:
    return argument.copy() if isinstance(argument, jax.Array) else np.asarray(argument)
