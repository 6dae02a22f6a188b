"""Checks what every pass requires of a module: one public function and static shapes."""

from __future__ import annotations

from alpa.dialects import func, ir, is_public, walk
from alpa.passes.base import PassError

_ADVICE = "refine the module to static shapes first, for example export it with concrete shapes"


def check_input(module: ir.Module, *, is_checked: bool = False) -> func.FuncOp:
    """The one public function of a module whose shapes are all static.

    Args:
        is_checked: the shapes are known to be.

    Raises:
        PassError: there is no function, no or several public ones, the public one has no body
            or several blocks, or a value has a dynamic or unknown shape.
    """
    functions = [op for op in module.body.operations if isinstance(op, func.FuncOp)]
    if not functions:
        raise PassError(module.operation, "empty module: it holds no function to plan")
    main = _only_public(functions)
    _check_body(main)
    if is_checked:
        return main
    known: set[ir.Type] = set()
    for function in functions:
        _check_shapes(function, known)
    return main


def _only_public(functions: list[func.FuncOp]) -> func.FuncOp:
    public = [function for function in functions if is_public(function)]
    if not public:
        raise PassError(
            functions[0],
            f"no public function: {_names(functions)} can be called by nobody; "
            "remove 'private' from the one to plan",
        )
    if len(public) > 1:
        raise PassError(
            public[0],
            f"{len(public)} public functions, {_names(public)}; one is planned: "
            "make the others private",
            tuple((other, "also public") for other in public[1:]),
        )
    return public[0]


def _check_body(main: func.FuncOp) -> None:
    blocks = main.regions[0].blocks
    if len(blocks) == 0:
        raise PassError(main, f"{_names([main])} has no body: a declaration cannot be planned")
    if len(blocks) > 1:
        raise PassError(
            main,
            f"{_names([main])} has {len(blocks)} blocks; write branches as stablehlo.while, "
            "stablehlo.case and stablehlo.if",
        )


def _check_shapes(function: func.FuncOp, known: set[ir.Type]) -> None:
    """Raises PassError at the first value whose shape is not static; types in `known` are."""
    name = _names([function])
    for op in (function, *(op for block in function.regions[0].blocks for op in walk(block))):
        for i, result in enumerate(op.results):
            if result.type not in known:
                _check_type(result.type, op.location, f"result {i} of {op.operation.name}", known)
        whose = name if op is function else f"a region of {op.operation.name}"
        for region in op.regions:
            for block in region.blocks:
                for i, argument in enumerate(block.arguments):
                    where = argument.location if op is function else op.location
                    _check_type(argument.type, where, f"argument {i} of {whose}", known)


def _check_type(type_: ir.Type, where: ir.Location, what: str, known: set[ir.Type]) -> None:
    if type_ in known:
        return
    if isinstance(type_, ir.TupleType):
        for i in range(type_.num_types):
            _check_type(type_.get_type(i), where, what, known)
    if isinstance(type_, ir.UnrankedTensorType):
        raise PassError(where, f"{what} has no rank ({type_}); {_ADVICE}")
    if isinstance(type_, ir.RankedTensorType) and not type_.has_static_shape:
        dim = next(i for i in range(type_.rank) if type_.is_dynamic_dim(i))
        raise PassError(where, f"dimension {dim} of {what} is dynamic ({type_}); {_ADVICE}")
    known.add(type_)


def _names(functions: list[func.FuncOp]) -> str:
    names = [f"@{function.sym_name.value}" for function in functions]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
