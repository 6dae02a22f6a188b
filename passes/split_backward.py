"""Splits backward fragments into what other stages wait for, and what only accumulators wait for.

The first part of a fragment makes the gradients of activations that leave for other stages, the
second one the gradients of weights, which only the sums over the micro-batches take. Zero-bubble
schedules run the second part where a mesh would wait. In loops over layers, and in layers that are
rematerialised, both parts are split, too (`loops/fission.py`). `plan/backward_slice.py` says which
ops move to the first part because they shrink what is kept between the parts.

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>>
    !w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
    !y = !mpmd.mesh_tensor<"mesh_1", tensor<8x4xf32>>
    sdy.mesh @mesh_0 = <["a"=1]>
    sdy.mesh @mesh_1 = <["a"=1]>
    func.func public @main(%w: !w, %x: !x, %d: !x) -> (!w, !y) attributes {
        topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>, <"mesh_1" : <["a"=1]>>>} {
      %g:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%w, %x, %d)
          {alpa.part = "backward"}
          (%a: tensor<4x4xf32>, %b: tensor<8x4xf32>, %c: tensor<8x4xf32>) {
        %0 = stablehlo.tanh %c : tensor<8x4xf32>
        %1 = stablehlo.dot_general %0, %a, contracting_dims = [1] x [1]
          : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
        %2 = stablehlo.dot_general %b, %0, contracting_dims = [0] x [0]
          : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
        mpmd.return %1, %2 : tensor<8x4xf32>, tensor<4x4xf32>
      } : (!w, !x, !x) -> (!x, !w)
      %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%g#1)
          {alpa.part = "update"} (%a: tensor<4x4xf32>) {
        %0 = stablehlo.negate %a : tensor<4x4xf32>
        mpmd.return %0 : tensor<4x4xf32>
      } : (!w) -> !w
      %t = mpmd.transfer %g#0 : (!x) -> !y
      return %n, %t : !w, !y
    }

**After**::

    sdy.mesh @mesh_0 = <["a"=1]>
    sdy.mesh @mesh_1 = <["a"=1]>
    func.func public @main(…) -> … {
      %g:2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%d, %w)
          {alpa.backward = "input", alpa.part = "backward"}
          (%a: tensor<8x4xf32>, %b: tensor<4x4xf32>) {
        %e = stablehlo.tanh %a : tensor<8x4xf32>
        %f = stablehlo.dot_general %e, %b, contracting_dims = [1] x [1]
          : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
        mpmd.return %f, %e : tensor<8x4xf32>, tensor<8x4xf32>
      } : …
      %h = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%x, %g#1)
          {alpa.backward = "weight", alpa.part = "backward"}
          (%a: tensor<8x4xf32>, %b: tensor<8x4xf32>) {
        %e = stablehlo.dot_general %a, %b, contracting_dims = [0] x [0]
          : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
        mpmd.return %e : tensor<4x4xf32>
      } : …
      %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%h) …
      %t = mpmd.transfer %g#0 : …
      return %n, %t : …
    }

**Requires**: a plan whose micro-batches can be run as it says (`plan/checks.py`).

**Ensures**: the same ops on the same values. `alpa.backward` of a backward fragment is `input` or
`weight`. A fragment from which nothing leaves is a `weight` part as it is; one that makes no weight
gradient apart from what leaves is an `input` part as it is. `alpa.seconds` are dealt out by the
work of the ops. A remark at each fragment says what moved to its second part, and what is kept
between the parts for each micro-batch. If the plan's schedule splits backwards,
`ilp-shard-annotate` has counted that for the moment of the schedule that is fullest by the bytes of
whole tensors. If another one is fullest by those of shards, `predicted_peak_bytes` becomes what is
held then.

**Options**: none.

**Fails when** a fragment is split already, a device does not have the memory for that moment, or
the micro-batches cannot be run as the plan says.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from alpa.dialects import body, ir, main_function, mpmd
from alpa.dialects.attributes import (
    BACKWARD,
    COMPUTE_SECONDS,
    FLOPS,
    PART,
    REMAT,
    SECONDS,
    read_float,
)
from alpa.dialects.mpmd_types import (
    MeshTensor,
    Origin,
    fragment,
    mesh_of,
    read_topology,
    return_,
    stage_of,
)
from alpa.dialects.records import f64, i64
from alpa.dialects.sharding import Mesh, Sharding, op_shardings
from alpa.passes.analysis import op_cost
from alpa.passes.analysis.graph import Graph, replace_operands
from alpa.passes.base import NoRoomError, Pass, PassError, Remark, errors_at
from alpa.passes.cost.device import size_text
from alpa.passes.plan.attribute import cluster_here
from alpa.passes.plan.backward_halves import Split, leaving_of, states_of
from alpa.passes.plan.backward_slice import Slice
from alpa.passes.plan.data import Fragment, Program
from alpa.passes.plan.fragment_costs import FragmentCosts
from alpa.passes.plan.reader import read_planned
from alpa.passes.schedules.planned import chunks_of, label, splits_backward
from alpa.passes.schedules.split_memory import Bytes, fullest, held_at


@dataclass(frozen=True, kw_only=True)
class SplitBackward(Pass):
    """Splits backward fragments into activation gradients that leave and weight gradients."""

    name: ClassVar[str] = "split-backward"

    def run(self, module: ir.Module, remark: Remark) -> None:
        program = read_planned(module)
        function = main_function(module)
        costs = FragmentCosts.of(function)
        meshes = read_topology(function)
        ops = list(body(function).operations)
        for step, op in zip(program.steps, ops, strict=False):
            if not isinstance(step, Fragment) or not isinstance(op, mpmd.FragmentOp):
                continue
            if step.part != "backward":
                continue
            if step.half is not None:
                raise PassError(
                    op, "the backward fragment is split already; run split-backward once only"
                )
            leaving = leaving_of(program, step)
            if not leaving:
                op.attributes[BACKWARD] = ir.StringAttr.get("weight", op.context)
                continue
            _split(program, step, op, leaving, meshes[step.mesh], costs, remark)
        _count_kept(module)


def _split(
    program: Program,
    step: Fragment,
    op: mpmd.FragmentOp,
    leaving: Sequence[int],
    mesh: Mesh,
    costs: FragmentCosts,
    remark: Remark,
) -> None:
    split = Split.of(body(op), leaving, states_of(program, step))
    graph, parts = split.graph, split.parts
    if not split.second:
        op.attributes[BACKWARD] = ir.StringAttr.get("input", op.context)
        return
    blocking = next((v for v in parts.kept if not _can_cross(graph, v, mesh)), None)
    if blocking is not None:
        op.attributes[BACKWARD] = ir.StringAttr.get("input", op.context)
        remark(
            graph.ops[graph.producer[blocking]].location,
            "the backward fragment stays whole: its second part would read this value, which is "
            "no tensor, is a partial sum, or is sharded unevenly",
        )
        return
    halves = _halves(op, graph, parts, split.second)
    _write_costs(op, halves, costs)
    place = f"@{step.mesh}" if step.stage is None else f"stage {step.stage}"
    remark(op.location, f"{place}: {_described(graph, parts)}")
    op.operation.erase()


def _can_cross(graph: Graph, v: int, mesh: Mesh) -> bool:
    """Whether a fragment can return a value as it is sharded."""
    type_, sharding = graph.values[v].type, _sharding_of(graph, v)
    if not isinstance(type_, ir.RankedTensorType) or sharding is None:
        return isinstance(type_, ir.RankedTensorType)
    parts = (prod(map(mesh.axis_size, axes)) for axes in sharding.dims)
    is_even = all(size % number == 0 for size, number in zip(type_.shape, parts, strict=True))
    return is_even and not sharding.unreduced


def _sharding_of(graph: Graph, v: int) -> Sharding | None:
    """The planned sharding of an op's result."""
    shardings = op_shardings(graph.ops[graph.producer[v]])
    if shardings is None:
        return None
    return replace(shardings[ir.OpResult(graph.values[v]).result_number], open_dims=frozenset())


def _halves(
    op: mpmd.FragmentOp, graph: Graph, parts: Slice, second_numbers: Sequence[int]
) -> tuple[mpmd.FragmentOp, mpmd.FragmentOp]:
    """The two fragments before the old one, whose results nobody reads any more."""
    first_numbers = [n for n in range(len(op.results)) if n not in second_numbers]
    by_value = {graph.returned[n]: n for n in reversed(first_numbers)}
    more = [v for v in parts.kept if v not in by_value]
    mesh = mesh_of(op)
    types = [
        *(op.results[n].type for n in first_numbers),
        *(
            MeshTensor(
                mesh, ir.RankedTensorType(graph.values[v].type), _sharding_of(graph, v)
            ).to_type()
            for v in more
        ),
    ]
    returned = [*(graph.returned[n] for n in first_numbers), *more]
    first = _half(op, graph, parts.first, parts, {}, returned, types)
    first.attributes[BACKWARD] = ir.StringAttr.get("input", op.context)
    made = dict(zip(returned, first.results, strict=True))
    kept: dict[int, ir.Value] = {v: made[v] for v in parts.kept}
    second = _half(
        op,
        graph,
        parts.second,
        parts,
        kept,
        [graph.returned[n] for n in second_numbers],
        [op.results[n].type for n in second_numbers],
    )
    second.attributes[BACKWARD] = ir.StringAttr.get("weight", op.context)
    for numbers, half in ((first_numbers, first), (second_numbers, second)):
        for number, result in zip(numbers, half.results, strict=False):
            op.results[number].replace_all_uses_with(result)
    return first, second


def _half(
    op: mpmd.FragmentOp,
    graph: Graph,
    numbers: Sequence[int],
    parts: Slice,
    kept: dict[int, ir.Value],
    returned: Sequence[int],
    types: Sequence[ir.Type],
) -> mpmd.FragmentOp:
    """A fragment with copies of some of the ops, before the old one.

    Args:
        numbers: the ops, without free ones that they read.
        kept: what stands outside for values of the first part.
        returned: the values that it returns, of `types`.
    """
    used = _with_free(graph, numbers, returned, parts.free)
    made = {v for o in used for v in graph.results[o]}
    read = dict.fromkeys([*(v for o in used for v in graph.operands[o]), *returned])
    outside = {v: kept[v] if v in kept else op.operands[v] for v in read if v not in made}
    inputs = list(dict.fromkeys(outside.values()))
    with ir.InsertionPoint(op):
        half, block = fragment(
            mesh_of(op),
            [Origin.from_attr(it) for it in ir.ArrayAttr(op.attributes["origin"])],
            stage_of(op),
            inputs,
            types,
            loc=op.location,
        )
    half.attributes[PART] = op.attributes[PART]
    if REMAT in op.attributes:
        half.attributes[REMAT] = op.attributes[REMAT]
    arguments = dict(zip(inputs, block.arguments, strict=True))
    inside: dict[ir.Value, ir.Value] = {
        graph.values[v]: arguments[outer] for v, outer in outside.items()
    }
    for o in used:
        clone = graph.ops[o].operation.clone(ip=ir.InsertionPoint(block)).opview
        replace_operands(clone, inside)
        inside.update(zip(graph.ops[o].results, clone.results, strict=True))
    with ir.InsertionPoint(block), op.location:
        return_([inside[graph.values[v]] for v in returned])
    return half


def _with_free(
    graph: Graph, numbers: Sequence[int], returned: Sequence[int], free: Collection[int]
) -> list[int]:
    """Ops in order, with the free ones that they or what is returned need."""
    found = {o for o in numbers if o not in free}
    waiting = [v for o in found for v in graph.operands[o]] + list(returned)
    while waiting:
        o = graph.producer[waiting.pop()]
        if o in free and o not in found:
            found.add(o)
            waiting += graph.operands[o]
    return sorted(found)


def _count_kept(module: ir.Module) -> None:
    """Adds to the predicted memory what a mesh holds at its fullest moment, by the shardings, and
    not at the one by which these were chosen (`plan/split_mesh.py`).

    Raises:
        NoRoomError: a mesh does not have that much.
    """
    program, function = read_planned(module), main_function(module)
    plan, meshes = program.plan, program.meshes
    if len(plan.predicted_peak_bytes) != len(meshes) or not splits_backward(plan.schedule):
        return
    cluster, stages = cluster_here(plan.cluster), len(meshes) * chunks_of(plan.schedule)
    peaks: list[int] = []
    for number, (mesh, peak) in enumerate(zip(meshes, plan.predicted_peak_bytes, strict=True)):
        at = plan.schedule, stages, plan.num_micro_batches, number
        backwards: dict[int | None, list[Fragment]] = {}
        for it in program.fragments:
            if it.mesh == mesh.name and it.part == "backward":
                backwards.setdefault(it.stage, []).append(it)
        whole, local = (
            {s: _bytes_of(program, its, size) for s, its in backwards.items() if s is not None}
            for size in (lambda v: program.values[v].bytes, program.local_bytes)
        )
        with errors_at(function):
            counted, most = fullest(*at, whole), fullest(*at, local)
        peaks.append(peak + round(held_at(most, local) - held_at(counted, local)))
        memory = None if cluster is None else cluster.of(mesh.hosts).device.memory
        if memory is not None and peak <= memory < peaks[-1]:
            raise NoRoomError(
                function,
                f"{mesh.name} needs {size_text(peaks[-1])} per device, {size_text(memory)} are "
                f"there: under {label(plan.schedule)} it keeps values for the weight gradients of "
                "several micro-batches; use 1f1b, smaller micro-batches, or more devices",
                missing=peaks[-1] / memory - 1,
            )
    replace(plan, predicted_peak_bytes=tuple(peaks)).write(function)


def _bytes_of(program: Program, backwards: Sequence[Fragment], size: Callable[[int], int]) -> Bytes:
    """What a stage holds for its backward, whose parts these are, by the size of each value."""
    first = {v for it in backwards if it.half == "input" for v in it.inputs}
    second = {v for it in backwards if it.half == "weight" for v in it.inputs}
    made = {v for it in backwards if it.half == "input" for v in it.outputs}
    read = second & program.activations
    behind = {v for v in second if made and program.parts[v] == "backward"}
    return Bytes(
        freed=sum(map(size, (first & program.activations) - read)),
        read=sum(map(size, read)),
        made=sum(map(size, behind)),
    )


def _write_costs(
    op: mpmd.FragmentOp, halves: Sequence[mpmd.FragmentOp], costs: FragmentCosts
) -> None:
    """Deals the seconds of a fragment out, with those of one more call, and writes the FLOPs."""
    flops = [sum(map(op_cost.flops, list(body(half).operations)[:-1])) for half in halves]
    works = [costs.seconds(half) for half in halves]
    more = max(sum(works) - costs.seconds(op), 0.0)
    weights = works if sum(works) else flops
    total = sum(weights)
    for half, weight, own in zip(halves, weights, flops, strict=True):
        share = weight / total if total else 1 / len(halves)
        for name, extra in ((SECONDS, more), (COMPUTE_SECONDS, 0.0)):
            seconds = read_float(op, name)
            if seconds is not None:
                half.attributes[name] = f64((seconds + extra) * share)
        if FLOPS in op.attributes:
            half.attributes[FLOPS] = i64(int(own))


def _described(graph: Graph, parts: Slice) -> str:
    def flops(numbers: Sequence[int]) -> float:
        return sum(op_cost.flops(graph.ops[o]) for o in numbers)

    second = set(parts.second) - parts.free
    all_flops = flops([*{*parts.first, *second}])
    kept = sum(graph.bytes[v] for v in parts.kept)
    return (
        f"{len(second)} of {len(graph.ops)} backward ops, with {flops([*second]):,.0f} of "
        f"{all_flops:,.0f} FLOPs, make weight gradients that no other stage waits for; "
        f"{kept:,} bytes are kept for them"
    )
