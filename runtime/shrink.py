"""Makes a smaller program of the same structure.

Before: `stablehlo.slice %x [0:16, 64:128] : (tensor<16x128xf32>) -> tensor<16x64xf32>`
After `{128: 16, 64: 8}`: `stablehlo.slice %x [0:16, 8:16] : (tensor<16x16xf32>) -> ...`

A size N becomes M wherever it occurs: in tensor types, in the attributes that count elements
(limits of slices, windows, groups of a convolution), and in constants whose elements all equal N,
such as the divisor of a mean or the size that is added to a negative index. Other constants are
cropped. The result is a valid program, but not the same function. It runs in seconds.

Limits: a size is identified by its number, so two dimensions of one size shrink together, and a
constant that happens to equal N changes. Loop bounds keep their value without `trip_counts`.

Fails when: a size does not occur, or the smaller program does not verify; the error names the op.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from alpa.dialects import body, func, ir, main_function, stablehlo, walk
from alpa.dialects.attributes import ROLE
from alpa.dialects.elided import Constant, elided_constants
from alpa.passes import PassError

# The attributes whose numbers are sizes of dimensions or positions in them.
_SIZES = (
    "start_indices",
    "limit_indices",
    "slice_sizes",
    "edge_padding_low",
    "edge_padding_high",
    "window_dimensions",
    "feature_group_count",
    "batch_group_count",
)


def shrink(module: ir.Module, sizes: Mapping[int, int], *, trip_counts: bool = False) -> None:
    """Replaces every size n by `sizes[n]`, in place. The module is not verified.

    Args:
        module: a program with tensors of static shapes.
        sizes: the new sizes by the old ones.
        trip_counts: also change the constants that loop conditions read.

    Raises:
        ValueError: a size does not occur.
        PassError: a constant cannot be cropped.
    """
    found = {size for type_ in _types(module) for size in type_.shape}
    if missing := sorted(set(sizes) - found):
        known = ", ".join(map(str, sorted(found)))
        raise ValueError(f"no dimension has size {missing[0]}; the program's sizes are {known}")
    bounds = set() if trip_counts else set(_loop_bounds(module))

    def new_type(type_: ir.Type) -> ir.Type:
        if not isinstance(type_, ir.RankedTensorType):
            return type_
        shape = [sizes.get(size, size) for size in type_.shape]
        return ir.RankedTensorType.get(shape, type_.element_type, type_.encoding)

    def new_constant(op: Constant) -> ir.Attribute:
        value, type_ = op.attributes["value"], ir.RankedTensorType(new_type(op.results[0].type))
        elements = value.maybe_downcast()
        if not isinstance(elements, ir.DenseElementsAttr):
            if type_ == op.results[0].type:
                return value
            raise PassError(
                op, "a constant kept apart cannot be cropped; if elided, make it an argument"
            )
        if not elements.is_splat:
            crop = tuple(slice(size) for size in type_.shape)
            return dense(numpy_elements(op)[crop], type_)
        scalar = elements.get_splat_value()
        if op.results[0] not in bounds:
            scalar = _scaled(scalar, sizes)
        return ir.DenseElementsAttr.get_splat(type_, scalar)

    with module.context, ir.Location.unknown():
        rewrite_types(module, new_type, new_constant)
        for op in walk(module.body):
            for name in _SIZES:
                if name in op.attributes:
                    op.attributes[name] = _resized(op.attributes[name], sizes)


def elided_to_arguments(module: ir.Module) -> int:
    """Turns elided constants into arguments of @main, in place, and returns their number.

    Raises:
        PassError: one of them is not directly in @main; `simplify-trivial-ops` moves it there.
    """
    main = main_function(module)
    elided = elided_constants(module)
    for op in elided:
        if op.operation.parent != main.operation:
            raise PassError(
                op,
                "this elided constant is not in the body of the main function; run "
                "simplify-trivial-ops first, which inlines the other functions",
            )
    with module.context, ir.Location.unknown():
        attrs = [ir.DictAttr.get()] * len(main.type.inputs)
        if "arg_attrs" in main.attributes:
            attrs = list(ir.ArrayAttr(main.attributes["arg_attrs"]))
        constant = ir.DictAttr.get({ROLE: ir.StringAttr.get("constant")})
        main.attributes["arg_attrs"] = ir.ArrayAttr.get([*attrs, *[constant] * len(elided)])
        inputs = [*main.type.inputs, *(op.results[0].type for op in elided)]
        type_ = ir.FunctionType.get(inputs, main.type.results)
        main.attributes["function_type"] = ir.TypeAttr.get(type_)
        for op in elided:
            argument = main.entry_block.add_argument(op.results[0].type, op.location)
            op.results[0].replace_all_uses_with(argument)
            op.operation.erase()
    return len(elided)


def rewrite_types(
    module: ir.Module,
    new_type: Callable[[ir.Type], ir.Type],
    new_constant: Callable[[Constant], ir.Attribute],
) -> None:
    """Gives every value, function and constant a new type, in place."""
    for op in walk(module.body):
        if isinstance(op, Constant):
            op.attributes["value"] = new_constant(op)
        if isinstance(op, func.FuncOp):
            type_ = ir.FunctionType.get(
                [new_type(each) for each in op.type.inputs],
                [new_type(each) for each in op.type.results],
            )
            op.attributes["function_type"] = ir.TypeAttr.get(type_)
        for value in _defined(op):
            value.set_type(new_type(value.type))


def numpy_elements(op: Constant) -> np.ndarray:
    """The elements of a constant.

    Raises:
        PassError: numpy has no such element type.
    """
    elements = ir.DenseElementsAttr(op.attributes["value"]).maybe_downcast()
    try:
        return np.array(elements)
    except TypeError as error:
        raise PassError(op, f"the elements of this constant cannot be read: {error}") from error


def dense(array: np.ndarray, type_: ir.RankedTensorType) -> ir.Attribute:
    """A constant's attribute from its elements."""
    buffer: Any = np.ascontiguousarray(array)  # the stubs know of Python 3.12's Buffer only
    return ir.DenseElementsAttr.get(buffer, type=type_)


def _defined(op: ir.OpView) -> Iterator[ir.Value]:
    yield from op.results
    for region in op.regions:
        for block in region.blocks:
            yield from block.arguments


def _types(module: ir.Module) -> Iterator[ir.RankedTensorType]:
    for op in walk(module.body):
        for value in _defined(op):
            if isinstance(value.type, ir.RankedTensorType):
                yield value.type


def _loop_bounds(module: ir.Module) -> Iterator[ir.Value]:
    """The operands of the ops in loop conditions."""
    for loop in walk(module.body):
        if isinstance(loop, stablehlo.WhileOp):
            for op in walk(body(loop)):
                yield from op.operands


def _scaled(scalar: ir.Attribute, sizes: Mapping[int, int]) -> ir.Attribute:
    scalar = scalar.maybe_downcast()
    if not isinstance(scalar, ir.IntegerAttr | ir.FloatAttr) or scalar.value not in sizes:
        return scalar
    new = sizes[int(scalar.value)]
    if isinstance(scalar, ir.FloatAttr):
        return ir.FloatAttr.get(scalar.type, new)
    return ir.IntegerAttr.get(scalar.type, new)


def _resized(attribute: ir.Attribute, sizes: Mapping[int, int]) -> ir.Attribute:
    attribute = attribute.maybe_downcast()
    if isinstance(attribute, ir.IntegerAttr):
        return ir.IntegerAttr.get(attribute.type, sizes.get(attribute.value, attribute.value))
    numbers = ir.DenseI64ArrayAttr(attribute)
    return ir.DenseI64ArrayAttr.get([sizes.get(number, number) for number in numbers])
