"""Donation of XLA's modules, as `mhlo.input_output_alias`, becomes that of JAX's."""

from __future__ import annotations

from collections.abc import Sequence

from alpa.dialects import func, ir
from alpa.dialects.attributes import ALIASING_OUTPUT, BUFFER_DONOR, signature_attrs
from alpa.dialects.hlo_aliases import ALIASES, Alias
from alpa.passes.base import PassError
from alpa.passes.imports.tuples import elements, starts


def take_aliases(module: ir.Module, main: func.FuncOp) -> dict[int, int]:
    """Removes the attribute, and returns the results whose place arguments take.

    Both are counted as if tuples were replaced by their elements. Pairs of other types are left
    out, and so are all if the arguments say themselves what is donated.

    Raises:
        PassError: an alias names no argument or result, or one that another alias names.
    """
    attribute = module.operation.attributes.get(ALIASES)
    if attribute is None:
        return {}
    del module.operation.attributes[ALIASES]
    said = signature_attrs(main, "arg_attrs", len(main.type.inputs))
    if any(it.keys() & {ALIASING_OUTPUT, BUFFER_DONOR} for it in said):
        return {}
    inputs, results = main.type.inputs, main.type.results
    flat_inputs = [part for it in inputs for part in elements(it)]
    flat_results = [part for it in results for part in elements(it)]
    try:
        pairs = [*Alias.read(attribute)]
    except (KeyError, TypeError, ValueError) as error:
        raise PassError(
            module.operation,
            f"{ALIASES} = {attribute}: expected a list of {{alias = {{parameter_number = 0, "
            "parameter_index = array<i64>}, output_index = array<i64>}",
        ) from error
    found: dict[int, int] = {}
    for alias in pairs:
        # Several results are the elements of one tuple, and one result has no number.
        output = alias.result if len(results) > 1 else (0, *alias.result)
        a = _place(main, inputs, alias.argument, "argument")
        r = _place(main, results, output, "result")
        if a in found or r in found.values():
            raise PassError(
                main,
                f"{ALIASES} names argument {a} or result {r} twice: a result can take one place, "
                "and a place has one result",
            )
        if flat_inputs[a] == flat_results[r]:
            found[a] = r
    return found


def write_aliases(main: func.FuncOp, aliases: dict[int, int]) -> None:
    """Writes them as JAX does, to the arguments of a function without tuples."""
    if not aliases:
        return
    said = signature_attrs(main, "arg_attrs", len(main.type.inputs))
    i32 = ir.IntegerType.get_signless(32)
    main.attributes["arg_attrs"] = ir.ArrayAttr.get(
        [
            ir.DictAttr.get(
                given
                | ({ALIASING_OUTPUT: ir.IntegerAttr.get(i32, aliases[a])} if a in aliases else {})
            )
            for a, given in enumerate(said)
        ]
    )


def _place(main: func.FuncOp, types: Sequence[ir.Type], path: Sequence[int], noun: str) -> int:
    """The number of an element among all. Raises PassError."""
    place, inside = 0, list(types)
    for index in path:
        if not 0 <= index < len(inside):
            where = ", ".join(map(str, path))
            raise PassError(main, f"{ALIASES} names {noun} [{where}], which @main does not have")
        place += starts(inside)[index]
        type_ = inside[index]
        inside = (
            [type_.get_type(i) for i in range(type_.num_types)]
            if isinstance(type_, ir.TupleType)
            else []
        )
    return place
