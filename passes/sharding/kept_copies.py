"""Keeps for the backward part what the forward part has brought into another layout already.

A value crosses fragments in one layout, that in which it is made, since each op's resharding is
costed by itself. Where the forward part has made a copy of it in another layout, and all that the
later fragments do with the value is to bring it into that layout, they get the copy, unless it is
larger: an exchange is spared, as in an MoE layer, whose backward part needs the dispatched tokens
again. What the exchange takes is taken off the seconds of the fragments that are spared it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from alpa.dialects import body, ir, mpmd, sdy, terminator
from alpa.dialects.attributes import SECONDS, f64, read_part
from alpa.dialects.sharding import Sharding
from alpa.passes.cost.collectives import LogicalMesh


def return_copies(
    fragments: Sequence[mpmd.FragmentOp],
    shardings: dict[ir.Value, Sharding],
    mesh: LogicalMesh,
    seconds: Mapping[ir.Value, float],
) -> None:
    """Rewrites what forward fragments return.

    Args:
        fragments: those of a mesh, with their `alpa.seconds`.
        shardings: of the values of @main.
        mesh: the mesh.
        seconds: what the constraints take, by their results, once.
    """
    for fragment in fragments:
        if read_part(fragment) != "forward":
            continue
        end = terminator(body(fragment))
        for number, result in enumerate(fragment.results):
            copies = {
                op.attributes["sharding"]: op
                for op in _constraints_on(end.operands[number])
                if op.operation.block == body(fragment)
            }
            wanted = _wanted_later(result)
            if not wanted or wanted[0].attributes["sharding"] not in copies:
                continue
            attr = wanted[0].attributes["sharding"]
            copy = Sharding.from_attr(attr)
            if _ways(copy, mesh) < _ways(shardings[result], mesh):
                continue
            end.operands[number] = copies[attr].result
            shardings[result] = copy
            for op in wanted:
                _spare(op, seconds.get(op.result, 0.0))
                op.result.replace_all_uses_with(op.operands[0])
                op.operation.erase()


def _spare(op: sdy.ShardingConstraintOp, seconds: float) -> None:
    """Takes seconds off what one run of the fragment around an op takes."""
    fragment = op.operation.parent
    attr = None if fragment is None else fragment.attributes.get(SECONDS)
    if fragment is not None and isinstance(attr, ir.FloatAttr):
        fragment.attributes[SECONDS] = f64(max(0.0, attr.value - seconds))


def _ways(sharding: Sharding, mesh: LogicalMesh) -> int:
    """Into how many parts a sharding cuts."""
    sizes = dict(zip(mesh.axis_names, mesh.sizes, strict=True))
    return prod(sizes[axis.name] for dim in sharding.dims for axis in dim)


def _constraints_on(value: ir.Value) -> list[sdy.ShardingConstraintOp]:
    users = [use.owner for use in value.uses]
    return [user for user in users if isinstance(user, sdy.ShardingConstraintOp)]


def _wanted_later(result: ir.Value) -> list[sdy.ShardingConstraintOp]:
    """The constraints that use a fragment's result in others, if nothing else does and all are
    equal; else none."""
    found: list[sdy.ShardingConstraintOp] = []
    for use in result.uses:
        if not isinstance(use.owner, mpmd.FragmentOp):
            return []
        argument = body(use.owner).arguments[use.operand_number]
        constraints = _constraints_on(argument)
        if len(constraints) != len(list(argument.uses)):
            return []
        found += constraints
    return found if len({op.attributes["sharding"] for op in found}) == 1 else []
