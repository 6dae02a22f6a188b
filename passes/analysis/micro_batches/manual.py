"""Manual computations (`shard_map`), whose bodies are written for shards.

A body's values have a relation on each device: that of its shard of every micro-batch to the shard
of a whole batch W' whose device k has the samples that device k has in the micro-batches, one
micro-batch behind the other. W' has the samples of W in another order. So a relation holds for W,
too, if a value depends on no device's samples in particular:

* Rows go out as they came in: their dimension is split over the axes that split the samples. What
  goes out in another way is `Dealt`: only another manual computation reads it, as the backward part
  reads what `jax.grad` keeps.
* A sum over a shard's samples is partial until it is added up over the axes of the samples.
* A value that differs between the devices of these axes (a shard of a parameter, a device's number)
  is not combined with samples. A collective may make it equal on all of them.

A loop or a branch takes one of several values, the same one on all devices: what it carries differs
between the devices if one of these values does. Trips and branches that differ are refused.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from alpa.dialects import body, ir, sdy, terminator
from alpa.dialects.sharding import Mesh, Sharding
from alpa.dialects.symbols import mesh_of
from alpa.passes.analysis.graph import combiner
from alpa.passes.analysis.micro_batches.context import Context
from alpa.passes.analysis.micro_batches.relation import (
    POSITIONS,
    Dealt,
    Relation,
    mixed,
    uneven,
    unknown,
    without_samples,
)
from alpa.passes.analysis.micro_batches.shapes import integer
from alpa.passes.analysis.micro_batches.shards import PARTIAL, Shards
from alpa.passes.base import PassError

_MOVED: dict[str, tuple[str, ...]] = {
    "stablehlo.all_gather": ("all_gather_dim",),
    "stablehlo.all_to_all": ("split_dimension", "concat_dimension"),
    "stablehlo.reduce_scatter": ("scatter_dimension",),
}
"""The attributes of collectives that name dimensions whose sizes they change."""
_ADDING = frozenset({"stablehlo.all_reduce", "stablehlo.reduce_scatter"})
_EQUAL_AFTER = frozenset({"stablehlo.all_gather", "stablehlo.all_reduce"})
"""Collectives after which all devices of a group have the same."""
_TOGETHER = "computes samples of several shards together"


def collective(context: Context, op: ir.OpView, operands: Sequence[Relation]) -> list[Relation]:
    """The relations of a collective's results."""
    if context.shards is None:
        return [unknown(op, operands)] * len(op.results)
    try:
        over = context.shards.axes_of(op)
    except PassError as error:
        return [mixed(op, error.message)] * len(op.results)
    dims = frozenset(integer(op, name) for name in _MOVED.get(op.operation.name, ()))
    pairs = zip(op.operands, op.results, operands, strict=True)
    return [_sent(context.shards, op, over, dims, *pair) for pair in pairs]


def _sent(
    shards: Shards,
    op: ir.OpView,
    over: frozenset[str],
    dims: frozenset[int],
    value: ir.Value,
    result: ir.Value,
    it: Relation,
) -> Relation:
    """The relation of what a collective makes of one operand."""
    name, samples, differs = op.operation.name, {*shards.samples}, value in shards.differing
    crosses, covers = bool(over & samples), samples <= over
    is_linear = name not in _ADDING or combiner(op) == "stablehlo.add"
    splat = it.splat if it.is_zero and is_linear else None
    if it.kind == "position":
        return mixed(op, POSITIONS)
    if it.kind == "rows":
        if crosses or it.dim in dims:
            return mixed(op, _TOGETHER)
        if not (is_linear or it.is_plain):
            return uneven(op, [it])
        return replace(it, root=None, splat=splat, free=it.free - dims)
    if it.kind == "sum" and differs:
        adds = is_linear and name in _ADDING
        if not is_linear or (crosses and not adds):
            return mixed(op, PARTIAL)
        if not (adds and covers):
            shards.differing.add(result)
    elif it.kind == "same" and (
        (differs and not (covers and name in _EQUAL_AFTER))
        or (crosses and name not in _EQUAL_AFTER)
    ):
        shards.differing.add(result)
    if not is_linear:
        return without_samples([it])
    return replace(it, root=None, splat=splat, dim=-1, free=it.free - dims)


def manual_computation(
    context: Context,
    op: sdy.ManualComputationOp,
    operands: Sequence[Relation],
    walk: Callable[[Context, ir.Block], list[Relation]],
) -> list[Relation]:
    """The relations of a manual computation's results; `walk` relates its body."""
    count, mesh = len(op.results), mesh_of(op)
    if mesh is None or not any(it.of_samples or (it.is_mixed and it.dealt) for it in operands):
        return [_alone(unknown(op, operands))] * count
    inputs, outputs = (_axes(op, name, mesh) for name in ("in_shardings", "out_shardings"))
    local: list[Relation] = []
    found: set[tuple[str, ...]] = set()
    for it, axes in zip(operands, inputs, strict=True):
        if it.dealt is not None and it.dealt.axes == axes:
            local.append(it.dealt.local)
            found.add(it.dealt.samples)
        elif it.is_mixed:
            return [_alone(it)] * count
        elif it.kind == "position":
            return [mixed(op, POSITIONS)] * count
        elif it.kind == "rows" and it.outer != 1:
            return [mixed(op, "splits samples that are in several blocks")] * count
        else:
            dim = it.dim if it.kind == "rows" else -1
            local.append(replace(it, root=None, splat=None, dim=dim))
            if it.kind == "rows":
                found.add(axes[dim])
    if len(found) > 1:
        return [mixed(op, "reads samples that are split over different axes")] * count
    (samples,) = found
    shards = Shards(mesh=mesh, samples=samples)
    block = body(op)
    for argument, given, it, axes in zip(block.arguments, operands, local, inputs, strict=True):
        is_cut = {*samples} & {name for on in axes for name in on}
        differs = it.kind == "sum" if given.dealt else it.kind == "same" and bool(is_cut)
        if differs:
            shards.differing.add(argument)
    context.relations.update(zip(block.arguments, local, strict=True))
    ways = prod(dict(mesh.axes)[name] for name in samples)
    inner = replace(context, shards=shards, samples=max(1, context.samples // ways))
    returned = zip(terminator(block).operands, walk(inner, block), outputs, strict=True)
    return [_result(op, shards, *each) for each in returned]


def _result(
    op: ir.OpView, shards: Shards, value: ir.Value, it: Relation, axes: tuple[tuple[str, ...], ...]
) -> Relation:
    """The relation of a whole result, from that of its shards."""
    if it.is_mixed:
        return _alone(it)
    if it.kind == "position":
        return mixed(op, POSITIONS)
    split = {dim for dim, on in enumerate(axes) if on}
    is_rows, is_partial = it.kind == "rows", it.kind == "sum" and value in shards.differing
    if is_partial or (is_rows and (it.outer != 1 or axes[it.dim] != shards.samples)):
        text = (
            "returns sums of each shard's samples"
            if is_partial
            else "does not put the samples together as it splits them"
        )
        made = mixed(op, text)
        if not {*shards.samples} <= {name for on in axes for name in on}:
            return made
        local = replace(it, root=None, splat=None)
        return replace(made, dealt=Dealt(local=local, samples=shards.samples, axes=axes))
    dealt = None
    if it.kind == "same" and value not in shards.differing and split:
        # Other shards may be copies, which another manual computation reads as what they are.
        dealt = Dealt(local=replace(it, root=None), samples=shards.samples, axes=axes)
    dim = it.dim if is_rows else -1
    return replace(it, root=None, splat=None, dim=dim, free=it.free - split, dealt=dealt)


def _alone(relation: Relation) -> Relation:
    """A relation that is mixed for everyone."""
    return replace(relation, dealt=None)


def _axes(op: ir.OpView, name: str, mesh: Mesh) -> list[tuple[tuple[str, ...], ...]]:
    """The manual axes of two devices or more of each dimension, of operands or results."""
    names = sdy.ManualAxesAttr(op.attributes["manual_axes"])
    manual, sizes = {names[i] for i in range(len(names))}, dict(mesh.axes)
    shardings = sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings
    return [
        tuple(
            tuple(axis.name for axis in dim if axis.name in manual and sizes[axis.name] > 1)
            for dim in Sharding.from_attr(sharding).dims
        )
        for sharding in shardings
    ]
