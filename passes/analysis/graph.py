"""The data flow of one block as numbers, for passes that analyse thousands of ops.

The bindings take microseconds for each op, so all analyses share one pass over them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from operator import or_
from typing import cast

from alpa.dialects import attributes_of, body, ir, mpmd, stablehlo, walk
from alpa.dialects.attributes import FOLLOW, GRADIENT, marker_of
from alpa.dialects.caches import cached
from alpa.passes.analysis.block_rows import Row, rows_of


@dataclass(frozen=True)
class Graph:
    """Ops of a block (without its terminator) and its values, both numbered in program order.

    Block arguments come first among the values. `read` has an op's operands as they are, -1 for
    values of other blocks. `operands` has each of these once, and the values that the op's regions
    capture. `bytes[v]` is a value's size, `returned` the terminator's operands.
    """

    ops: list[ir.OpView]
    read: list[list[int]]
    operands: list[list[int]]
    results: list[list[int]]
    values: list[ir.Value]
    types: list[ir.Type]
    producer: list[int]
    users: list[list[int]]
    bytes: list[int]
    returned: list[int]
    num_arguments: int

    @classmethod
    def of(cls, block: ir.Block) -> Graph:
        """Numbers a block; values defined outside it are not part of the graph."""
        *ops, end = block.operations
        values = list[ir.Value](block.arguments)
        types, count = [value.type for value in values], len(values)
        empty = cls(
            ops=[],
            read=[],
            operands=[],
            results=[],
            values=values,
            types=types,
            producer=[-1] * count,
            users=[[] for _ in values],
            bytes=[*map(type_bytes, types)],
            returned=[],
            num_arguments=count,
        )
        return empty.with_ops(ops, end)

    def with_ops(self, ops: Sequence[ir.OpView], end: ir.OpView) -> Graph:
        """The graph with more ops behind those that it has, in front of the terminator `end`."""
        values, producer = list(self.values), list(self.producer)
        number = {value: i for i, value in enumerate(values)}
        read: list[list[int]] = []
        operands: list[list[int]] = []
        results: list[list[int]] = []
        for i, op in enumerate(ops, len(self.ops)):
            own = [number.get(value, -1) for value in op.operands]
            read.append(own)
            if len(op.regions):
                own = [*own, *[number.get(it, -1) for it in captured_values(op)]]
            is_plain = len(set(own)) == len(own) and -1 not in own
            operands.append(own if is_plain else [v for v in dict.fromkeys(own) if v >= 0])
            produced: list[int] = []
            for result in op.results:
                number[result] = len(values)
                produced.append(len(values))
                values.append(result)
                producer.append(i)
            results.append(produced)
        new_types = [value.type for value in values[len(self.values) :]]
        users = [*map(list, self.users), *([] for _ in new_types)]
        for i, used in enumerate(operands, len(self.ops)):
            for value in used:
                users[value].append(i)
        return Graph(
            ops=[*self.ops, *ops],
            read=self.read + read,
            operands=self.operands + operands,
            results=self.results + results,
            values=values,
            types=self.types + new_types,
            producer=producer,
            users=users,
            bytes=[*self.bytes, *map(type_bytes, new_types)],
            returned=[number[value] for value in end.operands],
            num_arguments=self.num_arguments,
        )

    @cached_property
    def number(self) -> dict[ir.Value, int]:
        """The number of each value."""
        return {value: number for number, value in enumerate(self.values)}

    @cached_property
    def names(self) -> list[str]:
        """The name of each op; an op may have an attribute that hides its own `name`."""
        return [op.operation.name for op in self.ops]

    @cached_property
    def markers(self) -> list[str | None]:
        """For each op which marker of our front end it is."""
        return [
            marker_of(op) if name == "stablehlo.custom_call" else None
            for op, name in zip(self.ops, self.names, strict=True)
        ]

    @cached_property
    def gradient_marks(self) -> list[int]:
        """The ops by which our front end marks gradients."""
        return [o for o, marker in enumerate(self.markers) if marker == GRADIENT]

    def made_by(self, ops: Iterable[int]) -> list[int]:
        """The values that ops make."""
        return [v for o in ops for v in self.results[o]]

    def interface(self, ops: Sequence[int]) -> tuple[list[int], list[int]]:
        """The values that ops read but do not make, and those that they make for other ops."""
        inside, returned, made = set(ops), set(self.returned), self.made_by(ops)
        own = set(made)
        inputs = dict.fromkeys(v for o in ops for v in self.operands[o] if v not in own)
        outputs = [v for v in made if v in returned or not inside.issuperset(self.users[v])]
        return list(inputs), outputs

    def part(self, ops: Sequence[int]) -> Graph:
        """The graph of some ops, with its own numbers; `interface` has the values at its ends."""
        inputs, outputs = self.interface(ops)
        values = [*inputs, *self.made_by(ops)]
        number = {v: n for n, v in enumerate(values)}
        place = {o: n for n, o in enumerate(ops)}
        return Graph(
            ops=[self.ops[o] for o in ops],
            read=[[number.get(v, -1) for v in self.read[o]] for o in ops],
            operands=[[number[v] for v in self.operands[o]] for o in ops],
            results=[[number[v] for v in self.results[o]] for o in ops],
            values=[self.values[v] for v in values],
            types=[self.types[v] for v in values],
            producer=[place.get(self.producer[v], -1) for v in values],
            users=[[place[o] for o in self.users[v] if o in place] for v in values],
            bytes=[self.bytes[v] for v in values],
            returned=[number[v] for v in outputs],
            num_arguments=len(inputs),
        )

    def cone(self, values: Iterable[int], first: int = 0) -> set[int]:
        """The ops that one of the values depends on, of those from number `first` on."""
        producer, operands = self.producer, self.operands
        inside: set[int] = set()
        stack = [producer[v] for v in values]
        while stack:
            op = stack.pop()
            if op >= first and op not in inside:
                inside.add(op)
                stack += [producer[v] for v in operands[op]]
        return inside

    def depends(self, arguments: Iterable[int]) -> list[bool]:
        """For each value whether it depends on one of the arguments."""
        marked = set(arguments)
        for used, results in zip(self.operands, self.results, strict=True):
            if not marked.isdisjoint(used):
                marked.update(results)
        return [v in marked for v in range(len(self.values))]

    @cached_property
    def first_equal(self) -> list[int]:
        """For each value, the first value that is computed in the same way; it may be the value
        itself.

        An `optimization_barrier` counts as the identity, so a rematerialised value equals the value
        that it repeats.

        Integers that depend on no argument are equal if their types are. JAX folds the positions
        that it knows when it traces the forward part, but not those behind the barriers of
        rematerialisation.
        """
        first = list(range(len(self.values)))
        of_type: dict[ir.Type, int] = {}
        positions = self._positions()
        for v in sorted(positions):
            first[v] = of_type.setdefault(self.types[v], v)

        # Types, attributes and regions are read only of ops that agree in all else.
        alone: dict[Hashable, int] = {}
        several: set[Hashable] = set()
        seen: dict[Hashable, int] = {}

        def contents_of(o: int) -> Hashable:
            types = tuple([self.types[v] for v in self.results[o]])
            return (types, contents(self.ops[o], lambda v: first[self.number[v]], {}))

        for o, (name, read, results) in enumerate(
            zip(self.names, self.read, self.results, strict=True)
        ):
            if positions.issuperset(results):
                continue
            if name == "stablehlo.optimization_barrier":
                same = [first[v] for v in read]
            else:
                key = (name, *[first[v] for v in read])
                like = alone.setdefault(key, o)
                if like == o:
                    continue
                if key not in several:
                    several.add(key)
                    seen[key, contents_of(like)] = like
                same = self.results[seen.setdefault((key, contents_of(o)), o)]
            for result, equal in zip(results, same, strict=True):
                first[result] = equal
        return first

    def _positions(self) -> set[int]:
        """The integers that depend on no argument. A barrier's result counts as its operand."""
        moving = set(range(self.num_arguments))
        for name, read, operands, results in zip(
            self.names, self.read, self.operands, self.results, strict=True
        ):
            if moving.isdisjoint(operands):
                continue
            if name == "stablehlo.optimization_barrier":
                moving.update(v for v, of in zip(results, read, strict=True) if of in moving)
            else:
                moving.update(results)
        fixed = {*range(len(self.values))} - moving
        return {v for v in fixed if _of_integers(self.types[v])}


def union(sets: Iterable[int]) -> int:
    """The union of sets of numbers, each the bits of an integer."""
    return reduce(or_, sets, 0)


@cached
def _of_integers(type_: ir.Type) -> bool:
    is_tensor = isinstance(type_, ir.RankedTensorType)
    return is_tensor and isinstance(type_.element_type, ir.IntegerType)


def used_values(op: ir.OpView) -> list[ir.Value]:
    """An op's operands and the values that its regions use from outside or inside."""
    captured = captured_values(op)
    return [*op.operands, *captured] if captured else list(op.operands)


def captured_values(op: ir.OpView) -> list[ir.Value]:
    """The values that an op's regions use from outside or inside.

    Computations and fragments read values only as operands.
    """
    if not len(op.regions) or isinstance(op, mpmd.NamedComputationOp | mpmd.FragmentOp):
        return []
    return read_inside(op)


def read_inside(op: ir.OpView) -> list[ir.Value]:
    """The values that the ops in an op's regions read."""
    return [value for inner in inner_ops(op) for value in inner.operands]


def inner_ops(op: ir.OpView) -> Iterator[ir.OpView]:
    """Every op in an op's regions, parents first."""
    for region in op.regions:
        for block in region.blocks:
            yield from walk(block)


def inner_blocks(block: ir.Block) -> Iterator[ir.Block]:
    """Every block in the regions of a block's ops, parents first."""
    for op in block.operations:
        for region in op.regions:
            for inner in region.blocks:
                yield inner
                yield from inner_blocks(inner)


def combiner(op: ir.OpView, region: int = 0) -> str | None:
    """The name of the op by which a region combines its two arguments; None for any other."""
    arguments, (first, *rest) = list(body(op, region).arguments), body(op, region).operations
    alone = len(rest) == 1 and list(rest[0].operands) == list(first.results)
    both = list(first.operands) in (arguments, arguments[::-1])
    return first.operation.name if alone and both else None


def recipe(
    row: Row,
    outer: Callable[[ir.Value], int],
    inner: dict[ir.Value, int],
) -> Hashable:
    """What an op computes: equal for two ops whose operands are equal by `outer`.

    `inner` numbers the values of the regions around it, downwards from -1. Attributes of the
    planner make no difference.
    """
    op, name, operands, results = row
    if inner:
        read = tuple([inner[v] if v in inner else outer(v) for v in operands])
    else:
        read = tuple(map(outer, operands))
    types = (results[0].type,) if len(results) == 1 else tuple([v.type for v in results])
    return (name, read, types, contents(op, outer, inner))


def contents(
    op: ir.OpView,
    outer: Callable[[ir.Value], int],
    inner: dict[ir.Value, int],
) -> Hashable:
    """The attributes of an op, then what the ops of its regions compute, as in `recipe`."""
    attributes = _attributes(op)
    if not len(op.regions):
        return (attributes,)
    regions: list[Hashable] = []
    for region in op.regions:
        for block in region.blocks:
            for argument in block.arguments:
                inner[argument] = -1 - len(inner)
            for nested in rows_of(block):
                regions.append(recipe(nested, outer, inner))
                for result in nested.results:
                    inner[result] = -1 - len(inner)
    return (attributes, *regions)


def _attributes(op: ir.OpView) -> tuple[Hashable, ...]:
    """The attributes that make a difference; MLIR gives them in the order of their names."""
    given = op.attributes
    # Most ops have one attribute, of the planner.
    number = len(given)
    if not number or (number == 1 and FOLLOW in given):
        return ()
    return tuple([(name, attr) for name, attr in attributes_of(op) if not name.startswith("alpa.")])


def block_recipe(block: ir.Block) -> Hashable:
    """A key of what a block computes, independent of the names of its values, if it reads no
    others; see `recipe`."""
    number: dict[ir.Value, int] = {v: n for n, v in enumerate(block.arguments)}
    ops: list[Hashable] = [tuple([argument.type for argument in number])]
    for row in rows_of(block):
        ops.append(recipe(row, number.__getitem__, {}))
        for result in row.results:
            number[result] = len(number)
    return tuple(ops)


def replace_operands(op: ir.OpView, replacement: dict[ir.Value, ir.Value]) -> None:
    """Replaces operands of an op and of all ops inside its regions."""
    operands = op.operands
    for i, operand in enumerate(operands):
        if operand in replacement:
            operands[i] = replacement[operand]
    if len(op.regions):
        for region in op.regions:
            for block in region.blocks:
                for inner in block.operations:
                    replace_operands(inner, replacement)


def replace_op(op: ir.OpView, values: Sequence[ir.Value]) -> None:
    """Erases an op; the values take the place of its results."""
    for result, value in zip(op.results, values, strict=True):
        result.replace_all_uses_with(value)
    op.operation.erase()


def move_body(block: ir.Block, operands: Iterable[ir.Value], before: ir.OpView) -> list[ir.Value]:
    """Moves the ops of a block in front of an op, with values for its arguments. Returns what its
    terminator returns."""
    for argument, operand in zip(block.arguments, operands, strict=True):
        argument.replace_all_uses_with(operand)
    *ops, end = list(block.operations)
    for op in ops:
        op.operation.move_before(before.operation)
    return list(end.operands)


def first_reader(value: ir.Value, block: ir.Block) -> ir.Operation:
    """The first op of a block that reads a value, itself or in its regions."""
    readers: list[ir.Operation] = []
    for use in value.uses:
        op = use.owner.operation
        while op.block != block:
            parent = op.parent
            assert parent is not None
            op = parent.operation
        readers.append(op)
    return reduce(lambda a, b: b if b.is_before_in_block(a) else a, readers)


def shape(value: ir.Value) -> tuple[int, ...]:
    """The shape of a tensor; () for tokens and other types without one."""
    type_ = value.type
    return tuple(type_.shape) if isinstance(type_, ir.RankedTensorType) else ()


def splat(value: ir.Value) -> float | int | None:
    """The number that fills a tensor, if the tensor is a constant or the broadcast of one."""
    owner = value.owner
    if isinstance(owner, stablehlo.BroadcastInDimOp):
        owner = owner.operands[0].owner
    if not isinstance(owner, stablehlo.ConstantOp):
        return None
    element = ir.RankedTensorType(owner.results[0].type).element_type
    # The bindings raise TypeError where they are asked for a complex constant's value.
    if isinstance(element, ir.ComplexType):
        return None
    attr = owner.attributes["value"]
    if not isinstance(attr, ir.DenseElementsAttr) or not attr.is_splat:
        return None
    number = cast("ir.IntegerAttr | ir.FloatAttr", attr.get_splat_value()).value
    return abs(number) if isinstance(element, ir.IntegerType) and element.width == 1 else number


@cached
def elements(type_: ir.Type) -> int:
    """The number of a tensor's elements; 0 for tokens and other types without any."""
    return math.prod(type_.shape) if isinstance(type_, ir.RankedTensorType) else 0


@cached
def type_bytes(type_: ir.Type) -> int:
    """Bytes of a dense tensor, each element padded to whole bytes; 0 for tokens and the like."""
    if not isinstance(type_, ir.RankedTensorType):
        return 0
    return elements(type_) * element_bytes(type_.element_type)


def element_bytes(element: ir.Type) -> int:
    """Bytes of one element: at least 1, complex numbers twice their parts."""
    if isinstance(element, ir.ComplexType):
        return 2 * element_bytes(element.element_type)
    width = getattr(element, "width", None)
    if width is None:
        raise ValueError(f"elements of type {element} have no size")
    return max(1, width // 8)


def folds_into_dots(op: ir.OpView) -> bool:
    """Whether an op swaps the last two dimensions and only dots read it: they read either order."""
    if not isinstance(op, stablehlo.TransposeOp):
        return False
    dims = list(ir.DenseI64ArrayAttr(op.permutation))
    rank = len(dims)
    swapped = [*range(rank - 2), rank - 1, rank - 2]
    return dims == swapped and all(
        isinstance(use.owner, stablehlo.DotGeneralOp) for use in op.results[0].uses
    )


def has_effects(op: ir.OpView) -> bool:
    """Whether an op is a custom call with `has_side_effect`."""
    effect = op.has_side_effect if isinstance(op, stablehlo.CustomCallOp) else None
    return effect is not None and ir.BoolAttr(effect).value
