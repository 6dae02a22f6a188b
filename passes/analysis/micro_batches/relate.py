"""Finds for each value of a program how its micro-batches make up the whole batch.

One walk in program order: each op's relation follows from those of its operands by the rule of its
kind. Loops are walked until the relations of their carried values no longer change. A rule that
cannot derive a relation returns `mixed`, so unproven programs are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import chain

from alpa.dialects import body, file_position, ir, sdy, terminator
from alpa.dialects.attributes import (
    BATCH_DIM,
    GRADIENT,
    LAYER_BOUNDARY,
    RANDOM,
    SHARED,
    WHOLE,
    call_target,
)
from alpa.dialects.records import entries
from alpa.passes.analysis.graph import Graph, combiner, shape, used_values
from alpa.passes.analysis.micro_batches import (
    contractions,
    elementwise,
    indexing,
    manual,
    matrices,
    shapes,
)
from alpa.passes.analysis.micro_batches.context import Context, is_complex
from alpa.passes.analysis.micro_batches.relation import (
    POSITIONS,
    SAME,
    STEP,
    Reason,
    Relation,
    common_scale,
    mixed,
    mixed_among,
    once,
    rows_among,
    scale_of_sums,
    unknown,
)
from alpa.passes.analysis.op_kinds import COLLECTIVES, CONTROL_FLOW, ELEMENTWISE, SHARDING_CALLS

_Rule = Callable[[Context, ir.OpView, Sequence[Relation]], "Relation | list[Relation]"]
"""What an op's results are: each of them, or all of them alike."""

_READ_MIXED = CONTROL_FLOW | {
    "sdy.manual_computation",
    "stablehlo.compare",
    "stablehlo.custom_call",
    "stablehlo.gather",
    "stablehlo.optimization_barrier",
    "stablehlo.scatter",
    "stablehlo.select",
}
"""Ops of which a result may be known though an operand mixes samples."""
_REFUSE_POSITIONS = {
    "stablehlo.batch_norm_inference",
    "stablehlo.concatenate",
    "stablehlo.convolution",
    "stablehlo.dot",
    "stablehlo.dot_general",
    "stablehlo.pad",
    "stablehlo.reduce",
    "stablehlo.reduce_window",
}
"""Ops that compute with numbers of samples where they read them."""
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
    "stablehlo.constant": "value",
    "stablehlo.reduce": "dimensions",
    "stablehlo.reshape": None,
    "stablehlo.transpose": "permutation",
}
"""Ops whose relation follows from types, the relations of operands, and this attribute: the layers
of a model are alike, and each kind of op is looked at once."""
_LONGEST = 50
"""Rounds that a loop's relations may take: each changes one of them, of a few kinds."""


def relate(
    graph: Graph,
    roles: Sequence[tuple[str | None, int | None]],
    *,
    num_micro_batches: int,
    whole_is_known: bool,
    sum_power: int,
) -> Context:
    """The relations of all values of a block without calls.

    Args:
        graph: of the body of `@main`.
        roles: the role of each of its arguments, with the dimension of a batch that holds samples.
        num_micro_batches: how many there are, at least 2.
        whole_is_known: whether ops say how they differ in W (`whole.align`).
        sum_power: the power of sums over samples where W is not known.
    """
    arguments = [
        Relation(kind="rows", dim=dim or 0) if role == "batch" else SAME for role, dim in roles
    ]
    values = graph.values
    samples = [shape(values[a])[it.dim] for a, it in enumerate(arguments) if it.kind == "rows"]
    context = Context(
        num_micro_batches=num_micro_batches,
        whole_is_known=whole_is_known,
        sum_power=sum_power,
        samples=math.gcd(*samples) or 1,
    )
    context.relations.update(zip(values[: graph.num_arguments], arguments, strict=True))
    of_value = context.relations
    for op, name, read, made in zip(graph.ops, graph.names, graph.read, graph.results, strict=True):
        types = [graph.types[v] for v in (*made, *read)]
        related = [of_value[values[v]] for v in read]
        _relate_op(context, op, name, related, [values[v] for v in made], types)
    return context


def _walk(context: Context, block: ir.Block) -> list[Relation]:
    """Relates the ops of a block; what its terminator returns."""
    *ops, end = block.operations
    for op in ops:
        operands, results = list(op.operands), list(op.results)
        types = [value.type for value in (*results, *operands)]
        related = [context.relations[value] for value in operands]
        _relate_op(context, op, op.operation.name, related, results, types)
    return [context.at(value) for value in end.operands]


def _relate_op(
    context: Context,
    op: ir.OpView,
    name: str,
    operands: Sequence[Relation],
    results: Sequence[ir.Value],
    types: Sequence[ir.Type],
) -> None:
    """Adds the relations of an op's results to those of its operands; `types` are those of the
    results and of the operands."""
    found: Sequence[Relation] = _known_or_related(context, op, name, operands, types)
    if context.shards is not None:
        found = context.shards.checked(context.relations, op, found)
    for result, relation in zip(results, found, strict=True):
        if (
            relation.kind in ("sum", "step", "size")
            and relation.root is None
            and len(relation.free) == len(context.shape(result))
        ):
            relation = replace(relation, root=result)
        if relation.dealt is not None and not _passes_on(op):
            relation = replace(relation, dealt=None)
        if relation.is_mixed:
            relation = Relation(kind="mixed", reason=relation.reason, dealt=relation.dealt)
        context.relations[result] = relation


def _passes_on(op: ir.OpView) -> bool:
    """Whether an op's results may be rows for other `shard_map`s, though they are mixed."""
    name = op.operation.name
    markers = (GRADIENT, LAYER_BOUNDARY)
    return name in ("sdy.manual_computation", "stablehlo.optimization_barrier") or (
        name == "stablehlo.custom_call" and call_target(op) in markers
    )


def _known_or_related(
    context: Context,
    op: ir.OpView,
    name: str,
    operands: Sequence[Relation],
    types: Sequence[ir.Type],
) -> list[Relation]:
    """The relations of an op's results, from one that is like it if there was one."""
    # A root is a value of this op's own.
    is_alike = name in _READS and all(it.root is None for it in operands)
    combined = combiner(op) if is_alike and name == "stablehlo.reduce" else ""
    if not is_alike or combined is None or (name == "stablehlo.constant" and is_complex(types[0])):
        return _related(context, op, name, operands)
    read = _READS[name]
    alike = (
        name,
        op.attributes[read] if read else None,
        op.attributes.get(WHOLE) if context.whole_is_known else None,
        combined,
        *types,
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
    found = _by_rule(context, op, name, operands)
    found = [found] * len(op.results) if isinstance(found, Relation) else found
    found = context.agreed(op, found)
    return [_placed(op, it) for it in found] if len(op.regions) else found


def _by_rule(
    context: Context, op: ir.OpView, name: str, operands: Sequence[Relation]
) -> Relation | list[Relation]:
    differs = context.whole(op).keys() - {"types"} - _EXPLAINED.get(name, set())
    if differs:
        return mixed(op, f"has another {sorted(differs)[0]} for the whole batch")
    if name not in _READ_MIXED and (worst := mixed_among(operands)) is not None:
        return worst
    if name in _REFUSE_POSITIONS and any(it.kind == "position" for it in operands):
        return mixed(op, POSITIONS)
    rule = _RULES.get(name)
    return unknown(op, operands) if rule is None else rule(context, op, operands)


def _placed(op: ir.OpView, relation: Relation) -> Relation:
    """A relation whose reason is at a place in the user's code: that of the loop or branch around
    an op that has none."""
    reason = relation.reason
    if reason is None or file_position(reason.location) is not None:
        return relation
    return replace(relation, reason=replace(reason, location=op.location))


def _custom_call(
    context: Context, op: ir.OpView, operands: Sequence[Relation]
) -> Relation | list[Relation]:
    target = call_target(op) or ""
    if target == RANDOM:
        dim = shapes.integer(op, BATCH_DIM)
        if dim < 0:
            text = (
                "draws numbers that all samples share, in a loop or a branch and from a key that "
                "draws numbers for the samples, too (draw them in front of the loop or branch, or "
                "from a key that is another argument of the step)"
                if dim == SHARED
                else "draws numbers for the samples from a key that is no argument of the step "
                "(give it the key), or along several dimensions that grow with the batch"
            )
            return Relation(kind="mixed", reason=Reason(op.location, "jax.random", text))
        return Relation(kind="rows", dim=dim)
    if target in (GRADIENT, LAYER_BOUNDARY, *SHARDING_CALLS):
        return list(operands)
    if (worst := mixed_among(operands)) is not None:
        return worst
    if matrices.TRIANGULAR_SOLVE.fullmatch(target):
        config = op.attributes.get("mhlo.backend_config")
        side = entries(config).get("side") if isinstance(config, ir.DictAttr) else None
        # Older calls have other operands, and no such entry.
        if isinstance(side, ir.IntegerAttr) and len(operands) == 2:
            on_left = side.value == ord("L")
            return matrices.triangular_solve(context, op, operands, on_left=on_left)
    if target == "ApproxTopK":
        return indexing.approx_top_k(context, op, operands)
    if target.startswith(matrices.CALLS):
        return matrices.of_matrices(context, op, operands)
    return unknown(op, operands)


def _while(
    context: Context, op: ir.OpView, operands: Sequence[Relation]
) -> Relation | list[Relation]:
    """What a loop carries, until it stays; its trips have to be the same for all."""
    condition, block = body(op, 0), body(op, 1)
    arguments, ends = list(block.arguments), list(terminator(block).operands)
    carried = _each_one_of(context, op, [op.operands], arguments, operands)
    carried = [replace(it, root=None) for it in carried]
    read = _captured(context, op)
    for _ in range(_LONGEST):
        context.relations.update(zip(arguments, carried, strict=True))
        differ = list(map(context.differs, arguments))
        returned = _walk(context, block)
        joined = [_join(op, a, b) for a, b in zip(carried, returned, strict=True)]
        joined = _each_one_of(context, op, [arguments, ends], arguments, joined)
        if joined == carried and differ == list(map(context.differs, arguments)):
            break
        carried = joined
    else:
        carried = [mixed(op, "carries what changes from trip to trip")] * len(carried)
    carried = _each_one_of(context, op, [arguments], list(condition.arguments), carried)
    context.relations.update(zip(condition.arguments, carried, strict=True))
    (going_on,) = _walk(context, condition)
    if context.differs(terminator(condition).operands[0]):
        return mixed(op, "runs as often as each shard says")
    if going_on.is_fixed:
        found = _whole_op(context, op, carried, [*operands, *read])
        return _each_one_of(context, op, [arguments], op.results, found)
    if all(it.of_step for it in (*carried, *read)):
        return STEP
    text = "runs as often as the samples say, or as there are"
    return going_on if going_on.is_mixed else mixed(op, text)


def _branches(context: Context, op: ir.OpView, predicate: Relation) -> Relation | list[Relation]:
    read = [predicate, *_captured(context, op)]
    blocks = [region.blocks[0] for region in op.regions]
    found, *others = [_walk(context, block) for block in blocks]
    for returned in others:
        found = [_join(op, a, b) for a, b in zip(found, returned, strict=True)]
    ends = [terminator(block).operands for block in blocks]
    found = _each_one_of(context, op, ends, op.results, found)
    if predicate.is_mixed:
        return predicate
    if context.differs(op.operands[0]):
        return mixed(op, "takes the branch that each shard chooses")
    of_step = all(it.of_step for it in read)
    if not predicate.is_fixed:
        text = "takes the branch that all samples choose together"
        return once(read) if of_step else mixed(op, text)
    of_sums = of_step and any(it.kind == "sum" for it in read)
    if of_sums and any(it.kind == "same" for it in found):
        # A count beside gradients (optax.MultiSteps): all of it runs once per step.
        return [it if it.is_mixed else STEP for it in found]
    return _whole_op(context, op, found, read)


def _each_one_of(
    context: Context,
    op: ir.OpView,
    sources: Sequence[Sequence[ir.Value]],
    values: Sequence[ir.Value],
    relations: Sequence[Relation],
) -> list[Relation]:
    """`Context.one_of` of values, each from the sources at its place."""
    places = zip(zip(*sources, strict=True), values, relations, strict=True)
    return [context.one_of(op, *place) for place in places]


def _is_inside(value: ir.Value, op: ir.OpView) -> bool:
    """Whether a value is made in a region of an op."""
    maker = value.owner
    outer = maker.owner if isinstance(maker, ir.Block) else maker.operation.parent
    while outer is not None and outer.operation != op.operation:
        outer = outer.operation.parent
    return outer is not None


def _in_parts(context: Context, op: ir.OpView, results: Sequence[Relation]) -> bool:
    """Whether a part of an op with regions would run in the step, and the rest in micro-batches."""
    return any(it.kind in ("step", "size") for it in results) or any(
        _is_inside(value, op) for value, _ in context.substituted
    )


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
    if not _in_parts(context, op, results):
        return results
    if all(it.of_step for it in read):
        found = once(read)
    else:
        kind = {"stablehlo.while": "loop", "sdy.manual_computation": "shard_map"}
        within = kind.get(op.operation.name, "branch")
        text = f"computes with a function of all samples inside a {within} that computes with "
        text += "samples, too"
        remedy = f"move that out of the {within}"
        found = mixed(_first_of_step(context, op), text, remedy)
    return [it if it.is_mixed else found for it in results]


def _first_of_step(context: Context, op: ir.OpView) -> ir.OpView:
    """The first op inside an op's regions that makes or reads a function of all samples."""

    def makers(values: Iterable[ir.Value]) -> Iterator[ir.OpView]:
        for value in values:
            if not isinstance(value.owner, ir.Block) and _is_inside(value, op):
                yield value.owner.opview

    def of_step(values: Iterable[ir.Value]) -> Iterator[ir.OpView]:
        return makers(it for it in values if context.at(it).kind in ("step", "size"))

    ends = [end for region in op.regions for end in terminator(region.blocks[0]).operands]
    taken_out = [result for result, _ in context.substituted]
    earlier, at = next(chain(makers(taken_out), of_step(ends)), None), op
    while earlier is not None:
        earlier, at = next(of_step(earlier.operands), None), earlier
    return at


def _captured(context: Context, op: ir.OpView) -> list[Relation]:
    """The relations of what an op's regions use from outside."""
    outside = dict.fromkeys(value for value in used_values(op) if not _is_inside(value, op))
    return [context.at(value) for value in outside]


def _join(op: ir.OpView, a: Relation, b: Relation) -> Relation:
    """A relation that two values have, of which one is taken."""
    a, b = replace(a, root=None), replace(b, root=None)
    if a == b:
        return a
    if (worst := mixed_among((a, b))) is not None:
        return worst
    scale, kinds = common_scale((a, b)), {a.kind, b.kind}
    found = replace(a, free=a.free & b.free, splat=a.splat if a.splat == b.splat else None)
    rows = rows_among((a, b))
    if rows is not None and rows.are_in((a, b)) and scale is not None:
        return replace(found, kind="rows", dim=rows.dim, outer=rows.outer).with_scale(scale)
    if kinds == {"position"} and a.dim == b.dim:
        return found
    if kinds == {"same"} and scale is not None:
        return replace(found, dim=a.dim if a.dim == b.dim else -1).with_scale(scale)
    if "sum" in kinds and kinds <= {"sum", "same"}:
        scale = scale_of_sums((a, b))
        if scale is not None:
            return replace(found, kind="sum", dim=-1).with_scale(scale)
    if a.of_step and b.of_step:
        return once((a, b))
    return mixed(op, "takes samples, or what is made of all of them")


def _manual(context: Context, op: ir.OpView, operands: Sequence[Relation]) -> list[Relation]:
    assert isinstance(op, sdy.ManualComputationOp)
    found = manual.manual_computation(context, op, operands, _walk)
    if _in_parts(context, op, found):
        found = [replace(it, dealt=None) for it in found]
    return _whole_op(context, op, found, operands)


_RULES: dict[str, _Rule] = {
    "chlo.top_k": indexing.top_k,
    "sdy.manual_computation": _manual,
    "stablehlo.batch_norm_inference": elementwise.batch_norm_inference,
    "stablehlo.broadcast_in_dim": shapes.broadcast_in_dim,
    "stablehlo.case": lambda context, op, operands: _branches(context, op, operands[0]),
    "stablehlo.cholesky": matrices.of_matrices,
    "stablehlo.concatenate": shapes.concatenate,
    "stablehlo.constant": shapes.constant,
    "stablehlo.convolution": contractions.convolution,
    "stablehlo.custom_call": _custom_call,
    "stablehlo.dot": contractions.product,
    "stablehlo.dot_general": contractions.product,
    "stablehlo.dynamic_slice": indexing.dynamic_slice,
    "stablehlo.dynamic_update_slice": indexing.dynamic_update_slice,
    "stablehlo.fft": lambda context, op, operands: matrices.of_matrices(
        context, op, operands, len(shapes.integers(op, "fft_length")), linear=True
    ),
    "stablehlo.gather": indexing.gather,
    "stablehlo.if": lambda context, op, operands: _branches(context, op, operands[0]),
    "stablehlo.iota": shapes.iota,
    "stablehlo.optimization_barrier": lambda _, op, operands: list(operands),
    "stablehlo.pad": shapes.pad,
    "stablehlo.reduce": contractions.reduce,
    "stablehlo.reduce_window": contractions.windowed,
    "stablehlo.reshape": shapes.reshape,
    "stablehlo.reverse": shapes.reverse,
    "stablehlo.scatter": indexing.scatter,
    "stablehlo.select_and_scatter": contractions.select_and_scatter,
    "stablehlo.slice": shapes.slice_,
    "stablehlo.sort": indexing.sort,
    "stablehlo.transpose": shapes.transpose,
    "stablehlo.triangular_solve": lambda context, op, operands: matrices.triangular_solve(
        context, op, operands, on_left=ir.BoolAttr(op.attributes["left_side"]).value
    ),
    "stablehlo.while": _while,
    **dict.fromkeys(ELEMENTWISE | {"sdy.sharding_constraint"}, elementwise.elementwise),
    **dict.fromkeys(COLLECTIVES, manual.collective),
}
