"""The plan that `stage-mesh-partition` left on @main, and the cluster that it is for."""

from __future__ import annotations

from alpa.dialects import func
from alpa.dialects.attributes import Plan
from alpa.passes.base import PassError
from alpa.passes.cost.cluster import Cluster, ClusterError


def plan_and_cluster(function: func.FuncOp) -> tuple[Plan, Cluster]:
    """Raises PassError where there is no plan, or its cluster is unknown here."""
    try:
        plan = Plan.read(function)
        if plan is None:
            raise PassError(function, "no alpa.plan; run stage-mesh-partition before this pass")
        return plan, Cluster.parse(plan.cluster)
    except ClusterError as error:
        raise PassError(function, str(error)) from error
    except (ValueError, KeyError) as error:
        raise PassError(function, f"malformed alpa.plan: {error}") from error
