"""Passes resharded copies from the forward part to the backward part.

The search reshards each value for each fragment anew. If the forward part has made a copy of a
value in another layout, and later fragments only reshard the value to that layout, the copy crosses
instead, unless it is larger or its shards are uneven. This saves a collective in MoE layers, whose
backward part needs the dispatched tokens again. The saved seconds are subtracted from those of the
later fragments.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod

from alpa.dialects import body, ir, mpmd, sdy, terminator
from alpa.dialects.attributes import SECONDS, read_part
from alpa.dialects.records import f64
from alpa.dialects.sharding import Sharding
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.sharding.layouts import layout_of
from alpa.passes.sharding.padding import is_even


def return_copies(
    fragments: Sequence[mpmd.FragmentOp],
    shardings: dict[ir.Value, Sharding],
    mesh: LogicalMesh,
    seconds: Mapping[ir.Value, float],
) -> None:
    """Rewrites the results of forward fragments.

    Args:
        fragments: the fragments of a mesh, with `alpa.seconds`.
        shardings: the shardings of @main's values, which are updated.
        mesh: the mesh.
        seconds: seconds of one run of each constraint, by its result.
    """
    for fragment in fragments:
        if read_part(fragment) != "forward":
            continue
        end = terminator(body(fragment))
        for number, result in enumerate(fragment.results):
            copies = {
                op.attributes["sharding"]: op
                for op in _constraints_on(end.operands[number])
                if op.operation.block == body(fragment) and _is_even(op, mesh)
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
    """Subtracts seconds from one run of the fragment around an op."""
    fragment = op.operation.parent
    attr = None if fragment is None else fragment.attributes.get(SECONDS)
    if fragment is not None and isinstance(attr, ir.FloatAttr):
        fragment.attributes[SECONDS] = f64(max(0.0, attr.value - seconds))


def _is_even(op: sdy.ShardingConstraintOp, mesh: LogicalMesh) -> bool:
    """Whether a fragment may return what a constraint makes."""
    layout = layout_of(op, Sharding.from_attr(op.attributes["sharding"]), mesh)
    return is_even(ir.RankedTensorType(op.result.type).shape, mesh.sizes, layout)


def _ways(sharding: Sharding, mesh: LogicalMesh) -> int:
    """The number of shards."""
    sizes = dict(zip(mesh.axis_names, mesh.sizes, strict=True))
    return prod(sizes[axis.name] for dim in sharding.dims for axis in dim)


def _constraints_on(value: ir.Value) -> list[sdy.ShardingConstraintOp]:
    users = [use.owner for use in value.uses]
    return [user for user in users if isinstance(user, sdy.ShardingConstraintOp)]


def _wanted_later(result: ir.Value) -> list[sdy.ShardingConstraintOp]:
    """The constraints on a result in other fragments, if they are equal and its only uses."""
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
