"""Removes Shardy from a module, for compilers that do not know it.

What is left is the program of one device on whole tensors. Shardings and constraints only say where
shards are, so they go. A manual computation is written for the shard of a device: its body is
copied for each device, on the device's slices of the operands, and the results are concatenated.

**Before**::

    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%x: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
        -> tensor<2x4xf32> {
      %cst = stablehlo.constant dense<0.0> : tensor<f32>
      %0 = stablehlo.tanh %x : tensor<8x4xf32>
      %1 = sdy.sharding_constraint %0 <@mesh_0, [{"a"}, {}]> : tensor<8x4xf32>
      %2 = sdy.manual_computation(%1, %cst)
          in_shardings=[<@mesh_0, [{"a"}, {}]>, <@mesh_0, []>]
          out_shardings=[<@mesh_0, [{"a"}, {}]>]
          manual_axes={"a"} (%s: tensor<4x4xf32>, %zero: tensor<f32>) {
        %3 = stablehlo.reduce(%s init: %zero) applies stablehlo.add across dimensions = [0]
          : (tensor<4x4xf32>, tensor<f32>) -> tensor<4xf32>
        %4 = stablehlo.reshape %3 : (tensor<4xf32>) -> tensor<1x4xf32>
        sdy.return %4 : tensor<1x4xf32>
      } : (tensor<8x4xf32>, tensor<f32>) -> tensor<2x4xf32>
      return %2 : tensor<2x4xf32>
    }

**After**::

    func.func public @main(%x: tensor<8x4xf32>) -> tensor<2x4xf32> {
      %cst = stablehlo.constant …
      %0 = stablehlo.tanh %x : tensor<8x4xf32>
      %1 = stablehlo.slice %0 [0:4, 0:4] : (tensor<8x4xf32>) -> tensor<4x4xf32>
      %2 = stablehlo.reduce(%1 init: %cst) …
      %3 = stablehlo.reshape %2 : (tensor<4xf32>) -> tensor<1x4xf32>
      %4 = stablehlo.slice %0 [4:8, 0:4] : (tensor<8x4xf32>) -> tensor<4x4xf32>
      %5 = stablehlo.reduce(%4 init: %cst) …
      %6 = stablehlo.reshape %5 : (tensor<4xf32>) -> tensor<1x4xf32>
      %7 = stablehlo.concatenate %3, %6, dim = 0
        : (tensor<1x4xf32>, tensor<1x4xf32>) -> tensor<2x4xf32>
      return %7 : tensor<2x4xf32>
    }

**Requires**: a program before planning, or a module that `export-stages` wrote.

**Ensures**: no op, attribute or type of Shardy is left. On one device the module computes what it
computed on its mesh.

**Options**: none.

**Fails when** the module is a plan, a manual computation of several devices has a collective or
reads the number of its device, or an op of Shardy needs several devices.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import ClassVar, cast

from alpa.dialects import body, ir, main_function, passmanager, sdy, stablehlo, walk
from alpa.dialects.sharding import AxisRef, Mesh, Sharding
from alpa.dialects.symbols import lift_inlined_meshes, meshes_by_name
from alpa.passes.analysis.graph import move_body, replace_op
from alpa.passes.analysis.input_checks import check_unplanned
from alpa.passes.base import Pass, PassError, Remark
from alpa.passes.sharding.manual import fixed_shardings
from alpa.passes.sharding.rules import SHARDING_RULE
from alpa.passes.simplify.lone_device import COLLECTIVES, DEVICE_NUMBERS, run_on_one_device

# Each says where the shards of its operand are, which is its result.
_PLACEMENTS = (
    sdy.AllGatherOp,
    sdy.AllSliceOp,
    sdy.AllToAllOp,
    sdy.CollectivePermuteOp,
    sdy.DataFlowEdgeOp,
    sdy.PropagationBarrierOp,
    sdy.ReshardOp,
    sdy.ShardingConstraintOp,
)
_OF_SEVERAL = (*COLLECTIVES, *DEVICE_NUMBERS, stablehlo.SendOp, stablehlo.RecvOp)
_UPSTREAM = "builtin.module(sdy-drop-sharding-and-mesh)"


@dataclass(frozen=True, kw_only=True)
class StripSdy(Pass):
    """Removes Shardy from a module; what is left is the program of one device."""

    name: ClassVar[str] = "strip-sdy"

    def run(self, module: ir.Module, remark: Remark) -> None:
        check_unplanned(main_function(module))
        lift_inlined_meshes(module)
        meshes = meshes_by_name(module)
        ops = list(walk(module.body))
        for op in reversed(ops):  # inner manual computations first
            if isinstance(op, sdy.ManualComputationOp):
                _unroll(op, meshes)
        for op in list(walk(module.body)):
            if SHARDING_RULE in op.attributes:
                del op.attributes[SHARDING_RULE]
            if isinstance(op, _PLACEMENTS):
                replace_op(op, [op.operands[0]])
            elif isinstance(op, sdy.ConstantOp):
                with ir.InsertionPoint(op), op.location:
                    replace_op(op, [stablehlo.constant(op.attributes["value"])])
            elif isinstance(op, sdy.ShardingGroupOp):
                op.operation.erase()
            elif op.operation.name.startswith("sdy.") and not isinstance(op, sdy.MeshOp):
                raise PassError(op, f"{op.operation.name} needs the devices of its mesh")
        run_on_one_device(module, list(walk(module.body)))
        with module.context:
            passmanager.PassManager.parse(_UPSTREAM).run(module.operation)


def _unroll(op: sdy.ManualComputationOp, meshes: Mapping[str, Mesh]) -> None:
    """Replaces a manual computation by copies of its body, one per device of its manual axes.

    Raises:
        PassError: the body of several devices needs the others.
    """
    inputs, outputs = fixed_shardings(op)
    axes = list(cast("Iterable[str]", sdy.ManualAxesAttr(op.attributes["manual_axes"])))
    mesh = meshes[(inputs + outputs)[0].mesh] if axes else Mesh(())
    devices = [dict(zip(axes, place, strict=True)) for place in _places(mesh, axes)]
    if len(devices) > 1:
        for inner in walk(body(op)):
            if isinstance(inner, _OF_SEVERAL):
                raise PassError(
                    inner,
                    f"{inner.operation.name} in a manual computation of {len(devices)} devices; "
                    "without Shardy the program is that of one",
                )
    made: list[list[ir.Value]] = []
    with ir.InsertionPoint(op), op.location:
        for device in devices:
            operands = [
                _Cut(mesh, axes, sharding).shard(value, device)
                for value, sharding in zip(op.operands, inputs, strict=True)
            ]
            made.append(_copy_body(op, operands))
        results = [
            _Cut(mesh, axes, sharding).whole([values[r] for values in made], devices)
            for r, sharding in enumerate(outputs)
        ]
    replace_op(op, results)


def _places(mesh: Mesh, axes: Sequence[str]) -> Iterator[tuple[int, ...]]:
    sizes = dict(mesh.axes)
    return product(*(range(sizes[axis]) for axis in axes))


def _copy_body(op: sdy.ManualComputationOp, operands: Sequence[ir.Value]) -> list[ir.Value]:
    """Copies the ops of the body before the op, and returns what the copy returns."""
    # A clone maps captured values inside regions by itself; its ops are then moved.
    clone = op.operation.clone(ip=False)
    returned = move_body(body(clone), operands, op)
    clone.erase()
    return returned


@dataclass(frozen=True)
class _Cut:
    """How the manual axes of a mesh cut a value."""

    mesh: Mesh
    axes: Sequence[str]
    sharding: Sharding

    def shard(self, value: ir.Value, device: Mapping[str, int]) -> ir.Value:
        """A device's shard of a whole value."""
        whole = ir.RankedTensorType(value.type).shape
        numbers = self._numbers(device)
        if all(count == 1 for _, count in numbers):
            return value
        sizes = [size // count for size, (_, count) in zip(whole, numbers, strict=True)]
        starts = [size * number for size, (number, _) in zip(sizes, numbers, strict=True)]
        stops = [start + size for start, size in zip(starts, sizes, strict=True)]
        return stablehlo.slice(value, starts, stops, [1] * len(sizes))

    def whole(self, shards: Sequence[ir.Value], devices: Sequence[Mapping[str, int]]) -> ir.Value:
        """The whole value of the devices' shards; of equal ones, the first device's."""
        at: dict[tuple[int, ...], ir.Value] = {}
        counts: list[int] = []
        for shard, device in zip(shards, devices, strict=True):
            numbers = self._numbers(device)
            counts = [count for _, count in numbers]
            at.setdefault(tuple(number for number, _ in numbers), shard)
        for dim in reversed(range(len(counts))):
            joined: dict[tuple[int, ...], ir.Value] = {}
            for place in product(*(range(count) for count in counts[:dim])):
                parts = [at[(*place, number)] for number in range(counts[dim])]
                joined[place] = stablehlo.concatenate(parts, dim) if len(parts) > 1 else parts[0]
            at = joined
        return at[()]

    def _numbers(self, device: Mapping[str, int]) -> list[tuple[int, int]]:
        """For each dimension, which of how many shards a device has."""
        found: list[tuple[int, int]] = []
        for dim in self.sharding.dims:
            number, count = 0, 1
            for axis in dim:
                if axis.name in device:
                    size = self.mesh.axis_size(axis)
                    number = number * size + self._number(axis, device[axis.name])
                    count *= size
            found.append((number, count))
        return found

    def _number(self, axis: AxisRef, place: int) -> int:
        """Which part of an axis, or of its sub-axis, a place on the whole axis is in."""
        if axis.sub is None:
            return place
        before, size = axis.sub
        after = dict(self.mesh.axes)[axis.name] // (before * size)
        return place // after % size
