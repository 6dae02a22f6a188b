"""The plan that `stage-mesh-partition` left on @main, and the cluster that it is for."""

from __future__ import annotations

from alpa.dialects import func
from alpa.dialects.checks import check_meshes
from alpa.dialects.plan import Plan, read_meshes
from alpa.passes.base import PassError, errors_at
from alpa.passes.cost.cluster import AnyCluster, Cluster, ClusterError, MixedCluster, parse_cluster


def plan_and_cluster(function: func.FuncOp) -> tuple[Plan, Cluster]:
    """The plan and its cluster of equal hosts, in which the meshes have room.

    Raises:
        PassError: as `plan_and_any_cluster`, or the hosts are of several kinds.
    """
    plan, cluster = plan_and_any_cluster(function)
    if isinstance(cluster, MixedCluster):
        raise PassError(
            function,
            f"the plan is for hosts of several kinds, {plan.cluster}, and this is for one kind",
        )
    return plan, cluster


def plan_and_any_cluster(function: func.FuncOp) -> tuple[Plan, AnyCluster]:
    """The plan and its cluster, in which the meshes have room.

    Raises:
        PassError: there is no plan, its cluster is unknown here, or has no room for a mesh.
    """
    with errors_at(function):
        plan = Plan.read(function)
        if plan is None:
            raise PassError(function, "no alpa.plan; run stage-mesh-partition before this pass")
        cluster = parse_cluster(plan.cluster)
        check_meshes(function)
    for mesh in read_meshes(function):
        hosts, devices = len(mesh.hosts), len(mesh.devices) // len(mesh.hosts)
        kinds = {cluster.number_of((host,)) for host in mesh.hosts if host < cluster.hosts}
        is_there = max(mesh.hosts) < cluster.hosts and len(kinds) == 1
        if not is_there or devices > cluster.of(mesh.hosts).devices_per_host:
            raise PassError(
                function,
                f"{mesh.name} of {hosts}x{devices} devices does not fit into the cluster "
                f"{plan.cluster}",
            )
    return plan, cluster


def cluster_here(text: str) -> AnyCluster | None:
    """The cluster of a plan; None if it is not known here, such as a file."""
    try:
        return parse_cluster(text)
    except ClusterError:
        return None
