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

The first four run once. The other four run on a copy of the layers for each candidate
(`plan_search.py`, which has the constants, too):

* **Schedules.** With `schedule=auto`, 1F1B is planned first. Then stages are found for every other
  schedule, and their step is estimated, by simulation for all but GPipe. The search for a schedule
  ends when each cut is estimated to take 1.25 times the best plan (`USELESS`). One micro-batch,
  forwards alone and stages on one mesh take the same time under every schedule, and are not planned
  again. Of the other stages, those that predict at most 5 % more than the best plan so far become a
  plan, the shortest first. The best plan names the schedule that comes second, by its predicted
  step or, if it was not finished, by its estimate. If a schedule splits backwards, `split-backward`
  runs before `insert-cross-mesh-reshard`, which predicts the step. A plan is not finished where one
  of its meshes alone takes 1.1 times the best one (`_ALONE`). For `terapipe`, stages are cut as for
  GPipe, and then along the sequence by `token-slice`.
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
* **Transfers.** What crosses between stages is estimated before it is sharded. If a plan of several
  stages takes longer than they were estimated at, by `_WORTH`, and nothing restricts the stages,
  others are planned, too, as long as they are estimated to take hardly longer (`_ROUGH`): one
  stage, stages on each kind of hosts alone and, if meshes have different shapes on hosts of one
  kind, stages on equal meshes, which may leave hosts idle: between these few messages are needed.
  If the plan is one stage on several hosts, one stage on fewer of them is planned, too, where it is
  estimated to be faster by `_WORTH`: less may be sent there. On more than 8 hosts, those down to
  about an eighth are tried.
* **Costs.** The costs of sharded layers depend on neither the schedule nor the reserve, so all cuts
  share them (`stages/costing.py`). Meshes that are the same in several cuts are solved once
  (`sharding/solved.py`). All passes share the processes that help them (`workers.py`).

`verify-layers` does not run here: the passes that make layers and stages check them themselves.
`export-stages` does not run here either: it copies the fragments of the finished plan into modules
for XLA. `alpa{...},export-stages` runs both. `canonicalize` and `cse` may run before `alpa`. After
`simplify-trivial-ops`, only `layer-cluster` runs `cse`, within each layer. Between equal layers,
`cse` would share masks and iotas: layers would then differ, and the shared values would be sent
between meshes. A rewrite that swaps operands or replaces an op would falsify or lose its
`alpa.follow`.

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
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import ClassVar, Self, cast

from alpa.dialects import func, ir, main_function, walk
from alpa.dialects.attributes import FORCED, HELD, PROGRAM
from alpa.dialects.reading import move_contents
from alpa.passes.base import (
    Driver,
    NotFasterError,
    Option,
    Pass,
    PassError,
    Remark,
    RunPass,
    errors_at,
    option,
)
from alpa.passes.candidate import copied
from alpa.passes.combine_micro_batches import CombineMicroBatches
from alpa.passes.cost.cluster import parse_cluster
from alpa.passes.ilp_shard_annotate import IlpShardAnnotate
from alpa.passes.import_hlo import ImportHlo
from alpa.passes.insert_cross_mesh_reshard import InsertCrossMeshReshard
from alpa.passes.layer_cluster import LayerCluster
from alpa.passes.place_gradient_reductions import PlaceGradientReductions
from alpa.passes.plan_search import PlanSearch
from alpa.passes.schedules.planned import TERAPIPE
from alpa.passes.simplify_trivial_ops import SimplifyTrivialOps
from alpa.passes.solve.stages.placement import submeshes
from alpa.passes.split_loops import SplitLoops
from alpa.passes.stage_mesh_partition import StageMeshPartition
from alpa.passes.stages.clustered import even_seconds
from alpa.passes.tried import Tried
from alpa.passes.workers import Workers

_TO_LAYERS = (ImportHlo, CombineMicroBatches, SimplifyTrivialOps, SplitLoops, LayerCluster)
_MOST_LAYERS = 72
"""The halves of the blocks of a transformer with 32, and the blocks of one with 48."""
_LAYERS_TIMES_DEVICES = 50 * 64
"""GPT-39B on 64 V100s is predicted at 91.6 s per step if it is cut into its 48 blocks. The halves
of its blocks take twice the time of the search for 89.5 s, and 16 layers give 103.1 s."""
_OF_SEARCH = ("alpa.passes.stages.costing", "alpa.passes.solve.sharding.pareto")
"""Modules that processes need to find the costs of layers."""
_TO_PLAN = (PlaceGradientReductions, IlpShardAnnotate, InsertCrossMeshReshard)
STEPS: tuple[type[Pass], ...] = (*_TO_LAYERS, StageMeshPartition, *_TO_PLAN)
"""The passes in their order."""


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
        "or a file with a table of your own; `auto` takes the one with a name whose predicted step "
        "is the shortest",
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
        if self.schedule == TERAPIPE:
            self = self._with_token_slices(main_function(module))
        if self.schedule != "auto":
            with errors_at(main_function(module)):
                cut = replace(self.cut, schedule=self.schedule).with_schedule()
            self = replace(self, schedule=cut.schedule, cut=cut)
        stages = self.cut.known_stages()

        def run_checked(step: Pass, inner: ir.Module, say: Remark) -> None:
            run_pass(replace(step, is_checked=True), inner, say)

        first, *others = self.to_layers
        run_pass(first, module, remark)  # This pass checks all shapes, and leaves no tuples.
        if self.kept is not None:
            self.kept.program = copied(module)
        with errors_at(main_function(module)):
            workers = Workers(self.cut.processes)
        with workers:
            self._start(workers, module)
            for step in others:
                if isinstance(step, LayerCluster):
                    fewest, most = self.cut.fewest_stages(), self._most_layers()
                    step = replace(step, stages=stages, least=fewest, most=most)
                run_checked(step, module, remark)
            if self.faster_than is not None:
                self._check_bound(module, self.faster_than)
            costs = self.cut.costs or self.cut.new_costs()
            search = PlanSearch(
                schedule=self.schedule,
                cut=self.cut,
                steps=self.to_plan,
                keeps_stages=self.kept is not None,
                layers=module,
                costs=costs,
                workers=workers,
                run_pass=run_checked,
            )
            best = search.run()
        if self.kept is not None:
            self.kept.layers = copied(module)
            self.kept.stages = best.stages[-1]
            schedule = best.plan.schedule
            self.kept.cut = replace(self.cut, schedule=schedule, costs=costs, is_checked=True)
            self.kept.to_plan = tuple(search.steps_under(schedule))
        if self.on_tried is not None:
            self.on_tried(search.tried_until(best))
        for location, message in best.remarks:
            remark(location, message)
        move_contents(best.module, module)
        with module.context:
            module.operation.attributes[PROGRAM] = ir.StringAttr.get(program)

    def _start(self, workers: Workers, module: ir.Module) -> None:
        """Starts processes while this one makes layers, if there are meshes to search.

        Where costs are known, or kept in a folder, there may be nothing to ask.
        """
        cut = self.cut
        is_free = cut.mesh_shape == cut.meshes == "auto" and not cut.fixed_stages
        if cut.costs is not None or cut.costs_folder or not is_free:
            return
        try:
            kinds = parse_cluster(cut.cluster).kinds
        except ValueError:  # `stage-mesh-partition` says so.
            return
        meshes = sum(len(submeshes(kind.hosts, kind.devices_per_host)) - 1 for kind in kinds)
        workers.worth(walk(module.body), meshes).prepare(*_OF_SEARCH, calls=meshes + 1)

    def _most_layers(self) -> int:
        """How many small layers are worth it: the work of the search for stages grows with their
        square and with the number of devices."""
        try:
            devices = parse_cluster(self.cut.cluster).num_devices
        except ValueError:  # `stage-mesh-partition` says so.
            return 1
        return min(_MOST_LAYERS, _LAYERS_TIMES_DEVICES // devices)

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
        from alpa.passes.token_slice import TokenSlice  # noqa: PLC0415 - costs start-up time

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
        module = copied(module)
        for name in given:
            del main_function(module).attributes[name]
    text = module.operation.get_asm(binary=True, enable_debug_info=False, assume_verified=True)
    return hashlib.sha256(cast(bytes, text)).hexdigest()


def planned_for(module: ir.Module) -> str | None:
    """The fingerprint of the program that a module is the plan of, if it says so."""
    attr = module.operation.attributes.get(PROGRAM)
    return attr.value if isinstance(attr, ir.StringAttr) else None
