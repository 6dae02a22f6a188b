"""Checks what every pass requires of a module: one public function of tensors with static shapes,
and attributes of its arguments that fit them."""

from __future__ import annotations

from alpa.dialects import func, ir, is_public, ops_where, stablehlo
from alpa.dialects.attributes import CallCost, read_arguments
from alpa.dialects.mpmd_types import MeshTensor
from alpa.passes.analysis.symbolic_dims import dynamic_dims, place_of_dims, symbolic_dims
from alpa.passes.base import PassError, errors_at

_INTEGER_BITS = (2, 4, 8, 16, 32, 64)
_FLOAT_BITS = (4, 6, 8, 16, 32, 64)
_ADVICE = "refine the module to static shapes first, for example export it with concrete shapes"


def check_input(module: ir.Module, *, is_checked: bool = False) -> func.FuncOp:
    """The one public function of a module whose values are tensors of static shapes.

    Args:
        is_checked: all of this is known already.

    Raises:
        PassError: there is no function, no or several public ones, the public one has no body
            or several blocks, a value is no tensor, has a dynamic or unknown shape or elements
            that StableHLO lacks, or an attribute of an argument or the cost of a custom call does
            not fit.
    """
    return _main(_functions(module)) if is_checked else checked_types(module)[0]


def checked_types(module: ir.Module) -> tuple[func.FuncOp, set[ir.Type]]:
    """The same, and the types of all values, tuples among them. Raises PassError."""
    functions = _functions(module)
    main = _main(functions)
    _check_dimensions(main)
    known: set[ir.Type] = set()
    for function in functions:
        _check_ops(function, known)
    _check_arguments(main)
    return main, known


def _functions(module: ir.Module) -> list[func.FuncOp]:
    found = [op for op in module.body.operations if isinstance(op, func.FuncOp)]
    if not found:
        raise PassError(module.operation, "empty module: it holds no function to plan")
    return found


def _main(functions: list[func.FuncOp]) -> func.FuncOp:
    main = _only_public(functions)
    _check_body(main)
    return main


def check_unplanned(main: func.FuncOp) -> None:
    """Raises PassError if a program has been cut into stages, or takes tuples."""
    for a, argument in enumerate(main.regions[0].blocks[0].arguments):
        type_ = argument.type
        if isinstance(type_, ir.TupleType):
            message = f"argument {a} is {type_}; run import-hlo, which replaces it by its elements"
            raise PassError(argument.location, message)
        if not isinstance(type_, ir.RankedTensorType) and _is_tensor(type_):
            raise PassError(
                argument.location,
                f"argument {a} is on {MeshTensor.from_type(type_).mesh}: this program has been cut "
                "into stages already; plan the one that it was made from",
            )


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


def _check_dimensions(main: func.FuncOp) -> None:
    """Raises PassError at the first argument with a symbolic dimension."""
    dynamic = dynamic_dims(main)
    if not dynamic:
        return
    with errors_at(main):
        known = symbolic_dims(main)
        named = {place: dim.symbols for place, dim in known.items()}
    for a, d in dynamic:
        if symbols := named.get((a, d)):
            dim = known[a, d]
            sizes = [f"{symbol}=SIZE" for symbol in sorted(symbols)]
            raise PassError(
                place_of_dims(main),
                f"dimension {d} of argument {a} is '{dim.expression}' ({dim.name}), of any size; "
                f"give it one by {' '.join(f'--refine {size}' for size in sizes)}, or by the pass "
                f"refine-dimensions{{sizes={','.join(sizes)}}}",
            )


def _check_ops(function: func.FuncOp, known: set[ir.Type]) -> None:
    """Raises PassError at the first value whose shape is not static, or at an invalid `alpa.cost`;
    types in `known` are static."""
    name = _names([function])
    seen = set(known)

    def is_new(op: ir.Operation) -> bool:
        """Whether anything of an op is not checked yet."""
        is_known = not len(op.regions) and op.name != "stablehlo.custom_call"
        for result in op.results:
            if (type_ := result.type) not in seen:
                seen.add(type_)
                is_known = False
        return not is_known

    for op in (function, *ops_where(function, is_new)):
        if isinstance(op, stablehlo.CustomCallOp):
            with errors_at(op):
                CallCost.read(op)
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
    elif isinstance(type_, ir.UnrankedTensorType):
        raise PassError(where, f"{what} has no rank ({type_}); {_ADVICE}")
    elif isinstance(type_, ir.RankedTensorType):
        if not type_.has_static_shape:
            dim = next(i for i in range(type_.rank) if type_.is_dynamic_dim(i))
            raise PassError(where, f"dimension {dim} of {what} is dynamic ({type_}); {_ADVICE}")
        if not _is_element(type_.element_type):
            raise PassError(
                where, f"{what} is {type_}, whose elements {_instead(type_.element_type)}"
            )
    elif not str(type_).startswith("!"):  # Tokens, tensors on meshes and the like are of dialects.
        if _is_element(type_) or isinstance(type_, ir.IndexType):
            element = "i64" if isinstance(type_, ir.IndexType) else type_
            raise PassError(where, f"{what} is {type_}, not a tensor; make it a tensor<{element}>")
        raise PassError(where, f"{what} is {type_}, which StableHLO lacks; use a tensor")
    known.add(type_)


def _is_element(type_: ir.Type) -> bool:
    """Whether StableHLO has tensors of such elements."""
    if isinstance(type_, ir.ComplexType):
        return isinstance(type_.element_type, ir.F32Type | ir.F64Type)
    if isinstance(type_, ir.IntegerType):
        is_boolean = type_.width == 1 and type_.is_signless
        return is_boolean or (type_.width in _INTEGER_BITS and not type_.is_signed)
    return isinstance(type_, ir.FloatType) and type_.width in _FLOAT_BITS


def _instead(element: ir.Type) -> str:
    """What is wrong with such elements, and what to write instead."""
    if isinstance(element, ir.IndexType):
        return (
            "have no size; write i64, or make constant shapes static by "
            "func.func(stablehlo-canonicalize-dynamism)"
        )
    return "are not of StableHLO; use one of its integers, floats or complex numbers"


def _check_arguments(main: func.FuncOp) -> None:
    """Raises PassError where an attribute of an argument does not fit it."""
    arguments, results = list(main.regions[0].blocks[0].arguments), list(main.type.results)
    with errors_at(main):
        attributes = read_arguments(main)
    aliased: dict[int, int] = {}
    for a, (argument, its) in enumerate(zip(arguments, attributes, strict=True)):
        type_ = argument.type
        rank = _tensor(type_).rank if _is_tensor(type_) else 0
        if its.batch_dim is not None and not 0 <= its.batch_dim < rank:
            raise PassError(
                argument.location,
                f"argument {a} has alpa.batch_dim = {its.batch_dim}, but {rank} dimensions; count "
                "them from 0",
            )
        r = its.aliasing_output
        if r is None:
            continue
        says = f"argument {a} has tf.aliasing_output = {r}, but "
        if not 0 <= r < len(results):
            raise PassError(argument.location, f"{says}there are {len(results)} results")
        if r in aliased:
            message = f"{says}so has argument {aliased[r]}: a result can take one place only"
            raise PassError(argument.location, message)
        aliased[r] = a
        if _is_tensor(type_) and _is_tensor(results[r]) and _tensor(type_) != _tensor(results[r]):
            raise PassError(
                argument.location,
                f"{says}is {type_}, and that result is {results[r]}; a result can take the place "
                "of an argument of the same type only",
            )


def _is_tensor(type_: ir.Type) -> bool:
    return isinstance(type_, ir.RankedTensorType) or str(type_).startswith("!mpmd.mesh_tensor")


def _tensor(type_: ir.Type) -> ir.RankedTensorType:
    """The type of a tensor, on a mesh or not, which differ in their shardings."""
    if isinstance(type_, ir.RankedTensorType):
        return type_
    return MeshTensor.from_type(type_).type


def _names(functions: list[func.FuncOp]) -> str:
    names = [f"@{function.sym_name.value}" for function in functions]
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
