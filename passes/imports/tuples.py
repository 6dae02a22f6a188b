"""Tuples replaced by their elements: in signatures, calls and the results of custom calls."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import accumulate

from alpa.dialects import func, ir, stablehlo
from alpa.dialects.attributes import Signature, signature_attrs
from alpa.passes.base import PassError

_REBUILT = {"func.call", "func.return", "stablehlo.composite", "stablehlo.custom_call"}
"""StableHLO allows no tuples in loops, branches and barriers."""


def elements(type_: ir.Type) -> list[ir.Type]:
    """The types of a tuple that are no tuples, in their order; the type itself if it is none."""
    if not isinstance(type_, ir.TupleType):
        return [type_]
    return [it for i in range(type_.num_types) for it in elements(type_.get_type(i))]


def _paths(type_: ir.Type) -> list[tuple[str, ir.Type]]:
    """The elements of a type with their places in it, such as `[1][0]`."""
    if not isinstance(type_, ir.TupleType):
        return [("", type_)]
    return [
        (f"[{i}]{path}", it)
        for i in range(type_.num_types)
        for path, it in _paths(type_.get_type(i))
    ]


def _named(location: ir.Location, path: str) -> ir.Location:
    """The location of an element of an argument, whose name says which element it is."""
    if not path or not isinstance(location, ir.NameLoc):
        return location
    return ir.Location.name(f"{location.name_str}{path}", location.child_loc, location.context)


def starts(types: Iterable[ir.Type]) -> list[int]:
    """Where the elements of each type begin among those of all, and their number."""
    return list(accumulate((len(elements(it)) for it in types), initial=0))


def flatten_tuples(functions: Sequence[func.FuncOp]) -> None:
    """Replaces tuples by their elements in all functions of a module.

    Raises:
        PassError: a custom call takes a tuple as one operand, or another op takes or gives one.
    """
    flattener = _Flattener()
    for function in functions:
        for region in function.regions:
            for block in region.blocks:
                flattener.flatten_block(block)
        _flatten_signature(function)


class _Flattener:
    def __init__(self) -> None:
        self._elements: dict[ir.Value, list[ir.Value]] = {}
        """of each tuple"""

    def flatten_block(self, block: ir.Block) -> None:
        """Flattens arguments and ops. Raises PassError."""
        old_arguments = self._add_arguments(block)
        gone: list[ir.OpView] = []
        for op in list(block.operations):
            if isinstance(op, stablehlo.TupleOp):
                self._elements[op.result] = self._flat(op.operands)
                gone.append(op)
            elif isinstance(op, stablehlo.GetTupleElementOp):
                self._take(op)
                gone.append(op)
            else:
                for region in op.regions:
                    for inner in region.blocks:
                        self.flatten_block(inner)
                types = [it.type for it in (*op.operands, *op.results)]
                if any(isinstance(it, ir.TupleType) for it in types):
                    self._rebuild(op)
                    gone.append(op)
        for op in reversed(gone):
            op.operation.erase()
        for _ in range(old_arguments):
            block.erase_argument(0)

    def _flat(self, values: Iterable[ir.Value]) -> list[ir.Value]:
        return [it for value in values for it in self._elements.get(value, [value])]

    def _take(self, op: stablehlo.GetTupleElementOp) -> None:
        type_ = ir.TupleType(op.operands[0].type)
        places = starts(type_.get_type(i) for i in range(type_.num_types))
        index = ir.IntegerAttr(op.attributes["index"]).value
        self._replace(op.result, self._flat(op.operands)[places[index] : places[index + 1]])

    def _replace(self, value: ir.Value, parts: Sequence[ir.Value]) -> None:
        if isinstance(value.type, ir.TupleType):
            self._elements[value] = [*parts]
        else:
            value.replace_all_uses_with(parts[0])

    def _add_arguments(self, block: ir.Block) -> int:
        """Adds the elements of all arguments; the number of arguments before them, which go."""
        before = list(block.arguments)
        if not any(isinstance(it.type, ir.TupleType) for it in before):
            return 0
        for argument in before:
            parts = [
                block.add_argument(type_, _named(argument.location, path))
                for path, type_ in _paths(argument.type)
            ]
            self._replace(argument, parts)
        return len(before)

    def _rebuild(self, op: ir.OpView) -> None:
        """Makes an op with the elements in place of tuples, beside the old one."""
        name = op.operation.name
        takes = any(isinstance(it.type, ir.TupleType) for it in op.operands)
        if name not in _REBUILT or (takes and isinstance(op, stablehlo.CustomCallOp)):
            verb = "takes" if takes else "gives"
            raise PassError(
                op, f"{name} {verb} a tuple, which cannot be replaced by its elements; remove it"
            )
        with ir.InsertionPoint(op), op.location:
            new = ir.Operation.create(
                name,
                results=[part for it in op.results for part in elements(it.type)],
                operands=self._flat(op.operands),
                attributes={it: op.attributes[it] for it in op.attributes},
            )
        places = starts(it.type for it in op.results)
        for r, result in enumerate(op.results):
            self._replace(result, list(new.results)[places[r] : places[r + 1]])


def _flatten_signature(function: func.FuncOp) -> None:
    """Writes the types of the elements, each with the attributes of a value that is no tuple."""
    type_ = function.type
    _flatten_attributes(function, "arg_attrs", type_.inputs)
    _flatten_attributes(function, "res_attrs", type_.results)
    flat = ir.FunctionType.get(
        inputs=[part for it in type_.inputs for part in elements(it)],
        results=[part for it in type_.results for part in elements(it)],
    )
    function.attributes["function_type"] = ir.TypeAttr.get(flat)


def _flatten_attributes(function: func.FuncOp, name: Signature, types: Sequence[ir.Type]) -> None:
    if name not in function.attributes:
        return
    found = signature_attrs(function, name, len(types))
    flat: list[ir.Attribute] = []
    for type_, given in zip(types, found, strict=True):
        # What is said of a tuple as a whole, such as its layout, is no property of its elements.
        kept = {} if isinstance(type_, ir.TupleType) else given
        flat += [ir.DictAttr.get(kept)] * len(elements(type_))
    function.attributes[name] = ir.ArrayAttr.get(flat)
