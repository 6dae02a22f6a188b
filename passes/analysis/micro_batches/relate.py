"""Finds for each value of a program how its micro-batches make up the whole batch.

One walk in program order: each op's relation follows from those of its operands by the rule of its
kind. Loops are walked until the relations of what they carry stay. A rule that does not know says
`mixed`: what is claimed is proven, and what is not proven is refused.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from alpa.dialects import body, file_position, ir, terminator
from alpa.dialects.attributes import BATCH_DIM, GRADIENT, LAYER_BOUNDARY, RANDOM, WHOLE
from alpa.dialects.records import entries
from alpa.passes.analysis.graph import used_values
from alpa.passes.analysis.micro_batches import contractions, elementwise, indexing, shapes
from alpa.passes.analysis.micro_batches.context import Context
from alpa.passes.analysis.micro_batches.relation import (
    SAME,
    SIZE,
    STEP,
    Reason,
    Relation,
    mixed,
    rows_among,
    unknown,
)
from alpa.passes.analysis.op_kinds import ELEMENTWISE

_One = Callable[[Context, ir.OpView, Sequence[Relation]], Relation]
_Many = Callable[[Context, ir.OpView, Sequence[Relation]], list[Relation]]

_ONE: dict[str, _One] = {
    "stablehlo.broadcast_in_dim": shapes.broadcast_in_dim,
    "stablehlo.concatenate": shapes.concatenate,
    "stablehlo.constant": shapes.constant,
    "stablehlo.convolution": contractions.convolution,
    "stablehlo.dot": contractions.dot,
    "stablehlo.dot_general": contractions.dot_general,
    "stablehlo.dynamic_slice": indexing.dynamic_slice,
    "stablehlo.dynamic_update_slice": indexing.dynamic_update_slice,
    "stablehlo.gather": indexing.gather,
    "stablehlo.iota": shapes.iota,
    "stablehlo.pad": shapes.pad,
    "stablehlo.reshape": shapes.reshape,
    "stablehlo.reverse": shapes.reverse,
    "stablehlo.select_and_scatter": contractions.select_and_scatter,
    "stablehlo.slice": shapes.slice_,
    "stablehlo.transpose": shapes.transpose,
    **dict.fromkeys(ELEMENTWISE | {"sdy.sharding_constraint"}, elementwise.elementwise),
}
_MANY: dict[str, _Many] = {
    "stablehlo.reduce": contractions.reduce,
    "stablehlo.reduce_window": contractions.windowed,
    "stablehlo.scatter": indexing.scatter,
    "stablehlo.sort": indexing.sort,
    "chlo.top_k": indexing.top_k,
}
_EXPLAINED = {
    "stablehlo.constant": {"value"},
    "stablehlo.slice": {"start_indices", "limit_indices"},
    "stablehlo.gather": {"slice_sizes"},
    "stablehlo.dynamic_slice": {"slice_sizes"},
    "stablehlo.reduce_window": {"window_dimensions", "padding"},
    "stablehlo.custom_call": {"sdy.sharding_rule"},
}
"""Attributes that may be others in W; what they are there follows from the shapes, or is checked by
the rule."""
_READS: dict[str, str | None] = {
    **dict.fromkeys(ELEMENTWISE - {"stablehlo.compare"}, None),
    "stablehlo.broadcast_in_dim": "broadcast_dimensions",
    "stablehlo.dot_general": "dot_dimension_numbers",
    "stablehlo.reshape": None,
    "stablehlo.transpose": "permutation",
}
"""Ops whose relation follows from types, the relations of operands, and this attribute: the layers
of a model are alike, and each kind of op is looked at once."""
_MATRICES = ("lapack_", "cusolver_", "hipsolver_", "Qr", "Eigh", "LuDecomposition")
"""Custom calls of linear algebra: dimensions in front of the last two are computed apart."""
_TRIANGULAR_SOLVE = re.compile(r"lapack_[sdcz]trsm(_ffi)?")
_LONGEST = 50
"""Rounds that a loop's relations may take: each changes one of them, of a few kinds."""


def relate(
    block: ir.Block,
    arguments: Sequence[Relation],
    *,
    num_micro_batches: int,
    whole_is_known: bool,
    sum_power: int,
) -> Context:
    """The relations of all values of a block without calls.

    Args:
        block: the body of `@main`.
        arguments: the relations of its arguments.
        num_micro_batches: how many there are, at least 2.
        whole_is_known: whether ops say how they differ in W (`whole.align`).
        sum_power: the power of sums over samples where W is not known.
    """
    samples = [
        ir.RankedTensorType(value.type).shape[it.dim]
        for value, it in zip(block.arguments, arguments, strict=True)
        if it.kind == "rows"
    ]
    context = Context(
        num_micro_batches=num_micro_batches,
        whole_is_known=whole_is_known,
        sum_power=sum_power,
        samples=math.gcd(*samples) or 1,
    )
    context.relations.update(zip(block.arguments, arguments, strict=True))
    _walk(context, block)
    return context


def _walk(context: Context, block: ir.Block) -> list[Relation]:
    """Relates the ops of a block; what its terminator returns."""
    operations = list(block.operations)
    for op in operations[:-1]:
        for result, relation in zip(op.results, _known_or_related(context, op), strict=True):
            if (
                relation.kind in ("sum", "step", "size")
                and relation.root is None
                and len(relation.free) == len(context.shape(result))
            ):
                relation = replace(relation, root=result)
            if relation.is_mixed:
                relation = Relation(kind="mixed", reason=relation.reason)
            context.relations[result] = relation
    return [context.at(value) for value in operations[-1].operands]


def _known_or_related(context: Context, op: ir.OpView) -> list[Relation]:
    """The relations of an op's results, from one that is like it if there was one."""
    name = op.operation.name
    values = list(op.operands)
    operands = [context.relations[value] for value in values]
    # A root is a value of this op's own.
    if name not in _READS or any(it.root is not None for it in operands):
        return _related(context, op, name, operands)
    attributes = op.attributes
    read = _READS[name]
    alike = (
        name,
        op.results[0].type,
        attributes[read] if read else None,
        attributes.get(WHOLE) if context.whole_is_known else None,
        *(value.type for value in values),
        *operands,
    )
    found = context.alike.get(alike)
    if found is None:
        found = _related(context, op, name, operands)
        if not found[0].is_mixed:  # A reason has the place of its op.
            context.alike[alike] = found
    return found


def _related(
    context: Context, op: ir.OpView, name: str, operands: Sequence[Relation]
) -> list[Relation]:
    differs = context.whole(op).keys() - {"types"} - _EXPLAINED.get(name, set())
    if differs:
        found = [mixed(op, f"has another {sorted(differs)[0]} for the whole batch")]
        return found * len(op.results)
    if (one := _ONE.get(name)) is not None:
        found = [one(context, op, operands)]
    elif (many := _MANY.get(name)) is not None:
        found = many(context, op, operands)
    elif name == "stablehlo.optimization_barrier":
        found = list(operands)
    elif name == "stablehlo.custom_call":
        found = _custom_call(context, op, operands)
    elif name == "stablehlo.while":
        found = _while(context, op, operands)
    elif name in ("stablehlo.case", "stablehlo.if"):
        found = _branches(context, op, operands[0])
    elif name == "stablehlo.fft":
        rank, length = len(context.shape(op.operands[0])), len(shapes.integers(op, "fft_length"))
        found = _matrices(context, op, operands, rank - length, linear=True)
    elif name == "stablehlo.cholesky":
        rank = len(context.shape(op.operands[0]))
        found = _matrices(context, op, operands, rank - 2, linear=False)
    elif name == "stablehlo.triangular_solve":
        left = ir.BoolAttr(op.attributes["left_side"]).value
        found = _triangular_solve(context, op, operands, on_left=left)
    else:
        found = [unknown(op, operands)] * len(op.results)
    found = context.agreed(op, found)
    return [_placed(op, it) for it in found] if len(op.regions) else found


def _placed(op: ir.OpView, relation: Relation) -> Relation:
    """A relation whose reason is at a place in the user's code: that of the loop or branch around
    an op that has none."""
    reason = relation.reason
    if reason is None or file_position(reason.location) is not None:
        return relation
    return replace(relation, reason=replace(reason, location=op.location))


def _custom_call(context: Context, op: ir.OpView, operands: Sequence[Relation]) -> list[Relation]:
    target = ir.StringAttr(op.attributes["call_target_name"]).value
    if target == RANDOM:
        dim = shapes.get_dimension(op, BATCH_DIM)
        if dim < 0:
            text = (
                "draws numbers for the samples from a key that is no argument of the step (give it "
                "the key), or along several dimensions that grow with the batch"
            )
            reason = Reason(op.location, "jax.random", text)
            return [Relation(kind="mixed", reason=reason)]
        return [Relation(kind="rows", dim=dim, random=True)]
    if target in (GRADIENT, LAYER_BOUNDARY, "Sharding"):
        return list(operands)
    if _TRIANGULAR_SOLVE.fullmatch(target):
        config = entries(ir.DictAttr(op.attributes["mhlo.backend_config"]))
        on_left = ir.IntegerAttr(config["side"]).value == ord("L")
        return _triangular_solve(context, op, operands, on_left=on_left)
    if any(target.startswith(prefix) for prefix in _MATRICES):
        shaped = [len(context.shape(v)) for v in op.operands if context.shape(v)]
        return _matrices(context, op, operands, max([0, *shaped]) - 2, linear=False)
    return [unknown(op, operands)] * len(op.results)


def _matrices(
    context: Context, op: ir.OpView, operands: Sequence[Relation], leading: int, *, linear: bool
) -> list[Relation]:
    """Of an op whose leading dimensions are computed apart."""
    rows = next((it for it in operands if it.kind == "rows"), None)
    if rows is None or any(it.is_mixed for it in operands):
        return [unknown(op, operands)] * len(op.results)
    fits = rows.dim < leading and all(
        it.rows_at(rows.dim, rows.outer) or not context.shape(value)
        for it, value in zip(operands, op.operands, strict=True)
    )
    if not fits:
        return [mixed(op, "computes several samples together")] * len(op.results)
    if not (linear or all(it.is_plain for it in operands)):
        return [mixed(op, "is not linear in a number that depends on the size of the batch")] * len(
            op.results
        )
    is_random = any(it.random for it in operands)
    return [replace(rows, free=frozenset(), splat=None, random=is_random)] * len(op.results)


def _triangular_solve(
    context: Context, op: ir.OpView, operands: Sequence[Relation], *, on_left: bool
) -> list[Relation]:
    """Linear in the right-hand sides, which are computed apart where the matrix is one for all."""
    matrix, sides = operands
    rank = len(context.shape(op.operands[1]))
    apart = rank - 1 if on_left else rank - 2
    if matrix.kind == "same" and matrix.is_plain and (sides.kind, sides.dim) == ("rows", apart):
        random = matrix.random or sides.random
        return [replace(sides, free=frozenset(), splat=None, random=random)]
    found = _matrices(context, op, operands, rank - 2, linear=matrix.is_plain)
    if found[0].kind == "rows":
        found = [found[0].with_scale(sides.scaled)]
    return found


def _while(context: Context, op: ir.OpView, operands: Sequence[Relation]) -> list[Relation]:
    """What a loop carries, until it stays; its trips have to be the same for all."""
    condition, block = body(op, 0), body(op, 1)
    carried = [replace(it, root=None) for it in operands]
    read = _captured(context, op)
    for _ in range(_LONGEST):
        context.relations.update(zip(block.arguments, carried, strict=True))
        returned = _walk(context, block)
        joined = [_join(context, op, a, b) for a, b in zip(carried, returned, strict=True)]
        if joined == carried:
            break
        carried = joined
    else:
        carried = [mixed(op, "carries what changes from trip to trip")] * len(carried)
    context.relations.update(zip(condition.arguments, carried, strict=True))
    (going_on,) = _walk(context, condition)
    if going_on.kind != "same" or not going_on.is_plain:
        if all(it.of_step for it in (*carried, *read)):
            return [replace(STEP, random=any(it.random for it in carried))] * len(carried)
        worst = going_on if going_on.is_mixed else mixed(op, _TRIPS)
        return [worst] * len(carried)
    return _whole_op(context, op, carried, [*operands, *read])


_TRIPS = "runs as often as the samples say, or as there are"


def _branches(context: Context, op: ir.OpView, predicate: Relation) -> list[Relation]:
    read = _captured(context, op)
    number = len(op.results)
    found: list[Relation] | None = None
    for region in op.regions:
        returned = _walk(context, region.blocks[0])
        found = (
            returned
            if found is None
            else [_join(context, op, a, b) for a, b in zip(found, returned, strict=True)]
        )
    assert found is not None
    if predicate.is_mixed:
        return [predicate] * number
    if predicate.kind != "same" or not predicate.is_plain:
        if all(it.of_step for it in read):
            kinds = {predicate.kind, *(it.kind for it in read)}
            random = predicate.random or any(it.random for it in read)
            return [replace(SIZE if kinds <= {"same", "size"} else STEP, random=random)] * number
        return [mixed(op, "takes the branch that all samples choose together")] * number
    read = [predicate, *read]
    of_sums = all(it.of_step for it in read) and any(it.kind == "sum" for it in read)
    if of_sums and any(it.kind == "same" for it in found):
        # A count beside gradients (optax.MultiSteps): all of it runs once per step.
        step = replace(STEP, random=any(it.random for it in found))
        return [it if it.is_mixed else step for it in found]
    return _whole_op(context, op, found, read)


def _is_inside(value: ir.Value, op: ir.OpView) -> bool:
    """Whether a value is computed in a region of an op."""
    maker = value.owner
    outer = None if isinstance(maker, ir.Block) else maker.operation.parent
    while outer is not None and outer != op.operation:
        outer = outer.parent
    return outer is not None


def _whole_op(
    context: Context, op: ir.OpView, results: Sequence[Relation], read: Sequence[Relation]
) -> list[Relation]:
    """An op with regions runs in a micro-batch, or once in the step, and not in parts.

    What was taken out in front of it may pass through it, but not be taken out of its inside.
    """
    results = [
        replace(it, root=None, splat=None, free=frozenset() if it.kind != "rows" else it.free)
        for it in results
    ]
    parts = any(it.kind in ("step", "size") for it in results)
    if not parts and not any(_is_inside(value, op) for value, _ in context.substituted):
        return results
    if all(it.of_step for it in read):
        kinds = {it.kind for it in read}
        random = any(it.random for it in results)
        found = replace(SIZE if kinds <= {"same", "size"} else STEP, random=random)
        return [it if it.is_mixed else found for it in results]
    text = "computes with samples, and with a function of all of them, inside"
    return [it if it.is_mixed else mixed(op, text) for it in results]


def _captured(context: Context, op: ir.OpView) -> list[Relation]:
    """The relations of what an op's regions use from outside."""
    inside = set(_inside(op))
    used = dict.fromkeys(value for value in used_values(op) if value not in inside)
    return [context.at(value) for value in used]


def _inside(op: ir.OpView) -> Iterator[ir.Value]:
    """The values that an op's regions make, and their arguments."""
    for region in op.regions:
        for block in region.blocks:
            yield from block.arguments
            for inner in block.operations:
                yield from inner.results
                yield from _inside(inner)


def _join(context: Context, op: ir.OpView, a: Relation, b: Relation) -> Relation:
    """A relation that two values have, of which one is taken."""
    a, b = replace(a, root=None), replace(b, root=None)
    if a == b:
        return a
    if a.is_mixed or b.is_mixed:
        return a if a.is_mixed else b
    found = replace(a, free=a.free & b.free, splat=a.splat if a.splat == b.splat else None)
    found = replace(found, random=a.random or b.random)
    rows = rows_among((a, b))
    if rows is not None and all(it.rows_at(rows.dim, rows.outer) for it in (a, b)):
        scales = {it.scaled for it in (a, b) if not it.is_zero}
        if len(scales) <= 1:
            scale = scales.pop() if scales else (0, ())
            return replace(found, kind="rows", dim=rows.dim, outer=rows.outer).with_scale(scale)
    if a.kind == b.kind == "position" and a.dim == b.dim:
        return found
    if a.kind == b.kind == "same" and (a.scaled == b.scaled or a.is_zero or b.is_zero):
        scaled = b if a.is_zero else a
        return replace(found, dim=a.dim if a.dim == b.dim else -1).with_scale(scaled.scaled)
    if "sum" in (a.kind, b.kind) and {a.kind, b.kind} <= {"sum", "same"}:
        scales = {
            it.scaled if it.kind == "sum" else (it.power - 1, it.factors)
            for it in (a, b)
            if not it.is_zero
        }
        if len(scales) == 1:
            return replace(found, kind="sum", dim=-1).with_scale(scales.pop())
    if a.of_step and b.of_step:
        kind = SIZE if {a.kind, b.kind} <= {"same", "size"} else STEP
        return replace(kind, random=found.random)
    return mixed(op, "takes samples, or what is made of all of them")


def argument_relations(
    roles: Sequence[tuple[str | None, int | None]],
) -> list[Relation]:
    """The relations of arguments, by their roles and batch dimensions."""
    return [Relation(kind="rows", dim=dim or 0) if role == "batch" else SAME for role, dim in roles]


def returned(block: ir.Block) -> list[ir.Value]:
    """What a block returns."""
    return list(terminator(block).operands)
