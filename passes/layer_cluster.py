"""Cuts a program into layers: forward, backward and update computations.

Forward ops are cut by the dynamic program of the paper's eq. 6 (`solve/layers/layer_dp.py`), or at
the `@alpa.layer_boundary` markers, which pass values on or stand between ops without any. Layers of
16 may have to be cut inside of a network's blocks, where many bytes cross: blocks of experts have
most of the FLOPs of a GShard model. Fewer layers are taken if they avoid that. If the driver allows
more layers than 16, they are as small as places where few bytes cross make them
(`solve/layers/narrow.py`): the halves of a transformer's blocks, or its blocks.
`analysis/step_parts.py` tells forward, backward and update apart. `analysis/layer_placement.py`
places every other op.

**Before**::

    func.func public @main(
        %w: tensor<8x8xf32> {tf.aliasing_output = 0 : i32}, %x: tensor<4x8xf32>)
        -> (tensor<8x8xf32>, tensor<4x8xf32>) {
      %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
        : (tensor<4x8xf32>, tensor<8x8xf32>) -> tensor<4x8xf32>
      %0 = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0]
        : (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<8x8xf32>
      %g = stablehlo.custom_call @alpa.gradient(%0) : (tensor<8x8xf32>) -> tensor<8x8xf32>
      %new = stablehlo.subtract %w, %g : tensor<8x8xf32>
      return %new, %y : tensor<8x8xf32>, tensor<4x8xf32>
    }

**After** `layer-cluster{num-layers=1}`::

    func.func public @main(%w: … {alpa.input = 0 : i64, alpa.role = "state", …}, %x: …)
        -> (tensor<8x8xf32> {alpa.output = 0 : i64, alpa.result = "state:0"}, …) {
      // forward
      %y = mpmd.named_computation<"layer_0"> (%x, %w) {alpa.flops = 512 : i64} …
      // backward
      %g = mpmd.named_computation<"layer_0"(1)> (%x, %y) {alpa.flops = 512 : i64} …
      // update
      %new = mpmd.named_computation<"update_0"> (%g, %w) {alpa.flops = 64 : i64} …
      return %new, %y : tensor<8x8xf32>, tensor<4x8xf32>
    }

**Requires**: a function as `simplify-trivial-ops` or `split-loops` leaves it.

**Ensures**: every op is in a named computation that `verify-layers` accepts, and common
subexpressions of a computation are one op. `alpa.flops` is the sum of its ops. Markers are gone.
The roles of arguments and results are written where they could be inferred. A program that only
returns arguments has a layer that passes the first result on. A backward part that computes
activations again by contractions or loops, and depends on no cotangent there, begins with a barrier
for these activations and a cotangent (`analysis/recomputation.py`).

**Options**: see the fields.

**Fails when** there are fewer forward ops than layers, or fewer contractions with `equal-ops`.
With `manual` it fails when there is no marker, or another number of layers than `num-layers`. It
also fails when `delta` is negative, a role is malformed, or independent micro-batches need
gradients that nothing marks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import numpy as np

from alpa.dialects import (
    body,
    func,
    ir,
    mpmd,
    passmanager,
    stablehlo,
    terminator,
    transform,
    walk,
)
from alpa.dialects.attributes import (
    FLOPS,
    GRADIENT,
    INDEPENDENT,
    LAYER_BOUNDARY,
    Part,
    input_number,
    is_exact,
    marker_of,
    micro_batches_of,
    output_number,
    write_interface,
)
from alpa.dialects.mpmd_types import Origin, named_computation, return_
from alpa.dialects.records import i64
from alpa.passes.analysis import op_cost
from alpa.passes.analysis.graph import Graph, replace_operands
from alpa.passes.analysis.input_checks import check_input, check_unplanned
from alpa.passes.analysis.layer_placement import (
    GLOBAL,
    Floating,
    Slot,
    place,
    resolve_parts,
)
from alpa.passes.analysis.op_kinds import CONTRACTIONS
from alpa.passes.analysis.recomputation import Recomputation, read_through_barrier
from alpa.passes.analysis.roles import Roles, infer_roles
from alpa.passes.analysis.step_parts import StepParts, split_step
from alpa.passes.base import Pass, PassError, Remark, option
from alpa.passes.plan.layer_checks import check_layers, check_placed_once, placed_ops
from alpa.passes.simplify.returned import give_an_op, separate_states

_ONCE = "builtin.module(func.func(mpmd.named_computation(cse)))"
"""Makes common subexpressions of a layer one op, as XLA does. Those of different layers stay: their
values would be sent between meshes."""
_HEAVY_OPS_PER_LAYER = 4
_LAYERS_PER_STAGE = 4
"""If the number of stages is fixed. With GPT-2.6B on one of 8 V100s per stage, the slowest stage
takes 21 % longer than the mean with two layers for each, and 7 % with four."""
MOST_LAYERS = 16
FEWEST_LAYERS = 8
"""Where `MOST_LAYERS` are the limit, and half as many may receive much less."""


@dataclass(frozen=True, kw_only=True)
class LayerCluster(Pass):
    """Cuts a program into layers: forward, backward and update computations."""

    name: ClassVar[str] = "layer-cluster"
    num_layers: int | Literal["auto"] = option(
        "auto",
        "number of layers; `auto` cuts at the markers, or without them makes a layer for every 4 "
        "contractions of the forward part, where the body of a loop is counted once. There is at "
        "least one layer, and one for each stage that `alpa` is told of. There are up to 16, or "
        "up to 4 for each stage if `alpa` is told their number. Where this makes 16 layers, fewer "
        "are taken, down to 8, if they receive at most half as many bytes. Where it makes 16 or "
        "more, `alpa` takes small layers, such as the halves of a transformer's blocks, if there "
        "are more of them: up to 72, or 3200 over the number of devices",
    )
    delta: float = option(
        0.5,
        "a layer may have (1 + delta) times the mean FLOPs",
    )
    clustering: Literal["auto", "equal-ops", "manual"] = option(
        "auto",
        "`equal-ops`: equally many contractions in each layer (the paper's ablation); `manual`: "
        "only at `alpa.layer_boundary` markers, an error without them",
    )

    donate_states: bool = option(
        False,
        "whether each new state takes the place of the old one, which is gone after a step; "
        "otherwise where the program donates the old one",
    )

    stages: int = 1
    """how many stages the layers will be cut into, where that is fixed; from the driver"""
    least: int = 1
    """how many stages there are at least; from the driver"""
    most: int = MOST_LAYERS
    """how many layers there may be where they can be small; from the driver"""

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = check_input(module, is_checked=self.is_checked)
        check_unplanned(function)
        self._cluster(module, function, remark)
        # Nothing refers to an op of a layer any more, so ops may go.
        once = passmanager.PassManager.parse(_ONCE, module.context)
        once.run(module.operation)
        _write_flops(function)
        check_layers(function)

    def _cluster(self, module: ir.Module, function: func.FuncOp, remark: Remark) -> None:
        """Makes the layers."""
        if self.delta < 0:
            raise PassError(function, f"delta is {self.delta:g}; at least 0")
        give_an_op(body(function))
        said = micro_batches_of(module)
        step = _Step.of(function, said)
        barriers = separate_states(step.graph, step.part, terminator(body(function)))
        if barriers:
            step = step.with_barriers(function, barriers)
        graph, roles, parts, floating = step.graph, step.roles, step.parts, step.floating
        part = step.part
        independent = said == INDEPENDENT
        if independent and parts.learns and not _has_gradients(function):
            raise PassError(
                function,
                "nothing says which values are gradients: neither markers nor the names that jax "
                "gives to differentiated ops. With independent micro-batches the results depend on "
                "which ops run in each micro-batch and which once per step; mark the gradients "
                "with alpa.grad, keep the locations of the program "
                "(as_text(debug_info=True)), or plan with 1 micro-batch",
            )
        if independent and parts.misplaced:
            raise PassError(
                parts.misplaced[0],
                "is a part of a differentiation, and would be computed once per step, from means "
                "over the micro-batches: which gradients this step's update is made of cannot be "
                "told; mark those, and no others, by alpa.grad, or plan with 1 micro-batch",
            )
        for sentence in (*roles.ambiguous, *parts.doubts):
            remark(function.location, f"{sentence}; it matters with several micro-batches only")
        markers = [o for o, marker in enumerate(graph.markers) if marker == LAYER_BOUNDARY]
        forward = [o for o in range(len(graph.ops)) if part[o] == "forward"]
        boundaries = [bisect_left(forward, o) for o in markers if part[o] in (None, "forward")]
        flops = [op_cost.flops(op) for op in graph.ops]
        starts = self._starts(function, graph, flops, forward, boundaries)
        layers = np.searchsorted(starts, np.arange(len(forward)), side="right") - 1
        layer_of = dict(zip(forward, layers.tolist(), strict=True))
        slots = place(graph, roles, part, floating, layer_of)
        _write_roles(function, roles, donate=self.donate_states)
        ops = placed_ops(graph.ops)
        batch = [a for a, argument in enumerate(roles.arguments) if argument.role == "batch"]
        gates = _outline(function, graph, floating, slots, batch)
        check_placed_once(ops, function)
        for values in gates:
            read_through_barrier(values)

    def _starts(
        self,
        function: func.FuncOp,
        graph: Graph,
        flops: Sequence[float],
        forward: list[int],
        boundaries: list[int],
    ) -> Sequence[int]:
        """The first forward op of each layer; `boundaries` are how many lie before each mark."""
        if self.clustering == "manual" or (
            self.clustering == "auto" and self.num_layers == "auto" and boundaries
        ):
            return self._at_markers(function, forward, boundaries)
        contractions = [_contractions(graph.ops[o]) for o in forward]
        if self.num_layers != "auto":
            count = self.num_layers
        else:
            heavy = sum(contractions) // _HEAVY_OPS_PER_LAYER
            most = max(MOST_LAYERS, _LAYERS_PER_STAGE * self.stages)
            least = min(self.least, len(forward))
            count = max(1, least, min(most, len(forward), heavy))
        if not forward and count == 1:
            return []
        if not 1 <= count <= len(forward):
            raise PassError(
                function,
                f"cannot cut {len(forward)} forward ops into {count} layers; "
                f"ask for 1 to {max(1, len(forward))} with num-layers",
            )
        if self.clustering == "equal-ops":
            return _of_equal_ops(function, contractions, count)
        fewest = most = count
        if self.num_layers == "auto" and count >= MOST_LAYERS:
            fewest = max(FEWEST_LAYERS, self.least) if count == MOST_LAYERS else count
            most = max(count, self.most)
        return _cut(graph, flops, forward, range(fewest, count + 1), most, self.delta)

    def _at_markers(
        self, function: func.FuncOp, forward: list[int], boundaries: list[int]
    ) -> list[int]:
        """A layer begins at each marker that is not at an end."""
        if not boundaries:
            raise PassError(
                function,
                "clustering=manual cuts at the @alpa.layer_boundary markers, and this program has "
                "none; mark its layers (alpa.mark_layer_boundary), or leave clustering out",
            )
        starts = sorted({0, *(i for i in boundaries if 0 < i < len(forward) - 1)})
        if self.num_layers not in ("auto", len(starts)):
            raise PassError(
                function,
                f"the @alpa.layer_boundary markers make {len(starts)} layer(s), not "
                f"{self.num_layers}; leave num-layers out with clustering=manual",
            )
        return starts


def _has_gradients(function: func.FuncOp) -> bool:
    """Whether markers, or the names that jax gives, tell what differentiation makes."""
    return any(
        marker_of(op) == GRADIENT or transform(op.location) is not None
        for op in walk(body(function))
    )


@dataclass(frozen=True)
class _Step:
    """A program whose ops are told apart: `part` is that of each, None where it floats."""

    graph: Graph
    roles: Roles
    parts: StepParts
    floating: Floating
    part: list[Part | None]

    @classmethod
    def of(cls, function: func.FuncOp, micro_batches: str | None) -> _Step:
        graph = Graph.of(body(function))
        roles = infer_roles(function, graph)
        several = micro_batches is not None
        parts = split_step(graph, roles, exact=is_exact(micro_batches), several=several)
        return cls._placed(graph, roles, parts)

    def with_barriers(self, function: func.FuncOp, barriers: Sequence[ir.OpView]) -> _Step:
        """The step after `separate_states`: what depends on no batch got barriers at its end.

        They depend on none either, so all other ops keep their parts, as far as those are known
        before floating ops are placed.
        """
        graph = self.graph.with_ops(barriers, terminator(body(function)))
        parts = replace(self.parts, part=[*self.parts.part, *[None] * len(barriers)])
        return self._placed(graph, infer_roles(function, graph), parts)

    @classmethod
    def _placed(cls, graph: Graph, roles: Roles, parts: StepParts) -> _Step:
        floating = Floating.find(graph, parts)
        return cls(graph, roles, parts, floating, resolve_parts(graph, parts, floating))


def _of_equal_ops(function: func.FuncOp, contractions: list[int], count: int) -> list[int]:
    """Layer k begins at contraction k * H / count of H: what leads to it is counted before."""
    heavy = [i for i, number in enumerate(contractions) if number]
    if count > max(1, len(heavy)):
        raise PassError(
            function,
            f"cannot cut {len(heavy)} contraction(s) into {count} layers of equally many; ask "
            f"for 1 to {max(1, len(heavy))} with num-layers",
        )
    return [0, *(heavy[k * len(heavy) // count] for k in range(1, count))]


def _contractions(op: ir.OpView) -> int:
    """How many contractions are written in an op; a loop stands for one at least."""
    if not isinstance(op, stablehlo.WhileOp):
        return int(op.name in CONTRACTIONS)
    inner = walk(body(op, 1))
    return max(1, sum(other.operation.name in CONTRACTIONS for other in inner))


def _cut(
    graph: Graph,
    flops: Sequence[float],
    forward: list[int],
    counts: range,
    most: int,
    delta: float,
) -> Sequence[int]:
    """Eq. 6 on the forward ops; arguments are no input of a layer, what other layers made is.

    More layers, up to `most`, are taken if no more bytes cross where they begin than the largest
    input of those.
    """
    from alpa.passes.solve.layers import layer_dp, narrow  # noqa: PLC0415 - costs start-up time

    position = {o: i for i, o in enumerate(forward)}
    crossing = [
        (i, graph.bytes[v], sorted({position[u] for u in graph.users[v] if u in position}))
        for i, o in enumerate(forward)
        for v in graph.results[o]
        if graph.users[v]
    ]
    received = layer_dp.Received(len(forward), crossing)
    problem = layer_dp.Problem(
        flops=np.array([flops[o] for o in forward]),
        received=received,
        num_layers=counts[-1],
        delta=delta,
    )
    usual = layer_dp.solve_narrow(problem, counts[0])
    small = narrow.solve(problem.flops, received.crossing, usual.largest_input, most)
    return small if len(small) > len(usual.starts) else usual.starts


def _write_roles(function: func.FuncOp, roles: Roles, *, donate: bool) -> None:
    pairs = roles.state_pairs() if donate else {}
    states = {a for a in pairs.values() if roles.arguments[a].aliasing_output is None}
    arguments = [
        replace(argument, input=input_number(a, argument), donor=argument.donor or a in states)
        for a, argument in enumerate(roles.arguments)
    ]
    results = [
        replace(result, output=output_number(r, result)) for r, result in enumerate(roles.results)
    ]
    write_interface(function, arguments, results)


@dataclass(frozen=True)
class _Members:
    """The ops of a computation in program order: its own, and copies of floating ones."""

    slot: Slot
    ops: dict[int, ir.OpView]
    own: list[int]
    inputs: list[int]


def _outline(
    function: func.FuncOp,
    graph: Graph,
    floating: Floating,
    slots: Sequence[Slot | None],
    batch: Sequence[int],
) -> list[list[ir.Value]]:
    """Moves the ops of each slot into a named computation, in execution order.

    `batch` are the numbers of the batch's arguments. The result is what backward parts that compute
    activations again should read through a barrier.
    """
    own: dict[Slot, list[int]] = {}
    for o, slot in enumerate(slots):
        if slot is not None:
            own.setdefault(slot, []).append(o)
    ordered = sorted(own, key=_execution_order)
    groups = [_with_copies(graph, floating, slot, own[slot]) for slot in ordered]
    crossing = set(graph.returned).union(*(group.inputs for group in groups))
    end = terminator(body(function))
    outside: dict[int, ir.Value] = {v: graph.values[v] for v in range(graph.num_arguments)}
    forward = [it.own for it in groups if it.slot.part == "forward"]
    made = (v for own in forward for o in own for v in graph.results[o])
    recomputation = Recomputation(graph=graph, activations={*batch, *made})
    gates = list[list[ir.Value]]()
    for group in groups:
        inside = _outline_group(end, graph, group, crossing, outside)
        if group.slot.part == "backward":
            gate = recomputation.gate([*group.ops], group.inputs)
            gates.append([inside[v] for v in gate])
    for i, v in enumerate(graph.returned):
        end.operands[i] = outside[v]
    for o in reversed(range(len(graph.ops))):
        if slots[o] is None or graph.markers[o] is not None:
            graph.ops[o].erase()
    return [gate for gate in gates if gate]


def _execution_order(slot: Slot) -> tuple[int, int, int]:
    layer = -slot.layer if slot.part == "backward" else slot.layer
    return (get_args(Part).index(slot.part), slot.level, layer)


def _origin(slot: Slot) -> Origin:
    if slot.part == "update":
        return Origin("update_global" if slot.layer == GLOBAL else f"update_{slot.layer}")
    return Origin(f"layer_{slot.layer}", int(slot.part == "backward"))


def _with_copies(graph: Graph, floating: Floating, slot: Slot, own: list[int]) -> _Members:
    members = {o: graph.ops[o] for o in own}
    stack = list(own)
    while stack:
        for v in graph.operands[stack.pop()]:
            p = graph.producer[v]
            if p >= 0 and p not in members and floating.in_part(p, slot.part):
                op = graph.ops[p]
                members[p] = op.operation.clone(ip=ir.InsertionPoint(op)).opview
                stack.append(p)
    made = {v for o in members for v in graph.results[o]}
    ordered = dict(sorted(members.items()))
    inputs = list(dict.fromkeys(v for o in ordered for v in graph.operands[o] if v not in made))
    return _Members(slot, ordered, own, inputs)


def _outline_group(
    end: ir.OpView,
    graph: Graph,
    group: _Members,
    crossing: set[int],
    outside: dict[int, ir.Value],
) -> dict[int, ir.Value]:
    """Builds one computation before `end`; `outside` maps values to what stands for them there.

    The result is what stands for its inputs inside.
    """
    outputs = [v for o in group.own for v in graph.results[o] if v in crossing]
    with ir.InsertionPoint(end):
        computation, block = named_computation(
            _origin(group.slot),
            [outside[v] for v in group.inputs],
            [graph.types[v] for v in outputs],
            loc=graph.ops[group.own[0]].location,
        )
    # What stands for values of the graph inside.
    inside: dict[int, ir.Value] = dict(zip(group.inputs, block.arguments, strict=True))
    for o, op in group.ops.items():
        if graph.markers[o] is not None:
            passed = [inside.get(v, graph.values[v]) for v in graph.read[o]]
            inside.update(zip(graph.results[o], passed, strict=True))
            continue
        changed = {graph.values[v]: inside[v] for v in graph.operands[o] if v in inside}
        if changed:
            replace_operands(op, changed)
        if op is not graph.ops[o]:
            inside.update(zip(graph.results[o], op.results, strict=True))
    with ir.InsertionPoint(block), computation.location:
        last = return_([inside.get(v, graph.values[v]) for v in outputs])
    for o, op in group.ops.items():
        if graph.markers[o] is None:
            op.operation.move_before(last)
    outside.update(zip(outputs, computation.results, strict=True))
    return dict(zip(group.inputs, block.arguments, strict=True))


def _write_flops(function: func.FuncOp) -> None:
    for computation in body(function).operations:
        if isinstance(computation, mpmd.NamedComputationOp):
            *ops, _ = body(computation).operations
            total = sum(map(op_cost.flops, ops))
            if total >= 2**63:
                raise PassError(
                    computation,
                    f"a layer takes {total:.3g} operations, more than 64 bits can count",
                )
            computation.attributes[FLOPS] = i64(int(total))
