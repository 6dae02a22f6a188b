"""The candidates of `alpa`'s search, from a copy of the layers to a finished plan.

`alpa.py` says which schedules, reserves and rematerialisations are tried, and in which order.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from alpa.dialects import body, ir, main_function
from alpa.dialects.attributes import read_part, read_remat
from alpa.dialects.plan import Dropped, MeshAssignment, Plan, read_meshes
from alpa.passes.base import NoRoomError, Pass, PassError, RunPass
from alpa.passes.ilp_shard_annotate import IlpShardAnnotate
from alpa.passes.insert_cross_mesh_reshard import InsertCrossMeshReshard
from alpa.passes.schedules.planned import OTHERS, label, splits_backward
from alpa.passes.sharding.solved import Solved
from alpa.passes.split_backward import SplitBackward
from alpa.passes.stage_mesh_partition import StageMeshPartition
from alpa.passes.stages.costing import LayerCosts
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
_SLOW = 1.5
"""Times the bound of a step. With all layers rematerialised, forwards run twice, which takes at
least 4/3 of the bound, and collectives come on top."""
_FINISHED = 3
"""plans for other schedules, of `schedule=all`"""
_WORTH = 0.02
"""Of a step's seconds: the gap of the finished stages is as large (`ilp-shard-annotate`)."""


@dataclass(frozen=True)
class Candidate:
    """A copy of the layers on its way to a plan."""

    module: ir.Module
    number: int = 0
    """in the order of the search"""
    remarks: list[tuple[ir.Location, str]] = field(default_factory=list[tuple[ir.Location, str]])
    stages: list[ir.Module] = field(default_factory=list[ir.Module])
    """a copy before shardings are chosen, where later questions need it"""

    def remark(self, location: ir.Location, message: str) -> None:
        self.remarks.append((location, message))

    @property
    def plan(self) -> Plan:
        """What is known so far; numbers that are not are 0."""
        return Plan.read(main_function(self.module)) or Plan()

    @property
    def meshes(self) -> list[MeshAssignment]:
        """Those of the stages."""
        return read_meshes(main_function(self.module))

    @property
    def step_seconds(self) -> float:
        """Predicted, by what is known so far."""
        return self.plan.predicted_step_seconds

    @property
    def trains(self) -> bool:
        """Whether there are backward parts."""
        fragments = body(main_function(self.module)).operations
        return any(read_part(op) == "backward" for op in fragments)

    def note_runner_up(self, other: Plan) -> None:
        """Writes down the plan that comes second."""
        noted = replace(
            self.plan,
            runner_up=label(other.schedule),
            runner_up_seconds=other.predicted_step_seconds,
        )
        with self.module.context:
            noted.write(main_function(self.module))

    @property
    def is_partly_rematerialised(self) -> bool:
        """Whether some backward parts compute again what others read."""
        fragments = list(body(main_function(self.module)).operations)
        backwards = [op for op in fragments if read_part(op) == "backward"]
        layers = [len(ir.ArrayAttr(op.attributes["origin"])) for op in backwards]
        again = [len(read_remat(op)) for op in backwards]
        return 0 < sum(again) < sum(layers)


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
        if self.schedule == "all":
            return self._of_all()
        if self.schedule != "auto":
            return self._planned(self.schedule)
        return self._or_gpipe(self._planned("1f1b"))

    def _of_all(self) -> Candidate:
        """The best plan of all schedules. Raises PassError."""
        finished: list[Candidate] = []
        refused: NoRoomError | None = None
        try:
            finished.append(self._or_gpipe(self._planned("1f1b")))
        except NoRoomError as error:
            refused = error
        batches = self.cut.num_micro_batches
        if finished and (batches == 1 or not finished[0].trains):
            return finished[0]
        cuts: list[Candidate] = []
        for schedule in OTHERS if batches > 1 else ():
            # One that does not admit the numbers, or does not fit, is noted as tried.
            with suppress(PassError):
                cut = self._stages(self.cut, schedule, self.cut.reserve)
                if len(cut.meshes) > 1:  # On one mesh all schedules are the same.
                    cuts.append(cut)
        enough = len(finished) + _FINISHED
        for cut in sorted(cuts, key=lambda it: it.step_seconds):
            # Those that may come first or second.
            is_short = sum(it.step_seconds <= cut.step_seconds for it in finished) < 2
            if is_short and len(finished) < enough:
                with suppress(NoRoomError):
                    finished.append(self._fitting(self.cut, cut.plan.schedule, cut))
        if not finished:
            assert refused is not None, "1F1B is planned, or refused"
            raise refused
        best, *others = sorted(finished, key=lambda it: it.step_seconds)
        if others:
            best.note_runner_up(others[0].plan)
        return best

    def _or_gpipe(self, best: Candidate) -> Candidate:
        """The better one of a plan for 1F1B and of one for GPipe."""
        if self.cut.num_micro_batches == 1 or len(best.meshes) == 1:
            return best
        try:
            other = self._stages(self.cut, "gpipe", self.cut.reserve)
            if other.step_seconds >= best.step_seconds:
                return best
            self._finish(other)
        except NoRoomError as error:
            best.remark(error.location, f"gpipe is left out of the search: {error.message}")
            if error.missing is None:
                _write_dropped(best.module, Dropped(what="gpipe", reason=error.message))
            return best
        return other if other.step_seconds < best.step_seconds else best

    def _planned(self, schedule: str) -> Candidate:
        """The plan with the shortest predicted step under a schedule. Raises PassError."""
        best = self._best(self.cut, schedule)
        if self.cut.remat != "auto" or not best.is_partly_rematerialised:
            return best
        plan = best.plan
        is_slow = best.step_seconds >= _SLOW * plan.estimated_step_bound
        if not is_slow or best.step_seconds > (1 - _WORTH) * plan.estimated_step_seconds:
            return best
        try:
            other = self._best(replace(self.cut, remat="layer"), schedule)
        except NoRoomError:
            return best
        return min(best, other, key=lambda it: it.step_seconds)

    def _best(self, step: StageMeshPartition, schedule: str) -> Candidate:
        """The better plan of two: of stages cut for the memory that there is, and for more."""
        over = Overcommitment(share=_OVER, worth=_WORTH)
        first = self._cut(replace(step, over=over), schedule, step.reserve)
        if isinstance(first, NoRoomError) or over.within is None:
            return self._fitting(step, schedule, first)
        try:
            self._finish(first)
        except NoRoomError:
            return self._fitting(step, schedule, self._cut(step, schedule, step.reserve))
        if first.step_seconds <= over.within:
            return first
        fitting = self._fitting(step, schedule, self._cut(step, schedule, step.reserve))
        return min(first, fitting, key=lambda it: it.step_seconds)

    def _cut(
        self, step: StageMeshPartition, schedule: str, reserve: float
    ) -> Candidate | NoRoomError:
        """A copy of the layers, cut into stages, or why no stages fit."""
        try:
            return self._stages(step, schedule, reserve)
        except NoRoomError as error:
            return error

    def _fitting(
        self, step: StageMeshPartition, schedule: str, candidate: Candidate | NoRoomError
    ) -> Candidate:
        """The plan of the first stages that fit, from those that are cut without more reserve."""
        reserve, again = step.reserve, list[tuple[ir.Location, str]]()
        refused: NoRoomError | None = None
        for number in range(_CUTS):
            if number:
                candidate = self._cut(step, schedule, reserve)
            if isinstance(candidate, NoRoomError):
                raise refused or candidate
            try:
                self._finish(candidate)
            except NoRoomError as error:
                refused = refused or error
                reserve += max(reserve, (error.missing or 0.0) + _MORE)
                reason = error.message.partition(";")[0]
                text = f"{reason}: stages are cut again with reserve={reserve:.3f}"
                again.append((error.location, text))
            else:
                candidate.remarks[:0] = again
                return candidate
        assert refused is not None
        raise refused

    def _stages(self, step: StageMeshPartition, schedule: str, reserve: float) -> Candidate:
        """A copy of the layers, cut into stages."""
        candidate = Candidate(copied(self.layers), len(self.plans))
        cut = replace(
            step, schedule=schedule, reserve=reserve, costs=self.costs, workers=self.workers
        )
        self.plans.append(
            TriedPlan(schedule=label(schedule), remat=step.remat, reserve=reserve, outcome="pruned")
        )
        with self._noting_refusal(candidate):
            self.run_pass(cut, candidate.module, candidate.remark)
        if step.over is not None and step.over.within is not None:
            self._note(candidate, reserve=reserve - step.over.share)
        self._note(candidate, estimated_step_seconds=candidate.step_seconds)
        return candidate

    def _finish(self, candidate: Candidate) -> None:
        """Makes a plan of stages."""
        if self.keeps_stages:
            candidate.stages.append(copied(candidate.module))
        with self._noting_refusal(candidate):
            for step in self.to_plan:
                is_sharded = isinstance(step, InsertCrossMeshReshard)
                if is_sharded and splits_backward(candidate.plan.schedule):
                    self.run_pass(SplitBackward(), candidate.module, candidate.remark)
                if isinstance(step, IlpShardAnnotate):
                    step = replace(step, workers=self.workers)
                self.run_pass(step, candidate.module, candidate.remark)
        seconds = candidate.step_seconds
        self._note(candidate, outcome="slower", predicted_step_seconds=seconds)

    @contextmanager
    def _noting_refusal(self, candidate: Candidate) -> Generator[None]:
        """Notes why a candidate does not fit, if it does not."""
        try:
            yield
        except PassError as error:
            self._note(candidate, outcome="infeasible", reason=error.message)
            raise

    def _note(self, candidate: Candidate, **known: Any) -> None:
        """Notes what is known of a candidate now."""
        self.plans[candidate.number] = replace(self.plans[candidate.number], **known)

    def tried_until(self, best: Candidate) -> Tried:
        """What was tried until the best candidate was known."""
        self._note(best, outcome="taken")
        return Tried(submeshes=self.costs.tried(), plans=tuple(self.plans))

    @cached_property
    def to_plan(self) -> tuple[Pass, ...]:
        """The passes that make a plan of stages, which share the solutions of meshes."""
        return tuple(
            replace(step, solved=self.solved) if isinstance(step, IlpShardAnnotate) else step
            for step in self.steps
        )


def _write_dropped(module: ir.Module, dropped: Dropped) -> None:
    plan = Plan.read(main_function(module)) or Plan()
    with module.context:
        replace(plan, dropped=(*plan.dropped, dropped)).write(main_function(module))


def copied(module: ir.Module) -> ir.Module:
    """A copy of a module."""
    # The bindings give an op; as a view it has all that a pass uses of a module.
    return cast(ir.Module, module.operation.clone().opview)
