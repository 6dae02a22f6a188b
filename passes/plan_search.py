"""The candidates of `alpa`'s search, from a copy of the layers to a finished plan.

`alpa.py` says which schedules, reserves and rematerialisations are tried, and in which order.
"""

from __future__ import annotations

from collections.abc import Generator, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import inf
from typing import Any, ClassVar, NamedTuple

from alpa.dialects import ir
from alpa.passes.base import (
    MeshOverHostsError,
    NoRoomError,
    NotFasterError,
    Pass,
    PassError,
    Remark,
    RunPass,
    fresh,
    kept,
)
from alpa.passes.candidate import Candidate, copied
from alpa.passes.cost.cluster import parse_cluster
from alpa.passes.ilp_shard_annotate import IlpShardAnnotate
from alpa.passes.insert_cross_mesh_reshard import InsertCrossMeshReshard
from alpa.passes.schedules.planned import OTHERS, chunks_of, label, lists_of, splits_backward
from alpa.passes.schedules.work import WorkLists
from alpa.passes.sharding.solved import Solved
from alpa.passes.split_backward import SplitBackward
from alpa.passes.stage_mesh_partition import StageMeshPartition
from alpa.passes.stages.clustered import USELESS
from alpa.passes.stages.costing import LayerCosts
from alpa.passes.stages.merge import Stages
from alpa.passes.stages.overcommitment import Overcommitment
from alpa.passes.tried import Tried, TriedPlan
from alpa.passes.workers import Workers

_CUTS = 5
_MORE = 0.01
"""Of a device's memory, to reserve beside what was missing."""
_OVER = 0.03
"""Of a device's memory, that stages may exceed by their estimates. GPT-39B on 64 V100s of 16 GiB
with sums in f32 needs 1.4 % on its first stage, and is then planned at 106 s per step, not 174 s.
"""
_ROUGH = 1.05
"""Stages of other schedules, or with fewer transfers, are finished up to so many times the best
step: GPT-2.6B's for ZB-V on 4 meshes of 2 A100s are estimated at 577 ms, and planned at 570 ms,
after a best step of 555 ms."""
_ALONE = 1.1
"""A plan is not finished where one of its meshes alone takes so many times the best step. A mesh's
costs may count more than its work in the step: 4 % more on MoE-10B."""
_SLOW = 1.5
"""Times the bound of a step. With all layers rematerialised, forwards run twice, which takes at
least 4/3 of the bound, and collectives come on top."""
_WORTH = 0.02
"""Of a step's seconds: the gap of the finished stages is as large (`ilp-shard-annotate`)."""


class _Estimate(NamedTuple):
    """Stages for a schedule, which are no plan yet; the number is that of their candidate."""

    schedule: str
    stages: Stages
    number: int


@dataclass(frozen=True, kw_only=True)
class OtherSchedules(Pass):
    """Finds stages of a training step for each schedule but 1F1B, or why there are none.

    It is `stage-mesh-partition` without a result: the module is empty afterwards.
    """

    name: ClassVar[str] = StageMeshPartition.name
    cut: StageMeshPartition
    found: dict[str, Stages | PassError] = field(default_factory=dict[str, Stages | PassError])

    def run(self, module: ir.Module, remark: Remark) -> None:
        layers = replace(self.cut, is_checked=self.is_checked).ready(module, remark)
        for schedule in OTHERS if layers.program.trains else ():
            try:
                self.found[schedule] = self.cut.stages_of(layers.under(schedule), remark)
            except PassError as error:
                self.found[schedule] = kept(error)
        for op in list(module.body.operations):  # Layers that are ready are no valid IR.
            op.operation.erase()


@dataclass(frozen=True, kw_only=True)
class PlanSearch:
    """The search for the plan with the shortest predicted step."""

    schedule: str
    """as `alpa` has it"""
    cut: StageMeshPartition
    """the pass that cuts stages"""
    steps: tuple[Pass, ...]
    """the passes that make a plan of stages"""
    keeps_stages: bool
    """whether later questions need the stages"""
    layers: ir.Module
    """the program after `layer-cluster`"""
    costs: LayerCosts
    """of all candidates' layers, which are the same"""
    workers: Workers
    """processes of all passes"""
    run_pass: RunPass
    solved: Solved = field(default_factory=Solved)
    """the meshes of all candidates"""
    plans: list[TriedPlan] = field(default_factory=list[TriedPlan])
    """what has become of the candidates, by their numbers"""

    def run(self) -> Candidate:
        """The plan with the shortest predicted step (see `alpa.py`). Raises PassError."""
        if self.schedule != "auto":
            return self._planned(self.schedule)
        best: Candidate | None = None
        refused: PassError | None = None
        try:
            best = self._planned("1f1b")
        except NoRoomError as error:
            refused = kept(error)
        except PassError as error:
            # Schedules of several stages per mesh may have so many.
            if self.cut.num_stages in ("auto", 1):
                raise
            refused = kept(error)
        for other in self._others(best):
            if best is not None and other.stages.seconds >= _ROUGH * best.step_seconds:
                break
            try:
                found = self._finished(other, best)
            except NotFasterError:
                continue
            except NoRoomError as error:
                refused = refused or kept(error)
                if best is not None:
                    best.leave_out(other.schedule, error)
                continue
            if best is None or found.step_seconds < best.step_seconds:
                best = found
        if best is None:
            assert refused is not None, "1F1B is planned, or refused"
            raise fresh(refused)
        self._note_runner_up(best)
        return best

    def _others(self, best: Candidate | None) -> list[_Estimate]:
        """The stages for each schedule but 1F1B, those with the shortest step first, as far as they
        may be of use beside the best plan."""
        if self.cut.num_micro_batches == 1 or self.cut.num_stages == 1:
            return []
        within = inf if best is None else USELESS * best.step_seconds
        cut = replace(self._with_costs(self.cut), least_meshes=2, within=within)
        search = OtherSchedules(cut=cut)
        self.run_pass(search, copied(self.layers), lambda *_: None)
        found: dict[Hashable, _Estimate] = {}
        for schedule, stages in search.found.items():
            number = self._tried(self.cut, schedule, self.cut.reserve)
            if isinstance(stages, NotFasterError):
                self._note(number, reason=stages.message)
                continue
            if isinstance(stages, PassError):
                self._note(number, outcome="infeasible", reason=stages.message)
                continue
            self._note(number, estimated_step_seconds=stages.seconds)
            if len(stages.meshes) > 1:  # On one mesh all schedules are the same.
                key = self._lists(schedule, stages), stages.seconds, stages.peak_bytes
                found.setdefault(key, _Estimate(schedule, stages, number))
        return sorted(found.values(), key=lambda it: it.stages.seconds)

    def _lists(self, schedule: str, stages: Stages) -> WorkLists:
        """Under which stages run. With few meshes or micro-batches, schedules share their lists."""
        count = 1 + max(stages.layer_stage.values())
        return lists_of(schedule, count, self.cut.num_micro_batches)

    def _finished(self, other: _Estimate, best: Candidate | None) -> Candidate:
        """The plan of another schedule, as long as its stages predict hardly a longer step than the
        best plan so far. Raises PassError."""
        candidate = Candidate(copied(self.layers), other.number)
        cut = replace(self._with_costs(self.cut), schedule=other.schedule, stages=other.stages)
        self.run_pass(cut, candidate.module, candidate.remark)
        seconds = inf if best is None else best.step_seconds
        return self._fitting(self.cut, other.schedule, candidate, seconds)

    def _note_runner_up(self, best: Candidate) -> None:
        """Writes down the schedule that comes second, by finished plans and by estimates."""
        known = [it for it in self.plans if it.outcome != "infeasible"]
        every = [(it.predicted_step_seconds or it.estimated_step_seconds, it) for it in known]
        mine = label(best.plan.schedule)
        others = [(each, it) for each, it in every if each is not None and it.schedule != mine]
        if others:
            seconds, second = min(others, key=lambda it: it[0])
            best.note_runner_up(
                second.schedule, seconds, estimated=second.predicted_step_seconds is None
            )

    def _planned(self, schedule: str) -> Candidate:
        """The plan with the shortest predicted step under a schedule. Raises PassError."""
        first = best = self._best(self.cut, schedule)
        bound = first.plan.estimated_step_bound
        for step in (*self._rematerialised(first), *self._with_fewer_transfers(first)):
            try:
                other = self._best(step, schedule, best.step_seconds)
            except (MeshOverHostsError, NoRoomError, NotFasterError):
                continue
            best = min(best, other, key=lambda it: it.step_seconds)
            bound = min(bound, other.plan.estimated_step_bound)
        best.note_bound(bound)
        return best

    def _rematerialised(self, first: Candidate) -> Iterator[StageMeshPartition]:
        """The cut of layers that are all rematerialised, where the first plan is slow and has some
        of them."""
        if self.cut.remat != "auto" or not first.is_partly_rematerialised:
            return
        plan = first.plan
        is_slow = first.step_seconds >= _SLOW * plan.estimated_step_bound
        if is_slow and first.step_seconds <= (1 - _WORTH) * plan.estimated_step_seconds:
            yield replace(self.cut, remat="layer")

    def _with_fewer_transfers(self, first: Candidate) -> Iterator[StageMeshPartition]:
        """Cuts with fewer transfers, where nothing restricts the stages.

        What crosses between stages is estimated before it is sharded, as if it were split alike on
        both sides. Where the first plan takes longer than its stages were estimated at, these are
        cuts into one stage, into stages on equal meshes, and on one kind of hosts. A single stage
        on several hosts may be faster on fewer of them.
        """
        cut, meshes = self.cut, first.meshes
        is_free = cut.num_stages == cut.mesh_shape == cut.meshes == "auto"
        restricted = cut.fixed_stages or cut.equal_layers or cut.objective != "step"
        if restricted or not is_free or chunks_of(first.plan.schedule) > 1:
            return
        of_one_kind = len(parse_cluster(cut.cluster).kinds) == 1
        if of_one_kind and len(meshes) == 1 and len(meshes[0].hosts) > 1:
            # Estimates of stages are compared with estimates: they may all be too high.
            within = (1 - _WORTH) * max(first.step_seconds, first.plan.estimated_step_seconds)
            yield replace(cut, num_stages=1, equal_meshes=True, within=within)
        if first.step_seconds <= (1 + _WORTH) * first.plan.estimated_step_seconds:
            return
        cut = replace(cut, within=_ROUGH * first.step_seconds)
        if len(meshes) > 1:
            yield replace(cut, num_stages=1)
        if of_one_kind and len({mesh.logical_shape for mesh in meshes}) > 1:
            yield replace(cut, equal_meshes=True)
        devices = dict.fromkeys(mesh.device for mesh in meshes)
        for device in devices if len(devices) > 1 else ():
            yield replace(cut, device=device)

    def _best(self, step: StageMeshPartition, schedule: str, best: float = inf) -> Candidate:
        """The better plan of two: of stages cut for the memory that there is, and for more. Raises
        PassError, also where it takes much longer than the best plan so far."""
        step = replace(step, within=min(step.within, USELESS * best))
        over = Overcommitment(share=_OVER, worth=_WORTH)
        first = self._cut(replace(step, over=over), schedule, step.reserve)
        if isinstance(first, NoRoomError) or over.within is None:
            return self._fitting(step, schedule, first, best)
        is_finished = True
        try:
            self._finish(first, min(best, over.within))
        except NoRoomError:
            return self._fitting(step, schedule, self._cut(step, schedule, step.reserve), best)
        except NotFasterError:
            is_finished = False
        if is_finished and first.step_seconds <= over.within:
            return first
        try:
            other = self._fitting(step, schedule, self._cut(step, schedule, step.reserve), best)
        except NotFasterError:
            if not is_finished:
                raise
            return first
        except NoRoomError:  # The first one fits, as far as it was finished.
            if not is_finished:
                first = self._stages(replace(step, over=over), schedule, step.reserve)
                self._finish(first, best)
            return first
        return min(first, other, key=lambda it: it.step_seconds) if is_finished else other

    def _cut(
        self, step: StageMeshPartition, schedule: str, reserve: float
    ) -> Candidate | NoRoomError:
        """A copy of the layers, cut into stages, or why no stages fit."""
        try:
            return self._stages(step, schedule, reserve)
        except NoRoomError as error:
            return kept(error)

    def _fitting(
        self,
        step: StageMeshPartition,
        schedule: str,
        candidate: Candidate | NoRoomError,
        best: float = inf,
    ) -> Candidate:
        """The plan of the first stages that fit, from those that are cut without more reserve, as
        long as these predict hardly more seconds than the best plan so far. Raises PassError, also
        where it takes much longer than that."""
        step = replace(step, within=min(step.within, USELESS * best))
        reserve, again = step.reserve, list[tuple[ir.Location, str]]()
        refused: NoRoomError | None = None
        errors: dict[Hashable, NoRoomError] = {}
        for number in range(_CUTS):
            if number:
                try:
                    candidate = self._cut(step, schedule, reserve)
                except NotFasterError:
                    assert refused is not None, "the first stages are there"
                    raise fresh(refused) from None
            if isinstance(candidate, NoRoomError):
                raise fresh(refused or candidate)
            if refused is not None and candidate.step_seconds >= _ROUGH * best:
                raise fresh(refused)
            stages = candidate.key
            if stages not in errors:
                try:
                    self._finish(candidate, best)
                except NoRoomError as error:
                    errors[stages] = kept(error)
                else:
                    candidate.remarks[:0] = again
                    return candidate
            error = errors[stages]  # Stages that did not fit before do not fit now.
            self._note(candidate.number, outcome="infeasible", reason=error.message)
            refused = refused or error
            reserve += max(reserve, (error.missing or 0.0) + _MORE)
            if reserve >= 1:
                break
            reason = error.message.partition(";")[0]
            text = f"{reason}: stages are cut again with reserve={reserve:.3f}"
            again.append((error.location, text))
        assert refused is not None
        raise fresh(refused)

    def _stages(self, step: StageMeshPartition, schedule: str, reserve: float) -> Candidate:
        """A copy of the layers, cut into stages."""
        candidate = Candidate(copied(self.layers), self._tried(step, schedule, reserve))
        cut = replace(self._with_costs(step), schedule=schedule, reserve=reserve)
        with self._noting_refusal(candidate):
            self.run_pass(cut, candidate.module, candidate.remark)
        if step.over is not None and step.over.within is not None:
            self._note(candidate.number, reserve=reserve - step.over.share)
        self._note(candidate.number, estimated_step_seconds=candidate.step_seconds)
        return candidate

    def _with_costs(self, step: StageMeshPartition) -> StageMeshPartition:
        """The pass with what all candidates share."""
        return replace(step, costs=self.costs, workers=self.workers)

    def _finish(self, candidate: Candidate, best: float = inf) -> None:
        """Makes a plan of stages. Raises PassError, also where it takes much longer than the best
        plan so far."""
        if self.keeps_stages:
            candidate.stages.append(copied(candidate.module))
        with self._noting_refusal(candidate):
            for step in self.steps_under(candidate.plan.schedule):
                if isinstance(step, IlpShardAnnotate):
                    step = replace(step, workers=self.workers, within=_ALONE * best)
                self.run_pass(step, candidate.module, candidate.remark)
        seconds = candidate.step_seconds
        self._note(candidate.number, outcome="slower", predicted_step_seconds=seconds)

    @contextmanager
    def _noting_refusal(self, candidate: Candidate) -> Generator[None]:
        """Notes why a candidate does not fit, if it does not."""
        try:
            yield
        except PassError as error:
            outcome = "pruned" if isinstance(error, NotFasterError) else "infeasible"
            self._note(candidate.number, outcome=outcome, reason=error.message)
            raise

    def _tried(self, step: StageMeshPartition, schedule: str, reserve: float) -> int:
        """The number of a new candidate."""
        self.plans.append(
            TriedPlan(schedule=label(schedule), remat=step.remat, reserve=reserve, outcome="pruned")
        )
        return len(self.plans) - 1

    def _note(self, number: int, **known: Any) -> None:
        """Notes what is known of a candidate now."""
        self.plans[number] = replace(self.plans[number], **known)

    def tried_until(self, best: Candidate) -> Tried:
        """What was tried until the best candidate was known."""
        self._note(best.number, outcome="taken")
        return Tried(submeshes=self.costs.tried(), plans=tuple(self.plans))

    def steps_under(self, schedule: str) -> list[Pass]:
        """The passes that make a plan of stages under a schedule."""
        found: list[Pass] = []
        for step in self._to_plan:
            if isinstance(step, InsertCrossMeshReshard) and splits_backward(schedule):
                found.append(SplitBackward())
            found.append(step)
        return found

    @cached_property
    def _to_plan(self) -> tuple[Pass, ...]:
        """`steps`, which share the solutions of meshes."""
        return tuple(
            replace(step, solved=self.solved, shared=self.costs.shared)
            if isinstance(step, IlpShardAnnotate)
            else step
            for step in self.steps
        )
