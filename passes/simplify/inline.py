"""Calls replaced by the body of the function that they call."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from alpa.dialects import body, func, ir, ops_where, sdy
from alpa.dialects.attributes import signature_attrs
from alpa.dialects.symbols import referenced_symbols
from alpa.passes.analysis.graph import move_body, replace_op
from alpa.passes.analysis.op_kinds import ARITHMETIC
from alpa.passes.base import PassError
from alpa.passes.simplify.control_flow import run_known_loops

_CALLS = {"func.call": "callee", "stablehlo.composite": "decomposition"}


def inline_calls(
    module: ir.Module, main: func.FuncOp, *, keeps_loops: bool = False
) -> list[ir.OpView]:
    """Inlines every call below `main` and erases the functions that are referenced no more.

    A `stablehlo.composite` is by definition a call of its decomposition and is inlined too.
    Loops of no trips and of one go before the calls in them, unless the program `keeps_loops`
    because its ops are compared with those of another one.
    Returns the ops of `main` that are no arithmetic, parents first.

    Raises:
        PassError: a recursion, or a callee that has no body or several blocks.
    """
    functions = {
        op.sym_name.value: op for op in module.body.operations if isinstance(op, func.FuncOp)
    }
    if not keeps_loops:
        _run_known_loops(functions.values())
    flat: set[str] = set()
    kept = {main.sym_name.value: list[ir.OpView]()}
    left = [*kept]
    while left:  # a custom call of a kept function keeps its computations
        name = left.pop()
        others = ops_where(functions[name], _is_other)
        if any(_is_call(op.operation) for op in others):
            _flatten(name, functions, flat, ())
            others = ops_where(functions[name], _is_other)
        kept[name] = others
        if len(functions) > 1:
            # What is arithmetic refers to meshes only.
            symbols = referenced_symbols(functions[name], kept[name])
            new = [it for it in symbols if it in functions and it not in kept]
            kept.update((it, []) for it in new)
            left += new
    for name, function in functions.items():
        if name not in kept:
            function.operation.erase()
    return kept[main.sym_name.value]


def _run_known_loops(functions: Collection[func.FuncOp]) -> None:
    """In programs of several functions: without calls, the rewrites find them later."""
    for function in functions:
        blocks = function.regions[0].blocks
        if len(functions) > 1 and len(blocks) == 1:
            run_known_loops(blocks[0])


def _flatten(
    name: str, functions: dict[str, func.FuncOp], flat: set[str], callers: tuple[str, ...]
) -> None:
    """Inlines the calls in a function, the callee's own ones first."""
    if name in flat:
        return
    flat.add(name)
    callers = (*callers, name)
    for call in ops_where(functions[name], _is_call):
        attr = call.attributes[_CALLS[call.operation.name]]
        callee = ir.FlatSymbolRefAttr(attr).value
        _check_callee(call, callee, functions, callers)
        _flatten(callee, functions, flat, callers)
        _inline(call, functions[callee])


def _is_call(op: ir.Operation) -> bool:
    return op.name in _CALLS


def _is_other(op: ir.Operation) -> bool:
    return op.name not in ARITHMETIC


def _check_callee(
    call: ir.OpView, callee: str, functions: dict[str, func.FuncOp], callers: tuple[str, ...]
) -> None:
    blocks = functions[callee].regions[0].blocks
    if callee in callers:
        cycle = " -> ".join(f"@{name}" for name in (*callers[callers.index(callee) :], callee))
        problem = f"recursion, {cycle}: it cannot be unrolled; write it as stablehlo.while"
    elif len(blocks) != 1:
        found = "several blocks" if blocks else "no body"
        problem = f"it calls @{callee}, which has {found}; only a body of one block can be inlined"
    else:
        return
    raise PassError(call, problem, ((functions[callee], f"@{callee} is here"),))


def _inline(call: ir.OpView, callee: func.FuncOp) -> None:
    # A clone maps captured values inside regions by itself; its ops are then moved.
    clone = callee.operation.clone(ip=False)
    block = body(clone)
    operands = _constrained(list(call.operands), callee, "arg_attrs", call)
    for op in block.operations:
        op.operation.location = ir.Location.callsite(op.location, [call.location])
    returned = _constrained(move_body(block, operands, call), callee, "res_attrs", call)
    replace_op(call, returned)
    clone.operation.erase()


def _constrained(
    values: list[ir.Value],
    callee: func.FuncOp,
    name: Literal["arg_attrs", "res_attrs"],
    call: ir.OpView,
) -> list[ir.Value]:
    """The values, each under the `sdy.sharding` that the callee's signature gives it."""
    constrained: list[ir.Value] = []
    for value, attrs in zip(values, signature_attrs(callee, name, len(values)), strict=True):
        if "sdy.sharding" in attrs:
            with call.location, ir.InsertionPoint(call):
                value = sdy.ShardingConstraintOp(value, attrs["sdy.sharding"]).result
        constrained.append(value)
    return constrained
