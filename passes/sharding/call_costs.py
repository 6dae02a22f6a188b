"""Costs of custom calls that users register, written on the calls as `alpa.cost`.

The attribute says what a call computes to all later passes, and to processes that have no registry.
A program may bring it itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from alpa.dialects import ir
from alpa.dialects.attributes import CallCost, call_target
from alpa.passes.base import PassError, UsersCode, check_kind

CustomCost = CallCost | Callable[[ir.OpView], CallCost]

# Filled by user code before it plans; nothing in the compiler writes it.
CUSTOM_CALL_COSTS: dict[str, CustomCost] = {}
"""Costs of custom calls by their target."""


def register_cost(target: str, cost: CustomCost) -> None:
    """Tells the planner what custom calls of a target compute.

    `cost` is a CallCost, or a function that makes one from the op, whose shapes are those of all
    devices together. A custom call that carries `alpa.cost` itself keeps that.

    Raises:
        TypeError: an argument is of another type.
    """
    check_kind("target", target, str)
    check_kind("cost", cost, CallCost, Callable)
    CUSTOM_CALL_COSTS[target] = cost


def write_costs(ops: Iterable[ir.OpView]) -> None:
    """Writes `alpa.cost` on custom calls with a registered cost. Raises PassError."""
    for op in ops:
        cost = CUSTOM_CALL_COSTS.get(call_target(op) or "")
        if cost is None or CallCost.NAME in op.attributes:
            continue
        if not isinstance(cost, CallCost):
            cost = _made(op, cost)
        cost.write(op)


def _made(op: ir.OpView, cost: Callable[[ir.OpView], CallCost]) -> CallCost:
    title = f"the cost registered for @{call_target(op)}"
    with UsersCode(lambda reason: PassError(op, f"{title}: {reason}")):
        found = cost(op)
        check_kind("what it returns", found, CallCost)
    return found
