"""Writes each fragment as a module of its own that any XLA can compile.

The pass runs eleven passes, each of which does one thing to every fragment or module:

1. `delay-copies` lets copies in other layouts wait where memory would not suffice. It comes first,
   so that a backward part that is merged makes its own copies.
2. `merge-fragments` merges a forward and a backward fragment that follow one another on a mesh.
3. `wait-for-gradients` lets layers that are computed again wait for the gradients of others.
4. `outline-fragments` copies each fragment into the function of a nested module.
5. `lower-partial-sums` writes partial sums as parts along a leading dimension. XLA would reduce
   them at once.
6. `accumulate-gradients` adds gradients up over the micro-batches. It comes after
   `lower-partial-sums`, because parts are added up as they are.
7. `scale-totals` scales the sums that updates read.
8. `donate-states` gives the buffers of old states to the new ones.
9. `run-calls-on-shards` runs sharded custom calls on their shards.
10. `constrain-shardings` writes shardings as constraints. It comes after all passes that read or
   add shardings of ops.
11. `write-reshard-steps` writes the steps of each reshard. It comes last, because it reads the
   constraints.

It is a `Driver`, as `alpa` is: each pass is verified and timed, and its IR can be printed by
`--print-ir-after-all`. Merged fragments get new attributes, the others keep theirs; the rest
of the plan in `@main` stays as it is. `plan/data.py` says what the attributes mean.

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%x: !x) -> !x attributes {
        topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
      %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.part = "forward"}
          (%a: tensor<8x4xf32>) {
        %0 = stablehlo.tanh %a {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {"a"}]>]>}
          : tensor<8x4xf32>
        mpmd.return %0 : tensor<8x4xf32>
      } : (!x) -> !x
      return %y : !x
    }

**After**::

    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(…) -> … {
      %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x)
          {alpa.module = @mesh_0.layer_0.forward, alpa.part = "forward"} …
      return %y : …
    }
    module @mesh_0.layer_0.forward {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
          -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>}) {
        %0 = stablehlo.tanh %a : tensor<8x4xf32>
        %1 = sdy.sharding_constraint %0 <@mesh_0, [{}, {"a"}]> : tensor<8x4xf32>
        return %1 : tensor<8x4xf32>
      }
    }

**Requires**: a plan, as `insert-cross-mesh-reshard` leaves it.

**Ensures**: each fragment has a module, named by its `alpa.module`. The module holds StableHLO and
constraints, and no attribute that XLA does not read. Its function takes the fragment's operands,
then an accumulator for each number in `alpa.accumulators`. It returns the fragment's results, then
those of `alpa.extra_results` for this micro-batch alone.

**Options**: see the fields.

**Fails when** one of the eleven passes does.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from alpa.dialects import ir
from alpa.passes.accumulate_gradients import AccumulateGradients
from alpa.passes.base import Driver, Remark, RunPass, option
from alpa.passes.constrain_shardings import ConstrainShardings
from alpa.passes.delay_copies import DelayCopies
from alpa.passes.donate_states import DonateStates
from alpa.passes.lower_partial_sums import LowerPartialSums
from alpa.passes.merge_fragments import MergeFragments
from alpa.passes.outline_fragments import OutlineFragments
from alpa.passes.run_calls_on_shards import RunCallsOnShards
from alpa.passes.scale_totals import ScaleTotals
from alpa.passes.wait_for_gradients import WaitForGradients
from alpa.passes.write_reshard_steps import WriteReshardSteps


@dataclass(frozen=True, kw_only=True)
class ExportStages(Driver):
    """Writes each fragment as a module of its own that any XLA can compile."""

    name: ClassVar[str] = "export-stages"

    loss_reduction: Literal["mean", "sum"] = option("mean", "as in `scale-totals`")
    merge: bool = option(
        True, "run `merge-fragments`; without it, each part of a stage can be timed by itself"
    )

    def drive(self, module: ir.Module, remark: Remark, run_pass: RunPass) -> None:
        with module.operation.location:
            for step in (
                DelayCopies(),
                *((MergeFragments(),) if self.merge else ()),
                WaitForGradients(),
                OutlineFragments(),
                LowerPartialSums(),
                AccumulateGradients(),
                ScaleTotals(loss_reduction=self.loss_reduction),
                DonateStates(),
                RunCallsOnShards(),
                ConstrainShardings(),
                WriteReshardSteps(),
            ):
                run_pass(step, module, remark)
