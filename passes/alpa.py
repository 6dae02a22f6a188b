"""Plans a program for a cluster: runs the planning passes, keeps the plan predicted to be fastest.

The passes, and why in this order:

1. `combine-micro-batches` comes first: a rewrite would lose what ops say of the whole batch.
2. `simplify-trivial-ops` comes next: every later pass then reads one flat function of plain ops.
3. `split-loops` comes before the layers: layers inside one loop cannot be clustered apart.
4. `layer-cluster` comes before the stages, because a stage is an interval of layers.
5. `stage-mesh-partition` comes before the shardings: a sharding refers to the mesh of a stage.
6. `place-gradient-reductions` comes before the shardings, which decide what is reduced there.
7. `ilp-shard-annotate` needs the mesh of each op, and gives both ends of a transfer shardings.
8. `insert-cross-mesh-reshard` chooses each transfer by the shardings at its two ends.

The first four run once. The other four run on a copy of the layers for each candidate:

* **Schedules.** 1F1B keeps at most as many micro-batches in flight as GPipe on each stage, and both
  run the same work in as many rounds. So a plan that fits under GPipe fits under 1F1B: 1F1B is
  planned first, and if no plan is found, GPipe is not tried. With one micro-batch or one mesh both
  take the same time, and GPipe is not planned. Otherwise stages are cut for GPipe, too. That
  plan is finished only if the cut predicts a shorter step than the plan for 1F1B, and kept if the
  finished plan's step is shorter. With `schedule=all`, stages are cut for all other schedules, too.
  The step of each cut is simulated, and up to `_FINISHED` are finished, the shortest first, if at
  most one plan so far is as short. The plan names the schedule that comes second. Otherwise, other
  schedules are planned where they are asked for. If a schedule splits backwards, `split-backward`
  runs before `insert-cross-mesh-reshard`, which predicts the step. For `terapipe`, stages are cut
  as for GPipe, and then along the sequence by `token-slice`.
* **Reserves.** Stages are cut by estimates of their memory. If `ilp-shard-annotate` finds that a
  stage does not fit, stages are cut again with a reserve: the missing share of memory and a little
  more. Further reserves are at least twice the one before, up to `_CUTS` cuts in all. A remark
  names each reserve. If no cut fits, the first error is reported.
* **Overcommitment.** The estimates are of shardings that all layers of a class share, and hold
  more than those that `ilp-shard-annotate` finds for a stage. So stages are first cut for a little
  more memory than there is (`_OVER`). If their estimates exceed the memory, stages are also cut
  for the memory that there is. The first cut is finished if it predicts a shorter step by
  `_WORTH`, and kept if it fits and its finished step is shorter than the other cut's.
* **Rematerialisation.** Where memory binds, a finished stage may be much faster than its estimate,
  and most if all of its layers are rematerialised: then memory is left for faster shardings. So
  with `remat=auto`, if some layers of the plan are and some are not, stages are also planned as
  with `remat=layer`, if the finished step is shorter than its estimate by `_WORTH` and at least
  `_SLOW` times the bound of all plans.
* **Costs.** The costs of sharded layers depend on neither the schedule nor the reserve, so all cuts
  share them (`stages/costing.py`). Meshes that are the same in several cuts are solved once
  (`sharding/solved.py`). All passes share the processes that help them (`workers.py`).

`verify-layers` does not run here: the passes that make layers and stages check them themselves.
`export-stages` does not run here either: it copies the fragments of the finished plan into modules
for XLA. `alpa{...},export-stages` runs both. `canonicalize` and `cse` may run before `alpa`. After
`simplify-trivial-ops`, `cse` would share masks and iotas between equal layers. Layers would then
differ, and the shared values would be sent between meshes. A rewrite that swaps operands or
replaces an op would falsify or lose its `alpa.follow`.

**Before**::

    func.func public @main(%x: tensor<64x8xf32>, %w: tensor<8x8xf32>) -> tensor<64x8xf32> {
      %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
        : (tensor<64x8xf32>, tensor<8x8xf32>) -> tensor<64x8xf32>
      return %y : tensor<64x8xf32>
    }

**After** `alpa{cluster=cpu:1x2}`::

    module attributes {alpa.program = …} {
      sdy.mesh @mesh_0 = <["axis0"=2]>
      func.func public @main(
          %x: !mpmd.mesh_tensor<"mesh_0", tensor<64x8xf32>,
                                sharding=<@mesh_0, [{"axis0"}, {}]>> …,
          %w: !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>, sharding=<@mesh_0, [{}, {}]>> …)
          -> … attributes {alpa.meshes = …, alpa.plan = …, alpa.solver = …, topology = …} {
        %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x, %w) …
        return %y : …
      }
    }

**Requires**: StableHLO with one public function.

**Ensures**: a plan, as `insert-cross-mesh-reshard` leaves it. The module attribute `alpa.program`
is a hash of the program that was planned. Each option is given to every pass that has it.

**Options**: see the fields.

**Fails when** one of the passes fails, after stages that do not fit were cut again, or when no plan
can be faster than `faster-than`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Self, cast

from alpa.dialects import body, func, ir, main_function
from alpa.dialects.attributes import FORCED, HELD, PROGRAM, read_part, read_remat
from alpa.dialects.plan import Dropped, MeshAssignment, Plan, read_meshes
from alpa.passes.base import (
    Driver,
    NoRoomError,
    NotFasterError,
    Option,
    Pass,
    PassError,
    Remark,
    RunPass,
    errors_at,
    option,
)
from alpa.passes.combine_micro_batches import CombineMicroBatches
from alpa.passes.cost.cluster import parse_cluster
from alpa.passes.ilp_shard_annotate import IlpShardAnnotate
from alpa.passes.import_hlo import ImportHlo
from alpa.passes.insert_cross_mesh_reshard import InsertCrossMeshReshard
from alpa.passes.layer_cluster import LayerCluster
from alpa.passes.place_gradient_reductions import PlaceGradientReductions
from alpa.passes.schedules.planned import OTHERS, SEARCHED, TERAPIPE, label, splits_backward
from alpa.passes.sharding.solved import Solved
from alpa.passes.simplify_trivial_ops import SimplifyTrivialOps
from alpa.passes.split_backward import SplitBackward
from alpa.passes.split_loops import SplitLoops
from alpa.passes.stage_mesh_partition import StageMeshPartition
from alpa.passes.stages.clustered import even_seconds
from alpa.passes.stages.costing import LayerCosts
from alpa.passes.stages.overcommitment import Overcommitment
from alpa.passes.token_slice import TokenSlice
from alpa.passes.tried import Tried, TriedPlan
from alpa.passes.workers import Workers

_TO_LAYERS = (ImportHlo, CombineMicroBatches, SimplifyTrivialOps, SplitLoops, LayerCluster)
_TO_PLAN = (PlaceGradientReductions, IlpShardAnnotate, InsertCrossMeshReshard)
STEPS: tuple[type[Pass], ...] = (*_TO_LAYERS, StageMeshPartition, *_TO_PLAN)
"""The passes in their order."""

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


@dataclass
class Kept:
    """What a run of `alpa` leaves for questions about its plan, filled in at its end."""

    program: ir.Module | None = None
    """what was planned"""
    layers: ir.Module | None = None
    """the program after `layer-cluster`"""
    stages: ir.Module | None = None
    """the plan's stages, before their shardings are chosen"""
    cut: StageMeshPartition | None = None
    """the pass that cut them, with the costs of the layers"""
    to_plan: tuple[Pass, ...] = ()
    """the passes that make a plan of stages, with the solutions that are known"""


@dataclass(frozen=True, kw_only=True)
class Alpa(Driver):
    """Plans a program: finds layers, stages on device meshes, shardings and transfers."""

    name: ClassVar[str] = "alpa"
    schedule: str = option(
        "auto",
        "`gpipe`, `1f1b`, another name of docs/schedules.md, `terapipe` (GPipe with token slices), "
        "or a file with a table of your own; `auto` takes the one of the first two with the "
        "shorter predicted step, `all` the best of all with a name",
    )
    faster_than: float | None = option(
        None,
        "seconds of a step. If the compute of all layers, split evenly over all devices, "
        "takes at least that long, the pass fails at once: no plan is predicted to be faster",
    )
    to_layers: tuple[Pass, ...] = field(default_factory=lambda: tuple(it() for it in _TO_LAYERS))
    cut: StageMeshPartition = field(default_factory=StageMeshPartition)
    to_plan: tuple[Pass, ...] = field(default_factory=lambda: tuple(it() for it in _TO_PLAN))
    kept: Kept | None = None
    """where to leave what later questions need; None: nowhere"""
    on_tried: Callable[[Tried], None] | None = None
    """hears at the end what was tried"""

    @classmethod
    def options(cls) -> dict[str, Option]:
        """Those of the passes, and its own."""
        found: dict[str, Option] = {}
        for step in STEPS:
            found |= {name: it for name, it in step.options().items() if name not in found}
        return found | cls.own_options()

    @classmethod
    def from_options(cls, options: dict[str, str]) -> Self:
        own = cls.own_options().keys()
        shared = {name: text for name, text in options.items() if name not in own}
        return replace(
            super().from_options({name: options[name] for name in options.keys() & own}),
            to_layers=tuple(step.from_options(shared) for step in _TO_LAYERS),
            cut=StageMeshPartition.from_options(shared),
            to_plan=tuple(step.from_options(shared) for step in _TO_PLAN),
        )

    def drive(self, module: ir.Module, remark: Remark, run_pass: RunPass) -> None:
        program = fingerprint(module)
        if self.kept is not None:
            self.kept.program = _copied(module)
        if self.schedule == TERAPIPE:
            self = self._with_token_slices(main_function(module))
        if self.schedule not in SEARCHED:
            with errors_at(main_function(module)):
                cut = replace(self.cut, schedule=self.schedule).with_schedule()
            self = replace(self, schedule=cut.schedule, cut=cut)
        stages = self.cut.known_stages()

        def run_checked(step: Pass, inner: ir.Module, say: Remark) -> None:
            run_pass(replace(step, is_checked=True), inner, say)

        first, *others = self.to_layers
        run_pass(first, module, remark)  # This pass checks all shapes.
        for step in others:
            if isinstance(step, LayerCluster):
                step = replace(step, stages=stages, least=self.cut.fewest_stages())
            run_checked(step, module, remark)
        if self.faster_than is not None:
            self._check_bound(module, self.faster_than)
        costs = self.cut.costs or self.cut.new_costs()
        with errors_at(main_function(module)):
            workers = Workers(self.cut.processes)
        with workers:
            search = _Search(
                alpa=self, layers=module, costs=costs, workers=workers, run_pass=run_checked
            )
            best = search.run()
        if self.kept is not None:
            self.kept.layers = _copied(module)
            self.kept.stages = best.stages[-1]
            schedule = best.plan.schedule
            self.kept.cut = replace(self.cut, schedule=schedule, costs=costs, is_checked=True)
            self.kept.to_plan = search.to_plan
        if self.on_tried is not None:
            self.on_tried(search.tried_until(best))
        for location, message in best.remarks:
            remark(location, message)
        _move(best.module, module)
        with module.context:
            module.operation.attributes[PROGRAM] = ir.StringAttr.get(program)

    def _with_token_slices(self, main: func.FuncOp) -> Self:
        """The same with stages that are cut along the sequence, once they are known.

        All slices of all micro-batches are held, as under GPipe, and keys and values are kept.
        """
        if self.cut.remat == "layer":
            raise PassError(
                main,
                f"schedule={TERAPIPE} keeps the keys and values of all tokens, and remat=layer "
                "computes them again; leave remat out",
            )
        cut = replace(self.cut, remat="none")
        return replace(self, schedule="gpipe", cut=cut, to_plan=(TokenSlice(), *self.to_plan))

    def _check_bound(self, layers: ir.Module, limit: float) -> None:
        """Raises NotFasterError where no plan takes less than `limit` seconds."""
        with errors_at(main_function(layers)):
            cluster = parse_cluster(self.cut.cluster)
        bound = even_seconds(main_function(layers), cluster, self.cut.num_micro_batches)
        if bound >= limit:
            raise NotFasterError(
                main_function(layers),
                f"no plan is predicted to be faster than {limit:.4g} s: the compute alone, split "
                f"evenly over all devices, takes {bound:.4g} s",
                bound=bound,
            )


def fingerprint(module: ir.Module) -> str:
    """A hash of a program's text without locations: what a plan remembers of its program.

    Where its state lies (`alpa.held`) and forced shardings (`alpa.forced`) are no part of it.
    """
    given = [it for it in (HELD, FORCED) if it in main_function(module).attributes]
    if given:
        module = _copied(module)
        for name in given:
            del main_function(module).attributes[name]
    text = cast(str, module.operation.get_asm(enable_debug_info=False))
    return hashlib.sha256(text.encode()).hexdigest()


def planned_for(module: ir.Module) -> str | None:
    """The fingerprint of the program that a module is the plan of, if it says so."""
    attr = module.operation.attributes.get(PROGRAM)
    return attr.value if isinstance(attr, ir.StringAttr) else None


@dataclass(frozen=True)
class _Candidate:
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
class _Search:
    alpa: Alpa
    layers: ir.Module
    costs: LayerCosts
    """of all candidates' layers, which are the same"""
    workers: Workers
    """processes of all passes"""
    run_pass: RunPass
    solved: Solved = field(default_factory=Solved)
    """the meshes of all candidates"""
    plans: list[TriedPlan] = field(default_factory=list[TriedPlan])
    """what has become of the candidates, by their numbers"""

    def run(self) -> _Candidate:
        """The plan with the shortest predicted step (see the top of the file). Raises PassError."""
        alpa = self.alpa
        if alpa.schedule == "all":
            return self._of_all()
        if alpa.schedule != "auto":
            return self._planned(alpa.schedule)
        return self._or_gpipe(self._planned("1f1b"))

    def _of_all(self) -> _Candidate:
        """The best plan of all schedules. Raises PassError."""
        finished: list[_Candidate] = []
        refused: NoRoomError | None = None
        try:
            finished.append(self._or_gpipe(self._planned("1f1b")))
        except NoRoomError as error:
            refused = error
        batches = self.alpa.cut.num_micro_batches
        if finished and (batches == 1 or not finished[0].trains):
            return finished[0]
        cuts: list[_Candidate] = []
        for schedule in OTHERS if batches > 1 else ():
            # One that does not admit the numbers, or does not fit, is noted as tried.
            with suppress(PassError):
                cut = self._stages(self.alpa.cut, schedule, self.alpa.cut.reserve)
                if len(cut.meshes) > 1:  # On one mesh all schedules are the same.
                    cuts.append(cut)
        enough = len(finished) + _FINISHED
        for cut in sorted(cuts, key=lambda it: it.step_seconds):
            # Those that may come first or second.
            is_short = sum(it.step_seconds <= cut.step_seconds for it in finished) < 2
            if is_short and len(finished) < enough:
                with suppress(NoRoomError):
                    finished.append(self._fitting(self.alpa.cut, cut.plan.schedule, cut))
        if not finished:
            assert refused is not None, "1F1B is planned, or refused"
            raise refused
        best, *others = sorted(finished, key=lambda it: it.step_seconds)
        if others:
            best.note_runner_up(others[0].plan)
        return best

    def _or_gpipe(self, best: _Candidate) -> _Candidate:
        """The better one of a plan for 1F1B and of one for GPipe."""
        alpa = self.alpa
        if alpa.cut.num_micro_batches == 1 or len(best.meshes) == 1:
            return best
        try:
            other = self._stages(alpa.cut, "gpipe", alpa.cut.reserve)
            if other.step_seconds >= best.step_seconds:
                return best
            self._finish(other)
        except NoRoomError as error:
            best.remark(error.location, f"gpipe is left out of the search: {error.message}")
            if error.missing is None:
                _write_dropped(best.module, Dropped(what="gpipe", reason=error.message))
            return best
        return other if other.step_seconds < best.step_seconds else best

    def _planned(self, schedule: str) -> _Candidate:
        """The plan with the shortest predicted step under a schedule. Raises PassError."""
        cut = self.alpa.cut
        best = self._best(cut, schedule)
        if cut.remat != "auto" or not best.is_partly_rematerialised:
            return best
        plan = best.plan
        is_slow = best.step_seconds >= _SLOW * plan.estimated_step_bound
        if not is_slow or best.step_seconds > (1 - _WORTH) * plan.estimated_step_seconds:
            return best
        try:
            other = self._best(replace(cut, remat="layer"), schedule)
        except NoRoomError:
            return best
        return min(best, other, key=lambda it: it.step_seconds)

    def _best(self, step: StageMeshPartition, schedule: str) -> _Candidate:
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
    ) -> _Candidate | NoRoomError:
        """A copy of the layers, cut into stages, or why no stages fit."""
        try:
            return self._stages(step, schedule, reserve)
        except NoRoomError as error:
            return error

    def _fitting(
        self, step: StageMeshPartition, schedule: str, candidate: _Candidate | NoRoomError
    ) -> _Candidate:
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

    def _stages(self, step: StageMeshPartition, schedule: str, reserve: float) -> _Candidate:
        """A copy of the layers, cut into stages."""
        candidate = _Candidate(_copied(self.layers), len(self.plans))
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

    def _finish(self, candidate: _Candidate) -> None:
        """Makes a plan of stages."""
        if self.alpa.kept is not None:
            candidate.stages.append(_copied(candidate.module))
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
    def _noting_refusal(self, candidate: _Candidate) -> Generator[None]:
        """Notes why a candidate does not fit, if it does not."""
        try:
            yield
        except PassError as error:
            self._note(candidate, outcome="infeasible", reason=error.message)
            raise

    def _note(self, candidate: _Candidate, **known: Any) -> None:
        """Notes what is known of a candidate now."""
        self.plans[candidate.number] = replace(self.plans[candidate.number], **known)

    def tried_until(self, best: _Candidate) -> Tried:
        """What was tried until the best candidate was known."""
        self._note(best, outcome="taken")
        return Tried(submeshes=self.costs.tried(), plans=tuple(self.plans))

    @cached_property
    def to_plan(self) -> tuple[Pass, ...]:
        """The passes that make a plan of stages, which share the solutions of meshes."""
        return tuple(
            replace(step, solved=self.solved) if isinstance(step, IlpShardAnnotate) else step
            for step in self.alpa.to_plan
        )


def _write_dropped(module: ir.Module, dropped: Dropped) -> None:
    plan = Plan.read(main_function(module)) or Plan()
    with module.context:
        replace(plan, dropped=(*plan.dropped, dropped)).write(main_function(module))


def _copied(module: ir.Module) -> ir.Module:
    # The bindings give an op; as a view it has all that a pass uses of a module.
    return cast(ir.Module, module.operation.clone().opview)


def _move(source: ir.Module, target: ir.Module) -> None:
    """Replaces all that a module holds by what another one does, which is left empty."""
    for op in list(target.body.operations):
        op.operation.erase()
    for op in list(source.body.operations):
        target.body.append(op)
    for name in list(target.operation.attributes):
        del target.operation.attributes[name]
    for name in list(source.operation.attributes):
        target.operation.attributes[name] = source.operation.attributes[name]
