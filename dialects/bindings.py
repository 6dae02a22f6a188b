"""The MLIR bindings that jaxlib ships. Only this module imports them.

`jax.extend.mlir` is their public name, but importing jax takes 0.5 s instead of 0.18 s here, and
`alpa-opt` starts often.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from typing import cast

from jaxlib.mlir import ir, passmanager
from jaxlib.mlir._mlir_libs import _jax_mlir_ext as jax_extension
from jaxlib.mlir.dialects import chlo, func, mpmd, sdy, stablehlo

from alpa.dialects.caches import forget

# The registry of passes belongs to the process; jaxlib fills in all of them but these.
stablehlo.register_stablehlo_passes()

__all__ = [
    "attributes_of",
    "body",
    "chlo",
    "file_position",
    "filled",
    "func",
    "ir",
    "is_public",
    "main_function",
    "make_context",
    "mpmd",
    "ops_where",
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


_TRANSFORM = re.compile(r"(?:^|/)(jvp|transpose|vmap(?=\([^/]*transpose\())\(")


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
    """The terminator of a block."""
    # An index into the block's ops would count from the first one.
    last = ir.InsertionPoint.at_block_terminator(block).ref_operation
    assert last is not None
    return last.opview


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


def ops_where(
    root: ir.Module | ir.OpView | ir.Operation, wanted: Callable[[ir.Operation], bool]
) -> list[ir.OpView]:
    """The wanted ops among all in an op's regions, parents first."""
    # MLIR's own walk is a little faster, but turns an interrupt in a callback into another error.
    blocks = [block for region in root.operation.regions for block in region.blocks]
    return [op for block in blocks for op in walk(block) if wanted(op.operation)]


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
