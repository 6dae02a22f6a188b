"""Moves arrays between meshes as planned: tile by tile, from the chosen devices.

The plan gives a transfer's method and the layout in which it arrives. From these,
`passes.solve.transfers.messages.deliver` derives which device sends which part of the tensor. The
planner uses the same function for its bytes and seconds, so the runtime sends what was counted. For
a transfer outside the plan, such as a carried state on its way back to its argument, each device
fetches its part (`send_recv`).

Each process does its part: it passes on tiles among its own devices, and gives tiles for other
processes to its `Links`. A pair of processes exchanges tiles in the order of the instructions,
which is the same on both sides, so messages need no names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from math import prod
from typing import Any, Protocol, cast, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from alpa.passes.plan.data import DeviceMesh, Program, Transfer, Value
from alpa.passes.solve.transfers.messages import Message, Method, deliver
from alpa.passes.solve.transfers.tiles import Box, Crossing, TiledMesh
from alpa.runtime.dtypes import numpy_dtype
from alpa.runtime.placement import Placement


class Links(Protocol):
    """Connects a process with the others, identified by number."""

    rank: int
    """this process's own number"""
    owners: Mapping[int, int]
    """the process of each device of the cluster"""

    def send(self, peer: int, arrays: Sequence[jax.Array]) -> None:
        """Sends arrays, each on one device; may return before they have arrived."""
        ...

    def receive(self, peer: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Receives the peer's next message, each array in the requested sharding."""
        ...


class Tiles:
    """The steps of a program's moves between meshes, and a process's part in them.

    Without `links` all devices belong to this process.
    """

    def __init__(self, placement: Placement, links: Links | None = None) -> None:
        self._placement, self._links = placement, links
        self._known: dict[Transfer, tuple[Crossing, Steps]] = {}

    @cached_property
    def _planned(self) -> dict[int, Transfer]:
        """The transfers that have a method, by their targets."""
        return {t.target: t for t in self._placement.program.transfers if t.method is not None}

    def transfer(self, source: int, target: int) -> Transfer:
        """The planned transfer to a value, or a plain one."""
        plain = Transfer(source=source, target=target, method="send_recv")
        return self._planned.get(target, plain)

    def steps(self, transfer: Transfer) -> tuple[Crossing, Steps]:
        """The description of a planned transfer, and the messages of each of its steps."""
        if transfer not in self._known:
            crossing = _crossing(self._placement.program, transfer)
            if transfer.method not in get_args(Method):
                raise ValueError(
                    f"a transfer has the method {transfer.method!r}; there are "
                    f"{', '.join(get_args(Method))}"
                )
            steps = deliver(crossing, cast(Method, transfer.method))
            self._known[transfer] = crossing, tuple(tuple(step) for step in steps)
        return self._known[transfer]

    def carry(
        self, array: jax.Array | None, transfer: Transfer, *, copy: bool = False
    ) -> jax.Array | None:
        """Returns the array on the other mesh, in a process that has devices of it.

        `array` is in the sharding of the transfer's source, or None if that mesh is elsewhere.
        `copy` is needed if its buffers may be overwritten while tiles are being sent.
        """
        crossing, steps = self.steps(transfer)
        placement = self._placement
        dtype = numpy_dtype(placement.program.values[transfer.target].dtype)
        held: Held = defaultdict(list)
        if array is not None:
            shards = {shard.device: shard.data for shard in array.addressable_shards}
            for number, box in crossing.source.tiles(crossing.shape).items():
                if (shard := shards.get(placement.device_of[number])) is not None:
                    held[number].append((box, shard))
        got: Held = defaultdict(list)
        for step in steps:
            self._exchange(
                [message for message in step if _size(message.box)], held, got, dtype, copy
            )
            # From the second step on, devices of the destination pass on tiles that they received.
            held = got
        if not placement.has(transfer.target):
            return None
        sharding = placement.shardings[transfer.target]
        here = sharding.addressable_devices
        tiles = [
            _joined(box, got[number], dtype)
            if got[number]
            else jnp.zeros(_shape(box), dtype, device=placement.device_of[number])
            for number, box in crossing.target.tiles(crossing.shape).items()
            if placement.device_of[number] in here
        ]
        return jax.make_array_from_single_device_arrays(crossing.shape, sharding, tiles)

    def _exchange(
        self,
        step: Sequence[Message],
        held: Held,
        got: Held,
        dtype: np.dtype[Any],
        copy: bool,
    ) -> None:
        """Does this process's part of messages that do not depend on one another."""
        links, device_of = self._links, self._placement.device_of
        owners = links.owners if links else dict.fromkeys(device_of, 0)
        rank = links.rank if links else 0
        sent: list[tuple[int, Box, jax.Array]] = []
        outgoing: dict[int, list[jax.Array]] = defaultdict(list)
        incoming: dict[int, list[tuple[int, Box]]] = defaultdict(list)
        for message in step:
            source, target = owners[message.source], owners[message.target]
            if source == rank:
                part = _part(held[message.source], message.box)
                if target == rank:
                    part = jax.device_put(part, device_of[message.target], may_alias=False)
                    sent.append((message.target, message.box, part))
                else:
                    outgoing[target].append(jnp.copy(part) if copy else part)
            elif target == rank:
                incoming[source].append((message.target, message.box))
        if links:
            for peer, arrays in outgoing.items():
                links.send(peer, arrays)
            for peer, boxes in incoming.items():
                shapes = [
                    jax.ShapeDtypeStruct(
                        _shape(box), dtype, sharding=SingleDeviceSharding(device_of[number])
                    )
                    for number, box in boxes
                ]
                arrays = links.receive(peer, shapes)
                sent += [(*place, array) for place, array in zip(boxes, arrays, strict=True)]
        for target, box, part in sent:
            got[target].append((box, part))


Held = dict[int, list[tuple[Box, jax.Array]]]
Steps = tuple[tuple[Message, ...], ...]


def _crossing(program: Program, transfer: Transfer) -> Crossing:
    meshes = {mesh.name: mesh for mesh in program.meshes}
    source, target = program.values[transfer.source], program.values[transfer.target]
    return Crossing(
        shape=source.shape,
        itemsize=source.itemsize,
        source=_tiled(meshes[source.mesh], source),
        target=_tiled(meshes[target.mesh], target),
    )


def _tiled(mesh: DeviceMesh, value: Value) -> TiledMesh:
    axes = {name: number for number, (name, _) in enumerate(mesh.axes)}
    # A mesh over several hosts consists of whole hosts, one after the other.
    each = len(mesh.devices) // len(mesh.hosts)
    return TiledMesh(
        devices=mesh.devices,
        hosts=tuple(mesh.hosts[i // each] for i in range(len(mesh.devices))),
        sizes=tuple(size for _, size in mesh.axes),
        dims=tuple(tuple(axes[name] for name in dim) for dim in value.dims),
    )


def _part(held: list[tuple[Box, jax.Array]], box: Box) -> jax.Array:
    """A box of a device's data, which may have arrived in several pieces."""
    for around, array in held:
        if _inside(box, around):
            if box == around:
                return array
            starts = _starts(box, around)
            ends = [start + size for start, size in zip(starts, _shape(box), strict=True)]
            return jax.lax.slice(array, starts, ends)
    pieces = [(inner, array) for inner, array in held if _inside(inner, box)]
    return _joined(box, pieces, pieces[0][1].dtype)


def _joined(box: Box, pieces: list[tuple[Box, jax.Array]], dtype: np.dtype[Any]) -> jax.Array:
    """Joins a box from its pieces, on their device."""
    if len(pieces) == 1 and pieces[0][0] == box:
        return pieces[0][1]
    places = tuple(_starts(inner, box) for inner, _ in pieces)
    return _assembled(_shape(box), places, np.dtype(dtype), [array for _, array in pieces])


@partial(jax.jit, static_argnums=(0, 1, 2))
def _assembled(
    shape: tuple[int, ...],
    places: tuple[tuple[int, ...], ...],
    dtype: np.dtype[Any],
    pieces: Sequence[jax.Array],
) -> jax.Array:
    """An array with its pieces at their places; one call, where each op would take as long."""
    whole = jnp.zeros(shape, dtype)
    for starts, piece in zip(places, pieces, strict=True):
        whole = jax.lax.dynamic_update_slice(whole, piece, starts)
    return whole


def _starts(inner: Box, outer: Box) -> tuple[int, ...]:
    """Where a box begins inside another one."""
    return tuple(start - origin for (start, _), (origin, _) in zip(inner, outer, strict=True))


def _inside(inner: Box, outer: Box) -> bool:
    return all(
        begin <= start and stop <= end
        for (start, stop), (begin, end) in zip(inner, outer, strict=True)
    )


def _size(box: Box) -> int:
    return prod(_shape(box))


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
