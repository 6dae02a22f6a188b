"""Rematerialisation: a layer's backward part computes again what it reads of its forward part.

Before:
    %h, %r = mpmd.named_computation<"layer_0"(0)> (%w, %x) ...      // only the backward reads %r
    %g = mpmd.named_computation<"layer_0"(1)> (%w, %r, %d) ...

After:
    %h = mpmd.named_computation<"layer_0"(0)> (%w, %x) ...
    %g = mpmd.named_computation<"layer_0"(1)> (%w, %x, %d) {alpa.remat} ...      // makes %r itself

So a micro-batch in flight keeps what enters a layer, not what the layer computes on the way. The
backward part gets copies of those forward ops that lead to what it reads. They start from what is
there anyway: the forward part's operands, and its results that others read. A layer of several
blocks also keeps what crosses between these, and computes them again one by one (`segments.py`).
What must not be computed twice stays a result: random numbers drawn without a key, custom calls
with side effects, ops that nobody knows. Forward and backward parts become programs of their own,
so no compiler can merge a copy with its original.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Literal

from alpa.dialects import body, func, ir, main_function, mpmd, stablehlo
from alpa.dialects.attributes import FLOPS, REMAT, Part, read_arguments
from alpa.dialects.mpmd_types import Origin, named_computation, return_
from alpa.dialects.records import i64
from alpa.passes.analysis import op_cost
from alpa.passes.analysis.graph import Graph, has_effects, inner_ops, replace_operands, used_values
from alpa.passes.analysis.op_kinds import CONTROL_FLOW, PURE
from alpa.passes.stages import segments
from alpa.passes.stages.segments import Gate

Remat = Literal["none", "layer", "auto"]

_REPEATABLE = (
    PURE
    | CONTROL_FLOW
    | {
        "sdy.manual_computation",
        "sdy.return",
        "sdy.sharding_constraint",
        "stablehlo.all_gather",
        "stablehlo.all_reduce",
        "stablehlo.all_to_all",
        "stablehlo.collective_permute",
        "stablehlo.dynamic_gather",
        "stablehlo.optimization_barrier",
        "stablehlo.partition_id",
        "stablehlo.reduce_scatter",
        "stablehlo.return",
        "stablehlo.rng_bit_generator",
    }
)


def rematerialise(
    function: func.FuncOp,
    layers: Collection[int] | None = None,
    class_of: Sequence[int] | None = None,
) -> None:
    """Rewrites the given layers, or all, of a clustered program in place.

    A layer stays as it is where its backward part reads nothing that can be computed again, or
    where its forward part exists for its backward part alone. `class_of` has the class of each
    layer, if equal layers may get copies of each other's computations (`layer_classes.py`), with
    their locations and `alpa.*` attributes.
    """
    parts: dict[int, dict[Part, ir.OpView]] = {}
    for op in body(function).operations:
        if isinstance(op, mpmd.NamedComputationOp):
            origin = Origin.of(op)
            layer = origin.layer
            if layer is not None:
                parts.setdefault(layer, {})[origin.part] = op
    arguments = zip(body(function).arguments, read_arguments(function), strict=True)
    states = {value for value, argument in arguments if argument.role != "batch"}
    found: dict[int, _Rewritten | None] = {}
    for layer, mine in parts.items():
        if (layers is None or layer in layers) and {"forward", "backward"} <= mine.keys():
            pair = mine["forward"], mine["backward"]
            if class_of is None:
                _rematerialise(*pair, states, len(parts))
            elif class_of[layer] not in found:
                found[class_of[layer]] = _rematerialise(*pair, states, len(parts))
            elif (like := found[class_of[layer]]) is not None:
                like.copy_to(*pair)


def rematerialised(function: func.FuncOp, class_of: Sequence[int] | None = None) -> ir.Module:
    """A module with a copy of a clustered program in which all layers are.

    `class_of`: the class of each layer, if it is enough that equal layers equal the first of them
    but for locations and `alpa.*` attributes.
    """
    with function.location:
        module = ir.Module.create()
        function.operation.clone(ip=ir.InsertionPoint(module.body))
    rematerialise(main_function(module), class_of=class_of)
    return module


@dataclass(frozen=True)
class _Rewritten:
    """The computations of a layer that is rematerialised, for layers that are equal.

    Numbers are those among the operands of the layer's former forward and backward parts, and then
    the results of the new forward part.
    """

    forward: ir.OpView
    backward: ir.OpView
    forward_reads: list[int]
    backward_reads: list[int]
    kept: dict[int, int]
    """results of the former forward part, and what is read in their place"""

    @classmethod
    def of(
        cls,
        forward: ir.OpView,
        backward: ir.OpView,
        operands: Sequence[ir.Value],
        kept: Mapping[int, ir.Value],
    ) -> _Rewritten:
        """`operands` are those of the former parts."""
        number: dict[ir.Value, int] = {}
        for n, value in enumerate((*operands, *forward.results)):
            number.setdefault(value, n)
        return cls(
            forward,
            backward,
            [number[value] for value in forward.operands],
            [number[value] for value in backward.operands],
            {result: number[value] for result, value in kept.items()},
        )

    def copy_to(self, forward: ir.OpView, backward: ir.OpView) -> None:
        """Replaces the parts of another layer."""
        values: list[ir.Value] = [*forward.operands, *backward.operands]
        smaller = _copied(self.forward, forward, [values[n] for n in self.forward_reads])
        values += smaller.results
        larger = _copied(self.backward, backward, [values[n] for n in self.backward_reads])
        for old, new in zip(backward.results, larger.results, strict=True):
            old.replace_all_uses_with(new)
        backward.erase()
        for result, n in self.kept.items():
            forward.results[result].replace_all_uses_with(values[n])
        forward.erase()


def _copied(computation: ir.OpView, old: ir.OpView, operands: Sequence[ir.Value]) -> ir.OpView:
    """A copy of a computation, before an old one, whose name and place it has."""
    copy = computation.operation.clone(ip=ir.InsertionPoint(old)).opview
    copy.operation.location = old.location
    copy.attributes["origin"] = old.attributes["origin"]
    for number, value in enumerate(operands):
        copy.operands[number] = value
    return copy


def _rematerialise(
    forward: ir.OpView, backward: ir.OpView, states: Set[ir.Value], num_layers: int
) -> _Rewritten | None:
    """Replaces both parts of a layer, unless it stays as it is."""
    former = [*forward.operands, *backward.operands]
    graph = Graph.of(body(forward))
    results = list(zip(graph.returned, forward.results, strict=True))
    wanted = [v for v, result in results if _is_read_by(result, backward)]
    kept = [v for v, result in results if not _is_read_by(result, backward)]
    again, stays = _repeated(graph, wanted, kept)
    cuts = segments.least_memory(graph, again, wanted, num_layers)
    if cuts.kept:
        again, stays = _repeated(graph, wanted, [*kept, *cuts.kept])
    returned = list(dict.fromkeys([*kept, *sorted(cuts.kept), *stays]))
    if not wanted or not returned:
        return None
    outside: dict[ir.Value, ir.Value] = dict(
        zip(body(forward).arguments, forward.operands, strict=True)
    )
    values = [graph.values[v] for v in returned]
    smaller = _computation(forward, _live(graph, returned), values, outside, is_copied=True)
    outside = dict(zip(values, smaller.results, strict=True)) | outside
    inner: dict[ir.Value, ir.Value] = {result: graph.values[v] for v, result in results}
    for argument, operand in zip(body(backward).arguments, backward.operands, strict=True):
        if operand in inner:
            # Both computations go in the end: until then one reads the other's values.
            argument.replace_all_uses_with(inner[operand])
        else:
            outside[argument] = operand
    *own, end = body(backward).operations
    # An op with a kept result and one that is not kept makes both again.
    made = {value for o in again for value in graph.ops[o].results}
    activations = {v for v, outer in outside.items() if outer not in states and v not in made}
    cotangents = [v for v, outer in outside.items() if _is_cotangent(outer)]
    ops = segments.in_order(graph, again, cuts, own, set(end.operands), activations, cotangents)
    # The smaller forward part has copies, so all ops can move.
    larger = _computation(backward, list(ops), list(end.operands), outside, is_copied=False)
    if again:
        larger.attributes[REMAT] = ir.UnitAttr.get()
    for old, new in zip(backward.results, larger.results, strict=True):
        old.replace_all_uses_with(new)
    backward.erase()
    stand_in = {n: outside[graph.values[v]] for n, (v, _) in enumerate(results) if v in kept}
    for n, value in stand_in.items():
        forward.results[n].replace_all_uses_with(value)
    rewritten = _Rewritten.of(smaller, larger, former, stand_in)
    forward.erase()
    return rewritten


def _is_cotangent(value: ir.Value) -> bool:
    """Whether a backward part makes a value."""
    maker = value.owner
    if isinstance(maker, ir.Block) or not isinstance(maker.opview, mpmd.NamedComputationOp):
        return False
    return Origin.of(maker.opview).part == "backward"


def _is_read_by(value: ir.Value, reader: ir.OpView) -> bool:
    """Whether an op reads a value, and no other one does."""
    uses = list(value.uses)
    return bool(uses) and all(use.owner == reader for use in uses)


def _repeated(
    graph: Graph, wanted: Sequence[int], kept: Sequence[int]
) -> tuple[list[int], list[int]]:
    """The ops that make values again, from arguments and kept ones; and which values have to stay.

    Those stay that an op makes which must not run twice.
    """
    known = {*range(graph.num_arguments), *kept}
    again: set[int] = set()
    stays: list[int] = []
    waiting = list(wanted)
    while waiting:
        v = waiting.pop()
        if v in known:
            continue
        known.add(v)
        o = graph.producer[v]
        if not _is_repeatable(graph.ops[o]):
            stays.append(v)
        elif o not in again:
            again.add(o)
            waiting += graph.operands[o]
    return sorted(again), sorted(stays)


def _live(graph: Graph, returned: Sequence[int]) -> list[ir.OpView]:
    """The ops that lead to what is returned, or that have to run anyway."""
    effects = [o for o, op in enumerate(graph.ops) if not _is_repeatable(op)]
    inside = graph.cone([*returned, *(v for o in effects for v in graph.operands[o])])
    return [op for o, op in enumerate(graph.ops) if o in inside or o in effects]


def _is_repeatable(op: ir.OpView) -> bool:
    """Whether an op gives the same numbers each time and does nothing else."""
    return all(
        not has_effects(one)
        if isinstance(one, stablehlo.CustomCallOp)
        else one.operation.name in _REPEATABLE
        for one in (op, *inner_ops(op))
    )


def _computation(
    old: ir.OpView,
    steps: Sequence[ir.OpView | Gate],
    returned: Sequence[ir.Value],
    outside: Mapping[ir.Value, ir.Value],
    *,
    is_copied: bool,
) -> mpmd.NamedComputationOp:
    """A computation of ops or copies of them, before an old one, whose name it has.

    `outside` says what stands outside for a value that they read and do not make.
    """
    ops = [step for step in steps if not isinstance(step, tuple)]
    made = {result for op in ops for result in op.results}
    read = [*(v for op in ops for v in used_values(op)), *returned]
    entering = {v: outside[v] for v in read if v not in made and v in outside}
    inputs = list(dict.fromkeys(entering.values()))
    with ir.InsertionPoint(old):
        computation, block = named_computation(
            Origin.of(old),
            inputs,
            [value.type for value in returned],
            loc=old.location,
        )
    argument = dict(zip(inputs, block.arguments, strict=True))
    inside: dict[ir.Value, ir.Value] = {v: argument[outer] for v, outer in entering.items()}
    end = ir.InsertionPoint(block)
    for step in steps:
        if isinstance(step, tuple):
            with end, old.location:
                read = [inside.get(value, value) for value in step]
                barrier = stablehlo.OptimizationBarrierOp(read)
            inside.update(zip(step, barrier.results, strict=True))
        elif is_copied:
            clone = step.operation.clone(ip=end).opview
            replace_operands(clone, inside)
            inside.update(zip(step.results, clone.results, strict=True))
        else:
            block.append(step.operation)
            replace_operands(step, inside)
    with end, computation.location:
        return_([inside.get(value, value) for value in returned])
    computation.attributes[FLOPS] = i64(int(sum(op_cost.flops(op) for op in ops)))
    return computation
