"""Lets the second computation of a layer wait for the gradients of the layers after it.

Where activations are computed again, a layer's backward part begins with a barrier: it waits for a
cotangent (`stages/segments.py`, `analysis/recomputation.py`). The products that give gradients of
weights read activations, too, but no cotangent waits for them. XLA's scheduler for Hopper runs what
no collective waits for at last, so that the activations of all layers exist at once. So each
barrier passes on the gradients that are ready before it.

Waiting for all of them may keep other values longer. A fragment is changed if it needs less memory
then, as predicted for the device of its mesh (`plan/predicted_memory.py`).

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
    sdy.mesh @mesh_0 = <["a"=1]>
    func.func public @main(%x: !x, %d: !x) -> (!x, !x) attributes {
        topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>,
        alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0>,
          logical_shape = array<i64: 1>}],
        alpa.plan = {cluster = "cpu:1x1", num_micro_batches = 1 : i64, schedule = "1f1b",
          predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
      %g, %h = mpmd.fragment<mesh="mesh_0", origin=["layer_1"(1), "layer_0"(1)]> (%x, %d)
          {alpa.part = "backward"} (%a: tensor<4x4xf32>, %e: tensor<4x4xf32>) {
        %t = stablehlo.cholesky %a : tensor<4x4xf32>
        %c = stablehlo.dot_general %e, %t, contracting_dims = [1] x [1]
          : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
        %0 = stablehlo.dot_general %t, %e, contracting_dims = [0] x [0]
          : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
        %1:2 = stablehlo.optimization_barrier %a, %c : tensor<4x4xf32>, tensor<4x4xf32>
        %u = stablehlo.cholesky %1#0 : tensor<4x4xf32>
        %2 = stablehlo.dot_general %u, %1#1, contracting_dims = [0] x [0]
          : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
        mpmd.return %0, %2 : tensor<4x4xf32>, tensor<4x4xf32>
      } : (!x, !x) -> (!x, !x)
      return %g, %h : !x, !x
    }

**After** `wait-for-gradients`::

    sdy.mesh @mesh_0 = <["a"=1]>
    func.func public @main(…) -> … {
      … = mpmd.fragment<mesh="mesh_0", origin=["layer_1"(1), "layer_0"(1)]> (%x, %d) … {
        %t = stablehlo.cholesky %a : tensor<4x4xf32>
        %c = stablehlo.dot_general %e, %t …
        %0 = stablehlo.dot_general %t, %e …
        %1:3 = stablehlo.optimization_barrier … %a, %c, %0
          : tensor<4x4xf32>, tensor<4x4xf32>, tensor<4x4xf32>
        %u = stablehlo.cholesky %1#0 : tensor<4x4xf32>
        %2 = stablehlo.dot_general %u, %1#1 …
        mpmd.return %1#2, %2 : tensor<4x4xf32>, tensor<4x4xf32>
      } : … -> …
      return … : …
    }

**Requires**: a plan, as `insert-cross-mesh-reshard` leaves it, or `merge-fragments`.

**Ensures**: in a fragment that is changed, what is made before a barrier of several values, and
only read after the last one, has passed the first that follows it. So have gradients that the
fragment returns, or that the updates read that are merged with it. Without a cluster in the plan,
nothing changes.

**Options**: none.

**Fails when** the plan is malformed, or a sharding does not fit its mesh.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from alpa.dialects import body, ir, main_function, mpmd, stablehlo
from alpa.dialects.attributes import read_part
from alpa.dialects.mpmd_types import mesh_of
from alpa.passes.analysis.graph import first_reader, replace_op
from alpa.passes.analysis.op_kinds import BROADCASTS, SOURCES
from alpa.passes.base import Pass, Remark
from alpa.passes.plan.annotated import Annotated, logical_meshes
from alpa.passes.plan.predicted_memory import predicted_temporaries
from alpa.passes.plan.reordering import barrier, devices_here, reorder

_FREE = SOURCES | BROADCASTS
"""What is made where it is read."""


@dataclass(frozen=True, kw_only=True)
class WaitForGradients(Pass):
    """Lets the second computation of a layer wait for the gradients of the layers after it."""

    name: ClassVar[str] = "wait-for-gradients"

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = main_function(module)
        devices = devices_here(function)
        meshes = logical_meshes(function) if devices else {}
        for op in list(body(function).operations) if devices else ():
            if not isinstance(op, mpmd.FragmentOp) or read_part(op) != "backward":
                continue
            if any(map(_is_gate, body(op).operations)):
                mesh, device = meshes[mesh_of(op)], devices[mesh_of(op)]
                now = predicted_temporaries(Annotated.of(op, mesh), device)
                reorder(op, mesh, device, _wait, now - 1)


def _wait(fragment: mpmd.FragmentOp) -> bool:
    """Rewrites the barriers of a fragment; whether any waits for more now."""
    block = body(fragment)
    ops = list(block.operations)
    gates = [number for number, op in enumerate(ops) if _is_gate(op)]
    last, found, begin = ops[gates[-1]].operation, False, 0
    for number in gates:
        values = [
            value
            for op in ops[begin:number]
            if op.operation.name not in _FREE
            for value in op.results
            if isinstance(value.type, ir.RankedTensorType)
            and list(value.uses)
            and last.is_before_in_block(first_reader(value, block))
        ]
        if values:
            _pass_on(ops[number], values, fragment)
            found = True
        begin = number + 1
    return found


def _is_gate(op: ir.OpView) -> bool:
    """Whether something waits at an op for something else."""
    return isinstance(op, stablehlo.OptimizationBarrierOp) and len(op.operands) > 1


def _pass_on(gate: ir.OpView, values: Sequence[ir.Value], fragment: mpmd.FragmentOp) -> None:
    """Adds values to a barrier, behind which they are read."""
    with ir.InsertionPoint(gate), gate.location:
        larger = barrier([*gate.operands, *values], fragment)
    results, count = list(larger.results), len(gate.results)
    replace_op(gate, results[:count])
    for value, new in zip(values, results[count:], strict=True):
        value.replace_all_uses_except(new, larger.operation)
