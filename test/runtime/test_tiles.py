"""Transfers tile by tile: every device ends up with its tile, by the planned messages."""

from __future__ import annotations

from math import prod

import jax
import numpy as np
import pytest

from alpa import passes
from alpa.dialects import body, main_function
from alpa.dialects.plan import Plan, Reshard
from alpa.dialects.sharding import Sharding
from alpa.passes.plan.data import DeviceMesh, Program, Transfer, Value
from alpa.passes.plan.reader import read_planned
from alpa.runtime.placement import Placement
from alpa.runtime.tiles import Tiles

Dims = tuple[tuple[str, ...], ...]

STEP = """
func.func public @main(%w: tensor<8x8xf32> {alpa.role = "state"},
                       %x: tensor<64x8xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<8x8xf32> {alpa.result = "state:0"}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<64x8xf32>, tensor<8x8xf32>) -> tensor<64x8xf32>
  %1 = stablehlo.tanh %0 : tensor<64x8xf32>
  %2 = stablehlo.dot_general %1, %w, contracting_dims = [1] x [0]
    : (tensor<64x8xf32>, tensor<8x8xf32>) -> tensor<64x8xf32>
  %3 = stablehlo.dot_general %1, %2, contracting_dims = [0] x [0]
    : (tensor<64x8xf32>, tensor<64x8xf32>) -> tensor<8x8xf32>
  %4 = stablehlo.subtract %w, %3 : tensor<8x8xf32>
  return %4 : tensor<8x8xf32>
}
"""


def mesh(name: str, first: int, shape: tuple[int, ...], per_host: int) -> DeviceMesh:
    devices = tuple(range(first, first + int(np.prod(shape))))
    return DeviceMesh(
        name=name,
        hosts=tuple(dict.fromkeys(device // per_host for device in devices)),
        devices=devices,
        axes=tuple((f"axis{i}", size) for i, size in enumerate(shape)),
    )


def crossing(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dims: tuple[Dims, Dims],
    method: str,
    per_host: int,
    shape: tuple[int, ...] = (8, 12),
) -> tuple[Placement, Transfer]:
    source, target = shapes
    meshes = (
        mesh("mesh_0", 0, source, per_host),
        mesh("mesh_1", int(np.prod(source)), target, per_host),
    )
    values = tuple(
        Value(mesh=it.name, shape=shape, dtype="f32", sharding=Sharding.of(it.name, layout))
        for it, layout in zip(meshes, dims, strict=True)
    )
    transfer = Transfer(source=0, target=1, method=method)
    program = Program(
        values=values, arguments=(), results=(), steps=(transfer,), meshes=meshes, plan=Plan()
    )
    return Placement(program=program, devices=tuple(jax.devices())), transfer


WHOLE: Dims = ((), ())
ROWS: Dims = (("axis0",), ())
COLUMNS: Dims = ((), ("axis0",))
BLOCKS: Dims = (("axis0",), ("axis1",))
SWAPPED: Dims = (("axis1",), ("axis0",))
FINE: Dims = (("axis1", "axis0"), ())


@pytest.mark.parametrize("method", ["send_recv", "broadcast", "local_reshard"])
@pytest.mark.parametrize(
    ("shapes", "dims", "per_host"),
    [
        (((2,), (2,)), (ROWS, ROWS), 4),  # whole tiles
        (((2,), (2,)), (ROWS, COLUMNS), 4),  # every tile is cut
        (((4,), (1,)), (ROWS, WHOLE), 4),  # joined on one device
        (((1,), (4,)), (WHOLE, COLUMNS), 4),
        (((2, 2), (2, 2)), (BLOCKS, SWAPPED), 4),
        (((4,), (2, 2)), (COLUMNS, FINE), 4),
        (((2,), (2, 2)), (ROWS, WHOLE), 2),  # replicas on two other hosts
        (((2,), (2, 2)), (ROWS, COLUMNS), 2),
        (((1,), (2,)), (WHOLE, WHOLE), 4),  # replicas on the sender's host
    ],
)
def test_each_device_gets_its_tile(
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    dims: tuple[Dims, Dims],
    per_host: int,
    method: str,
) -> None:
    placement, transfer = crossing(shapes, dims, method, per_host)
    whole = np.arange(96, dtype=np.float32).reshape(8, 12)
    array = jax.device_put(whole, placement.shardings[0])
    moved = Tiles(placement).carry(array, transfer)
    assert moved.sharding == placement.shardings[1]
    for shard in moved.addressable_shards:
        np.testing.assert_array_equal(shard.data, whole[shard.index])


@pytest.mark.parametrize("shape", [(), (0, 4)])
def test_scalars_and_nothing(shape: tuple[int, ...]) -> None:
    whole: Dims = ((),) * len(shape)
    placement, transfer = crossing(((2,), (4,)), (whole, whole), "send_recv", 4, shape)
    array = jax.device_put(np.ones(shape, np.float32), placement.shardings[0])
    moved = Tiles(placement).carry(array, transfer)
    np.testing.assert_array_equal(moved, np.ones(shape, np.float32))
    assert len(moved.addressable_shards) == 4


def test_a_broadcast_enters_each_host_once() -> None:
    placement, transfer = crossing(((2,), (2, 2)), (ROWS, WHOLE), "broadcast", 2)
    _, (first, second) = Tiles(placement).steps(transfer)
    assert {(message.source, message.target) for message in first} == {
        (0, 2),
        (1, 2),
        (0, 4),
        (1, 4),
    }
    assert {(message.source, message.target) for message in second} == {(2, 3), (4, 5)}


def test_an_unknown_method() -> None:
    placement, transfer = crossing(((2,), (2,)), (ROWS, ROWS), "by_post", 4)
    with pytest.raises(ValueError, match="the method 'by_post'; there are send_recv, local_all_"):
        Tiles(placement).steps(transfer)


def test_what_runs_has_the_bytes_that_were_planned() -> None:
    options = "cluster=cpu:2x2 num-layers=2 num-stages=2 num-micro-batches=2"
    module = passes.run(STEP, f"alpa{{{options}}}")
    program = read_planned(module)
    tiles = Tiles(Placement(program=program, devices=tuple(jax.devices())))
    reshards = [
        found for op in body(main_function(module)).operations if (found := Reshard.read(op))
    ]
    assert len(reshards) == len(program.transfers) > 1
    for transfer, reshard in zip(program.transfers, reshards, strict=True):
        it, steps = tiles.steps(transfer)
        carried = {True: 0, False: 0}
        for message in (message for step in steps for message in step):
            assert message.source != message.target
            size = prod(stop - start for start, stop in message.box) * it.itemsize
            carried[it.hosts[message.source] != it.hosts[message.target]] += size
        assert (carried[True], carried[False]) == (reshard.slow_bytes, reshard.fast_bytes)
