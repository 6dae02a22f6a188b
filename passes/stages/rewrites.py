"""Replaces a named computation by one with other operands and results."""

from __future__ import annotations

from collections.abc import Sequence

from alpa.dialects import attributes_of, body, ir, mpmd, terminator
from alpa.dialects.mpmd_types import Origin, named_computation, return_


def with_interface(
    op: ir.OpView,
    inputs: Sequence[tuple[ir.Value, ir.Value]],
    outputs: Sequence[tuple[ir.Value, ir.Value | None]],
) -> mpmd.NamedComputationOp:
    """Replaces a computation by one with these operands and results, and the same ops.

    Args:
        op: the computation. What `inputs` and `outputs` leave out must have no users.
        inputs: arguments of its block, each with the operand that it stands for.
        outputs: values of its block, each with the result whose users read it from now on, if any.
    """
    end = terminator(body(op))
    with ir.InsertionPoint(op):
        new, block = named_computation(
            Origin.of(op),
            [operand for _, operand in inputs],
            [value.type for value, _ in outputs],
            loc=op.location,
        )
    for name, attribute in attributes_of(op):
        if isinstance(attribute, ir.Attribute):
            new.attributes[name] = attribute
    moved: dict[ir.Value, ir.Value] = {
        before: after for (before, _), after in zip(inputs, block.arguments, strict=True)
    }
    returned = [moved.get(value, value) for value, _ in outputs]
    for before, after in moved.items():
        before.replace_all_uses_with(after)
    for inner in list(body(op).operations)[:-1]:
        block.append(inner)
    with ir.InsertionPoint(block):
        return_(returned, loc=end.location)
    for (_, before), after in zip(outputs, new.results, strict=True):
        if before is not None:
            before.replace_all_uses_with(after)
    op.operation.erase()
    return new
