"""Lets micro-batches read numbers of the whole batch, where they cannot be taken out of a sum.

A number that multiplies or divides all samples, such as one over a count, is taken out of the
micro-batches, which do not know it (`analysis/micro_batches`). This fails where samples with
different numbers are added, as in the gradient of a loss with two means::

    (losses * mask).sum() / mask.sum() + extra.mean()

Here the count depends on the batch alone, and the divisor of the mean on its size. A micro-batch
can read both: the program takes the mask a second time, as one array for the whole batch, and
computes the count from it. The divisor of the mean becomes that of the whole batch.

**Before**, lowered for 2 micro-batches::

    func.func public @main(%x: tensor<4xf32>, %mask: tensor<4xf32>) {
      %count = stablehlo.reduce(%mask init: %zero) … : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
      %size = stablehlo.constant {alpa.whole = {value = dense<8.0> …}} dense<4.0> : tensor<f32>

**After**::

    func.func public @main(%x: tensor<4xf32>, %mask: tensor<4xf32>, %0: tensor<8xf32>) {
      %count = stablehlo.reduce(%0 init: %zero) … : (tensor<8xf32>, tensor<f32>) -> tensor<f32>
      %size = stablehlo.constant dense<8.0> : tensor<f32>

Only numbers of cheap ops are read like this: a model is not run on the whole batch.
"""

from __future__ import annotations

from collections.abc import Sequence

from alpa.dialects import body, func, ir, ops_where
from alpa.dialects.attributes import WHOLE, Argument
from alpa.passes.analysis.graph import Graph, shape
from alpa.passes.analysis.micro_batches.context import Context, is_real
from alpa.passes.analysis.micro_batches.relate import relate
from alpa.passes.analysis.op_kinds import DATA_MOVEMENT, SOURCES, TRIVIAL
from alpa.passes.micro_batches.enlarge import enlarged_copy

_CHEAP = TRIVIAL | DATA_MOVEMENT | SOURCES | {"stablehlo.gather"}


def read_whole_numbers(
    main: func.FuncOp, arguments: Sequence[Argument], batch: Sequence[int], num_micro_batches: int
) -> tuple[int, ...]:
    """Lets micro-batches read numbers of the whole batch if they need them to be exact.

    Args:
        main: the program of one micro-batch, without calls, whose ops have `alpa.whole`.
        arguments: its arguments.
        batch: the numbers of those that may be read as one array for the whole batch.
        num_micro_batches: how many there are, at least 2.

    Returns:
        The numbers of the arguments that the program takes a second time, behind all others, for
        the whole batch.
    """
    graph = Graph.of(body(main))
    context = relate(
        graph,
        [(it.role, it.batch_dim) for it in arguments],
        num_micro_batches=num_micro_batches,
        whole_is_known=True,
        sum_power=0,
    )
    returned = [context.at(graph.values[v]) for v in graph.returned]
    if not any(it.is_mixed or (it.kind == "rows" and it.factors) for it in returned):
        return ()
    numbers = _numbers(graph, batch)
    cone = sorted(graph.cone(numbers))
    read = sorted({v for o in cone for v in graph.operands[o] if v < graph.num_arguments})
    with main.location:
        copies = _whole_arguments(main, arguments, read, num_micro_batches)
    for o in cone:
        op = graph.ops[o]
        copy = enlarged_copy(context, op, copies)
        if WHOLE in copy.attributes:
            del copy.attributes[WHOLE]
        copies.update(zip(op.results, copy.results, strict=True))
    for v in numbers:
        value = graph.values[v]
        value.replace_all_uses_with(copies[value])
    _erase_unused(graph, cone)
    _use_whole_sizes(main, context)
    return tuple(read)


def _numbers(graph: Graph, batch: Sequence[int]) -> list[int]:
    """The numbers made of the batch by cheap ops that something else reads."""
    cheap = set(batch)
    for name, operands, results in zip(graph.names, graph.operands, graph.results, strict=True):
        if name in _CHEAP and cheap.issuperset(operands):
            cheap.update(results)
    of_batch = graph.depends(batch)
    numbers = {
        v for v in cheap if of_batch[v] and v >= graph.num_arguments and not shape(graph.values[v])
    }
    return [
        v
        for v in sorted(numbers)
        if any(not numbers.issuperset(graph.results[o]) for o in graph.users[v])
    ]


def _whole_arguments(
    main: func.FuncOp, arguments: Sequence[Argument], numbers: Sequence[int], num_micro_batches: int
) -> dict[ir.Value, ir.Value]:
    """Adds arguments for the whole batch; each of them by the argument of a micro-batch."""
    block, added = body(main), dict[ir.Value, ir.Value]()
    for n in numbers:
        value = block.arguments[n]
        dim, type_ = arguments[n].batch_dim or 0, ir.RankedTensorType(value.type)
        sizes = [s * num_micro_batches if d == dim else s for d, s in enumerate(type_.shape)]
        whole = ir.RankedTensorType.get(sizes, type_.element_type)
        added[value] = block.add_argument(whole, value.location)
    types = [value.type for value in block.arguments]
    kind = ir.FunctionType.get(types, list(main.type.results))
    main.attributes["function_type"] = ir.TypeAttr.get(kind)
    old = ir.ArrayAttr(main.attributes["arg_attrs"])
    new = [Argument(role="constant").to_attr({}) for _ in numbers]
    main.attributes["arg_attrs"] = ir.ArrayAttr.get([*old, *new])
    return added


def _erase_unused(graph: Graph, ops: Sequence[int]) -> None:
    for o in reversed(ops):
        op = graph.ops[o]
        if not any(True for value in op.results for _ in value.uses):
            op.operation.erase()


def _use_whole_sizes(main: func.FuncOp, context: Context) -> None:
    """Replaces real constants that differ for the whole batch, each one number everywhere, by the
    constants of the whole batch."""
    for op in ops_where(main, lambda op: op.name == "stablehlo.constant"):
        differs = context.whole(op)
        value, (result,) = differs.pop("value", None), op.results
        if not (isinstance(value, ir.DenseElementsAttr) and value.is_splat):
            continue
        if not is_real(result.type):
            continue
        number = value.get_splat_value()
        op.attributes["value"] = ir.DenseElementsAttr.get_splat(result.type, number)
        if differs:
            op.attributes[WHOLE] = ir.DictAttr.get(differs)
        else:
            del op.attributes[WHOLE]
