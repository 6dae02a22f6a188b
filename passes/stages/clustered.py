"""A program of layers that is to be cut into stages, with what it is cut for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from alpa.dialects import body, func
from alpa.dialects.attributes import Argument, Plan, Result, read_arguments, read_results
from alpa.dialects.mpmd_types import Origin
from alpa.passes.analysis.graph import Graph
from alpa.passes.cost.cluster import Cluster
from alpa.passes.sharding.baselines import Intra
from alpa.passes.stages.boundary import Boundary, boundary_of
from alpa.passes.stages.remat import Remat


@dataclass(frozen=True, kw_only=True, eq=False)
class Clustered:
    """A program whose ops are named computations, as `layer-cluster` leaves it."""

    function: func.FuncOp
    cluster: Cluster
    plan: Plan
    intra: Intra
    remat: Remat
    reserve: float
    """the share of each device's memory that stages leave free"""
    widened_bytes: int
    """what all sums over the micro-batches hold more than in the gradients' own types"""

    @cached_property
    def graph(self) -> Graph:
        """The computations and their values."""
        return Graph.of(body(self.function))

    @cached_property
    def arguments(self) -> Sequence[Argument]:
        """The attributes of the function's arguments."""
        return read_arguments(self.function)

    @cached_property
    def results(self) -> Sequence[Result]:
        """The attributes of the function's results."""
        return read_results(self.function)

    @cached_property
    def origins(self) -> Sequence[Origin]:
        """The origin of each computation."""
        return [Origin.from_attr(op.attributes["origin"]) for op in self.graph.ops]

    @cached_property
    def num_layers(self) -> int:
        """How many layers there are; a program without any counts as one."""
        return 1 + max((n for o in self.origins if (n := o.layer) is not None), default=0)

    @cached_property
    def boundary(self) -> Boundary:
        """What crosses between stages."""
        return boundary_of(self.graph, self.arguments, self.results, self.num_layers)

    @cached_property
    def left(self) -> Cluster:
        """The cluster with the memory that is left without the reserve."""
        memory = int(self.cluster.device.memory * (1 - self.reserve))
        return replace(self.cluster, device=replace(self.cluster.device, memory=memory))
