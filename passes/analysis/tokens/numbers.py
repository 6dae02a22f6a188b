"""The numbers of values that depend on no argument: masks of attention, mostly."""

from __future__ import annotations

import operator
from collections.abc import Callable
from math import prod

import numpy as np

from alpa.dialects import ir, stablehlo
from alpa.passes.analysis.graph import shape, splat
from alpa.passes.analysis.micro_batches.shapes import integer, integers

Array = np.ndarray
_MOST = 1 << 24
"""Elements that are computed: a mask of 4096 tokens."""

_COMPARE: dict[str, Callable[[Array, Array], Array]] = {
    "EQ": operator.eq,
    "NE": operator.ne,
    "GE": operator.ge,
    "GT": operator.gt,
    "LE": operator.le,
    "LT": operator.lt,
}
_BINARY: dict[str, Callable[[Array, Array], Array]] = {
    "stablehlo.add": np.add,
    "stablehlo.and": np.bitwise_and,
    "stablehlo.maximum": np.maximum,
    "stablehlo.minimum": np.minimum,
    "stablehlo.multiply": np.multiply,
    "stablehlo.or": np.bitwise_or,
    "stablehlo.subtract": np.subtract,
    "stablehlo.xor": np.bitwise_xor,
}


class Numbers:
    """Computes values, each once.

    `same_as` maps a value that another one is, such as the argument of a fragment, to that one.
    """

    def __init__(self, same_as: dict[ir.Value, ir.Value]) -> None:
        self._same_as = same_as
        self._found: dict[ir.Value, Array | None] = {}

    def beyond(self, value: ir.Value, query: int, key: int) -> float | None:
        """What all elements of a value are whose index along `key` is larger than along `query`.

        None if they differ, if there are none, or if the value depends on arguments.
        """
        number = splat(value)
        if number is not None:
            return float(number)
        found = self.of(value)
        if found is None or found.shape[query] != found.shape[key] or found.shape[query] < 2:
            return None
        # A broadcast repeats its elements: one of them is enough.
        repeated = [s == 0 and d not in (query, key) for d, s in enumerate(found.strides)]
        found = found[tuple(slice(0, 1) if it else slice(None) for it in repeated)]
        found = np.moveaxis(found, (query, key), (-2, -1))
        later = found[..., np.triu(np.ones(found.shape[-2:], bool), 1)]
        first = later.flat[0]
        return float(first) if (later == first).all() else None

    def of(self, value: ir.Value) -> Array | None:
        """A value's elements. None if it depends on arguments, on ops that are not computed, or on
        numbers that its type lacks, which the program rounds or wraps."""
        while value in self._same_as:
            value = self._same_as[value]
        if value not in self._found:
            self._found[value] = None if isinstance(value.owner, ir.Block) else self._made(value)
        return self._found[value]

    def _made(self, value: ir.Value) -> Array | None:
        op = ir.OpResult(value).owner.opview
        sizes = shape(value)
        if isinstance(op, stablehlo.ConstantOp):
            return _constant(op, sizes)
        operands = [self.of(operand) for operand in op.operands]
        known = [it for it in operands if it is not None]
        if len(known) != len(operands):
            return None
        if isinstance(op, stablehlo.IotaOp):
            dim = integer(op, "iota_dimension")
            aligned = [-1 if d == dim else 1 for d in range(len(sizes))]
            counted = np.arange(sizes[dim]).reshape(aligned)
            return np.broadcast_to(counted, sizes) if _has_all(value, counted) else None
        moved = _moved(op, known, sizes)
        if moved is not None:
            return moved
        found = _computed(op, known) if prod(sizes) <= _MOST else None
        return found if found is not None and _has_all(value, found) else None


def _has_all(value: ir.Value, numbers: Array) -> bool:
    """Whether the element type of a value has all of some numbers."""
    element = ir.RankedTensorType(value.type).element_type
    if numbers.dtype == bool or isinstance(element, ir.F64Type):
        return True
    if isinstance(element, ir.IntegerType):
        sign = 0 if element.is_unsigned else 1
        low, high = -sign * 2 ** (element.width - 1), 2 ** (element.width - sign)
        return bool((numbers >= low).all() and (numbers < high).all())
    if isinstance(element, ir.F16Type):
        return np.array_equal(numbers, numbers.astype(np.float16))
    single = numbers.astype(np.float32)
    if not np.array_equal(numbers, single):
        return False
    # The first half of the bits is the number in bf16.
    is_half = isinstance(element, ir.BF16Type) and not (single.view(np.uint32) & 0xFFFF).any()
    return is_half or isinstance(element, ir.F32Type)


def _constant(op: stablehlo.ConstantOp, sizes: tuple[int, ...]) -> Array | None:
    number = splat(op.results[0])
    if number is not None:
        return np.broadcast_to(np.asarray(_typed(op.results[0], number)), sizes)
    attr = op.attributes["value"]
    if isinstance(attr, ir.DenseIntElementsAttr | ir.DenseFPElementsAttr):
        return np.array(attr).reshape(sizes)
    return None


def _typed(value: ir.Value, number: float) -> float | bool:
    element = ir.RankedTensorType(value.type).element_type
    return bool(number) if isinstance(element, ir.IntegerType) and element.width == 1 else number


def _moved(op: ir.OpView, known: list[Array], sizes: tuple[int, ...]) -> Array | None:
    """What an op makes that only moves elements; None for other ops."""
    if isinstance(op, stablehlo.BroadcastInDimOp):
        dims = integers(op, "broadcast_dimensions")
        order = np.argsort(dims, kind="stable")
        aligned = [1] * len(sizes)
        for n, d in enumerate(dims):
            aligned[d] = known[0].shape[n]
        return np.broadcast_to(known[0].transpose(order).reshape(aligned), sizes)
    if isinstance(op, stablehlo.TransposeOp):
        return known[0].transpose(integers(op, "permutation"))
    if isinstance(op, stablehlo.ReshapeOp):
        return known[0].reshape(sizes) if prod(sizes) <= _MOST else None
    if isinstance(op, stablehlo.SliceOp):
        names = ("start_indices", "limit_indices", "strides")
        return known[0][tuple(map(slice, *(integers(op, name) for name in names)))]
    return None


def _computed(op: ir.OpView, known: list[Array]) -> Array | None:
    """What an element-wise op computes, as far as masks need it; None for other ops."""
    name = op.operation.name
    if name in _BINARY:
        return _BINARY[name](known[0], known[1])
    if name == "stablehlo.compare":
        direction = stablehlo.ComparisonDirectionAttr(op.attributes["comparison_direction"]).value
        return _COMPARE[direction](known[0], known[1])
    if name == "stablehlo.select":
        return np.where(*known)
    if name == "stablehlo.not":
        return ~known[0]
    if name == "stablehlo.negate":
        return -known[0]
    if name == "stablehlo.convert":
        element = ir.RankedTensorType(op.results[0].type).element_type
        if isinstance(element, ir.IntegerType):
            if not np.isfinite(known[0]).all():
                return None
            return known[0].astype(bool if element.width == 1 else np.int64)
        return known[0].astype(np.float64)
    return None
