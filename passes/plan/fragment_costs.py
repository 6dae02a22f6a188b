"""What fragments take by their ops and their calls, for passes that merge or split them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from alpa.dialects import body, func, mpmd
from alpa.dialects.mpmd_types import mesh_of
from alpa.dialects.plan import MeshAssignment, Plan, read_meshes
from alpa.passes.cost.cluster import AnyCluster
from alpa.passes.plan.attribute import cluster_here
from alpa.passes.sharding.call_seconds import call_seconds
from alpa.passes.sharding.op_seconds import block_works, work_seconds


@dataclass(frozen=True)
class FragmentCosts:
    """What fragments take without what they send, if the plan says on which devices."""

    plan: Plan | None
    cluster: AnyCluster | None
    meshes: Mapping[str, MeshAssignment]

    @classmethod
    def of(cls, function: func.FuncOp) -> Self:
        plan = Plan.read(function)
        cluster = cluster_here(plan.cluster) if plan is not None and plan.cluster else None
        return cls(plan, cluster, {mesh.name: mesh for mesh in read_meshes(function)})

    def seconds(self, op: mpmd.FragmentOp) -> float:
        """Of the call, and of the ops, split evenly; 0 if the devices are not known."""
        mesh = self.meshes.get(mesh_of(op))
        if self.plan is None or self.cluster is None or mesh is None:
            return 0.0
        cluster, devices = self.cluster.of(mesh.hosts), len(mesh.devices)
        work = sum(
            float(work_seconds(it, cluster.device, 1 / devices))
            for it in block_works(body(op), cluster.device)
        )
        return work + call_seconds(op, self.plan.num_micro_batches, cluster, devices)
