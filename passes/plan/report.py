"""A planned module in numbers: what `PLAN.json` holds, what the plan's table and the API show.

    report = PlanReport.of(module)
    report.stages[0].forward_seconds
    report.to_json()

Everything is read from the IR: `alpa.plan`, `alpa.meshes`, `alpa.solver`, the fragments' predicted
seconds, and the shardings of arguments, activations and transfers. Only `phases`, the seconds of
the search, and `tried`, its candidates, are passed in by the caller: neither is part of the plan,
and both may differ between two searches that find the same plan.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import ceil
from typing import Any, Self

from alpa.dialects import ir, main_function
from alpa.dialects.attributes import Part
from alpa.dialects.checks import check_planned
from alpa.dialects.plan import (
    AccumulateDtype,
    Dropped,
    MeshAssignment,
    SolverReport,
    read_meshes,
    read_solver_reports,
)
from alpa.passes.base import errors_at
from alpa.passes.plan.annotated import annotated_fragments
from alpa.passes.plan.attribute import cluster_here
from alpa.passes.plan.combined_collectives import combined_counts
from alpa.passes.plan.data import Program
from alpa.passes.plan.predicted_collectives import collectives_in_order, merged
from alpa.passes.plan.reader import read_planned
from alpa.passes.plan.split_factors import SplitFactors, in_words
from alpa.passes.plan.transfer_report import TransferReport, transfers_of
from alpa.passes.schedules.planned import label
from alpa.passes.sharding.rules import populated
from alpa.passes.tried import Tried

_STATUSES = ("optimal", "within_gap", "time_limit")
"""From the strongest statement to the weakest."""
_JSON_NAMES = {"source": "from", "target": "to"}


@dataclass(frozen=True, kw_only=True)
class SolverSummary:
    """What is proven about the shardings, all meshes together; seconds per step.

    `status` is the weakest status of all meshes. `bound` is a lower bound of the problems that were
    solved. `folded_bound` is a lower bound of the problems in which equal layers are sharded alike;
    None if there are no equal layers. If a mesh's `problem` is `folded`, status and bounds refer to
    the folded problem: a plan that shards equal layers differently may cost less.
    """

    status: str
    objective: float
    bound: float
    folded_bound: float | None
    gap: float
    variables: int
    meshes: tuple[SolverReport, ...]

    @classmethod
    def of(cls, reports: tuple[SolverReport, ...]) -> Self | None:
        """None before `ilp-shard-annotate`."""
        if not reports:
            return None
        objective, bound = sum(it.objective for it in reports), sum(it.bound for it in reports)
        folded = [it.bound if it.folded_bound is None else it.folded_bound for it in reports]
        has_folded = any(it.folded_bound is not None for it in reports)
        return cls(
            status=max((it.status for it in reports), key=_STATUSES.index),
            objective=objective,
            bound=bound,
            folded_bound=sum(folded) if has_folded else None,
            gap=(objective - bound) / objective if objective else 0.0,
            variables=sum(it.variables for it in reports),
            meshes=reports,
        )


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """One mesh: predicted seconds of one micro-batch (of the update: per step), bytes per device.

    `activation_bytes` is what each micro-batch in flight keeps for the backward part;
    `parameter_bytes` and `optimizer_bytes` are (on a device, of the whole tensors).
    """

    mesh: str
    numbers: tuple[int, ...]
    """of its stages, in the order of their layers; several under some schedules"""
    layers: tuple[str, ...]
    remat: tuple[str, ...]
    """the layers whose backward part recomputes activations"""
    forward_seconds: float
    backward_seconds: float
    update_seconds: float
    state_bytes: int
    parameter_bytes: tuple[int, int]
    optimizer_bytes: tuple[int, int]
    activation_bytes: int
    peak_bytes: int | None
    """None where the plan says nothing of it"""
    compute_seconds: float | None
    """of a step, split evenly over the devices, nothing sent; None before shardings are chosen"""
    splits: str
    """what is split over which axis, in words; empty before shardings are chosen"""
    sent_bytes: int | None
    """by each device in the collectives of a step; None before shardings are chosen"""
    num_collectives: int | None
    """in a step, as XLA partitions the stage"""
    num_combined: int | None
    """how many are left once the devices' compiler has combined them"""
    priced_starts: int | None
    """as how many the search prices them"""

    @property
    def seconds(self) -> float:
        return self.forward_seconds + self.backward_seconds

    @property
    def held(self) -> str:
        """What part of the state a device holds, in words; empty without state."""
        parts = [
            f"{_part_of(here, whole)} {what}"
            for (here, whole), what in (
                (self.parameter_bytes, "the parameters"),
                (self.optimizer_bytes, "the optimizer's state"),
            )
            if whole
        ]
        return f"a device holds {' and '.join(parts)}" if parts else ""

    @property
    def strategy(self) -> str:
        """The splits and what a device holds, in words; empty before shardings are chosen."""
        return "; ".join(text for text in (self.splits, self.held) if text) if self.splits else ""


@dataclass(frozen=True, kw_only=True)
class CollectiveReport:
    """Collectives of one kind and size on a mesh.

    `axis` names the axes, joined by `+`; `bytes` are what one device holds of the full array;
    `count` is how many there are in a step, `sent_bytes` what a device sends in all of them on a
    ring, `starts` as how many the search prices them where the compiler combines small ones.
    """

    mesh: str
    part: Part
    kind: str
    axis: str
    bytes: int
    count: int
    sent_bytes: float
    starts: float


MEMORY_MARGIN = 0.1
"""By which share XLA may need more memory for GPUs than the search predicts: the largest one of the
fullest meshes of the verified plans in docs/figures.md, rounded up."""


@dataclass(frozen=True, kw_only=True)
class PlanReport:
    """A plan in numbers. Seconds and bytes throughout; `predicted_peak_bytes` is per mesh.

    It has the entries of `alpa.plan` (`dialects/plan.py`) and what follows from the other IR.
    """

    cluster: str
    num_micro_batches: int
    schedule: str
    """its name; `own` for a table of the user's"""
    estimated_step_seconds: float
    """T of the stages by the costs that they were cut by"""
    estimated_step_bound: float
    """no cut has a smaller T, if transfers take what is estimated"""
    predicted_step_seconds: float
    predicted_peak_bytes: tuple[int, ...]
    accumulate_dtype: AccumulateDtype
    runner_up: str
    """the schedule that comes second; empty if one only was planned"""
    runner_up_seconds: float
    """its predicted step"""
    runner_up_is_estimated: bool
    """whether that is the estimate of its stages, because their plan was not finished"""
    dropped: tuple[Dropped, ...]
    """candidates that the search left out because a solver ran out of time or failed"""
    micro_batches: str | None
    """`alpa.micro_batches`, such as `exact`; None without `combine-micro-batches`"""
    memory_bytes: int | None
    """of a device, of several kinds the largest; None where the plan names no cluster that is known
    here"""
    memory_margin: float | None
    """by which share of `predicted_peak_bytes` XLA may need more; None for virtual CPU devices"""
    solver: SolverSummary | None
    meshes: tuple[MeshAssignment, ...]
    stages: tuple[StageReport, ...]
    transfers: tuple[TransferReport, ...]
    collectives: tuple[CollectiveReport, ...]
    """none before shardings are chosen, or where the plan's cluster is not known here"""
    search_seconds: float = 0.0
    phases: Mapping[str, float] = field(default_factory=dict[str, float])
    tried: Tried | None = None
    """what the search tried; None if the plan was not searched here"""

    @classmethod
    def of(cls, module: ir.Module) -> Self:
        """The report of a module that `stage-mesh-partition`, at least, has run on.

        Raises:
            CheckError, PassError: the module is not a planned one.
        """
        check_planned(module)
        program, function = read_planned(module), main_function(module)
        with errors_at(function):
            solver = SolverSummary.of(tuple(read_solver_reports(function)))
        cluster = cluster_here(program.plan.cluster)
        devices = () if cluster is None else [kind.device for kind in cluster.kinds]
        memory = max((device.memory for device in devices), default=None)
        inside = _Inside()
        # Which way a change of layout takes depends on the links.
        knows_links = memory is not None or not program.plan.cluster
        if knows_links and all(value.sharding is not None for value in program.values):
            inside = _Inside.of(module, program)
        return cls(
            schedule=label(program.plan.schedule),
            **{name: it for name, it in vars(program.plan).items() if name != "schedule"},
            micro_batches=program.micro_batches,
            memory_bytes=memory,
            memory_margin=MEMORY_MARGIN if any(it.name != "CPU" for it in devices) else None,
            solver=solver,
            meshes=tuple(read_meshes(function)),
            stages=tuple(_stage(program, n, inside) for n in range(len(program.meshes))),
            transfers=tuple(transfers_of(program)),
            collectives=tuple(inside.collectives),
        )

    def searched(self, phases: Mapping[str, float], tried: Tried | None = None) -> Self:
        """The same with the seconds of each phase of the search, and what it tried."""
        total = sum(phases.values())
        return replace(self, phases=dict(phases), search_seconds=total, tried=tried)

    def to_json(self) -> str:
        """The text of `PLAN.json`: the attributes by their names, transfers `from` and `to`."""
        names = [it.name for it in fields(PlanReport)]  # without those of a subclass
        report = {name: _plain(getattr(self, name)) for name in names}
        return json.dumps(report, indent=2, allow_nan=False)


def _part_of(here: int, whole: int) -> str:
    """`all`, `1/4 of`, `37% of`."""
    ways = whole / max(1, here)
    if ways < 1.02:
        return "all"
    if abs(ways - round(ways)) < 0.02 * ways:
        return f"1/{round(ways)} of"
    return f"{here / whole:.0%} of"


def _plain(value: Any) -> Any:
    """What JSON can hold: fields and properties by their names, null for what is not finite."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if not is_dataclass(value):
        return value
    names = [it.name for it in fields(value)]
    names += [name for name, it in vars(type(value)).items() if isinstance(it, property)]
    return {_JSON_NAMES.get(name, name): _plain(getattr(value, name)) for name in names}


@dataclass(frozen=True)
class _Inside:
    """What the shardings of a plan say of the insides of its meshes; nothing before there are any.

    By mesh: what is split over which axis, in words, and how many collectives are left of those of
    a step once the devices' compiler has combined them.
    """

    splits: dict[str, str] = field(default_factory=dict[str, str])
    combined: Counter[str] = field(default_factory=Counter[str])
    collectives: list[CollectiveReport] = field(default_factory=list[CollectiveReport])

    @classmethod
    def of(cls, module: ir.Module, program: Program) -> Self:
        inside = cls()
        with populated(module) as rule_of:
            fragments = list(zip(program.fragments, annotated_fragments(module), strict=True))
            factors = SplitFactors(main_function(module), rule_of)
            for mesh in program.meshes:
                forward = (
                    annotated
                    for one, annotated in fragments
                    if one.mesh == mesh.name and one.runs_forward
                )
                nothing = "one device" if len(mesh.devices) == 1 else "no contraction to split"
                inside.splits[mesh.name] = in_words(factors.of(forward)) or nothing
            for one, annotated in fragments:
                found, runs = collectives_in_order(annotated), program.runs(one)
                inside.combined[one.mesh] += runs * combined_counts(found).total()
                inside.collectives.extend(
                    CollectiveReport(
                        mesh=one.mesh,
                        part=one.part,
                        kind=it.kind,
                        axis="+".join(it.axes),
                        bytes=it.bytes,
                        count=runs * it.count,
                        sent_bytes=runs * it.sent,
                        starts=runs * it.starts,
                    )
                    for it in merged(placed.collective for placed in found)
                )
        return inside


def _stage(program: Program, number: int, inside: _Inside) -> StageReport:
    mesh, peaks = program.meshes[number].name, program.plan.predicted_peak_bytes
    fragments = [fragment for fragment in program.fragments if fragment.mesh == mesh]
    forward = [fragment for fragment in fragments if fragment.runs_forward]
    compute = [
        program.runs(fragment) * fragment.compute_seconds
        for fragment in fragments
        if fragment.compute_seconds is not None
    ]

    known = mesh in inside.splits
    collectives = [it for it in inside.collectives if it.mesh == mesh]

    def seconds(part: Part) -> float:
        return sum(fragment.seconds for fragment in fragments if fragment.part == part)

    def held(values: frozenset[int]) -> tuple[int, int]:
        here = [v for v in values if program.values[v].mesh == mesh]
        return sum(map(program.local_bytes, here)), sum(program.values[v].bytes for v in here)

    return StageReport(
        mesh=mesh,
        numbers=tuple(dict.fromkeys(number if f.stage is None else f.stage for f in forward)),
        layers=tuple(
            dict.fromkeys(
                origin.name for f in forward for origin in f.origins if origin.part != "update"
            )
        ),
        remat=tuple(f"layer_{layer}" for layer in sorted({n for f in fragments for n in f.remat})),
        forward_seconds=seconds("forward"),
        backward_seconds=seconds("backward"),
        update_seconds=seconds("update"),
        state_bytes=held(program.states)[0],
        parameter_bytes=held(program.parameters),
        optimizer_bytes=held(program.states - program.parameters),
        activation_bytes=held(program.activations)[0],
        peak_bytes=peaks[number] if number < len(peaks) else None,
        compute_seconds=sum(compute) if compute else None,
        splits=inside.splits.get(mesh, ""),
        sent_bytes=round(sum(it.sent_bytes for it in collectives)) if known else None,
        num_collectives=sum(it.count for it in collectives) if known else None,
        num_combined=inside.combined[mesh] if known else None,
        priced_starts=ceil(sum(it.starts for it in collectives)) if known else None,
    )
