"""The MLIR bindings that jaxlib ships. Only this module imports them.

`jax.extend.mlir` is their public name, but importing jax takes 0.5 s instead of 0.18 s here, and
`alpa-opt` starts often.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
from jaxlib.mlir import ir, passmanager
from jaxlib.mlir._mlir_libs import _jax_mlir_ext as jax_extension
from jaxlib.mlir.dialects import chlo, func, mpmd, sdy, stablehlo

from alpa.dialects.caches import forget
from alpa.dialects.hlo_text import without_mhlo

__all__ = [
    "attributes_of",
    "body",
    "chlo",
    "file_position",
    "filled",
    "func",
    "ir",
    "is_bytecode",
    "is_public",
    "main_function",
    "make_context",
    "mpmd",
    "parse",
    "parse_file",
    "passmanager",
    "sdy",
    "stablehlo",
    "terminator",
    "walk",
    "walk_outside_manual",
]


def make_context() -> ir.Context:
    """A context with StableHLO, CHLO, Shardy, Shardy MPMD and the upstream dialects loaded."""
    forget()
    context = ir.Context()
    registry = ir.DialectRegistry()
    jax_extension.register_dialects(registry)
    context.append_dialect_registry(registry)
    for dialect in (stablehlo, chlo, sdy, mpmd):
        dialect.register_dialect(context)
    context.load_all_available_dialects()
    return context


class UnreadableError(ir.MLIRError):
    """MLIR's reader failed with an impossible request, such as too much memory: broken bytecode."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason, [])
        self._message = f"this is not an MLIR module: {reason}"
        self._error_diagnostics: list[ir.DiagnosticInfo] = []

    def __str__(self) -> str:
        return self._message


_DEEPEST = 1000
"""The largest depth of nested brackets. MLIR's reader recurses for each. From about 3000 nested
modules on, it overflows the stack and crashes the process."""
_BRACKETS = b"([{)]}"
_OTHERS = bytes(set(range(256)) - {*_BRACKETS})
_TRANSFORM = re.compile(r"(?:^|/)(jvp|transpose|vmap(?=\([^/]*transpose\())\(")
_NO_CODE = re.compile(rb'"(?:[^"\\\n]|\\.)*"|//[^\n]*')
"""Strings and comments."""


def _check_depth(text: bytes) -> None:
    """Raises UnreadableError if the input, text or not, is nested too deep."""
    if is_bytecode(text) or _depth(text) <= _DEEPEST:
        return
    # Brackets in strings and comments may be unbalanced, so they are removed when it matters.
    depth = _depth(_NO_CODE.sub(b"", text))
    if depth > _DEEPEST:
        raise UnreadableError(f"it has {depth:,} nested brackets; at most {_DEEPEST:,} are allowed")


def _depth(text: bytes) -> int:
    brackets = np.frombuffer(text.translate(None, _OTHERS), np.uint8)
    opens = np.isin(brackets, list(b"([{"))
    return int(np.cumsum(np.where(opens, 1, -1)).max(initial=0))


def parse(source: str | bytes, context: ir.Context | None = None) -> ir.Module:
    """Parses and verifies a module from MLIR text or bytecode.

    Raises:
        ir.MLIRError: the source does not parse or verify; the diagnostics have places.
    """
    data = source.encode(errors="surrogatepass") if isinstance(source, str) else source
    return _parsed(data, context or make_context())


def _parsed(data: bytes, context: ir.Context) -> ir.Module:
    """Raises ir.MLIRError."""
    _check_depth(data)
    try:
        return ir.Module.parse(data if is_bytecode(data) else without_mhlo(data), context)
    except (ValueError, MemoryError) as error:
        raise UnreadableError(str(error)) from error


def parse_file(path: str | Path, context: ir.Context | None = None) -> ir.Module:
    """Parses a file like `parse`; locations carry its path."""
    context = context or make_context()
    if Path(path).is_file():
        data = Path(path).read_bytes()
        if not is_bytecode(data) and (changed := without_mhlo(data)) is not data:
            module = _parsed(changed, context)
            _name_file(module, str(path))
            return module
        _check_depth(data)
    try:
        return ir.Module.parseFile(str(path), context)
    except (ValueError, MemoryError) as error:
        raise UnreadableError(str(error)) from error


def _name_file(module: ir.Module, path: str) -> None:
    """Gives the ops of a parsed text the file that it is from; MLIR calls it `-`."""
    with module.context:
        for op in (module.operation, *walk(module.body)):
            where = op.location
            if isinstance(where, ir.FileLineColLoc) and where.filename == "-":
                op.operation.location = ir.Location.file(path, where.start_line, where.start_col)


def is_bytecode(data: bytes) -> bool:
    """Whether a file that begins like this is MLIR bytecode."""
    return data.startswith(b"ML\xefR")


def attributes_of(op: ir.OpView) -> list[tuple[str, ir.Attribute | str]]:
    """The names and values of an op's attributes, for comparisons.

    If jaxlib has no Python class for a value (complex constants, in 0.10.2), only the op's text is
    available.
    """
    try:
        return list(op.attributes.items())
    except TypeError:
        # To print an op where it is numbers the values of its whole function, and shows them.
        alone = op.operation.clone(ip=False)
        text = str(alone)
        alone.erase()
        return [("", text)]


def file_position(location: ir.Location) -> ir.FileLineColLoc | None:
    """The first file position inside a location, also a named, call-site or fused one."""
    # The location of a raised error has lost its kind; the attribute still has it.
    return _position(ir.Location.from_attr(location.attr, location.context))


def _position(location: ir.Location) -> ir.FileLineColLoc | None:
    if isinstance(location, ir.FileLineColLoc):
        return location
    if isinstance(location, ir.NameLoc):
        return _position(location.child_loc)
    if isinstance(location, ir.CallSiteLoc):
        return _position(location.callee) or _position(location.caller)
    if isinstance(location, ir.FusedLoc):
        inner = cast(Iterable[ir.Location], location.locations)
        return next((found for each in inner if (found := _position(each)) is not None), None)
    return None


def transform(location: ir.Location) -> str | None:
    """The outermost JAX transformation that made an op: jvp, transpose, vmap of a transpose.

    JAX names its ops by their transformations, such as `transpose(jvp())/mul`, and inlining keeps
    the name of the call. Returns None if no name says so, as in text without locations.
    """
    if isinstance(location, ir.NameLoc):
        match = _TRANSFORM.search(location.name_str)
        return match[1] if match else None
    if isinstance(location, ir.CallSiteLoc):
        return transform(location.caller) or transform(location.callee)
    if isinstance(location, ir.FusedLoc):
        inner = cast(Iterable[ir.Location], location.locations)
        return next((found for each in inner if (found := transform(each)) is not None), None)
    return None


def body(op: ir.OpView | ir.Operation, region: int = 0) -> ir.Block:
    """The only block of an op's region."""
    return op.regions[region].blocks[0]


def terminator(block: ir.Block) -> ir.OpView:
    """The last op of a block."""
    return block.operations[len(block.operations) - 1]


def main_function(module: ir.Module) -> func.FuncOp:
    """The public function of a module that `alpa.dialects.checks` has accepted.

    It keeps its module alive: an op from `operations` does not, one from a symbol table does.
    """
    for op in module.body.operations:
        if isinstance(op, func.FuncOp) and is_public(op):
            return cast("func.FuncOp", ir.SymbolTable(module.operation)[op.name.value])
    raise ValueError("the module has no public function")


def is_public(function: func.FuncOp) -> bool:
    """Whether a function can be seen from outside its module (MLIR's default)."""
    visibility = function.attributes.get("sym_visibility")
    return visibility is None or ir.StringAttr(visibility).value == "public"


def walk(block: ir.Block) -> Iterator[ir.OpView]:
    """Every op of a block and of the regions inside, parents first."""
    for op in block.operations:
        yield op
        for region in op.regions:
            for inner in region.blocks:
                yield from walk(inner)


def walk_outside_manual(block: ir.Block) -> list[ir.OpView]:
    """All ops of a block and of its regions, except those that run on shards and are written for
    devices (`sdy.manual_computation`)."""
    found: list[ir.OpView] = []
    for op in block.operations:
        found.append(op)
        if not isinstance(op, sdy.ManualComputationOp):
            for region in op.regions:
                for inner in region.blocks:
                    found += walk_outside_manual(inner)
    return found


def filled(type_: ir.RankedTensorType, number: float) -> ir.Value:
    """A tensor whose elements are all one number."""
    element = type_.element_type
    if isinstance(element, ir.ComplexType):
        # The bindings raise TypeError for a complex constant.
        part = ir.RankedTensorType.get(type_.shape, element.element_type)
        return stablehlo.complex(filled(part, number), filled(part, 0.0))
    if isinstance(element, ir.FloatType):
        value: ir.Attribute = ir.FloatAttr.get(element, number)
    else:
        value = ir.IntegerAttr.get(element, int(number))
    return stablehlo.constant(ir.DenseElementsAttr.get_splat(type_, value))
