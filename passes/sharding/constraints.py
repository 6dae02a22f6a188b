"""Writes the planned layouts of an exported function as constraints, which XLA keeps.

A constraint stands behind each result, and at both ends of a loop's body, but not where it says
what the only use says anyway, and not on constants, which cost nothing in any layout.
"""

from __future__ import annotations

from dataclasses import replace

from alpa.dialects.bindings import body, func, ir, sdy, stablehlo, terminator
from alpa.dialects.sharding import Sharding, op_shardings
from alpa.passes.base import PassError

_SHARDING = "sdy.sharding"
# Their results cost nothing to make anew in any layout.
_FREE = (stablehlo.ConstantOp, stablehlo.IotaOp)


def closed(op: ir.OpView, sharding: Sharding, mesh: str) -> Sharding:
    """A sharding that propagation may not grow.

    Raises:
        PassError: it is over another mesh than the fragment's.
    """
    if sharding.mesh != mesh:
        raise PassError(op, f"a sharding over @{sharding.mesh} in a fragment on {mesh}")
    return replace(sharding, open_dims=frozenset())


def materialise(op: ir.OpView, mesh: str, devices: int) -> None:
    """Turns an op's `sdy.sharding` into constraints on its results; drops `alpa.*`."""
    shardings = op_shardings(op)
    for name in [name for name in op.attributes if name.startswith("alpa.")]:
        del op.attributes[name]
    if shardings is None:
        return
    del op.attributes[_SHARDING]
    fixed = [closed(op, sharding, mesh) for sharding in shardings]
    if isinstance(op, sdy.ShardingConstraintOp):
        op.attributes["sharding"] = fixed[0].to_attr()
        return
    if isinstance(op, _FREE) or devices == 1 or _is_manual(op):
        return
    if isinstance(op, stablehlo.WhileOp):
        _pin_variables(op, fixed)
    for result, sharding in zip(op.results, fixed, strict=True):
        if sharding.dims and not _says_the_same(result, sharding):
            attr = sharding.to_attr()
            with ir.InsertionPoint.after(op), op.location:
                constraint = sdy.ShardingConstraintOp(result, sharding=attr)
            result.replace_all_uses_except(constraint.result, constraint.operation)


def _pin_variables(loop: stablehlo.WhileOp, shardings: list[Sharding]) -> None:
    """Fixes the layouts of a loop's variables inside it, which XLA else takes from their uses."""
    block = body(loop, 1)
    end = terminator(block)
    for i, sharding in enumerate(shardings):
        if not sharding.dims:
            continue
        argument, attr = block.arguments[i], sharding.to_attr()
        with ir.InsertionPoint.at_block_begin(block), loop.location:
            start = sdy.ShardingConstraintOp(argument, sharding=attr)
        argument.replace_all_uses_except(start.result, start.operation)
        with ir.InsertionPoint(end), loop.location:
            end.operands[i] = sdy.ShardingConstraintOp(end.operands[i], sharding=attr).result


def _is_manual(op: ir.OpView) -> bool:
    """Whether an op computes on local shards, inside a shard_map."""
    parent = op.operation.parent
    while parent is not None and parent.operation.name != "func.func":
        if parent.operation.name == "sdy.manual_computation":
            return True
        parent = parent.operation.parent
    return False


def _says_the_same(result: ir.Value, sharding: Sharding) -> bool:
    """Whether the only use of a result fixes this very sharding already, or nothing uses it."""
    uses = list(result.uses)
    if len(uses) != 1:
        return not uses
    user = uses[0].owner
    if isinstance(user, func.ReturnOp):
        function = user.operation.parent
        assert function is not None
        fixed = ir.DictAttr(ir.ArrayAttr(function.attributes["res_attrs"])[uses[0].operand_number])
        return Sharding.from_attr(fixed[_SHARDING]) == sharding
    if isinstance(user, sdy.ShardingConstraintOp):
        return Sharding.from_attr(user.attributes["sharding"]) == sharding
    return False
