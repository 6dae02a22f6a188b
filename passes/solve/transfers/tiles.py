"""A tensor's tiles on two meshes, and the messages that bring it from one to the other.

A *tile* is what one device holds, a *piece* the overlap of a source tile and a destination tile.
Any device that holds the source tile may send a piece. It comes from the device itself where it is
there already, else from a device of its own host, else from another host. The planner and the
runtime make the messages of a transfer by the same function, `deliver`.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from math import prod
from typing import Literal

from alpa.passes.cost.cluster import AnyCluster
from alpa.passes.cost.reshard import Layout
from alpa.passes.solve.transfers.senders import Box, Demand, balance

Index = tuple[int, ...]
"""the number of a tile along each dimension"""

Method = Literal["send_recv", "local_all_gather", "broadcast"]


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
    def coordinates(self) -> tuple[tuple[int, ...], ...]:
        """Where each device lies along each axis."""
        return tuple(product(*(range(size) for size in self.sizes)))

    @cached_property
    def indices(self) -> tuple[Index, ...]:
        """The tile of each device."""
        return tuple(
            tuple(tile_number(at, self.sizes, axes) for axes in self.dims)
            for at in self.coordinates
        )

    @cached_property
    def ways(self) -> tuple[int, ...]:
        """The number of tiles along each dimension."""
        return tuple(prod(self.sizes[axis] for axis in axes) for axes in self.dims)

    @cached_property
    def free_axes(self) -> tuple[int, ...]:
        """The axes along which devices hold replicas."""
        used = {axis for axes in self.dims for axis in axes}
        return tuple(a for a, size in enumerate(self.sizes) if size > 1 and a not in used)

    def tile_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        """The size of a tile that is not cut short."""
        return tuple(-(-length // ways) for length, ways in zip(shape, self.ways, strict=True))

    def tiles(self, shape: Sequence[int]) -> dict[int, Box]:
        """The box of each device."""
        steps = self.tile_shape(shape)
        return {
            device: tuple(
                (min(length, k * step), min(length, (k + 1) * step))
                for length, step, k in zip(shape, steps, index, strict=True)
            )
            for device, index in zip(self.devices, self.indices, strict=True)
        }


def tile_number(at: tuple[int, ...], sizes: tuple[int, ...], axes: tuple[int, ...]) -> int:
    """The row-major number of a coordinate over some axes."""
    index = 0
    for axis in axes:
        index = index * sizes[axis] + at[axis]
    return index


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

    def bytes_of(self, box: Box) -> int:
        return prod(stop - start for start, stop in box) * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Message:
    """A message: ``target`` gets ``box`` from ``source``. Both may be one device of both meshes,
    which keeps what it has."""

    source: int
    target: int
    box: Box


def deliver(crossing: Crossing, method: Method) -> tuple[tuple[Message, ...], ...]:
    """The steps that bring a tensor into the layout in which it lands, ``crossing.target``'s. What
    is planned and what is run are the same."""
    demands, passed_on = _demands(crossing, once_per_host=method == "broadcast")
    senders = balance(demands, crossing.hosts)
    received = tuple(
        Message(source=sender, target=demand.target, box=demand.box)
        for sender, demand in zip(senders, demands, strict=True)
    )
    return tuple(step for step in (received, *passed_on) if step)


@dataclass(frozen=True)
class Pieces:
    """The overlaps of source tiles and destination tiles."""

    overlaps: list[list[list[tuple[int, tuple[int, int]]]]]
    """[dimension][number of the destination tile] = (number of the source tile, bounds)"""
    holders: dict[Index, list[int]]
    """positions in the source mesh by the tile that they hold"""
    source: TiledMesh

    @staticmethod
    def of(crossing: Crossing) -> Pieces:
        source, target = crossing.source, crossing.target
        holders: dict[Index, list[int]] = defaultdict(list)
        for position, index in enumerate(source.indices):
            holders[index].append(position)
        steps = source.tile_shape(crossing.shape), target.tile_shape(crossing.shape)
        overlaps = [
            [_along(length, k * there, (k + 1) * there, here) for k in range(ways)]
            for length, ways, here, there in zip(crossing.shape, target.ways, *steps, strict=True)
        ]
        return Pieces(overlaps, holders, source)

    def boxes(self, index: Index) -> Iterator[tuple[Index, Box]]:
        """The pieces of a destination tile: which source tile each is of, and its box."""
        for parts in product(*(by[k] for by, k in zip(self.overlaps, index, strict=True))):
            yield tuple(number for number, _ in parts), tuple(bounds for _, bounds in parts)

    def holders_on(self, held: Index, host: int) -> list[int]:
        """The positions on a host that hold a source tile."""
        return [position for position in self.holders[held] if self.source.hosts[position] == host]


def _along(length: int, start: int, stop: int, step: int) -> list[tuple[int, tuple[int, int]]]:
    """The tiles of size ``step`` that start..stop overlaps, with the bounds of the overlaps."""
    stop = min(length, stop)
    if start >= stop:
        return []
    return [
        (k, (max(start, k * step), min(stop, (k + 1) * step)))
        for k in range(start // step, (stop - 1) // step + 1)
    ]


def _demands(
    crossing: Crossing, *, once_per_host: bool
) -> tuple[list[Demand], list[tuple[Message, ...]]]:
    """What is received from the source, and what devices of a host then pass on to others.

    ``once_per_host``: of the devices of a host that want a tile, the first one alone receives the
    pieces that come from other hosts.
    """
    target, pieces = crossing.target, Pieces.of(crossing)
    groups: dict[tuple[Index, int], list[int]] = defaultdict(list)
    for position, key in enumerate(zip(target.indices, target.hosts, strict=True)):
        groups[key].append(position)
    demands: list[Demand] = []
    passed_on: list[list[Message]] = []
    for (index, host), members in groups.items():
        entering: list[Box] = []
        complete = True
        for held, box in pieces.boxes(index):
            near = pieces.holders_on(held, host)
            single = once_per_host and not near
            for position in members[:1] if single else members:
                holders = near or pieces.holders[held]
                demands.append(_demand(crossing, target.devices[position], position, box, holders))
            if single:
                entering.append(box)
            complete &= single
        if complete and entering:
            entering = [_hull(entering)]
        devices = [target.devices[position] for position in members]
        for number, device in enumerate(devices[1:] if entering else (), 1):
            step = number.bit_length() - 1
            passed_on += [[] for _ in range(step + 1 - len(passed_on))]
            giver = devices[number - (1 << step)]
            passed_on[step] += [Message(source=giver, target=device, box=box) for box in entering]
    return demands, [tuple(step) for step in passed_on]


def _demand(crossing: Crossing, device: int, position: int, box: Box, holders: list[int]) -> Demand:
    held_by = [crossing.source.devices[holder] for holder in holders]
    if device in held_by:
        return Demand(target=device, box=box, num_bytes=0, senders=(device,), slow=False)
    first = holders.index(position) if position in holders else position % len(holders)
    return Demand(
        target=device,
        box=box,
        num_bytes=crossing.bytes_of(box),
        senders=(*held_by[first:], *held_by[:first]),
        slow=all(crossing.hosts[sender] != crossing.hosts[device] for sender in held_by),
    )


def _hull(boxes: list[Box]) -> Box:
    """The box that is made up of pieces."""
    return tuple(
        (min(start for start, _ in bounds), max(stop for _, stop in bounds))
        for bounds in zip(*boxes, strict=True)
    )
