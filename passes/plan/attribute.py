"""The plan that `stage-mesh-partition` left on @main, and the cluster that it is for."""

from __future__ import annotations

from alpa.dialects import func
from alpa.dialects.checks import check_meshes
from alpa.dialects.plan import Plan, read_meshes
from alpa.passes.base import PassError, errors_at
from alpa.passes.cost.cluster import Cluster


def plan_and_cluster(function: func.FuncOp) -> tuple[Plan, Cluster]:
    """The plan and its cluster, in which the meshes have room.

    Raises:
        PassError: there is no plan, its cluster is unknown here, or has no room for a mesh.
    """
    with errors_at(function):
        plan = Plan.read(function)
        if plan is None:
            raise PassError(function, "no alpa.plan; run stage-mesh-partition before this pass")
        cluster = Cluster.parse(plan.cluster)
        check_meshes(function)
    for mesh in read_meshes(function):
        hosts, devices = len(mesh.hosts), len(mesh.devices) // len(mesh.hosts)
        if hosts > cluster.hosts or devices > cluster.devices_per_host:
            raise PassError(
                function,
                f"{mesh.name} of {hosts}x{devices} devices does not fit into the cluster "
                f"{plan.cluster}",
            )
    return plan, cluster
