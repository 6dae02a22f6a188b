"""Ops at the size of the whole batch, as `alpa.whole` describes them."""

from __future__ import annotations

from alpa.dialects import ir
from alpa.passes.analysis.graph import inner_ops, replace_operands
from alpa.passes.analysis.micro_batches.context import Context
from alpa.passes.analysis.micro_batches.whole import complex_constant
from alpa.passes.base import PassError
from alpa.passes.micro_batches.related import REMEDIES


def enlarged_copy(context: Context, op: ir.OpView, operands: dict[ir.Value, ir.Value]) -> ir.OpView:
    """A copy of an op, in front of it, that computes at the size of the whole batch.

    Args:
        context: knows how ops differ for the whole batch.
        op: the op.
        operands: what the copy reads in the place of values.

    Raises:
        PassError: as `enlarge`.
    """
    differs = context.whole(op)
    if isinstance(differs.get("value"), ir.StringAttr):
        copy = complex_constant(op, ir.StringAttr(differs["value"]).value)
    else:
        copy = op.operation.clone(ip=ir.InsertionPoint(op)).opview
        replace_operands(copy, operands)
    enlarge(context, copy, op)
    return copy


def enlarge(context: Context, op: ir.OpView, place: ir.OpView) -> None:
    """Makes an op that of the whole batch.

    Raises:
        PassError: at `place`, if ops in its regions have other types there.
    """
    if any("types" in context.whole(inner) for inner in inner_ops(op)):
        raise PassError(
            place,
            "computes in a loop or a branch with arrays as long as the batch that hold no "
            f"samples; {REMEDIES}",
        )
    for each in (op, *inner_ops(op)):
        differs = context.whole(each)
        for name, attr in differs.items():
            if name != "types":
                each.attributes[name] = attr
                continue
            for result, type_ in zip(each.results, ir.ArrayAttr(attr), strict=True):
                result.set_type(ir.TypeAttr(type_).value)
