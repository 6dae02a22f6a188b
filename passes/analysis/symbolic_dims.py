"""The symbolic dimensions of a program that `jax.export` wrote.

Such a program checks the sizes of its arguments in `shape_assertion` calls. Their messages say
which expression of names, such as `2*b`, each dynamic dimension is. Their operands say which
dimension that is.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from alpa.dialects import body, func, ir, stablehlo, walk
from alpa.dialects.attributes import call_target
from alpa.passes.base import location_of

ASSERTION = "shape_assertion"
_SIZE = r"(?P<name>.*?) \(= \{(?P<at>\d+)\}\)"
_LARGEST_EXPONENT = 63
_SPECIFIED = (
    re.compile(rf"from specification '(?P<text>[^']*)' for dimension {_SIZE}"),
    re.compile(rf"dimension size {_SIZE} and the specification '(?P<text>[^']*)'"),
)


def _power(base: int, exponent: int) -> int:
    """A power. Raises ValueError where no dimension is as large."""
    if not 0 <= exponent <= _LARGEST_EXPONENT:
        raise ValueError(f"the exponent {exponent} is not between 0 and {_LARGEST_EXPONENT}")
    return base**exponent


_BINARY: Mapping[type[ast.operator], Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: _power,
}
_CALLS: Mapping[str, Callable[..., int]] = {
    "floordiv": operator.floordiv,
    "max": max,
    "min": min,
    "mod": operator.mod,
    "non_negative": lambda number: max(number, 0),
}


@dataclass(frozen=True)
class SymbolicDim:
    """A dimension of an argument: JAX's name of it, and the expression that its size is."""

    name: str
    expression: str

    @property
    def symbols(self) -> set[str]:
        """The names in the expression. Raises ValueError where it is none of JAX."""
        nodes = list(ast.walk(self._tree))
        called = {id(node.func) for node in nodes if isinstance(node, ast.Call)}
        return {n.id for n in nodes if isinstance(n, ast.Name) and id(n) not in called}

    def size(self, sizes: Mapping[str, int]) -> int:
        """The size of the dimension, with a size of each name. Raises ValueError."""
        try:
            return self._value(self._tree, sizes)
        except ZeroDivisionError as error:
            given = ", ".join(f"{name}={sizes[name]}" for name in sorted(self.symbols))
            message = (
                f"{self.name} has the size '{self.expression}', which divides by 0 with {given}"
            )
            raise ValueError(message) from error

    @property
    def _tree(self) -> ast.expr:
        try:
            return ast.parse(self.expression.replace("^", "**"), mode="eval").body
        except SyntaxError as error:
            raise self._unknown() from error

    def _value(self, node: ast.expr, sizes: Mapping[str, int]) -> int:
        match node:
            case ast.Constant(value=int(number)):
                return number
            case ast.Name(id=name):
                return sizes[name]
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -self._value(operand, sizes)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
                return _BINARY[type(op)](self._value(left, sizes), self._value(right, sizes))
            case ast.Call(func=ast.Name(id=name), args=args) if name in _CALLS:
                return _CALLS[name](*(self._value(argument, sizes) for argument in args))
            case _:
                raise self._unknown()

    def _unknown(self) -> ValueError:
        return ValueError(f"{self.name} has the size '{self.expression}', which cannot be computed")


def symbolic_dims(main: func.FuncOp) -> dict[tuple[int, int], SymbolicDim]:
    """The dimensions of @main's arguments that have an expression, by argument and dimension.

    Raises:
        ValueError: an assertion has no text, or refers to an operand that it lacks.
    """
    found: dict[tuple[int, int], SymbolicDim] = {}
    for op in assertions(main):
        message, sizes = message_of(op), list(op.operands)[1:]
        for pattern in _SPECIFIED:
            for match in pattern.finditer(message):
                at = int(match["at"])
                if at >= len(sizes):
                    raise ValueError(f"an assertion refers to {{{at}}} and has {len(sizes)} sizes")
                place = _dimension(sizes[at])
                if place is not None:
                    found.setdefault(place, SymbolicDim(match["name"], match["text"]))
    return found


def assertions(main: func.FuncOp) -> Iterator[stablehlo.CustomCallOp]:
    """The calls by which a program checks the sizes of its arguments."""
    for op in walk(main.entry_block):
        if call_target(op) == ASSERTION and "error_message" in op.attributes:
            yield cast("stablehlo.CustomCallOp", op)


def message_of(assertion: stablehlo.CustomCallOp) -> str:
    """What an assertion says where it does not hold; `{0}` is its first operand but one."""
    return ir.StringAttr(assertion.attributes["error_message"]).value


def dynamic_dims(main: func.FuncOp) -> list[tuple[int, int]]:
    """The dimensions of arguments without a size, by argument and dimension."""
    return [
        (number, dim)
        for number, argument in enumerate(main.entry_block.arguments)
        if isinstance(type_ := argument.type, ir.RankedTensorType)
        for dim in range(type_.rank)
        if type_.is_dynamic_dim(dim)
    ]


def place_of_dims(main: func.FuncOp) -> ir.Location:
    """A place in a file for what is wrong with a dimension.

    `jax.export` wraps a program in an @main without places; the wrapped function has some.
    """
    return location_of(main, *(function for function, _ in _callees(main)))


def name_arguments(main: func.FuncOp) -> None:
    """Gives the arguments of @main the names of those of the function that it wraps."""
    for function, call in _callees(main):
        for operand, argument in zip(call.operands, body(function).arguments, strict=True):
            if isinstance(operand, ir.BlockArgument) and isinstance(
                operand.location, ir.UnknownLoc
            ):
                operand.set_location(argument.location)


def _callees(main: func.FuncOp) -> Iterator[tuple[func.FuncOp, func.CallOp]]:
    """The functions that @main calls, with the calls."""
    parent = main.operation.parent
    assert parent is not None
    symbols = ir.SymbolTable(parent.operation)
    for op in body(main).operations:
        if isinstance(op, func.CallOp):
            name = ir.FlatSymbolRefAttr(op.attributes["callee"]).value
            yield cast("func.FuncOp", symbols[name]), op


def _dimension(size: ir.Value) -> tuple[int, int] | None:
    """The dimension of an argument of @main whose size a value is, if it is one."""
    while isinstance(size, ir.OpResult):
        op = size.owner.opview
        if isinstance(op, stablehlo.GetDimensionSizeOp):
            value = op.operands[0]
            if not isinstance(value, ir.BlockArgument):
                return None
            return value.arg_number, ir.IntegerAttr(op.attributes["dimension"]).value
        if not isinstance(op, stablehlo.ConvertOp):
            return None
        size = op.operands[0]
    return None
