"""Makes a program for one size of the batch out of the same program at two others.

A batch of one sample hides its dimension: JAX differentiates a broadcast of a dimension of size 1
by a sum over it, which says nothing of samples. So the program for micro-batches of one sample is
not lowered at that size but read off two larger ones: sizes of dimensions and of slices are linear
in the number of samples, and other numbers are the same, linear, or powers of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from alpa.dialects import func, ir, terminator, walk
from alpa.dialects.attributes import WHOLE
from alpa.dialects.records import entries
from alpa.dialects.sharding import ShardingRule
from alpa.passes.analysis.micro_batches.whole import (
    MisalignedError,
    align,
    complex_constant,
    elements,
    is_arange,
    is_readable,
)

_REMEDIES = "plan with micro-batches of two samples or more, or with 1 micro-batch"


def resize(small: func.FuncOp, large: func.FuncOp, sizes: tuple[int, int], to: int) -> None:
    """Rewrites a function without calls, of `sizes[0]` samples, as that of `to` samples.

    Args:
        small: the function, rewritten in place.
        large: the same for `sizes[1]` samples.
        sizes: two numbers of samples.
        to: the number of samples wanted.

    Raises:
        MisalignedError: the two are not one program, or a number in them follows no rule.
    """
    scale = _Scale(*sizes, to)
    block = small.entry_block
    with small.operation.context, small.location:
        align(block, large.entry_block, (f"{scale.small} samples", f"{scale.large} samples"))
        for one, other in zip(_blocks(block), _blocks(large.entry_block), strict=True):
            for value, its in zip(one.arguments, other.arguments, strict=True):
                value.set_type(_type(scale, value.type, its.type, one.owner))
        for op in list(walk(block)):
            if WHOLE in op.attributes:
                differs = entries(ir.DictAttr(op.attributes[WHOLE]))
                del op.attributes[WHOLE]
                _resize(scale, op, differs)
        kind = ir.FunctionType.get(
            [value.type for value in block.arguments],
            [value.type for value in terminator(block).operands],
        )
        small.attributes["function_type"] = ir.TypeAttr.get(kind)


@dataclass(frozen=True)
class _Scale:
    """What numbers at two sizes are at a third."""

    small: int
    large: int
    to: int

    def linear(self, small: int, large: int) -> int | None:
        """Of sizes, which are linear in the number of samples."""
        slope, rest = divmod(large - small, self.large - self.small)
        return None if rest else small + slope * (self.to - self.small)

    def linears(self, small: Iterable[int], large: Iterable[int]) -> list[int] | None:
        """As `linear`, of each pair; None where one of them follows no rule."""
        numbers = [self.linear(a, b) for a, b in zip(small, large, strict=True)]
        known = [number for number in numbers if number is not None]
        return known if len(known) == len(numbers) else None

    def number(self, small: float, large: float) -> float | None:
        """Of other numbers: a power of the number of samples, times something, or linear."""
        if small and large / small > 0:
            for power in (1, -1, 2, -2, 3, -3, 0.5, -0.5):
                ratio = (self.large / self.small) ** power
                if math.isclose(large / small, ratio, rel_tol=3e-7):
                    return small * (self.to / self.small) ** power
        if small.is_integer() and large.is_integer():
            return self.linear(int(small), int(large))
        return None


def _blocks(block: ir.Block) -> list[ir.Block]:
    """A block and those of the regions inside."""
    return [block, *(inner for op in walk(block) for region in op.regions for inner in region)]


def _resize(scale: _Scale, op: ir.OpView, differs: dict[str, ir.Attribute]) -> None:
    """Rewrites an op, given what is different of it at the larger size."""
    larger = ir.ArrayAttr(differs.pop("types", ir.ArrayAttr.get([])))
    types = [
        _type(scale, value.type, ir.TypeAttr(attr).value, op)
        for value, attr in zip(op.results, larger, strict=False)
    ]
    if not is_readable(op):  # a complex constant, whose elements are text
        if differs:
            raise MisalignedError(op, _another(scale, "value"))
        resized = complex_constant(op, elements(op), types[0])
        op.results[0].replace_all_uses_with(resized.results[0])
        op.operation.erase()
        return
    for name, attr in differs.items():
        op.attributes[name] = _attribute(scale, op, name, attr)
    for value, type_ in zip(op.results, types, strict=False):
        value.set_type(type_)


def _type(scale: _Scale, small: ir.Type, large: ir.Type, where: ir.OpView | ir.Block) -> ir.Type:
    if str(small) == str(large) or not isinstance(small, ir.RankedTensorType):
        return small
    assert isinstance(large, ir.RankedTensorType)
    shape = scale.linears(small.shape, large.shape)
    if shape is None or min(shape, default=0) < 0:
        op = where.owner if isinstance(where, ir.Block) else where
        raise MisalignedError(
            op,
            f"has {small} for {scale.small} samples and {large} for {scale.large}, which is no "
            f"rule for {scale.to}; {_REMEDIES}",
        )
    return ir.RankedTensorType.get(shape, small.element_type)


def _attribute(scale: _Scale, op: ir.OpView, name: str, large: ir.Attribute) -> ir.Attribute:
    small = op.attributes.get(name)
    if isinstance(small, ir.DenseI64ArrayAttr) and isinstance(large, ir.DenseI64ArrayAttr):
        if (numbers := scale.linears(small, large)) is not None:
            return ir.DenseI64ArrayAttr.get(numbers)
    elif isinstance(small, ir.DenseElementsAttr) and isinstance(large, ir.DenseElementsAttr):
        if (found := _elements(scale, small, large)) is not None:
            return found
    elif name == "sdy.sharding_rule" and small is not None:
        ours, theirs = ShardingRule.from_attr(small), ShardingRule.from_attr(large)
        sizes = scale.linears(ours.factor_sizes, theirs.factor_sizes)
        if sizes is not None and replace(theirs, factor_sizes=ours.factor_sizes) == ours:
            return replace(ours, factor_sizes=tuple(sizes)).to_attr()
    raise MisalignedError(op, _another(scale, name))


def _another(scale: _Scale, name: str) -> str:
    return (
        f"has another {name} for {scale.small} samples than for {scale.large}, and none is known "
        f"for {scale.to}; {_REMEDIES}"
    )


def _elements(
    scale: _Scale, small: ir.DenseElementsAttr, large: ir.DenseElementsAttr
) -> ir.Attribute | None:
    own, its = ir.RankedTensorType(small.type), ir.RankedTensorType(large.type)
    shape = scale.linears(own.shape, its.shape)
    if shape is None:
        return None
    type_ = ir.RankedTensorType.get(shape, own.element_type)
    if small.is_splat and large.is_splat:
        number = _splat(scale, small.get_splat_value(), large.get_splat_value())
        return None if number is None else ir.DenseElementsAttr.get_splat(type_, number)
    if not isinstance(small, ir.DenseIntElementsAttr):
        return None
    assert isinstance(large, ir.DenseIntElementsAttr)
    numbers: Sequence[int] | None = None
    if is_arange(small) and is_arange(large):
        numbers = range(shape[0])
    elif own.shape == its.shape:
        numbers = scale.linears([*small], [*large])
    if numbers is None:
        return None
    return ir.DenseElementsAttr.get(
        [ir.IntegerAttr.get(own.element_type, n) for n in numbers], type_
    )


def _splat(scale: _Scale, small: ir.Attribute, large: ir.Attribute) -> ir.Attribute | None:
    """The number that all elements are."""
    if str(small) == str(large):
        return small
    if not isinstance(small, ir.FloatAttr | ir.IntegerAttr):
        return None
    assert isinstance(large, ir.FloatAttr | ir.IntegerAttr)
    number = scale.number(float(small.value), float(large.value))
    if number is None or isinstance(small, ir.FloatAttr):
        return None if number is None else ir.FloatAttr.get(small.type, number)
    return ir.IntegerAttr.get(small.type, int(number)) if number == int(number) else None
