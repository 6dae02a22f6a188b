"""For passes that order the ops of fragments by barriers, where that saves memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from alpa.dialects import func, ir, mpmd, stablehlo
from alpa.dialects.mpmd_types import MeshTensor, mesh_of
from alpa.dialects.plan import Plan, read_meshes
from alpa.dialects.sharding import Sharding, op_shardings, set_op_shardings
from alpa.passes.analysis.graph import replace_op
from alpa.passes.base import errors_at
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.device import Device
from alpa.passes.plan.annotated import Annotated
from alpa.passes.plan.attribute import cluster_here, plan_and_any_cluster
from alpa.passes.plan.predicted_memory import predicted_temporaries


def devices_here(function: func.FuncOp) -> Mapping[str, Device]:
    """The device of each mesh; none where the plan names no cluster, or one unknown here.

    Raises:
        PassError: the plan is malformed, or the cluster has no room for a mesh.
    """
    with errors_at(function):
        plan = Plan.read(function)
    if plan is None or not plan.cluster or cluster_here(plan.cluster) is None:
        return {}
    _, cluster = plan_and_any_cluster(function)
    return {mesh.name: cluster.of(mesh.hosts).device for mesh in read_meshes(function)}


def barrier(
    values: Sequence[ir.Value], fragment: mpmd.FragmentOp
) -> stablehlo.OptimizationBarrierOp:
    """Adds a barrier for values of a fragment, each in its planned sharding."""
    made = stablehlo.OptimizationBarrierOp(values)
    set_op_shardings(made, tuple(_sharding(value, fragment) for value in values))
    return made


def _sharding(value: ir.Value, fragment: mpmd.FragmentOp) -> Sharding:
    """The planned sharding of an argument or of what an op makes; without one, it is replicated."""
    found: Sharding | None = None
    if isinstance(value.owner, ir.Block):
        operand = fragment.operands[ir.BlockArgument(value).arg_number]
        found = MeshTensor.from_type(operand.type).sharding
    elif (of_results := op_shardings(value.owner)) is not None:
        found = of_results[ir.OpResult(value).result_number]
    whole = ((),) * ir.RankedTensorType(value.type).rank
    return Sharding.of(mesh_of(fragment), whole) if found is None else found


def reorder(
    fragment: mpmd.FragmentOp,
    mesh: LogicalMesh,
    device: Device,
    rewrite: Callable[[mpmd.FragmentOp], bool],
    at_most: int,
) -> None:
    """Replaces a fragment by a rewritten copy, if that is predicted to need little memory.

    Args:
        fragment: the fragment.
        mesh: its mesh.
        device: of its mesh.
        rewrite: changes a fragment; whether it did.
        at_most: bytes per device that the copy may need beside its arguments and results.

    Raises:
        PassError: a sharding does not fit the mesh.
    """
    copy = fragment.operation.clone(ip=ir.InsertionPoint(fragment)).opview
    assert isinstance(copy, mpmd.FragmentOp)
    if rewrite(copy) and predicted_temporaries(Annotated.of(copy, mesh), device) <= at_most:
        replace_op(fragment, copy.results)
    else:
        copy.erase()
