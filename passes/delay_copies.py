"""Lets copies in other layouts wait until they are read, where memory would not suffice.

XLA for GPUs starts a collective as soon as its operand exists: for what a fragment gets as an
argument, that is the beginning. So gathered activations and parameters of all layers may exist at
once. The search counts each copy while the op runs that reads it (`sharding/copies.py`). A barrier
makes this true: the copy begins when what is read beside it exists.

This gives up that compute hides collectives. So the copies of a mesh wait if its step would need
more than its device has, as predicted from the fragments (`plan/memory_over_time.py`), and in those
fragments that are not predicted to need more then. XLA also begins early what needs a conversion
first, which the prediction does not know.

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<64x64xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
    !w = !mpmd.mesh_tensor<"mesh_0", tensor<64x64xf32>>
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%w: !w, %v: !x) -> !w attributes {
        topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
        alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>,
          logical_shape = array<i64: 2>}],
        alpa.plan = {cluster = "a100-80gb:1x2,memory=64KiB", num_micro_batches = 1 : i64,
          schedule = "1f1b", predicted_step_seconds = 0.0 : f64,
          predicted_peak_bytes = array<i64: 65536>}} {
      %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%w, %v) {alpa.part = "forward"}
          (%a: tensor<64x64xf32>, %b: tensor<64x64xf32>) {
        %0 = sdy.sharding_constraint %b <@mesh_0, [{}, {}]>
          {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {}]>]>} : tensor<64x64xf32>
        %1 = stablehlo.cholesky %a : tensor<64x64xf32>
        %2 = stablehlo.cholesky %1 : tensor<64x64xf32>
        %3 = stablehlo.dot_general %2, %0, contracting_dims = [1] x [0]
          : (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>
        mpmd.return %3 : tensor<64x64xf32>
      } : (!w, !x) -> !w
      return %y : !w
    }

**After** `delay-copies`::

    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(…) -> … {
      %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%w, %v) … {
        %1 = stablehlo.cholesky %a : tensor<64x64xf32>
        %2 = stablehlo.cholesky %1 : tensor<64x64xf32>
        %4:2 = stablehlo.optimization_barrier … %b, %2 : tensor<64x64xf32>, tensor<64x64xf32>
        %0 = sdy.sharding_constraint %4#0 <@mesh_0, [{}, {}]> … : tensor<64x64xf32>
        %3 = stablehlo.dot_general %4#1, %0 …
        mpmd.return %3 : tensor<64x64xf32>
      } : … -> …
      return %y : …
    }

**Requires**: a plan, as `insert-cross-mesh-reshard` leaves it.

**Ensures**: in a fragment that is changed, a collective on an argument, or on what is fused with
it, is made right before it is read. The barrier before it also passes on something that the same or
the next ops read, and that is not there from the beginning. Updates stay as they are. So does all
if no mesh's planned memory is at least 85 % of what there is, or if the plan's cluster is not known
here.

**Options**: none.

**Fails when** the plan is malformed, or a sharding does not fit its mesh.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

from alpa.dialects import body, ir, main_function, mpmd
from alpa.dialects.attributes import read_part
from alpa.dialects.mpmd_types import mesh_of
from alpa.dialects.plan import Plan
from alpa.passes.analysis.graph import first_reader
from alpa.passes.analysis.op_kinds import FUSIBLE
from alpa.passes.base import Pass, Remark
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.device import Device
from alpa.passes.plan.annotated import Annotated, logical_meshes
from alpa.passes.plan.memory_over_time import memory_over_time
from alpa.passes.plan.op_order import Scheduler, is_collective
from alpa.passes.plan.predicted_memory import predicted_memory
from alpa.passes.plan.reader import read_planned
from alpa.passes.plan.reordering import barrier, devices_here, reorder

_FREE = FUSIBLE | {"stablehlo.reshape", "sdy.sharding_constraint"}
_NEAR = 0.85
"""Of a device's memory, from which on the step's memory is predicted. The plans of nine models of
docs/figures.md need up to 1.11 times what the search counts; tiny ones may need more."""


@dataclass(frozen=True, kw_only=True)
class DelayCopies(Pass):
    """Lets copies in other layouts wait until they are read, where memory would not suffice."""

    name: ClassVar[str] = "delay-copies"

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = main_function(module)
        devices = devices_here(function)
        program = read_planned(module) if devices else None
        if program is None or not _is_near(program.plan, devices.values()):
            return
        inside, meshes = predicted_memory(module), logical_meshes(function)
        full = {
            it.mesh
            for it in memory_over_time(program, inside)
            if it.peak > devices[it.mesh].memory and _is_gpu(devices[it.mesh])
        }
        fragments = [op for op in body(function).operations if isinstance(op, mpmd.FragmentOp)]
        for fragment, memory in zip(fragments, inside, strict=True):
            name = mesh_of(fragment)
            if name in full and read_part(fragment) != "update":
                rewrite = partial(_delay, mesh=meshes[name])
                reorder(fragment, meshes[name], devices[name], rewrite, memory.temporaries)


def _is_near(plan: Plan, devices: Iterable[Device]) -> bool:
    """Whether the planned memory of GPUs is most of what they have."""
    return any(
        _is_gpu(device) and peak >= _NEAR * device.memory
        for device, peak in zip(devices, plan.predicted_peak_bytes, strict=False)
    )


def _is_gpu(device: Device) -> bool:
    return Scheduler.of(device).is_gpu


def _delay(fragment: mpmd.FragmentOp, mesh: LogicalMesh) -> bool:
    """Lets the collectives of a fragment wait; whether there are any."""
    annotated, block = Annotated.of(fragment, mesh), body(fragment)
    ops = list(block.operations)
    place = {op: number for number, op in enumerate(ops)}
    early: set[ir.Value] = set(block.arguments)
    """what XLA has at the beginning: arguments, and what is fused or made of them"""
    late: dict[ir.Value, int] = {}
    """what it makes later, and the number of the op that makes it"""
    collectives: list[ir.OpView] = []
    for number, op in enumerate(ops):
        is_sent = is_collective(op, annotated)
        if (is_sent or op.operation.name in _FREE) and early.issuperset(op.operands):
            early.update(op.results)
            if is_sent:
                collectives.append(op)
        else:
            made = (it for it in op.results if isinstance(it.type, ir.RankedTensorType))
            late.update(dict.fromkeys(made, number))
    # The hash of an op depends on its operands: all are looked up before any changes.
    starts = [
        (op, place[first_reader(op.results[0], block).opview])
        for op in collectives
        if list(op.results[0].uses)
    ]
    waiting = [_wait(op, ops[start:], start, late, fragment) for op, start in starts]
    return any(waiting)


def _wait(
    op: ir.OpView,
    readers: Sequence[ir.OpView],
    start: int,
    late: Mapping[ir.Value, int],
    fragment: mpmd.FragmentOp,
) -> bool:
    """Puts a collective right before the first op that reads its result, behind a barrier.

    Args:
        op: the collective.
        readers: the ops from that one on, of which the first is `start`. What one of them reads,
            and is made late, but before, passes the barrier, too.
        late: as in `_delay`.
        fragment: its fragment.
    """
    for reader in readers:
        for number, value in enumerate(reader.operands):
            if late.get(value, start) < start:
                op.operation.move_before(readers[0].operation)
                with ir.InsertionPoint(op), op.location:
                    passed = barrier([op.operands[0], value], fragment)
                op.operands[0], reader.operands[number] = passed.results
                return True
    return False
