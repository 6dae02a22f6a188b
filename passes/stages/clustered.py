"""A program of layers to cut into stages, the cluster that it is cut for, and checks of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf

from alpa.dialects import body, func, mpmd
from alpa.dialects.attributes import (
    Argument,
    Result,
    input_number,
    output_number,
    read_arguments,
    read_results,
)
from alpa.dialects.mpmd_types import Origin
from alpa.dialects.plan import Plan
from alpa.passes.analysis.graph import Graph
from alpa.passes.base import PassError, Show, quiet
from alpa.passes.cost.cluster import AnyCluster, Cluster
from alpa.passes.sharding.baselines import Intra
from alpa.passes.sharding.op_seconds import computation_seconds
from alpa.passes.sharding.user_shardings import UserShardings
from alpa.passes.stages.boundary import Boundary, boundary_of
from alpa.passes.stages.remat import Remat

USELESS = 1.25
"""Times the seconds of a step: where T of each cut is as long, none is of use. T supposes that a
forward and the parts of a backward take equally long, and the simulated step may be shorter."""


@dataclass(frozen=True, eq=False)
class Layers:
    """What is read of named computations, once for all searches of their stages."""

    function: func.FuncOp

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
        return [Origin.of(op) for op in self.graph.ops]

    @cached_property
    def number(self) -> int:
        """How many layers there are; a program without any counts as one."""
        return 1 + max((n for o in self.origins if (n := o.layer) is not None), default=0)

    @cached_property
    def boundary(self) -> Boundary:
        """What crosses between stages."""
        return boundary_of(self.graph, self.arguments, self.results, self.number)


@dataclass(frozen=True, kw_only=True, eq=False)
class Clustered:
    """A program whose ops are named computations, as `layer-cluster` leaves it."""

    layers: Layers
    cluster: AnyCluster
    plan: Plan
    intra: Intra
    remat: Remat
    reserve: float
    """the share of each device's memory that stages leave free, or if negative, may exceed"""
    widened_bytes: int
    """by how many bytes `accumulate_dtype` enlarges all sums over the micro-batches"""
    given: UserShardings | None = None
    """of the program itself"""
    within: float = inf
    """seconds of a step; where no cut is estimated to take less, none is of use"""
    show: Show = quiet
    """hears how far the search is"""

    @property
    def function(self) -> func.FuncOp:
        """With the computations."""
        return self.layers.function

    @property
    def graph(self) -> Graph:
        """The computations and their values."""
        return self.layers.graph

    @property
    def arguments(self) -> Sequence[Argument]:
        """The attributes of the function's arguments."""
        return self.layers.arguments

    @property
    def results(self) -> Sequence[Result]:
        """The attributes of the function's results."""
        return self.layers.results

    @property
    def origins(self) -> Sequence[Origin]:
        """The origin of each computation."""
        return self.layers.origins

    @property
    def num_layers(self) -> int:
        """How many layers there are; a program without any counts as one."""
        return self.layers.number

    @property
    def boundary(self) -> Boundary:
        """What crosses between stages."""
        return self.layers.boundary

    @property
    def trains(self) -> bool:
        """Whether there are backward parts."""
        return any(origin.part == "backward" for origin in self.origins)

    @property
    def always_rematerialised(self) -> frozenset[int]:
        """The layers that no stage leaves as they are."""
        return frozenset(range(self.num_layers) if self.remat == "layer" else ())

    @cached_property
    def left(self) -> tuple[Cluster, ...]:
        """The kinds of hosts with the memory that is left without the reserve."""

        def less(kind: Cluster) -> Cluster:
            memory = int(kind.device.memory * (1 - self.reserve))
            return replace(kind, device=replace(kind.device, memory=memory))

        return tuple(map(less, self.cluster.kinds))


def even_seconds(function: func.FuncOp, cluster: AnyCluster, num_micro_batches: int) -> float:
    """A lower bound of the seconds of a step, for every plan of a program cut into layers.

    It is the roofline compute, of each computation on the fastest kind of device, split evenly over
    all devices, with nothing sent and no device waiting.
    """
    seconds = 0.0
    bounding = [kind.for_bounds for kind in cluster.kinds]
    for op in body(function).operations:
        if isinstance(op, mpmd.NamedComputationOp):
            is_update = Origin.of(op).part == "update"
            fastest = min(computation_seconds(op, kind) for kind in bounding)
            seconds += fastest * (1 if is_update else num_micro_batches)
    return seconds / cluster.num_devices


def require_roles(
    function: func.FuncOp, arguments: Sequence[Argument], results: Sequence[Result]
) -> None:
    """Checks that arguments and results have the roles that several micro-batches need.

    Raises:
        PassError: a role is missing.
    """
    for a, argument in enumerate(arguments):
        if argument.role is None or (argument.role == "batch" and argument.batch_dim is None):
            raise PassError(
                function,
                f"cannot tell whether argument {input_number(a, argument)} is batch, state, key or "
                "constant, which several micro-batches need; set alpa.role (and alpa.batch_dim) on "
                "it, or name it in a file of roles (alpa-plan --roles)",
            )
    for r, result in enumerate(results):
        if result.role is None:
            raise PassError(
                function,
                f"cannot tell how result {output_number(r, result)} is made from those of the "
                'micro-batches; set alpa.result = "concat:<dim>", "mean", "sum", "last" or '
                '"state:<argument>" on it, or name it in a file of roles (alpa-plan --roles)',
            )


def require_forwards(function: func.FuncOp) -> None:
    """Checks that a program has no backward part and no update.

    Raises:
        PassError: at the first one.
    """
    for op in list(body(function).operations)[:-1]:
        origin = Origin.of(op)
        if origin.part != "forward":
            raise PassError(
                op,
                "objective=throughput is for programs of forwards only, and this is the "
                f"{origin.part} part {origin.name}; leave the objective out to minimise the "
                "seconds of a training step",
            )
