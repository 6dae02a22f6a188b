"""The driver of the rewrites: one sweep forwards, one backwards to erase what is unused."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from alpa.dialects import ir, sdy
from alpa.passes.analysis.graph import inner_ops, replace_op, splat
from alpa.passes.analysis.op_kinds import CONTROL_FLOW, PURE

_REPEATED = ("stablehlo.constant", "stablehlo.broadcast_in_dim")
_WITH_PROGRAMS = CONTROL_FLOW | {"sdy.manual_computation"}
HARMLESS = PURE | CONTROL_FLOW | {"stablehlo.return"}
"""Ops without effects, but for those of the ops in their regions."""


class Rewriter:
    """Builds ops before the one that is rewritten."""

    def __init__(self) -> None:
        self.created: list[ir.OpView] = []
        """what now stands before the op; these are simplified in their turn"""
        self.rewritten: ir.OpView | None = None
        self.repeated: set[ir.Value] = set()
        """the constants and broadcasts so far"""

    def new(self, kind: Callable[..., ir.OpView | ir.Operation], *args: object) -> ir.Value:
        """The first result of a new op, `kind(*args)`."""
        # Entering a location and an insertion point for each candidate would take a third of
        # the time: most are not rewritten.
        assert self.rewritten is not None
        place = ir.InsertionPoint(self.rewritten)
        op = kind(*args, loc=self.rewritten.location, ip=place).operation.opview
        self.created.append(op)
        return op.results[0]

    def splat(self, value: ir.Value) -> float | int | None:
        """The number that fills a tensor, if the tensor is a constant or the broadcast of one."""
        return splat(value) if value in self.repeated else None


# The values that take the place of an op's results, or None where the rewrite does not apply.
Rewrite = Callable[[ir.OpView, Rewriter], Sequence[ir.Value] | None]


def simplify(block: ir.Block, rewrites: Mapping[str, tuple[Rewrite, ...]]) -> None:
    """Applies rewrites, keyed by op name, until none applies, in a block and its control flow.

    A rewrite looks at an op and at the producers of its operands only, and these stand before
    it: in program order one visit of each op, old or new, is enough. Linear in the number of ops.
    Those of loops look at their regions, too, as they are before these are simplified.
    """
    pending = _reversed(block.operations)
    removable: list[ir.OpView] = []
    rewriter = Rewriter()
    while pending:
        op, name = pending.pop()
        rewriter.rewritten = op
        for rewrite in rewrites.get(name, ()):
            values = rewrite(op, rewriter)
            if values is None:
                continue
            replace_op(op, keep_sharding(op, values))
            pending += _reversed(rewriter.created)
            rewriter.created.clear()
            break
        else:
            if name in _REPEATED:
                rewriter.repeated.add(op.results[0])
            if name in PURE or name in CONTROL_FLOW:
                removable.append(op)
            for inner in reversed(programs(op, name)):
                pending += _reversed(inner.operations)
    _erase_dead(removable)


def _reversed(ops: Iterable[ir.OpView]) -> list[tuple[ir.OpView, str]]:
    """Ops with their names, the last one first."""
    return [(op, op.operation.name) for op in ops][::-1]


def programs(op: ir.OpView, name: str) -> list[ir.Block]:
    """The blocks in an op of a name that are programs of their own rather than scalar functions."""
    if name in _WITH_PROGRAMS:
        return [block for region in op.regions for block in region.blocks]
    return []


def keep_sharding(op: ir.OpView, values: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """The values under the sharding that the program asks of the op which they replace, where
    its results are used."""
    if "sdy.sharding" not in op.attributes:
        return values
    per_value = sdy.TensorShardingPerValueAttr(op.attributes["sdy.sharding"])
    place = ir.InsertionPoint(op)
    return [
        sdy.ShardingConstraintOp(value, sharding, loc=op.location, ip=place).result
        if _is_read(result)
        else value
        for result, value, sharding in zip(op.results, values, per_value.shardings, strict=True)
    ]


def _erase_dead(ops: Sequence[ir.OpView]) -> None:
    """Erases those of these ops, in program order, that nobody uses, users before producers.

    Loops and branches stay if something in them has an effect, or may have one. A loop counts as
    one that ends, as it does for XLA.
    """
    for op in reversed(ops):
        if _is_used(op):
            continue
        if op.operation.name in PURE or all(o.operation.name in HARMLESS for o in inner_ops(op)):
            op.operation.erase()


def _is_used(op: ir.OpView) -> bool:
    return any(map(_is_read, op.results))


def _is_read(value: ir.Value) -> bool:
    return any(True for _ in value.uses)


def producer(value: ir.Value, kind: type[ir.OpView]) -> ir.OpView | None:
    """The op that makes a value, where it is of that kind and carries no sharding of its own."""
    owner = value.owner
    if isinstance(owner, kind) and "sdy.sharding" not in owner.attributes:
        return owner
    return None


def element_type(value: ir.Value) -> ir.Type:
    return ir.RankedTensorType(value.type).element_type
