"""Holds a program against itself at the size of the whole batch, op by op.

The same function, lowered twice, gives the same ops in the same order, unless its Python code
looks at the size of the batch. What is different of an op at the whole batch is written on it, as
`alpa.whole`: the types of its results, and attributes, such as a constant that is made of the
batch's size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from alpa.dialects import attributes_of, ir, stablehlo, walk
from alpa.dialects.attributes import WHOLE

_REMEDIES = (
    "write it without Python loops or branches over the size of the batch, or plan with 1 "
    "micro-batch"
)


class MisalignedError(ValueError):
    """The program has other ops for a micro-batch than for the whole batch."""

    def __init__(self, op: ir.OpView, message: str) -> None:
        super().__init__(message)
        self.location = _place(op)


def _place(op: ir.OpView) -> ir.Location:
    """Where an op is in the user's code; of a constant, which JAX makes elsewhere, where it is
    read."""
    if isinstance(op, stablehlo.ConstantOp):
        return next((use.owner.location for use in op.results[0].uses), op.location)
    return op.location


def align(
    micro: ir.Block, whole: ir.Block, sizes: tuple[str, str] = ("a micro-batch", "the whole batch")
) -> None:
    """Writes `alpa.whole` on the ops of a block, without calls, that are different in W.

    Args:
        micro: the block.
        whole: the same at the other size.
        sizes: of the two, in words.

    Raises:
        MisalignedError: an op has no counterpart, or reads other values than it.
    """
    _Alignment(*sizes).block(micro, whole)


@dataclass(frozen=True)
class _Alignment:
    """The values of a program that have a counterpart in the other one, and both sizes in words."""

    size: str
    other_size: str
    counterparts: dict[ir.Value, ir.Value] = field(default_factory=dict[ir.Value, ir.Value])

    def block(self, micro: ir.Block, whole: ir.Block) -> None:
        self.counterparts.update(zip(micro.arguments, whole.arguments, strict=True))
        ours, theirs = list(micro.operations), list(whole.operations)
        for op, other in zip(ours, theirs, strict=False):
            self._op(op, other)
        if len(ours) != len(theirs):
            raise MisalignedError(
                ours[min(len(ours), len(theirs)) - 1],
                f"the program has {len(ours)} operations for {self.size} and {len(theirs)} for "
                f"{self.other_size}; {_REMEDIES}",
            )

    def _op(self, op: ir.OpView, other: ir.OpView) -> None:
        alike = (
            op.operation.name == other.operation.name
            and len(op.operands) == len(other.operands)
            and list(map(_rank, op.results)) == list(map(_rank, other.results))
            and _signatures(op) == _signatures(other)
        )
        if not alike:
            raise MisalignedError(
                op,
                f"for {self.size} the program has {_shown(op)} here, for {self.other_size} "
                f"{_shown(other)}; {_REMEDIES}",
            )
        if [self.counterparts[value] for value in op.operands] != list(other.operands):
            raise MisalignedError(
                op,
                f"{op.operation.name} reads other values for {self.size} than for "
                f"{self.other_size}; {_REMEDIES}",
            )
        self.counterparts.update(zip(op.results, other.results, strict=True))
        differs = self._different_attributes(op, other)
        if _types(op) != _types(other):
            context = op.operation.context
            # The other module has a context of its own.
            types = [ir.Type.parse(text, context) for text in _types(other)]
            attrs = [ir.TypeAttr.get(type_, context) for type_ in types]
            differs["types"] = ir.ArrayAttr.get(attrs, context)
        if differs:
            op.attributes[WHOLE] = ir.DictAttr.get(differs, op.operation.context)
        for region, others in zip(op.regions, other.regions, strict=True):
            for block, counterpart in zip(region.blocks, others.blocks, strict=True):
                self.block(block, counterpart)

    def _different_attributes(self, op: ir.OpView, other: ir.OpView) -> dict[str, ir.Attribute]:
        """Those that are others in W, as they are there; a complex constant's elements as text."""
        if not (is_readable(op) and is_readable(other)):
            if elements(op) == elements(other):
                return {}
            return {"value": ir.StringAttr.get(elements(other), op.operation.context)}
        mine, theirs = dict(attributes_of(op)), dict(attributes_of(other))
        if missing := mine.keys() - theirs.keys():
            raise MisalignedError(
                op,
                f"{op.operation.name} has {sorted(missing)[0]} for {self.size}, and none for "
                f"{self.other_size}; {_REMEDIES}",
            )
        return {
            name: ir.Attribute.parse(str(attr), op.operation.context)
            for name, attr in theirs.items()
            if name != WHOLE and str(mine.get(name)) != str(attr)
        }


def _shown(op: ir.OpView) -> str:
    types = ", ".join(str(result.type) for result in op.results)
    return f"{op.operation.name} of {types}" if types else op.operation.name


def _rank(value: ir.Value) -> int:
    return len(value.type.shape) if isinstance(value.type, ir.RankedTensorType) else -1


def _signatures(op: ir.OpView) -> list[list[list[int]]]:
    """Of each block of each region the ranks of its arguments."""
    return [[list(map(_rank, block.arguments)) for block in region] for region in op.regions]


def strip_whole(module: ir.Module) -> None:
    """Removes what a program says of the whole batch: it is then as one of a file."""
    for op in (module.operation, *(it.operation for it in walk(module.body))):
        if WHOLE in op.attributes:
            del op.attributes[WHOLE]


def _types(op: ir.OpView) -> Sequence[str]:
    return [str(result.type) for result in op.results]


def is_readable(op: ir.OpView) -> bool:
    """Whether jaxlib has classes for an op's attributes; it has none for complex elements."""
    return all(name for name, _ in attributes_of(op))


def is_arange(attr: ir.Attribute) -> bool:
    """Whether elements count from 0 along the one dimension of a tensor."""
    if not isinstance(attr, ir.DenseIntElementsAttr) or ir.RankedTensorType(attr.type).rank != 1:
        return False
    return [*attr] == [*range(len(attr))]


def elements(op: ir.OpView) -> str:
    """The elements of a constant as text, for those that jaxlib has no class for: complex ones."""
    return str(op).partition(" dense")[2].partition(" : ")[0]


def complex_constant(op: ir.OpView, text: str, type_: ir.Type | None = None) -> ir.OpView:
    """A constant in front of a complex one, of other elements, which are text."""
    source = f"%0 = stablehlo.constant dense{text} : {type_ or op.results[0].type}"
    made = ir.Operation.parse(source, context=op.operation.context)
    ir.InsertionPoint(op).insert(made)
    return made.opview
