"""Adds gradients and losses up over the micro-batches, in donated arguments.

`plan/data.py` defines which values are totals: the gradients and losses that updates read. The
function that makes such a value takes the sum so far as a further argument. It returns that sum
plus its own value, in the same buffer. If the value of the single micro-batch is read, too, the
function returns both.

A sum has the type of the value that is added up. `stage-mesh-partition` makes gradients wide where
`accumulate-dtype` asks for it. A plan that was written by hand may use a narrower type than its
`alpa.plan` says. A remark then names the result.

**Before**::

    !w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%w: !w {alpa.role = "state"},
        %x: !w {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> (!w {alpa.result = "state:0"})
        attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
        alpa.plan = {num_micro_batches = 4 : i64, schedule = "gpipe",
        predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
      %g = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x)
          {alpa.module = @layer, alpa.part = "backward"} (%a: tensor<8xf32>) {
        mpmd.return %a : tensor<8xf32>
      } : (!w) -> !w
      %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%g)
          {alpa.module = @update, alpa.part = "update"} (%a: tensor<8xf32>) {
        mpmd.return %a : tensor<8xf32>
      } : (!w) -> !w
      return %n : !w
    }
    module @layer {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>})
          -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
        return %x : tensor<8xf32>
      }
    }
    module @update {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %g: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>})
          -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
        return %g : tensor<8xf32>
      }
    }

**After**::

    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(…) -> … {
      %g = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%x)
          {alpa.accumulators = array<i64: 0>, alpa.module = @layer, alpa.part = "backward"} …
    }
    module @layer {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>},
          %total: tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>,
                                 tf.aliasing_output = 0 : i32})
          -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
        %sum = stablehlo.add %total, %x : tensor<8xf32>
        return %sum : tensor<8xf32>
      }
    }
    module @update {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %g: tensor<8xf32> {alpa.total = "gradient",
                             sdy.sharding = #sdy.sharding<@mesh_0, [{}]>})
          -> (tensor<8xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}]>}) {
        return %g : tensor<8xf32>
      }
    }

**Requires**: modules without partial sums, as `lower-partial-sums` leaves them.

**Ensures**: `alpa.accumulators` of a fragment are the numbers of its results that are totals, and
`alpa.extra_results` those of them that are returned for the single micro-batch, too. `alpa.total`
marks each argument of an update that is a total: the sum of a `gradient`, or of a loss that is
returned as a `mean` or a `sum`.

**Options**: none.

**Fails when** a total is a partial sum, the pass has run before, or a fragment has no module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alpa.dialects import func, ir, stablehlo, terminator
from alpa.dialects.attributes import ALIASING_OUTPUT
from alpa.dialects.sharding import Sharding
from alpa.passes.base import Pass, PassError, Remark
from alpa.passes.plan import data
from alpa.passes.plan.data import Fragment, Program
from alpa.passes.plan.fragment_modules import SHARDING, FragmentModule, fragment_modules
from alpa.passes.plan.reader import read_planned


@dataclass(frozen=True, kw_only=True)
class AccumulateGradients(Pass):
    """Adds gradients and losses up over the micro-batches, in donated arguments."""

    name: ClassVar[str] = "accumulate-gradients"

    def run(self, module: ir.Module, remark: Remark) -> None:
        program = read_planned(module)
        for fragment, nested in zip(program.fragments, fragment_modules(module), strict=True):
            if fragment.accumulators:
                raise PassError(
                    nested.fragment,
                    "the fragment accumulates already; run accumulate-gradients once only",
                )
            _accumulate(program, fragment, nested)
            if fragment.part == "update":
                _mark_totals(program, fragment, nested)
            narrow = _narrow_sum(program, fragment)
            if narrow is not None:
                remark(nested.fragment.location, narrow)


def _accumulate(program: Program, fragment: Fragment, nested: FragmentModule) -> None:
    """Adds the results that are totals to new arguments, and writes their numbers."""
    accumulated = [i for i, v in enumerate(fragment.outputs) if v in program.totals]
    extra = [i for i in accumulated if fragment.outputs[i] in program.micro_used]
    if not accumulated:
        return
    block = nested.function.entry_block
    results = nested.results
    end = terminator(block)
    single = list(end.operands)
    summed = list(single)
    i32 = ir.IntegerType.get_signless(32)
    with ir.InsertionPoint(end), nested.fragment.location as location:
        for i in accumulated:
            if Sharding.from_attr(results[i][SHARDING]).unreduced:
                raise PassError(
                    nested.fragment,
                    f"result {i} is a partial sum; run lower-partial-sums before this pass",
                )
            total = block.add_argument(single[i].type, location)
            nested.arguments.append({**results[i], ALIASING_OUTPUT: ir.IntegerAttr.get(i32, i)})
            summed[i], single[i] = _added(total, single[i])
        func.ReturnOp([*summed, *(single[i] for i in extra)])
    end.operation.erase()
    results += [results[i] for i in extra]
    nested.write_signature()
    nested.write_numbers(data.ACCUMULATORS, accumulated)
    nested.write_numbers(data.EXTRA_RESULTS, extra)


def _added(total: ir.Value, value: ir.Value) -> tuple[ir.Value, ir.Value]:
    """A total with a value added, and the value.

    If the value has passed a barrier to be returned only, the sum does so in its place: XLA fuses
    the addition with what makes the value.
    """
    maker = None if isinstance(value.owner, ir.Block) else value.owner.opview
    if not isinstance(maker, stablehlo.OptimizationBarrierOp) or len(list(value.uses)) > 1:
        return stablehlo.add(total, value), value
    number = ir.OpResult(value).result_number
    before = maker.operands[number]
    with ir.InsertionPoint(maker):
        maker.operands[number] = stablehlo.add(total, before)
    return value, before


def _mark_totals(program: Program, fragment: Fragment, nested: FragmentModule) -> None:
    """Marks each argument of an update that is a total with its kind."""
    for attrs, value in zip(nested.arguments, fragment.inputs, strict=True):
        if value in program.totals:
            kind = program.losses.get(program.sources[value], "gradient")
            attrs[data.TOTAL] = ir.StringAttr.get(kind)
    nested.write_signature()


def _narrow_sum(program: Program, fragment: Fragment) -> str | None:
    """A remark on a sum whose type is narrower than the plan asks for, if there is one."""
    for number, value in enumerate(fragment.outputs):
        dtype = program.values[value].dtype
        wide = program.plan.accumulator(dtype)
        if value in program.totals and program.parts[value] != "update" and wide != dtype:
            return (
                f"result {number} is added up in {dtype} over {program.num_micro_batches} "
                f"micro-batches; to add up in {wide}, plan the program anew by stage-mesh-partition"
            )
    return None
