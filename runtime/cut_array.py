"""A state that is split between meshes, as the caller holds it between steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from alpa.dialects.attributes import Slice
from alpa.runtime.mesh_array import MeshArray
from alpa.runtime.pjrt import weakly_typed
from alpa.runtime.placement import rows

_CUT_AXIS = "mesh"


class CutArray(MeshArray):
    """An array in parts, each on its mesh, which are joined when the array is read.

    The next step takes the parts in place. `parts` are keyed by their slices.

    The array has a `sharding` if its parts are in this process and their meshes have the same axes
    and equally many rows. It covers the devices of all the meshes, with one more axis, `mesh`,
    along which the array is split. Functions of JAX then compute with it there; otherwise they
    fetch it.
    """

    def __init__(self, parts: Mapping[Slice, jax.Array]) -> None:
        self.parts: dict[Slice, Any] = dict(sorted(parts.items(), key=lambda item: item[0].start))
        cut, first = next(iter(self.parts.items()))
        rows = max(part.stop for part in self.parts)
        shape = (*first.shape[: cut.dim], rows, *first.shape[cut.dim + 1 :])
        super().__init__(shape, first.dtype, first.weak_type)
        self._dim = cut.dim

    def fetch(self) -> np.ndarray:
        self.check_alive()
        return np.concatenate([np.asarray(part) for part in self.parts.values()], self._dim)

    def where(self) -> str:
        parts = self.parts.values()
        others = dict.fromkeys(part.where() for part in parts if isinstance(part, MeshArray))
        return f"in {len(parts)} parts {' and '.join(others) or 'on devices of this process'}"

    def here(self) -> jax.Array | None:
        if self._joined_sharding is None:
            return None
        self.check_alive()
        pieces = [self._piece(parts) for parts in self._by_mesh]
        shards = [shard.data for piece in pieces for shard in piece.addressable_shards]
        joined = jax.make_array_from_single_device_arrays(self.shape, self._joined_sharding, shards)
        return weakly_typed(joined) if self.weak_type else joined

    def shared(self) -> jax.Array | None:
        """The joined array if it can share the buffers of its parts, else None."""
        parts = self.parts.values()
        single = len(self._by_mesh) == len(parts)
        alike = (
            self._joined_sharding is not None and len({part.sharding.spec for part in parts}) == 1
        )
        return self.here() if single and alike else None

    @property
    def sharding(self) -> Sharding:
        return super().sharding if self._joined_sharding is None else self._joined_sharding

    @property
    def committed(self) -> bool:
        return self._joined_sharding is not None

    @property
    def is_fully_replicated(self) -> bool:
        return self._joined_sharding is not None and self._joined_sharding.is_fully_replicated

    @property
    def is_fully_addressable(self) -> bool:
        return all(part.is_fully_addressable for part in self.parts.values())

    @cached_property
    def _by_mesh(self) -> list[list[Any]]:
        """The parts in this process, grouped by mesh."""
        shardings = [getattr(part, "sharding", None) for part in self.parts.values()]
        if not all(isinstance(it, NamedSharding) for it in shardings):
            return []
        meshes = groupby(self.parts.values(), lambda part: part.sharding.mesh)
        return [list(parts) for _, parts in meshes]

    @cached_property
    def _joined_sharding(self) -> NamedSharding | None:
        """The sharding of the joined array, if there is one."""
        meshes = [parts[0].sharding.mesh for parts in self._by_mesh]
        rows = {sum(part.shape[self._dim] for part in parts) for parts in self._by_mesh}
        axes = {tuple(mesh.shape.items()) for mesh in meshes}
        if len(rows) != 1 or len(axes) != 1:
            return None
        spec = self._by_mesh[0][0].sharding.spec
        if len(meshes) == 1:
            return NamedSharding(meshes[0], spec)
        devices = np.stack([mesh.devices for mesh in meshes])
        if len(set(devices.flat)) < devices.size or _CUT_AXIS in meshes[0].axis_names:
            return None
        names = (_CUT_AXIS, *meshes[0].axis_names)
        mesh = Mesh(devices, names, axis_types=(AxisType.Auto,) * len(names))
        dims: list[Any] = [*spec, *[None] * (self.ndim - len(spec))]
        inside = dims[self._dim] or ()
        dims[self._dim] = (_CUT_AXIS, *((inside,) if isinstance(inside, str) else inside))
        return NamedSharding(mesh, PartitionSpec(*dims))

    def _piece(self, parts: Sequence[Any]) -> jax.Array:
        """The rows of one mesh, in the sharding of the first part."""
        sharding = NamedSharding(parts[0].sharding.mesh, self._by_mesh[0][0].sharding.spec)
        if len(parts) == 1:
            return jax.device_put(parts[0], sharding)
        with jax.enable_x64(True):  # 64-bit numbers keep their width
            return jax.device_put(jax.lax.concatenate(parts, self._dim), sharding)

    def __repr__(self) -> str:
        return f"CutArray({self.dtype}{list(self.shape)} in {len(self.parts)} parts)"

    def block_until_ready(self) -> CutArray:
        """Waits until all parts are computed."""
        self.check_alive()
        jax.block_until_ready(list(self.parts.values()))
        return self

    def check_workers(self) -> None:
        for part in self.parts.values():
            if isinstance(part, MeshArray):
                part.check_workers()

    def is_ready(self) -> bool:
        """Whether all parts are computed."""
        return all(part.is_ready() for part in self.parts.values())

    def delete(self) -> None:
        """Frees all parts."""
        for part in self.parts.values():
            part.delete()

    def is_deleted(self) -> bool:
        """Whether a part was donated to a step."""
        return any(part.is_deleted() for part in self.parts.values())


def part_of(array: Any, slice_: Slice, sharding: NamedSharding | None = None) -> Any:
    """Returns the part of an array that a slice selects.

    If the array is split there, this is the existing part: of a `CutArray`, or of an array whose
    shards lie where `sharding` requires them.

    Raises:
        RuntimeError: the array was deleted or donated.
    """
    if isinstance(array, CutArray) and slice_ in array.parts:
        array.check_alive()
        return array.parts[slice_]
    if isinstance(array, MeshArray):
        array = array.fetch()
    elif isinstance(array, jax.Array) and sharding is not None:
        there = _part_there(array, slice_, sharding)
        if there is not None:
            return there
    return rows(array, slice_.dim, slice_.start, slice_.stop)


def _part_there(array: jax.Array, slice_: Slice, sharding: NamedSharding) -> jax.Array | None:
    """The part in its sharding, from shards in place; None if one lies elsewhere."""
    if not sharding.device_set <= array.sharding.device_set:
        return None
    shape = list(array.shape)
    shape[slice_.dim] = slice_.stop - slice_.start
    shards = {shard.device: shard for shard in array.addressable_shards}
    wanted = sharding.addressable_devices_indices_map(tuple(shape))
    for device, index in wanted.items():
        first = [0 if at.start is None else at.start for at in index or ()]
        first[slice_.dim] += slice_.start
        there = [0 if at.start is None else at.start for at in shards[device].index]
        if first != there or shards[device].data.shape != sharding.shard_shape(tuple(shape)):
            return None
    arrays = [shards[device].data for device in wanted]
    return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays)
