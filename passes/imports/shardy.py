"""Ops of Shardy that say where a value is and that JAX does not write, as constraints."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat

from alpa.dialects import body, ir, sdy
from alpa.passes.analysis.graph import move_body, replace_op
from alpa.passes.base import PassError

_PLACED = {
    "sdy.reshard": "sharding",
    "sdy.all_gather": "out_sharding",
    "sdy.all_slice": "out_sharding",
    "sdy.all_to_all": "out_sharding",
    "sdy.collective_permute": "out_sharding",
}
"""Ops whose result is their operand, and the attribute that says where it is."""
_PARTIAL = frozenset(
    {
        "sdy.all_reduce",
        "sdy.reduce_scatter",
        "sdy.replicated_to_unreduced",
        "sdy.sharded_to_unreduced",
    }
)
_NAMED = "sdy.named_computation"
_EDGE = "sdy.data_flow_edge"
SHARDY = frozenset({*_PLACED, *_PARTIAL, _NAMED, _EDGE})
"""What `import_shardy` replaces or refuses."""


def import_shardy(ops: Iterable[ir.OpView]) -> None:
    """Replaces such ops, given parents first, by `sdy.sharding_constraint`, and named computations
    by their bodies.

    Raises:
        PassError: an op makes or adds up partial sums, which are the partitioner's.
    """
    for op in ops:
        name = op.operation.name
        if name in _PARTIAL:
            raise PassError(
                op,
                f"{name} is about the partial sums of a program that has been partitioned; plan "
                "the program from before",
            )
        if name in _PLACED:
            attr = op.attributes[_PLACED[name]]
            replace_op(op, _constrained(op, op.operands, [attr]))
        elif name == _EDGE:
            replace_op(op, list(op.operands))
        elif name == _NAMED:
            _inline(op)


def _inline(op: ir.OpView) -> None:
    """Puts the body of a named computation in its place."""
    operands = _constrained(op, op.operands, _shardings(op, "in_shardings"))
    returned = move_body(body(op), operands, op)
    replace_op(op, _constrained(op, returned, _shardings(op, "out_shardings")))


def _shardings(op: ir.OpView, name: str) -> Iterable[ir.Attribute | None]:
    """The shardings of an op's operands or results; of each None if it has none."""
    if name not in op.attributes:
        return repeat(None)
    return sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings


def _constrained(
    op: ir.OpView,
    values: Sequence[ir.Value] | ir.OpOperandList,
    shardings: Iterable[ir.Attribute | None],
) -> list[ir.Value]:
    """Values under constraints in front of an op."""
    with ir.InsertionPoint(op), op.location:
        return [
            value if sharding is None else sdy.ShardingConstraintOp(value, sharding).result
            for value, sharding in zip(values, shardings, strict=False)
        ]
