"""This process's shards of arrays: written to stored arrays, or copied to host memory first."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from alpa.runtime.checkpoints.priority import lower_priority
from alpa.runtime.checkpoints.stored_array import Shape, StoredArray, finish_all, store_errors

_IN_FLIGHT_BYTES = 1 << 30
"""of host memory for pending writes"""
_BETWEEN_CHECKS = 16 << 20
"""bytes that new threads of tensorstore may write before their priority is lowered, too"""


@dataclass(frozen=True, kw_only=True)
class Write:
    """An array, or a piece of one, to be written at `start`."""

    stored: StoredArray
    start: Shape


@dataclass(frozen=True, kw_only=True)
class HostCopy:
    """This process's shards of an array, each once with its start, in memory of their own."""

    shards: Sequence[tuple[Shape, np.ndarray]]


def shard_shape(array: Any) -> Shape:
    """The shape of an array's shards, or of the array if it is not sharded."""
    return (
        tuple(array.sharding.shard_shape(array.shape))
        if isinstance(array, jax.Array)
        else tuple(np.shape(array))
    )


def copy_shards(arrays: Sequence[Any]) -> list[HostCopy]:
    """Copies this process's shards to host memory; waits for the steps that make them.

    Raises:
        RuntimeError: an array was deleted or donated, or the step that makes it has failed.
    """
    for array in arrays:
        for shard in array.addressable_shards if isinstance(array, jax.Array) else ():
            # Accelerators send all shards at once, before this process waits for the first.
            if shard.replica_id == 0:
                shard.data.copy_to_host_async()
    return [
        HostCopy(shards=[(at, _own(array, shard)) for at, shard in _shards(array)])
        for array in arrays
    ]


def write_shards(writes: Iterable[tuple[Any, Write]]) -> None:
    """Writes this process's shards of arrays; one process writes each shard.

    Raises:
        CheckpointError: they cannot be written.
    """
    futures: list[tuple[str, Any]] = []
    size = 0
    try:
        for array, write in writes:
            for at, shard in _shards(array):
                start = [a + b for a, b in zip(write.start, at, strict=True)]
                with store_errors("cannot write", write.stored.path):
                    futures.append((write.stored.path, write.stored.begin_write(start, shard)))
                size += shard.nbytes
                if size > _IN_FLIGHT_BYTES:
                    finish_all(futures)
                    futures, size = [], 0
    except BaseException:
        # The caller deletes the folder, in which these would go on writing.
        for _, future in futures:
            future.exception()
        raise
    finish_all(futures)


def write_copies(writes: Iterable[tuple[HostCopy, Write]]) -> None:
    """Writes copies beside running steps: one at a time, by threads of low priority.

    Raises:
        CheckpointError: they cannot be written.
    """
    since = _BETWEEN_CHECKS  # bytes since the threads' priorities were lowered
    for copied, write in writes:
        for at, shard in copied.shards:
            if since >= _BETWEEN_CHECKS:
                lower_priority()
                since = 0
            since += shard.nbytes
            start = [a + b for a, b in zip(write.start, at, strict=True)]
            with store_errors("cannot write", write.stored.path):
                write.stored.begin_slow_write(start, shard).result()


def _shards(array: Any) -> Iterable[tuple[Shape, np.ndarray]]:
    if not isinstance(array, jax.Array):
        yield (0,) * np.ndim(array), np.asarray(array)
        return
    for shard in array.addressable_shards:
        if shard.replica_id == 0:
            yield tuple(at.start or 0 for at in shard.index), np.asarray(shard.data)


def _own(array: Any, shard: np.ndarray) -> np.ndarray:
    """A shard in memory of its own. On accelerators, fetching it has made a copy already."""
    fetched = (
        isinstance(array, jax.Array)
        and array.sharding.memory_kind == "device"
        and all(device.platform != "cpu" for device in array.sharding.device_set)
    )
    return shard if fetched else np.array(shard)
