"""One array on disk; many processes write and read it, each its own part.

The format is zarr 3 as tensorstore and Orbax read it, without compression. Each chunk carries a
CRC-32C, which is checked when it is read. A missing chunk is an error and is not read as zeros. The
checkpoint's manifest gives the shape and the chunks; if the array's own file differs, it is
refused. The manifest also has the CRC-32C of each chunk, which detects a whole chunk from another
place or checkpoint.

Processes that write the same array write whole chunks only, so that no process reads what another
is about to write: `chunk_shape` chooses chunks that divide each shard.
"""

from __future__ import annotations

import os
import re
import stat
import struct
from collections.abc import Generator, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from math import gcd, prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.sharding import NamedSharding

from alpa.dialects.attributes import Slice
from alpa.runtime.checkpoints.errors import CheckpointError

_CHUNK_BYTES = 64 << 20
"""the largest chunk, so that a device with a smaller shard reads little beyond it"""
_CRC = struct.Struct("<I")
"""CRC-32C, behind the bytes of each chunk"""
_OPENERS = 16
"""threads; opening a file on a network file system takes about a millisecond"""

Shape = tuple[int, ...]


def chunk_shape(shape: Shape, itemsize: int, shards: Iterable[tuple[Shape, Shape]]) -> Shape:
    """The largest chunks of at most 64 MiB that divide the pieces of an array.

    `shards` are, for each piece, its start and the shape of its shards, which lie side by side from
    there.
    """
    sizes = list(shape)
    for start, shard in shards:
        sizes = [gcd(size, *ends) for size, *ends in zip(sizes, start, shard, strict=True)]
    chunk = [max(1, size) for size in sizes]
    while prod(chunk) * itemsize > _CHUNK_BYTES and max(chunk) > 1:
        dim = chunk.index(max(chunk))
        chunk[dim] //= next(n for n in range(2, chunk[dim] + 1) if chunk[dim] % n == 0)
    return tuple(chunk)


@dataclass(frozen=True, kw_only=True)
class StoredArray:
    """The place and layout of a stored array: `dtype` by numpy's name, chunks of one shape.

    `checksums` are those of the chunks in row-major order, once they are written.
    """

    path: str
    shape: Shape
    dtype: str
    chunk: Shape
    checksums: tuple[int, ...] = ()

    def read(self, sharding: NamedSharding, part: Slice | None) -> jax.Array:
        """Reads a part of the array, or the whole, in a sharding; only this process's shards.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        with store_errors("cannot read", self.path):
            whole = self._open()
            if part is not None:
                rows = slice(part.start, part.stop)
                whole = whole[(*[slice(None)] * part.dim, rows)].translate_to[0]
            shape: Shape = tuple(whole.shape)
            # Replicas are read once, and all shards in parallel.
            places = sharding.addressable_devices_indices_map(shape).values()
            shards = {str(at): whole[at] for at in places}
            for shard in shards.values():
                self._check_chunks(shard, part)
            reads = {at: shard.read() for at, shard in shards.items()}
            with jax.enable_x64(True):
                return jax.make_array_from_callback(
                    shape, sharding, lambda at: reads[str(at)].result()
                )

    def read_whole(self) -> np.ndarray:
        """Reads the array into this process's memory.

        Raises:
            CheckpointError: it is missing or damaged.
        """
        with store_errors("cannot read", self.path):
            whole = self._open()
            self._check_chunks(whole, None)
            return whole.read().result()

    def written_checksums(self, parallel: bool) -> tuple[int, ...]:
        """The checksums of all chunks, read from their files, several at a time if `parallel`.

        Raises:
            CheckpointError: a chunk is missing or incomplete.
        """
        chunks = product(*map(range, self._grid))
        with store_errors("cannot read", self.path):
            if not parallel:
                return tuple(map(self._checksum, chunks))
            with ThreadPoolExecutor(_OPENERS) as pool:
                return tuple(pool.map(self._checksum, chunks))

    def _open(self) -> Any:
        with open_regular(Path(self.path, "zarr.json")):
            return ts.open(self._spec(open=True)).result()

    @property
    def _grid(self) -> Shape:
        """The numbers of chunks along each dimension."""
        return tuple(size // each for size, each in zip(self.shape, self.chunk, strict=True))

    def _check_chunks(self, region: Any, part: Slice | None) -> None:
        """Raises ValueError unless the chunks of a region are those that were written.

        `region` is tensorstore's, in the coordinates of the part that is read.
        """
        begin, end = list(region.domain.inclusive_min), list(region.domain.exclusive_max)
        if part is not None:
            begin[part.dim] += part.start
            end[part.dim] += part.start
        touched = (
            range(first // size, -(-last // size))
            for first, last, size in zip(begin, end, self.chunk, strict=True)
        )
        for at in product(*touched):
            number = 0
            for index, count in zip(at, self._grid, strict=True):
                number = number * count + index
            if self._checksum(at) != self.checksums[number]:
                raise ValueError(
                    f"chunk {at} is not the one that was saved, but another chunk's or checkpoint's"
                )

    def _checksum(self, at: Shape) -> int:
        """Reads the checksum at the end of a chunk's file. Raises ValueError, OSError."""
        path = Path(self.path, "c", *map(str, at))
        wanted = prod(self.chunk) * jnp.dtype(self.dtype).itemsize + _CRC.size
        try:
            with open_regular(path) as file:
                size = os.fstat(file).st_size
                if size != wanted:
                    raise ValueError(f"chunk {at} has {size} bytes instead of {wanted}")
                (checksum,) = _CRC.unpack(os.pread(file, _CRC.size, size - _CRC.size))
        except FileNotFoundError:
            raise ValueError(f"chunk {at} is missing") from None
        return checksum

    def begin_write(self, at: Sequence[int], shard: np.ndarray) -> Any:
        """Starts to write a part of the array; returns a future of tensorstore."""
        return ts.open(self._writing()).result()[_region(at, shard)].write(shard)

    def begin_slow_write(self, at: Sequence[int], shard: np.ndarray) -> Any:
        """Like `begin_write`, with one thread for encoding and one for files.

        Nothing may change the shard any more: tensorstore reads it in place, which takes a quarter
        less processor time.
        """
        one = {"limit": 1}
        threads = {"data_copy_concurrency": one, "file_io_concurrency": one}
        target = ts.open(self._writing(context=threads)).result()[_region(at, shard)]
        return target.write(shard, can_reference_source_data_indefinitely=True)

    def _writing(self, **others: Any) -> dict[str, Any]:
        # The driver has written the array's description, so it is not read again.
        return self._spec(open=True, assume_metadata=True, **others)

    def creation(self) -> dict[str, Any]:
        """The specification with which tensorstore creates the array."""
        return self._spec(create=True)

    def _spec(self, **mode: Any) -> dict[str, Any]:
        """The specification for tensorstore. `mode` replaces keyword arguments of `ts.open`.

        Each call with keyword arguments leaves up to three dead entries in Python's table of
        interned strings. After a hundred checkpoints, Python would rebuild the table at twice its
        size.
        """
        zero: Any = False if self.dtype == "bool" else 0
        chunks = {"chunk_shape": list(self.chunk)}
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{self.path}/"},
            "metadata": {
                "shape": list(self.shape),
                "data_type": self.dtype,
                "chunk_grid": {"name": "regular", "configuration": chunks},
                "chunk_key_encoding": {"name": "default"},
                "codecs": [
                    {"name": "bytes", "configuration": {"endian": "little"}},
                    {"name": "crc32c"},
                ],
                "fill_value": [zero, zero] if self.dtype.startswith("complex") else zero,
            },
            # Otherwise chunks of zeros are omitted, and look like lost chunks.
            "store_data_equal_to_fill_value": True,
            "fill_missing_data_reads": False,
            **mode,
        }


def _region(at: Sequence[int], shard: np.ndarray) -> tuple[slice, ...]:
    return tuple(slice(start, start + size) for start, size in zip(at, shard.shape, strict=True))


@contextmanager
def open_regular(path: Path) -> Generator[int]:
    """Opens a regular file for reading, as a descriptor.

    Raises:
        ValueError: it is something else, such as a pipe, which may block or never end.
        OSError: it cannot be opened.
    """
    # Opening a pipe without a writer would block.
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        if not stat.S_ISREG(os.fstat(file).st_mode):
            raise ValueError(f"{path.name} is not a regular file")
        yield file
    finally:
        os.close(file)


@contextmanager
def store_errors(what: str, path: str) -> Any:
    """Turns tensorstore's errors into a CheckpointError."""
    try:
        yield
    except (ValueError, IndexError, OSError) as error:
        # After the reason, tensorstore repeats the request and names its source line.
        reason, *_ = re.split(r" \[(?:tensorstore_spec|source locations)=", str(error))
        raise CheckpointError(f"{what} {path}: {reason}") from error


def create_stored(arrays: Iterable[StoredArray]) -> None:
    """Creates arrays without elements, all at the same time.

    Raises:
        CheckpointError: one cannot be written, or exists already.
    """
    finish_all([(it.path, ts.open(it.creation())) for it in arrays])


def finish_all(futures: Sequence[tuple[str, Any]]) -> None:
    """Waits until the writes of arrays, by their paths, have ended; raises the first error.

    Raises:
        CheckpointError: one of them has failed.
    """
    for _, future in futures:
        future.exception()
    for path, future in futures:
        with store_errors("cannot write", path):
            future.result()
