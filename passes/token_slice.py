"""Cuts the stages of a causal program along the sequence, into token slices (TeraPipe).

Each forward and backward fragment becomes one per slice. Forward fragments return the keys and
values that later slices read; slices run backward from the last to the first, and hand on what they
send back to the keys and values of earlier ones. Sums over the tokens, such as the loss and the
gradients of weights, are added up from slice to slice. `analysis/tokens` proves that this computes
the same.

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<2x4x3xf32>>
    sdy.mesh @mesh_0 = <["a"=1]>
    func.func public @main(%x: !x {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> !x
        attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>} {
      %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x)
          {alpa.part = "forward"} (%a: tensor<2x4x3xf32>) {
        %0 = stablehlo.tanh %a : tensor<2x4x3xf32>
        %1 = stablehlo.dot_general %a, %0, batching_dims = [0] x [0], contracting_dims = [2] x [2]
          : (tensor<2x4x3xf32>, tensor<2x4x3xf32>) -> tensor<2x4x4xf32>
        %2 = stablehlo.iota dim = 1 : tensor<2x4x4xi32>
        %3 = stablehlo.iota dim = 2 : tensor<2x4x4xi32>
        %4 = stablehlo.compare GE, %2, %3
          : (tensor<2x4x4xi32>, tensor<2x4x4xi32>) -> tensor<2x4x4xi1>
        %5 = stablehlo.convert %4 : (tensor<2x4x4xi1>) -> tensor<2x4x4xf32>
        %6 = stablehlo.multiply %1, %5 : tensor<2x4x4xf32>
        %7 = stablehlo.dot_general %6, %0, batching_dims = [0] x [0], contracting_dims = [2] x [1]
          : (tensor<2x4x4xf32>, tensor<2x4x3xf32>) -> tensor<2x4x3xf32>
        mpmd.return %7 : tensor<2x4x3xf32>
      } : (!x) -> !x
      return %y : !x
    }

**After** `token-slice{lengths=3+1}`::

    sdy.mesh @mesh_0 = <["a"=1]>
    func.func public @main(%x: …) -> … attributes {…} {
      %f:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x)
          {alpa.part = "forward"} (%a: tensor<2x4x3xf32>) {
        %s = stablehlo.slice %a [0:2, 0:3, 0:3] : (tensor<2x4x3xf32>) -> tensor<2x3x3xf32>
        %k = stablehlo.tanh %s : tensor<2x3x3xf32>
        …
        mpmd.return %r, %k : tensor<2x3x3xf32>, tensor<2x3x3xf32>
      } : …
      %g = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x, %f#1, %f#0)
          {alpa.part = "forward"}
          (%b: tensor<2x4x3xf32>, %d: tensor<2x3x3xf32>, %e: tensor<2x3x3xf32>) {
        %t = stablehlo.slice %b [0:2, 3:4, 0:3] : (tensor<2x4x3xf32>) -> tensor<2x1x3xf32>
        %l = stablehlo.tanh %t : tensor<2x1x3xf32>
        %c = stablehlo.concatenate %d, %l, dim = 1
          : (tensor<2x3x3xf32>, tensor<2x1x3xf32>) -> tensor<2x4x3xf32>
        %p = stablehlo.dot_general %t, %c, …
        %y = stablehlo.concatenate %e, %z, dim = 1
          : (tensor<2x3x3xf32>, tensor<2x1x3xf32>) -> tensor<2x4x3xf32>
        mpmd.return %y : tensor<2x4x3xf32>
      } : …
      return %g : …
    }

**Requires**: forward and backward fragments, as `stage-mesh-partition` leaves them, without
shardings, for the schedule `gpipe` if there are several micro-batches. A dimension of the batch,
beside that of the samples, along which the program is causal.

**Ensures**: the same results, but for the order of sums. Each stage has one forward fragment for
each slice, and one backward fragment, with shapes that depend on the slice's length and its
context. Slices follow one another as stages do: the lists of the plan's schedule have one stage for
each stage and slice. Micro-batches stay: each of them is cut in the same way. The FLOPs and seconds
of a fragment are its share of those of the whole. A remark says which slices `lengths=auto` takes.

**Options**: see the fields.

**Fails when** the program is not causal, `lengths` do not add up to a sequence, shardings are
chosen already, a backward part computes keys and values again (rematerialisation), several
micro-batches are planned for another schedule than `gpipe`, or, with `lengths=auto`, the plan's
cluster is not known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import gcd
from typing import ClassVar

from alpa.dialects import body, func, ir, main_function, mpmd
from alpa.dialects.attributes import read_part
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.plan import Plan
from alpa.passes.analysis.tokens.causal import Causal, causal
from alpa.passes.base import Pass, PassError, Remark, errors_at, option
from alpa.passes.cost.device import seconds_text
from alpa.passes.plan.attribute import plan_and_any_cluster
from alpa.passes.schedules.planned import label
from alpa.passes.tokens.estimate import best_slices, spans
from alpa.passes.tokens.stages import SlicedStages


@dataclass(frozen=True, kw_only=True)
class TokenSlice(Pass):
    """Cuts the stages of a causal program along the sequence, into token slices."""

    name: ClassVar[str] = "token-slice"
    lengths: str = option(
        "auto",
        "tokens of each slice, joined by +, such as 24+16+16+8; auto: those of least latency by "
        "the cost model",
    )
    granularity: int = option(
        8,
        "tokens of which each slice of lengths=auto has a multiple; if it does not divide a "
        "sequence, its greatest common divisor with the length",
    )

    def run(self, module: ir.Module, remark: Remark) -> None:
        main = main_function(module)
        with errors_at(main):
            lengths = None if self.lengths == "auto" else _lengths(self.lengths)
        _check_fragments(main)
        _check_schedule(main)
        found = causal(main, None if lengths is None else sum(lengths))
        if lengths is None:
            lengths = self._best(module, main, found, remark)
        with module.context:
            SlicedStages(main, found.context, spans(lengths)).rewrite()

    def _best(
        self, module: ir.Module, main: func.FuncOp, found: Causal, remark: Remark
    ) -> Sequence[int]:
        """The slices of least latency."""
        plan, _ = plan_and_any_cluster(main)
        if self.granularity < 1:
            raise PassError(main, f"granularity is {self.granularity}; expected 1 or more tokens")
        unit = gcd(self.granularity, found.length)
        best, seconds, whole = best_slices(module, found.length, unit, plan.num_micro_batches)
        remark(
            main.location,
            f"slices of {'+'.join(map(str, best))} tokens: forward and backward of all "
            f"micro-batches take {seconds_text(seconds)} by the cost model, and "
            f"{seconds_text(whole)} without slices",
        )
        return best


def _lengths(text: str) -> Sequence[int]:
    """Raises ValueError for anything but positive numbers joined by +."""
    words = text.split("+")
    if not all(word.isdecimal() and int(word) for word in words):
        raise ValueError(
            f"lengths is '{text}'; expected the tokens of each slice joined by +, such as 24+16+8"
        )
    return [int(word) for word in words]


def _check_schedule(main: func.FuncOp) -> None:
    """Raises PassError where a mesh would hold more micro-batches than the plan counts as memory.

    Each stage and slice has a list of its own, so under 1F1B the first ones wait for the last ones
    with more micro-batches in flight than there are stages. GPipe holds all of them anyway.
    """
    with errors_at(main):
        plan = Plan.read(main)
    if plan is not None and plan.num_micro_batches > 1 and plan.schedule != "gpipe":
        raise PassError(
            main,
            f"the schedule is {label(plan.schedule)}, which holds more micro-batches with slices "
            "than are counted as memory; plan with schedule=gpipe",
        )


def _check_fragments(main: func.FuncOp) -> None:
    """Raises PassError where there are none to cut, or they have shardings."""
    fragments = [op for op in body(main).operations if isinstance(op, mpmd.FragmentOp)]
    with errors_at(main):
        cut = [op for op in fragments if read_part(op) in ("forward", "backward")]
    if not cut:
        raise PassError(main, "there are no stages to cut; run stage-mesh-partition before")
    for op in cut:
        if any(MeshTensor.from_type(it.type).sharding is not None for it in op.results):
            raise PassError(
                op,
                "the fragment's results have shardings, which are those of whole sequences; run "
                "token-slice directly after stage-mesh-partition, without shardings of your own",
            )
