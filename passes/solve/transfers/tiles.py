"""A tensor's tiles on two meshes, and their overlaps.

A *tile* is what one device holds, a *piece* the overlap of a source tile and a destination tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import permutations
from math import prod
from typing import Any

import numpy as np

from alpa.passes.cost.cluster import AnyCluster
from alpa.passes.cost.reshard import Layout
from alpa.passes.solve.transfers.senders import Integers

Box = tuple[tuple[int, int], ...]
"""(start, stop) of each dimension of a tensor, half-open"""


@dataclass(frozen=True, kw_only=True)
class TiledMesh:
    """A tensor's tiles on a mesh.

    Where a dimension of size n does not divide evenly over w ways, each tile has ceil(n / w), the
    last ones less or nothing: as XLA pads.
    """

    devices: tuple[int, ...]
    """numbers in the cluster, row-major over ``sizes``"""
    hosts: tuple[int, ...]
    """the host of each device"""
    sizes: tuple[int, ...]
    """devices along each axis of the mesh"""
    dims: Layout
    """for each dimension of the tensor the axes that shard it, major first"""

    @staticmethod
    def of(
        cluster: AnyCluster, devices: tuple[int, ...], sizes: tuple[int, ...], dims: Layout
    ) -> TiledMesh:
        """On devices of a cluster, which numbers them host by host."""
        hosts = tuple(cluster.host_of(device) for device in devices)
        return TiledMesh(devices=devices, hosts=hosts, sizes=sizes, dims=dims)

    @cached_property
    def ways(self) -> tuple[int, ...]:
        """The number of tiles along each dimension."""
        return tuple(prod(self.sizes[axis] for axis in axes) for axes in self.dims)

    @cached_property
    def free_axes(self) -> tuple[int, ...]:
        """The axes along which devices hold replicas."""
        used = {axis for axes in self.dims for axis in axes}
        return tuple(a for a, size in enumerate(self.sizes) if size > 1 and a not in used)

    @cached_property
    def indices(self) -> Integers:
        """[device, dimension]: the number of its tile along each."""
        result = np.zeros((len(self.devices), len(self.dims)), np.int64)
        for d, axes in enumerate(self.dims):
            result[:, d] = self.numbers(axes)
        return result

    @cached_property
    def tile_numbers(self) -> Integers:
        """Of each device: the row-major number of its tile."""
        return self.numbers(tuple(axis for axes in self.dims for axis in axes))

    def numbers(self, axes: tuple[int, ...]) -> Integers:
        """Of each device: the row-major number of its coordinate over some axes."""
        result = np.zeros(len(self.devices), np.int64)
        left = np.arange(len(self.devices))
        at = dict[int, Integers]()
        for axis in reversed(range(len(self.sizes))):
            left, at[axis] = np.divmod(left, self.sizes[axis])
        for axis in axes:
            result = result * self.sizes[axis] + at[axis]
        return result

    def crosses_hosts(self, axes: tuple[int, ...]) -> bool:
        """Whether devices that differ along some axes only are on several hosts."""
        others = self.numbers(tuple(a for a in range(len(self.sizes)) if a not in axes))
        return len(np.unique(np.stack([others, self.hosts]), axis=1).T) > len(np.unique(others))

    def tile_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The size of a tile that is not cut short."""
        return tuple(-(-length // ways) for length, ways in zip(shape, self.ways, strict=True))

    def boxes(self, shape: tuple[int, ...]) -> Integers:
        """[device, dimension, start or stop] of its tile."""
        first = self.indices * np.array(self.tile_shape(shape), np.int64)
        both = np.stack([first, first + np.array(self.tile_shape(shape), np.int64)], axis=-1)
        return np.minimum(both, np.array(shape, np.int64)[:, None])

    def tiles(self, shape: tuple[int, ...]) -> dict[int, Box]:
        """The box of each device."""
        boxes = self.boxes(shape).tolist()
        return dict(zip(self.devices, map(box_of, boxes), strict=True))


def box_of(bounds: list[list[int]]) -> Box:
    """A box of a row of an array of boxes."""
    return tuple((start, stop) for start, stop in bounds)


@dataclass(frozen=True, kw_only=True)
class Crossing:
    """A tensor that is on ``source`` and is to be on ``target``."""

    shape: tuple[int, ...]
    itemsize: int
    """bytes of an element"""
    source: TiledMesh
    target: TiledMesh

    def check(self) -> None:
        """Raises ``ValueError`` unless tensor and layouts are valid and fit one another."""
        if any(length < 0 for length in self.shape) or self.itemsize < 1:
            raise ValueError(
                f"invalid tensor: shape {self.shape} and {self.itemsize} bytes per element"
            )
        for name, mesh in (("source", self.source), ("target", self.target)):
            counts = {len(mesh.devices), len(mesh.hosts), len(set(mesh.devices)), prod(mesh.sizes)}
            if len(counts) != 1:
                raise ValueError(
                    f"the {name} of sizes {mesh.sizes} needs that many different devices with a "
                    f"host each, not {mesh.devices} on {mesh.hosts}"
                )
            axes = [axis for dim in mesh.dims for axis in dim]
            if len(mesh.dims) != len(self.shape) or len(axes) != len(set(axes)):
                raise ValueError(
                    f"{mesh.dims} is no layout of shape {self.shape} on the {name}: it takes one "
                    "tuple per dimension, and each axis once"
                )
            if any(not 0 <= axis < len(mesh.sizes) for axis in axes):
                raise ValueError(
                    f"{mesh.dims} refers to axes that the {name} {mesh.sizes} does not have"
                )
        hosts = dict(zip(self.source.devices, self.source.hosts, strict=True))
        for device, host in zip(self.target.devices, self.target.hosts, strict=True):
            if hosts.get(device, host) != host:
                raise ValueError(f"device {device} is on host {hosts[device]} and on host {host}")

    @cached_property
    def hosts(self) -> dict[int, int]:
        """The host of each device of both meshes."""
        meshes = (self.source, self.target)
        return {d: h for mesh in meshes for d, h in zip(mesh.devices, mesh.hosts, strict=True)}

    @cached_property
    def host_of(self) -> Integers:
        """The same as an array by the devices' numbers; -1 for those of neither mesh."""
        result = np.full(1 + max(self.hosts, default=-1), -1, np.int64)
        result[list(self.hosts)] = list(self.hosts.values())
        return result

    @cached_property
    def pieces(self) -> Pieces:
        return Pieces.of(self)

    @cached_property
    def groups(self) -> HostGroups:
        """of the target"""
        return HostGroups.of(self.target)

    def bytes_of(self, boxes: Integers) -> Integers:
        """Of each box [.., dimension, start or stop]."""
        return np.prod(boxes[..., 1] - boxes[..., 0], axis=-1, dtype=np.int64) * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """What each device of the destination wants, piece by piece: a row each, device by device."""

    position: Integers
    """[row]: in the target mesh, of the device that wants it"""
    number: Integers
    """[row]: among the pieces of the device's tile"""
    boxes: Integers
    """[row, dimension, start or stop]"""
    holders: Integers
    """[row, replica]: positions in the source mesh of the devices that hold it"""
    near: np.ndarray[Any, np.dtype[np.bool_]]
    """[row, replica]: whether that device is on the host of the one that wants it"""

    @staticmethod
    def of(crossing: Crossing) -> Pieces:
        source, target, shape = crossing.source, crossing.target, crossing.shape
        step = np.maximum(1, np.array(source.tile_shape(shape), np.int64))
        wanted = target.boxes(shape)
        first, last = wanted[..., 0] // step, (wanted[..., 1] - 1) // step
        counts = np.where(wanted[..., 0] < wanted[..., 1], last - first + 1, 0)
        total = np.prod(counts, axis=1, dtype=np.int64)
        position = np.repeat(np.arange(len(total)), total)
        number = numbered(total)
        held = np.zeros((len(position), len(shape)), np.int64)
        left = number
        for d in reversed(range(len(shape))):
            left, along = np.divmod(left, counts[position, d])
            held[:, d] = first[position, d] + along
        start = np.maximum(wanted[position, :, 0], held * step)
        stop = np.minimum(wanted[position, :, 1], (held + 1) * step)
        tile = np.zeros(len(position), np.int64)
        for d, ways in enumerate(source.ways):
            tile = tile * ways + held[:, d]
        # As many devices hold one tile as another.
        by_tile = np.argsort(source.tile_numbers, kind="stable").reshape(prod(source.ways), -1)
        holders = by_tile[tile]
        hosts = np.array(source.hosts)[holders], np.array(target.hosts)[position]
        return Pieces(
            position=position,
            number=number,
            boxes=np.stack([start, stop], axis=-1),
            holders=holders,
            near=hosts[0] == hosts[1][:, None],
        )

    @cached_property
    def slow(self) -> np.ndarray[Any, np.dtype[np.bool_]]:
        """[row]: whether no device of the same host holds it."""
        return np.logical_not(self.near.any(axis=1))


@dataclass(frozen=True, kw_only=True)
class HostGroups:
    """The devices of a host that want the same tile, by their positions in the target mesh."""

    group: Integers
    """[position]: the number of its group; groups are numbered by their first devices"""
    member: Integers
    """[position]: its number in the group"""

    @staticmethod
    def of(target: TiledMesh) -> HostGroups:
        key = target.tile_numbers * (1 + max(target.hosts)) + np.array(target.hosts)
        _, first, inverse = np.unique(key, return_index=True, return_inverse=True)
        group = np.argsort(np.argsort(first))[inverse]
        member = np.empty_like(group)
        member[np.argsort(group, kind="stable")] = numbered(np.bincount(group))
        return HostGroups(group=group, member=member)


def as_on(source: TiledMesh, target: TiledMesh) -> Layout | None:
    """A layout of the target in which tiles are those of the source; None if it has none."""
    if source.sizes == target.sizes:
        return source.dims
    axes = [axis for axis, size in enumerate(target.sizes) if size > 1]
    orders = (order for count in range(len(axes) + 1) for order in permutations(axes, count))
    for order in orders:
        left, dims = list(order), list[tuple[int, ...]]()
        for ways in source.ways:
            dim: tuple[int, ...] = ()
            while left and prod(target.sizes[axis] for axis in dim) < ways:
                dim = (*dim, left.pop(0))
            dims.append(dim)
        if not left and replace(target, dims=tuple(dims)).ways == source.ways:
            return tuple(dims)
    return None


def numbered(counts: Integers) -> Integers:
    """0, 1 ... up to each count, one after the other."""
    ends = np.cumsum(counts)
    return np.arange(int(counts.sum())) - np.repeat(ends - counts, counts)
