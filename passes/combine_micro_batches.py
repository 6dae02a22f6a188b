"""Proves that micro-batches give what the whole batch gives.

Every value gets a relation to the same value of a program for the whole batch. It is the same, it
holds rows of samples, it is a sum over samples, or it is a function of such sums
(`analysis/micro_batches`). If a result or a new state depends on the samples in another way, the
pass fails at the op that mixes samples. Otherwise it splits the program. What a micro-batch
computes comes first. A sum that is read by what runs once per step gets a marker `@alpa.gradient`,
by which later passes accumulate it. A number of the step by which samples are multiplied, such as
one over the number of tokens that count, is taken out: the micro-batch computes with one, and the
accumulated sum is multiplied by the number.

With `micro-batches=independent` nothing is proven. The markers of gradients then tell what runs in
each micro-batch and what once per step. A program without markers gets them by the names that JAX
gives to ops that differentiation makes (`simplify/gradients.py`).

A program that was lowered for both sizes says on its ops how they differ (`alpa.whole`). In any
other program the divisor of a mean cannot be told from other numbers. There, sums of floats over
samples, and counts that become floats, are taken for means, or with `loss-reduction=sum` for sums.

**Before**::

    func.func public @main(
        %x: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64},
        %mask: tensor<4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64}) -> tensor<f32> {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %sum = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0]
        : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
      %count = stablehlo.reduce(%mask init: %zero) applies stablehlo.add across dimensions = [0]
        : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
      %mean = stablehlo.divide %sum, %count : tensor<f32>
      return %mean : tensor<f32>
    }

**After** `combine-micro-batches{num-micro-batches=2}`::

    module attributes {alpa.micro_batches = "exact if sums over samples are parts of means"} {
      func.func public @main(%x: …, %mask: …) -> (tensor<f32> {alpa.result = "last"}) {
        %zero = stablehlo.constant …
        %sum = stablehlo.reduce(%x init: %zero) …
        %0 = stablehlo.custom_call @alpa.gradient(%sum) : (tensor<f32>) -> tensor<f32>
        %count = stablehlo.reduce(%mask init: %zero) …
        %1 = stablehlo.custom_call @alpa.gradient(%count) : (tensor<f32>) -> tensor<f32>
        %mean = stablehlo.divide %0, %1 : tensor<f32>
        return %mean : tensor<f32>
      }
    }

**Requires**: a program for one micro-batch, as it was lowered.

**Ensures**: calls are inlined, and no loop or branch holds markers, which would mean nothing there.
With several micro-batches the module attribute `alpa.micro_batches` is `independent` or `exact`.
After `exact` it says what the proof assumes if the module has no `alpa.whole` (` if sums over
samples are parts of means`, or `of sums`), and that random numbers differ (`, random numbers per
micro-batch`). With `exact` results have their `alpa.result`. With one micro-batch nothing is
proven, and no marker is added.

**Options**: see the fields.

**Fails when** there are several micro-batches and samples are mixed, the program was lowered for
another number of micro-batches, or no argument is a batch and the state changes. It also
fails when the number of micro-batches is not 1 to 65,536.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from alpa.dialects import body, func, ir, ops_where, terminator
from alpa.dialects.attributes import (
    EXACT,
    GRADIENT,
    IF_MEANS,
    IF_SUMS,
    INDEPENDENT,
    LAYER_BOUNDARY,
    MICRO_BATCHES,
    RANDOM,
    WHOLE,
    WITH_NOISE,
    call_target,
    micro_batches_of,
    read_results,
)
from alpa.passes.analysis.graph import Graph, replace_op, shape, splat
from alpa.passes.analysis.input_checks import check_input, check_unplanned
from alpa.passes.analysis.micro_batches.relate import relate
from alpa.passes.analysis.micro_batches.whole import strip_whole
from alpa.passes.analysis.roles import Roles, infer_roles
from alpa.passes.base import Pass, PassError, Remark, option
from alpa.passes.micro_batches.split import Split
from alpa.passes.plan.checks import check_num_micro_batches
from alpa.passes.simplify.gradients import mark_gradients
from alpa.passes.simplify.host_calls import refuse_host_calls
from alpa.passes.simplify.inline import inline_calls
from alpa.passes.simplify.scatter_add import scatter_apart


@dataclass(frozen=True, kw_only=True)
class CombineMicroBatches(Pass):
    """Proves that micro-batches give what the whole batch gives, and marks what they add up."""

    name: ClassVar[str] = "combine-micro-batches"

    num_micro_batches: int = option(
        1,
        "with one there is nothing to prove",
    )
    micro_batches: Literal["auto", "exact", "independent"] = option(
        "auto",
        "`exact` proves that micro-batches compute what the whole batch computes; `independent` "
        "makes each a batch of its own; `auto` follows the module's `alpa.micro_batches`, or exact",
    )
    loss_reduction: Literal["mean", "sum"] = option(
        "mean",
        "how sums over samples are treated if the whole batch is not known",
    )

    def run(self, module: ir.Module, remark: Remark) -> None:
        with module.context:
            main = check_input(module, is_checked=self.is_checked)
            check_unplanned(main)
            check_num_micro_batches(main, self.num_micro_batches)
            others = inline_calls(module, main)
            unclean = [op for op in others if _is_removed(op, body(main))]
            mode = self._mode(module)
            if self.num_micro_batches > 1 and mode == EXACT:
                mode = self._combine(module, main, others, remark)
            elif self.num_micro_batches > 1:
                _check_states(main)
                mark_gradients(body(main))
            if WHOLE in module.operation.attributes:
                strip_whole(module)
            if unclean:
                _clean(main, remark)
            if self.num_micro_batches > 1:
                module.operation.attributes[MICRO_BATCHES] = ir.StringAttr.get(mode)

    def _mode(self, module: ir.Module) -> str:
        if self.micro_batches != "auto":
            return self.micro_batches
        return INDEPENDENT if micro_batches_of(module) == INDEPENDENT else EXACT

    def _combine(
        self, module: ir.Module, main: func.FuncOp, others: Sequence[ir.OpView], remark: Remark
    ) -> str:
        """Proves and rewrites; what was proven. `others` are the ops that are no arithmetic."""
        whole = module.operation.attributes.get(WHOLE)
        if whole is not None and ir.IntegerAttr(whole).value != self.num_micro_batches:
            raise PassError(
                main,
                f"the program was lowered for {ir.IntegerAttr(whole).value} micro-batches, and "
                f"num-micro-batches is {self.num_micro_batches}; lower it for as many",
            )
        graph = Graph.of(body(main))
        if scatter_apart(graph):
            graph = Graph.of(body(main))
        roles = infer_roles(main, graph)
        if not any(argument.role == "batch" for argument in roles.arguments):
            if any(graph.returned[r] != a for r, a in roles.state_pairs().items()):
                raise PassError(
                    main,
                    f"no argument is cut into {self.num_micro_batches} micro-batches, and each of "
                    "them would change the state; say which arguments hold the samples "
                    '(alpa.role = "batch"), or plan with 1 micro-batch',
                )
            return EXACT
        if whole is None:
            _report_sizes(graph, roles, remark)
        context = relate(
            graph,
            [(it.role, it.batch_dim) for it in roles.arguments],
            num_micro_batches=self.num_micro_batches,
            whole_is_known=whole is not None,
            sum_power=-1 if self.loss_reduction == "mean" else 0,
        )
        split = Split(main=main, graph=graph, roles=roles, context=context)
        draws = any(
            call_target(op) == RANDOM and context.at(op.results[0]).kind == "rows" for op in others
        )
        if any(context.at(value).is_mixed for value in split.returned):
            # Calls of the host mix whatever they read, and have a sentence of their own.
            refuse_host_calls(main, others)
        split.check()
        split.rewrite()
        assumed = IF_MEANS if self.loss_reduction == "mean" else IF_SUMS
        return EXACT + (assumed if whole is None else "") + (WITH_NOISE if draws else "")


def _check_states(main: func.FuncOp) -> None:
    """Raises PassError where a micro-batch could not read a state that the one before wrote."""
    arguments, end = list(body(main).arguments), terminator(body(main))
    for result, value in zip(read_results(main), end.operands, strict=True):
        role = result.role
        if role is None or role.kind != "state" or role.index is None:
            continue
        old = arguments[role.index].type
        if value.type != old:
            raise PassError(
                main.location if isinstance(value.owner, ir.Block) else value.owner.location,
                f"the new state of argument {role.index} is {value.type} in a micro-batch, and the "
                f"old one is {old}: it is made of the rows of a whole batch; plan with 1 "
                "micro-batch",
            )


def _report_sizes(graph: Graph, roles: Roles, remark: Remark) -> None:
    """Says which numbers of a file may be the size of its batch: nothing tells them from it."""
    sizes = {
        float(shape(graph.values[a])[role.batch_dim or 0])
        for a, role in enumerate(roles.arguments)
        if role.role == "batch"
    }
    found = [
        (number, op.location)
        for op, name in zip(graph.ops, graph.names, strict=True)
        if name == "stablehlo.constant"
        and (number := splat(op.results[0])) is not None
        and number in sizes
        and number > 2  # Smaller ones are everywhere.
    ]
    if found:
        number, first = found[0]
        remark(
            first,
            f"the number {number:g}, here and in {len(found) - 1} other places, may be the size of "
            "the batch. A file does not say so, so it is treated as a constant; lower the program "
            "with alpa.parallelize(...).lower, which records the differences at the whole batch",
        )


def _is_removed(op: ir.OpView, block: ir.Block) -> bool:
    """Whether only this pass reads a call, or it is a marker that means nothing where it is: not in
    the block of `@main`."""
    target = call_target(op)
    return target == RANDOM or (
        target in (GRADIENT, LAYER_BOUNDARY) and op.operation.block != block
    )


def _clean(main: func.FuncOp, remark: Remark) -> None:
    """Removes what only this pass reads, and markers where they mean nothing."""
    boundary: ir.Location | None = None
    block = body(main)
    for op in ops_where(main, lambda op: op.name == "stablehlo.custom_call"):
        if _is_removed(op, block):
            if call_target(op) == LAYER_BOUNDARY:
                boundary = boundary or op.location
            replace_op(op, op.operands)
    if boundary is not None:
        remark(
            boundary,
            "a layer boundary inside of a loop or a branch says nothing: a loop is cut between its "
            "trips, if at all; the marker is ignored",
        )
