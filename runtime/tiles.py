"""Transfers between meshes as they were planned: tile by tile, from the device that was chosen.

The plan says a transfer's method and the layout in which it lands; who sends which part of the
tensor to whom follows from these by `passes.solve.cross_mesh.deliver`, from which the planner has
its bytes and seconds. So what runs is what was counted.
"""

from __future__ import annotations

from collections import defaultdict
from functools import cached_property
from typing import cast, get_args

import jax
import jax.numpy as jnp

from alpa.passes.analysis.planned import DeviceMesh, Program, Transfer, Value
from alpa.passes.solve import cross_mesh
from alpa.passes.solve.cross_mesh import Crossing, Method, TiledMesh
from alpa.passes.solve.cross_mesh_senders import Box
from alpa.runtime.placement import Placement


class Tiles:
    """The steps of a program's transfers, and their execution in one process."""

    def __init__(self, placement: Placement) -> None:
        self._placement = placement
        self._known: dict[Transfer, tuple[Crossing, Steps]] = {}

    @cached_property
    def planned(self) -> dict[int, Transfer]:
        """The transfers that have a method, by their targets."""
        return {t.target: t for t in self._placement.program.transfers if t.method is not None}

    def steps(self, transfer: Transfer) -> tuple[Crossing, Steps]:
        """What a planned transfer is, and the messages of each of its steps."""
        if transfer not in self._known:
            crossing = _crossing(self._placement.program, transfer)
            if transfer.method not in get_args(Method):
                raise ValueError(
                    f"a transfer has the method {transfer.method!r}; there are "
                    f"{', '.join(get_args(Method))}"
                )
            steps, _ = cross_mesh.deliver(crossing, cast(Method, transfer.method))
            self._known[transfer] = crossing, steps
        return self._known[transfer]

    def carry(self, array: jax.Array, transfer: Transfer) -> jax.Array:
        """The array on the other mesh; `array` is in the sharding of the transfer's source."""
        crossing, steps = self.steps(transfer)
        devices = self._placement.devices
        numbers = {devices[number]: number for number in crossing.source.devices}
        shards = {numbers[shard.device]: shard.data for shard in array.addressable_shards}
        held = {
            number: [(box, shards[number])]
            for number, box in crossing.source.tiles(crossing.shape).items()
        }
        got: dict[int, list[tuple[Box, jax.Array]]] = defaultdict(list)
        for step in steps:
            sent = [
                (
                    message.target,
                    message.box,
                    jax.device_put(
                        _part(held[message.source], message.box),
                        devices[message.target],
                        may_alias=False,
                    ),
                )
                for message in step
            ]
            for target, box, part in sent:
                got[target].append((box, part))
            # From the second step on, devices of the destination pass on what they have got.
            held = got
        tiles = [
            _joined(box, got[number], array.dtype)
            if got[number]
            else jnp.zeros(_shape(box), array.dtype, device=devices[number])
            for number, box in crossing.target.tiles(crossing.shape).items()
        ]
        sharding = self._placement.shardings[transfer.target]
        return jax.make_array_from_single_device_arrays(crossing.shape, sharding, tiles)


Steps = tuple[tuple[cross_mesh.Transfer, ...], ...]


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
    # A mesh over several hosts is made of whole ones, host by host.
    each = len(mesh.devices) // len(mesh.hosts)
    return TiledMesh(
        devices=mesh.devices,
        hosts=tuple(mesh.hosts[i // each] for i in range(len(mesh.devices))),
        sizes=tuple(size for _, size in mesh.axes),
        dims=tuple(tuple(axes[name] for name in dim) for dim in value.dims),
    )


def _part(held: list[tuple[Box, jax.Array]], box: Box) -> jax.Array:
    """A box of what a device has: it may have got it in several pieces."""
    for around, array in held:
        if _inside(box, around):
            if box == around:
                return array
            starts = [start - origin for (start, _), (origin, _) in zip(box, around, strict=True)]
            return jax.lax.dynamic_slice(array, starts, _shape(box))
    pieces = [(inner, array) for inner, array in held if _inside(inner, box)]
    return _joined(box, pieces, pieces[0][1].dtype)


def _joined(box: Box, pieces: list[tuple[Box, jax.Array]], dtype: jnp.dtype) -> jax.Array:
    """A box from its pieces, on the device that they are on."""
    if len(pieces) == 1 and pieces[0][0] == box:
        return pieces[0][1]
    (device,) = pieces[0][1].devices()
    whole = jnp.zeros(_shape(box), dtype, device=device)
    for inner, array in pieces:
        starts = [start - origin for (start, _), (origin, _) in zip(inner, box, strict=True)]
        whole = jax.lax.dynamic_update_slice(whole, array, starts)
    return whole


def _inside(inner: Box, outer: Box) -> bool:
    return all(
        begin <= start and stop <= end
        for (start, stop), (begin, end) in zip(inner, outer, strict=True)
    )


def _shape(box: Box) -> tuple[int, ...]:
    return tuple(stop - start for start, stop in box)
