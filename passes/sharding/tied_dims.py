"""Classes of tied dimensions of a program's arguments: the evidence for which ones hold samples.

Two dimensions are tied if an op requires them to be equal: those of the operands of an addition,
those that a product sums over, those of a batch of indices and of the rows that it reads. So
dimensions with one factor of a sharding rule are tied. Equal sizes alone do not tie
dimensions: class weights that are looked up by labels share no dimension with the batch, even if
there are as many classes as samples.

Two dimensions are also tied if they have the same size and equal parts of them are tied
(`x.reshape(2, -1, 6)` beside `y.reshape(2, -1)`), or if one loop counter indexes both.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from alpa.dialects import body, ir, stablehlo, terminator
from alpa.dialects.sharding import ShardingRule
from alpa.passes.analysis.graph import shape
from alpa.passes.analysis.micro_batches.slices import Slices
from alpa.passes.analysis.op_kinds import ELEMENTWISE
from alpa.passes.sharding.rules import RuleOf

Dimension = tuple[int, int]
"""The number of an argument, and one of its dimensions."""

_At = tuple[ir.Value, int]
"""A dimension of a value."""

_Pair = tuple[_At, _At]


@dataclass(frozen=True, kw_only=True)
class _Part:
    """A dimension `part` that was cut out of the dimension `whole` in the way `how`."""

    how: tuple[object, ...]
    part: _At
    whole: _At


def tied_dims(block: ir.Block, rule_of: RuleOf) -> dict[Dimension, int]:
    """The class of each dimension of the arguments of a block without calls."""
    parent: dict[_At, _At] = {}

    def find(at: _At) -> _At:
        while (above := parent.setdefault(at, at)) != at:
            parent[at] = parent[above]
            at = above
        return at

    parts: list[_Part] = []
    for found in _ties(block, rule_of):
        if isinstance(found, _Part):
            parts.append(found)
        else:
            a, b = found
            parent[find(a)] = find(b)
    changed = True
    while changed:
        changed = False
        first: dict[tuple[object, _At], _At] = {}
        for it in parts:
            other = first.setdefault((it.how, find(it.part)), it.whole)
            if find(other) != find(it.whole):
                parent[find(other)] = find(it.whole)
                changed = True
    numbers: dict[_At, int] = {}
    return {
        (n, d): numbers.setdefault(find((value, d)), len(numbers))
        for n, value in enumerate(block.arguments)
        for d in range(len(shape(value)))
    }


def _ties(block: ir.Block, rule_of: RuleOf) -> Iterator[_Pair | _Part]:
    """The dimensions that the ops of a block tie, and those that they cut, or make of parts."""
    for op in list(block.operations)[:-1]:
        name = op.operation.name
        if name == "stablehlo.while":
            ends = [terminator(body(op, 1)).operands, body(op, 1).arguments, body(op, 0).arguments]
            for values in (op.operands, *ends):
                yield from _each(values, op.results)
            yield from _counted_through(body(op, 1))
        elif name in ("stablehlo.case", "stablehlo.if"):
            for region in op.regions:
                yield from _each(terminator(region.blocks[0]).operands, op.results)
        elif (rule := rule_of(op)) is not None:
            yield from _by_rule(op, rule)
        elif len(op.operands) == len(op.results) == 1:
            yield from _each(op.operands, op.results)
        if name in ("stablehlo.slice", "stablehlo.dynamic_slice"):
            x, y = op.operands[0], op.results[0]
            for d, (a, b) in enumerate(zip(shape(x), shape(y), strict=True)):
                if a != b and b > 1:
                    yield _Part(how=(name, a, b), part=(y, d), whole=(x, d))
        elif isinstance(op, stablehlo.GatherOp | stablehlo.ScatterOp) and len(op.results) == 1:
            yield from _counted_rows(Slices.of(op))
        for region in op.regions:
            for inner in region.blocks:
                yield from _ties(inner, rule_of)


def _by_rule(op: ir.OpView, rule: ShardingRule) -> Iterator[_Pair | _Part]:
    """Dimensions of one factor, and of several."""
    values = zip((*op.operands, *op.results), (*rule.operands, *rule.results), strict=True)
    dims = [((value, d), factors) for value, of in values for d, factors in enumerate(of)]
    alone: dict[int, _At] = {}
    for at, factors in dims:
        if len(factors) == 1 and _size(at) == rule.factor_sizes[factors[0]]:
            yield at, alone.setdefault(factors[0], at)
    for at, factors in dims:
        sizes = [rule.factor_sizes[factor] for factor in factors]
        for n, factor in enumerate(factors):
            if len(factors) > 1 and factor in alone:
                yield _Part(how=(n, *sizes), part=alone[factor], whole=at)


def _each(a: Iterable[ir.Value], b: Iterable[ir.Value]) -> Iterator[_Pair]:
    """All dimensions of pairs of arrays of one shape."""
    for one, other in zip(a, b, strict=True):
        if shape(one) == shape(other):
            yield from (((one, d), (other, d)) for d in range(len(shape(one))))


def _size(at: _At) -> int:
    return shape(at[0])[at[1]]


def _counted_through(block: ir.Block) -> Iterator[_Pair]:
    """The dimensions whose elements a loop reads or writes one by one, by the same counter."""
    first: dict[_At, _At] = {}
    for op in list(block.operations)[:-1]:
        name = op.operation.name
        if name == "stablehlo.dynamic_slice":
            x, window, starts = op.operands[0], op.results[0], list(op.operands)[1:]
        elif name == "stablehlo.dynamic_update_slice":
            x, window, starts = op.operands[0], op.operands[1], list(op.operands)[2:]
        else:
            continue
        for d, start in enumerate(starts):
            counter = _counter(start, block)
            if counter is not None and shape(window)[d] == 1 < shape(x)[d]:
                yield (x, d), first.setdefault((counter, shape(x)[d]), (x, d))


def _counter(value: ir.Value, block: ir.Block) -> ir.Value | None:
    """The one argument of a loop that an index is made of, element by element."""
    found: set[ir.Value] = set()
    stack = [value]
    while stack:
        value = stack.pop()
        owner = value.owner
        if isinstance(owner, ir.Block):
            found.add(value)
        elif owner.name in ELEMENTWISE:
            stack += owner.operands
        elif owner.name != "stablehlo.constant":
            return None
    (counter, *others) = found or {None}
    return None if others or counter not in set(block.arguments) else counter


def _counted_rows(it: Slices) -> Iterator[_Pair]:
    """The rows of an array and the indices that count them: `x[arange(n), labels]`."""
    columns = it.columns if len(it.columns) > 1 else []
    for column, dim in zip(columns, it.numbered, strict=False):
        if _counts(column):
            rows = (((it.sliced, dim), (it.indices, d)) for d in it.outer)
            yield from (pair for pair in rows if _size(pair[0]) == _size(pair[1]))


def _counts(value: ir.Value) -> bool:
    """Whether a value is made of an iota, or a constant, and nothing else."""
    stack, has_count = [value], False
    while stack:
        owner = stack.pop().owner
        if isinstance(owner, ir.Block):
            return False
        name = owner.name
        has_count = has_count or name == "stablehlo.iota"
        if name == "stablehlo.constant":
            has_count = has_count or not ir.DenseElementsAttr(owner.attributes["value"]).is_splat
        stack += owner.operands
    return has_count
