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
from alpa.dialects.plan import Plan, read_meshes
from alpa.dialects.sharding import Sharding, op_shardings, set_op_shardings
from alpa.passes.analysis.graph import first_reader
from alpa.passes.base import Pass, Remark, errors_at
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.device import Device
from alpa.passes.plan.annotated import Annotated, logical_meshes
from alpa.passes.plan.attribute import plan_and_any_cluster
from alpa.passes.plan.predicted_memory import predicted_temporaries


@dataclass(frozen=True, kw_only=True)
class WaitForGradients(Pass):
    """Lets the second computation of a layer wait for the gradients of the layers after it."""

    name: ClassVar[str] = "wait-for-gradients"

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = main_function(module)
        with errors_at(function):
            plan = Plan.read(function)
        if plan is None or not plan.cluster:
            return
        _, cluster = plan_and_any_cluster(function)
        devices = {it.name: cluster.of(it.hosts).device for it in read_meshes(function)}
        meshes = logical_meshes(function)
        for op in list(body(function).operations):
            if isinstance(op, mpmd.FragmentOp) and read_part(op) == "backward":
                _choose(op, meshes[mesh_of(op)], devices[mesh_of(op)])


def _choose(fragment: mpmd.FragmentOp, mesh: LogicalMesh, device: Device) -> None:
    """Replaces a fragment by one whose barriers wait for gradients, if that needs less memory."""
    waiting = fragment.operation.clone(ip=ir.InsertionPoint(fragment)).opview
    assert isinstance(waiting, mpmd.FragmentOp)
    if _wait(waiting):
        now, then = (
            predicted_temporaries(Annotated.of(it, mesh), device) for it in (fragment, waiting)
        )
        if then < now:
            for old, new in zip(fragment.results, waiting.results, strict=True):
                old.replace_all_uses_with(new)
            fragment.erase()
            return
    waiting.erase()


def _wait(fragment: mpmd.FragmentOp) -> bool:
    """Rewrites the barriers of a fragment; whether any waits for more now."""
    block = body(fragment)
    ops = list(block.operations)
    gates = [number for number, op in enumerate(ops) if _is_gate(op)]
    if not gates:
        return False
    last, found, begin = ops[gates[-1]].operation, False, 0
    for number in gates:
        values = [
            value
            for op in ops[begin:number]
            for value in op.results
            if isinstance(value.type, ir.RankedTensorType)
            and list(value.uses)
            and last.is_before_in_block(first_reader(value, block))
        ]
        if values:
            _pass_on(ops[number], values, mesh_of(fragment))
            found = True
        begin = number + 1
    return found


def _is_gate(op: ir.OpView) -> bool:
    """Whether an op makes activations wait for a cotangent."""
    return isinstance(op, stablehlo.OptimizationBarrierOp) and len(op.operands) > 1


def _pass_on(barrier: ir.OpView, values: Sequence[ir.Value], mesh: str) -> None:
    """Adds values to a barrier, behind which they are read."""
    with ir.InsertionPoint(barrier), barrier.location:
        larger = stablehlo.OptimizationBarrierOp([*barrier.operands, *values])
    shardings = [_sharding(value, mesh) for value in (*barrier.results, *values)]
    set_op_shardings(larger, tuple(shardings))
    count = len(barrier.results)
    for old, new in zip(barrier.results, larger.results, strict=False):
        old.replace_all_uses_with(new)
    barrier.erase()
    for value, new in zip(values, list(larger.results)[count:], strict=True):
        value.replace_all_uses_except(new, larger.operation)


def _sharding(value: ir.Value, mesh: str) -> Sharding:
    """The planned sharding of what an op makes; without one, it is replicated."""
    result = ir.OpResult(value)
    shardings = op_shardings(result.owner)
    if shardings is None:
        return Sharding.of(mesh, ((),) * ir.RankedTensorType(value.type).rank)
    return shardings[result.result_number]
