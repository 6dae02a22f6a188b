"""Places every op of a step in a computation: a layer's forward or backward, or an update.

Forward ops get their layer from clustering (`layer_cluster`). The others follow:

* A backward op goes to the layer whose values it uses, and never above the layer that its
  cotangent comes from, so that values flow from later to earlier layers only.
* An update op goes to the layer of the only parameter that it leads to, else to the layer of
  the only gradients that it reads. Ops that mix layers (a global norm, a step count) are in
  `update_global`.
* Cheap ops that depend on no batch float: each computation that uses one gets a copy.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import get_args

from alpa.dialects.attributes import LAYER_BOUNDARY, Part
from alpa.passes.analysis.graph import Graph, union
from alpa.passes.analysis.op_kinds import SOURCES, TRIVIAL
from alpa.passes.analysis.roles import Roles
from alpa.passes.analysis.step_parts import StepParts

GLOBAL = -1

CHEAP = TRIVIAL | SOURCES | {"sdy.sharding_constraint", "stablehlo.reverse"}
"""Ops that may be copied to their users; every other op has one place."""


@dataclass(frozen=True, order=True)
class Slot:
    """A computation: `layer` is `GLOBAL` for update_global.

    `level` orders updates: a value that leaves an update for another one raises it by one, so
    that a norm's partial sums, the norm and the scaled update are three levels.
    """

    part: Part
    layer: int
    level: int = 0


@dataclass(frozen=True)
class Floating:
    """Ops that are copied to where they are used, by the part that uses them.

    Forward and backward copy cheap ops on arguments other than the batch. Updates copy only cheap
    ops on constants, so a learning rate is computed once and sent. Broadcasts that grow their
    operand, and ops on such broadcasts alone, are copied everywhere: the small operand is sent.
    """

    of_arguments: set[int]
    of_constants: set[int]
    growing: set[int]

    @classmethod
    def find(cls, graph: Graph, parts: StepParts) -> Floating:
        # The producer of an argument is -1.
        of_arguments, of_constants, growing = {-1}, set[int](), set[int]()
        for o, op in enumerate(graph.ops):
            producers = {graph.producer[v] for v in graph.operands[o]}
            if op.name in CHEAP and not (parts.is_training and parts.part[o]):
                if producers <= of_arguments:
                    of_arguments.add(o)
                if producers <= of_constants:
                    of_constants.add(o)
            if op.name == "stablehlo.broadcast_in_dim":
                grows = graph.bytes[graph.operands[o][0]] < graph.bytes[graph.results[o][0]]
            else:
                grows = (
                    op.name in TRIVIAL
                    and op.name != "stablehlo.reduce"  # its result is small and should be sent
                    and all(p in growing or p in of_constants for p in producers)
                    and not producers <= of_constants
                )
            if grows:
                growing.add(o)
        return cls(of_arguments, of_constants, growing)

    def in_part(self, o: int, part: Part) -> bool:
        """Whether an op is copied into a computation of this part."""
        cheap = self.of_constants if part == "update" else self.of_arguments
        return o in cheap or o in self.growing

    def anywhere(self, o: int) -> bool:
        """Whether an op is copied into the computations of some part."""
        return o in self.of_arguments or o in self.growing


def resolve_parts(graph: Graph, parts: StepParts, floating: Floating) -> list[Part | None]:
    """Each op's part where it is computed, None where it is only copied.

    An op that does not depend on the batch and is not copied belongs to the forward part where
    forward or backward need it, else to the update. Where only the backward part computes
    anything, that is the forward part.
    """
    final: Part = "update" if parts.is_training else "forward"
    returned = set(graph.returned)
    part: list[Part | None] = [None] * len(graph.ops)
    bit = {it: 1 << number for number, it in enumerate(get_args(Part))}
    in_a_layer = bit["forward"] | bit["backward"]
    needed = [0] * len(graph.ops)
    """of each op, the parts that read it, as bits"""
    for o in reversed(range(len(graph.ops))):
        if graph.markers[o] == LAYER_BOUNDARY and not graph.operands[o]:
            continue  # It stands between ops, and computes nothing of any part.
        here = parts.part[o]
        floats = floating.anywhere(o)
        is_result = not returned.isdisjoint(graph.results[o])
        is_copied = floating.in_part(o, "update") or final == "forward"
        is_copied = is_copied or not needed[o] & bit[final]
        if not floats or is_result or not is_copied:
            if here is None:
                in_layers = not (floats or is_result) and needed[o] & in_a_layer
                here = "forward" if in_layers else final
            part[o] = here
        users = needed[o] if floats else 0
        if is_result and parts.part[o] is None:
            # `separate_states` gives the result an op of its own where layers read this one: then
            # this one is theirs, and so is what it reads, which may be returned, too.
            users |= needed[o] & in_a_layer
        if (own := part[o]) is not None:
            users |= bit[own]
        for v in graph.operands[o]:
            if graph.producer[v] >= 0:
                needed[graph.producer[v]] |= users
    if "forward" not in part:
        # All of it is copied to where it is used, and a backward part needs a forward one.
        kept = set(graph.gradient_marks)
        part = [
            "forward" if it == "backward" and o not in kept else it for o, it in enumerate(part)
        ]
    return part


def place(
    graph: Graph,
    roles: Roles,
    part: list[Part | None],
    floating: Floating,
    layer_of: dict[int, int],
) -> list[Slot | None]:
    """The slot of each op, None for one that is only copied.

    `part` is what `resolve_parts` says, `layer_of` the layers of the forward ops.
    """
    flow = _Flow(graph, part, [None] * len(graph.ops), _sources(graph, part))
    for o, layer in layer_of.items():
        flow.slot[o] = Slot("forward", layer)
    users = _layers_using(flow, floating)
    _place_backward(flow, users, set(roles.state_pairs().values()))
    _place_updates(flow, roles, users)
    return flow.slot


@dataclass(frozen=True)
class _Flow:
    """The graph without copied ops: `sources[o]` are the values that op `o` reads, directly or
    through copied ops."""

    graph: Graph
    part: list[Part | None]
    slot: list[Slot | None]
    sources: list[list[int]]

    def slot_of(self, value: int) -> Slot | None:
        producer = self.graph.producer[value]
        return self.slot[producer] if producer >= 0 else None


def _sources(graph: Graph, part: list[Part | None]) -> list[list[int]]:
    sources: list[list[int]] = []
    for used in graph.operands:
        found: dict[int, None] = {}
        for v in used:
            p = graph.producer[v]
            if p >= 0 and part[p] is None:
                found.update(dict.fromkeys(sources[p]))
            else:
                found[v] = None
        sources.append(list(found))
    return sources


def _layers_using(flow: _Flow, floating: Floating) -> list[set[int]]:
    """For each value the layers whose forward uses it, directly or through copied ops."""
    graph = flow.graph
    users: list[set[int]] = [set() for _ in graph.values]
    for o in reversed(range(len(graph.ops))):
        where = flow.slot[o]
        layers = {where.layer} if where is not None else set[int]()
        if floating.anywhere(o):
            for v in graph.results[o]:
                layers |= users[v]
        for v in graph.operands[o]:
            users[v] |= layers
    return users


def _place_backward(flow: _Flow, users: list[set[int]], states: set[int]) -> None:
    """Layers of backward ops.

    A *cotangent* depends on the loss: it starts in the last layer and only descends, each op to
    the layer that makes or uses most of the forward values it reads. Other backward ops are
    residuals, which use forward values only (`cos(x)`). They can be in any layer that their
    operands can, and go to the layer that reads them. Values that depend on the batch alone, such
    as a recomputed mask or one over its sum, do not pull their readers to a layer.
    """
    graph, slot = flow.graph, flow.slot
    last = _loss_layer(flow)
    of_batch = _made_of_batch(flow, states)
    lowest: dict[int, int] = {}
    fitting: dict[int, set[int]] = {}
    for o in range(len(graph.ops)):
        if flow.part[o] != "backward":
            continue
        above: list[int] = []
        low = 0
        choices: list[tuple[set[int], int]] = []
        for v in flow.sources[o]:
            p = graph.producer[v]
            where = flow.slot_of(v)
            if p in fitting:
                low = max(low, lowest[p])
                choices.append((fitting[p], graph.bytes[v]))
            elif where is not None and where.part == "backward":
                above.append(where.layer)
            else:
                made = {where.layer} if where is not None else set[int]()
                low = max(low, *made, 0)
                choices.append((made | users[v], graph.bytes[v]))
        if above:
            slot[o] = Slot("backward", _vote(choices, min(above)))
        elif low == last:
            slot[o] = Slot("backward", last)
        else:
            lowest[o] = low
            fitting[o] = {low}.union(*({c for c in cs if c >= low} for cs, _ in choices))
            if of_batch.issuperset(flow.sources[o]):
                of_batch.update(graph.results[o])
                fitting[o] = set()
    for o in sorted(lowest, reverse=True):
        users_of = [slot[u] for v in graph.results[o] for u in readers(graph, flow.part, v)]
        layers = [it.layer for it in users_of if it is not None and it.part == "backward"]
        slot[o] = Slot("backward", max([lowest[o], *layers]))


def _made_of_batch(flow: _Flow, states: set[int]) -> set[int]:
    """The arguments that are not states, and the values that forward ops make of these only."""
    found = {*range(flow.graph.num_arguments)} - states
    for part, sources, results in zip(flow.part, flow.sources, flow.graph.results, strict=True):
        if part == "forward" and found.issuperset(sources):
            found.update(results)
    return found


def _loss_layer(flow: _Flow) -> int:
    """The last layer whose values any backward op reads: cotangents start there."""
    made = [
        where.layer
        for o, part in enumerate(flow.part)
        if part == "backward"
        for v in flow.sources[o]
        if (where := flow.slot_of(v)) is not None
    ]
    return max(made, default=0)


def _vote(choices: list[tuple[set[int], int]], ceiling: int) -> int:
    """The layer up to `ceiling` that holds the most bytes of the forward values.

    Ties go to the highest layer. Returns `ceiling` if there is no such layer."""
    score = {ceiling: 0}
    for layers, size in choices:
        for layer in layers:
            if layer <= ceiling:
                score[layer] = score.get(layer, 0) + size
    return max(score, key=lambda layer: (score[layer], layer))


def readers(graph: Graph, part: Sequence[Part | None], value: int) -> list[int]:
    """The ops that read a value, directly or through copied ops, which have no part."""
    found: list[int] = []
    stack = [value]
    while stack:
        for user in graph.users[stack.pop()]:
            found.append(user)
            if part[user] is None:
                stack += graph.results[user]
    return found


def _place_updates(flow: _Flow, roles: Roles, users: list[set[int]]) -> None:
    """Layers of updates. A set of layers is an integer: bit l is set if layer l is in it."""
    graph, part, slot = flow.graph, flow.part, flow.slot
    owner = {a: min(users[a]) for a in range(graph.num_arguments) if users[a]}
    leads_to = [0] * len(graph.values)
    for r, a in roles.state_pairs().items():
        if a in owner:
            leads_to[graph.returned[r]] |= 1 << owner[a]
    for o in reversed(range(len(graph.ops))):
        if part[o] in ("update", None):
            reached = union(leads_to[v] for v in graph.results[o])
            for v in graph.operands[o]:
                leads_to[v] |= reached
    reads = [0] * len(graph.values)
    for a, layer in owner.items():
        reads[a] |= 1 << layer
    for o in range(len(graph.ops)):
        where = slot[o]
        if where is not None and where.part == "backward":
            for v in graph.results[o]:
                reads[v] |= 1 << where.layer
        if part[o] != "update":
            continue
        inputs = union(reads[v] for v in flow.sources[o])
        for v in graph.results[o]:
            reads[v] |= inputs
        outputs = union(leads_to[v] for v in graph.results[o])
        if outputs.bit_count() == 1 or (outputs and inputs.bit_count() != 1):
            chosen = outputs
        else:
            chosen = inputs
        layer = chosen.bit_length() - 1 if chosen.bit_count() == 1 else GLOBAL
        before = [s for v in flow.sources[o] if (s := flow.slot_of(v)) is not None]
        level = max((s.level + (s.layer != layer) for s in before if s.part == "update"), default=0)
        slot[o] = Slot("update", layer, level)
