"""Adds the gradients of one parameter's uses where they are made, not in its update.

Each gradient that a backward computation hands to an update is added up over the micro-batches, and
reduced over the devices. If a parameter has several uses, the update adds their gradients, so each
of them would have its accumulator and its reduction. Sums are linear: this rewrite adds the
gradients that one mesh makes in its backward part, and the update reads one sum per mesh. What the
update does to a gradient before the addition, such as a transpose, moves along.

Before:
    %1:2 = mpmd.named_computation<"layer_1"(1)> (%h) (...) { ... mpmd.return %5, %6 : !w, !x }
    %2 = mpmd.named_computation<"layer_0"(1)> (%x, %1#1) (...) { ... mpmd.return %5 : !w }
    %3 = mpmd.named_computation<"update_0"(0)> (%w, %1#0, %2) (%a: !w, %b: !w, %c: !w) {
      %5 = stablehlo.transpose %b, dims = [1, 0]
      %6 = stablehlo.add %5, %c
      %7 = stablehlo.subtract %a, %6
      mpmd.return %7 : !w }

After, if both layers are on one mesh:
    %1:2 = mpmd.named_computation<"layer_1"(1)> (%h) (...) { ...
      %7 = stablehlo.transpose %5, dims = [1, 0]
      mpmd.return %7, %6 : !w, !x }
    %2 = mpmd.named_computation<"layer_0"(1)> (%x, %1#1, %1#0) (..., %s: !w) { ...
      %6 = stablehlo.add %s, %5
      mpmd.return %6 : !w }
    %3 = mpmd.named_computation<"update_0"(0)> (%w, %2) (%a: !w, %b: !w) {
      %5 = stablehlo.subtract %a, %b
      mpmd.return %5 : !w }

The sum has the widest type on the way: that of the gradients, which `accumulators.py` may have made
wide, or that of the update's addition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce

from alpa.dialects import body, func, ir, mpmd, stablehlo, terminator
from alpa.dialects.attributes import FOLLOW
from alpa.dialects.mpmd_types import Origin
from alpa.dialects.records import i64
from alpa.passes.analysis.graph import element_bytes
from alpa.passes.stages.rewrites import with_interface

_MOVES = (stablehlo.ReshapeOp, stablehlo.TransposeOp)


@dataclass(frozen=True, kw_only=True)
class _Leaf:
    """A gradient that an update adds to others: `term` is made of `argument` by `moves` and at
    most one convert, and `result` is the result of the backward computation `maker`."""

    term: ir.Value
    argument: ir.Value
    moves: tuple[ir.OpView, ...]
    result: ir.Value

    maker: ir.OpView


def add_tied_gradients(function: func.FuncOp, place_of: Callable[[int], int]) -> bool:
    """Rewrites a clustered program in place, and says whether that changed anything.

    `place_of` says where the backward part of a layer runs: gradients of one place are added there.
    """
    is_changed = False
    updates = [op for op in _computations(function) if Origin.of(op).part == "update"]
    for op in updates:
        update: ir.OpView = op
        while (found := _next_group(update, place_of)) is not None:
            update = _add_where_made(function, update, *found)
            is_changed = True
    return is_changed


def _computations(function: func.FuncOp) -> list[mpmd.NamedComputationOp]:
    return [op for op in body(function).operations if isinstance(op, mpmd.NamedComputationOp)]


def _next_group(
    update: ir.OpView, place_of: Callable[[int], int]
) -> tuple[stablehlo.AddOp, list[ir.Value], list[_Leaf]] | None:
    """A sum in an update, its terms, and those of them that one place makes; None without any."""
    for op in body(update).operations:
        if not isinstance(op, stablehlo.AddOp) or _is_term(op.result):
            continue
        terms = list(_terms(op))
        places: dict[int, list[_Leaf]] = {}
        for term in terms:
            leaf = _leaf(update, term)
            layer = Origin.of(leaf.maker).layer if leaf is not None else None
            if leaf is not None and layer is not None:
                places.setdefault(place_of(layer), []).append(leaf)
        for leaves in places.values():
            if len(leaves) > 1 and len({_element(leaf.argument) for leaf in leaves}) == 1:
                return op, terms, leaves
    return None


def _element(value: ir.Value) -> ir.Type:
    return ir.RankedTensorType(value.type).element_type


def _only_reader(value: ir.Value) -> ir.OpView | None:
    """The op that alone reads a value, and once."""
    uses = list(value.uses)
    return uses[0].owner if len(uses) == 1 else None


def _is_term(value: ir.Value) -> bool:
    """Whether a sum is no more than a term of another one."""
    return isinstance(_only_reader(value), stablehlo.AddOp)


def _terms(total: stablehlo.AddOp) -> Iterator[ir.Value]:
    """What a sum of sums adds, in order."""
    for operand in total.operands:
        owner = operand.owner
        if isinstance(owner, stablehlo.AddOp) and _only_reader(operand) is not None:
            yield from _terms(owner)
        else:
            yield operand


def _leaf(update: ir.OpView, term: ir.Value) -> _Leaf | None:
    """What a term of a sum is made of, if it is a gradient that nothing else reads."""
    moves: list[ir.OpView] = []
    value, converts = term, 0
    while not isinstance(value.owner, ir.Block):
        op = value.owner
        converts += isinstance(op, stablehlo.ConvertOp)
        if not isinstance(op, (*_MOVES, stablehlo.ConvertOp)) or converts > 1:
            return None
        if _only_reader(value) is None:
            return None
        moves.append(op)
        value = op.operands[0]
    if value.owner != body(update) or _only_reader(value) is None or not _is_float(value):
        return None
    result = update.operands[ir.BlockArgument(value).arg_number]
    maker = result.owner
    if isinstance(maker, ir.Block) or _only_reader(result) is None:
        return None
    if Origin.of(maker).part != "backward":
        return None
    return _Leaf(
        term=term, argument=value, moves=tuple(reversed(moves)), result=result, maker=maker
    )


def _is_float(value: ir.Value) -> bool:
    return isinstance(value.type, ir.RankedTensorType) and isinstance(
        _element(value), ir.FloatType | ir.ComplexType
    )


def _add_where_made(
    function: func.FuncOp,
    update: ir.OpView,
    total: stablehlo.AddOp,
    terms: list[ir.Value],
    leaves: list[_Leaf],
) -> ir.OpView:
    """Adds leaves in the computations that make them, in execution order.

    Args:
        function: the clustered program.
        update: the computation that adds.
        total: the sum.
        terms: all that it adds.
        leaves: the terms that are added elsewhere.

    Returns the update that reads the sum of the leaves.
    """
    wide = max((_element(value) for value in (leaves[0].argument, total.result)), key=element_bytes)
    order: dict[ir.OpView, int] = {op: i for i, op in enumerate(_computations(function))}
    by_maker: dict[ir.OpView, dict[ir.Value, ir.Value]] = {}
    for leaf in sorted(leaves, key=lambda leaf: order[leaf.maker]):
        by_maker.setdefault(leaf.maker, {})[leaf.result] = _moved_to_maker(leaf, wide)
    *_, last = by_maker.values()
    result = next(iter(last))
    rewritten = _read_sum(update, total, terms, leaves, wide, result)
    running: ir.Value | None = None
    for maker, mine in by_maker.items():
        running = _add_in(maker, mine, running, result if mine is last else None)
    return rewritten


def _moved_to_maker(leaf: _Leaf, wide: ir.Type) -> ir.Value:
    """What the update adds, made at the end of the computation that makes the gradient."""
    end = terminator(body(leaf.maker))
    value = end.operands[ir.OpResult(leaf.result).result_number]
    with ir.InsertionPoint(end), end.location:
        value = _convert(value, wide)
        for move in leaf.moves:
            if not isinstance(move, stablehlo.ConvertOp):
                (copy,) = move.operation.clone().opview.results
                copy.owner.operands[0] = value
                copy.set_type(ir.RankedTensorType.get(ir.RankedTensorType(copy.type).shape, wide))
                value = copy
    return value


def _read_sum(
    update: ir.OpView,
    total: stablehlo.AddOp,
    terms: list[ir.Value],
    leaves: list[_Leaf],
    wide: ir.Type,
    operand: ir.Value,
) -> ir.OpView:
    """Replaces an update by one that reads the sum of the leaves as `operand`."""
    block = body(update)
    shape = ir.RankedTensorType(total.result.type).shape
    argument = block.add_argument(ir.RankedTensorType.get(shape, wide), total.location)
    first, *others = (leaf.term for leaf in leaves)
    with ir.InsertionPoint(total), total.location:
        narrow = _convert(argument, _element(total.result))
        left = [narrow if term == first else term for term in terms if term not in others]
        new = reduce(_add, left)
        if new == argument and terminator(block) in [use.owner for use in total.result.uses]:
            # The step needs an op of its own that returns what was accumulated.
            new = stablehlo.OptimizationBarrierOp([new]).results[0]
        total.result.replace_all_uses_with(new)
    _erase(total)
    read = {leaf.argument for leaf in leaves}
    arguments = [value for value in block.arguments if value != argument and value not in read]
    given = {v: update.operands[ir.BlockArgument(v).arg_number] for v in arguments}
    outputs = list(zip(terminator(block).operands, update.results, strict=True))
    return with_interface(update, [*given.items(), (argument, operand)], outputs)


def _add_in(
    maker: ir.OpView,
    terms: dict[ir.Value, ir.Value],
    running: ir.Value | None,
    result: ir.Value | None,
) -> ir.Value:
    """Adds what a computation makes to the sum so far; the new sum is its last result.

    Args:
        maker: the computation.
        terms: the results that are replaced, with what is added instead.
        running: the sum so far.
        result: the one of the results whose users read the new sum from now on, if any.
    """
    block = body(maker)
    end = terminator(block)
    inputs: list[tuple[ir.Value, ir.Value]] = list(
        zip(block.arguments, maker.operands, strict=True)
    )
    added = list(terms.values())
    if running is not None:
        added.insert(0, block.add_argument(running.type, end.location))
        inputs.append((added[0], running))
    with ir.InsertionPoint(end), end.location:
        total = reduce(_add, added)
    outputs: list[tuple[ir.Value, ir.Value | None]] = [
        (value, one)
        for value, one in zip(end.operands, maker.results, strict=True)
        if one not in terms
    ]
    new = with_interface(maker, inputs, [*outputs, (total, result)])
    return new.results[len(outputs)]


def _add(a: ir.Value, b: ir.Value) -> ir.Value:
    op = stablehlo.AddOp(a, b)
    op.attributes[FOLLOW] = i64(0)
    return op.result


def _convert(value: ir.Value, element: ir.Type) -> ir.Value:
    if _element(value) == element:
        return value
    type_ = ir.RankedTensorType.get(ir.RankedTensorType(value.type).shape, element)
    op = stablehlo.ConvertOp(type_, value)
    op.attributes[FOLLOW] = i64(0)
    return op.result


def _erase(op: ir.OpView) -> None:
    """Erases a sum that nothing reads, and all that was made for it alone."""
    operands = list(op.operands)
    op.operation.erase()
    for value in operands:
        owner = value.owner
        unused = not isinstance(owner, ir.Block) and not list(value.uses)
        if unused and isinstance(owner, (stablehlo.AddOp, stablehlo.ConvertOp, *_MOVES)):
            _erase(owner)
