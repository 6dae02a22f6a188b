"""Live buffers of a mesh over time: the memory rows of its sharding problem.

Time counts the ops of the mesh's fragments in program order. A value holds the bytes of its
shard, which depend on its node's strategy, from the op that makes it to its last use.
`MeshProblem.usages` lists what is live outside of fragments, and this file the rest:

* Arguments are live all the time, the batch once per micro-batch. If an old state is donated, the
  new value takes its place.
* The results of a fragment are live from its start, because XLA allocates results first. A
  temporary that fits may use this memory until the result is written. There is one version for each
  micro-batch that needs it (`versions.py`).
* Accumulators are live all the time: those of gradients, and those of results that are sums over
  the micro-batches. They have the type in which the sum is added up.
* Temporaries of a fragment are live if they are written to memory. An element-wise op that feeds
  only one other is fused into it. Views, transposes that dots read directly, and values that are
  free in any layout need no memory.
* Loops work in place (`analysis/liveness.py`).

Copies in other layouts or orders, made for one op, live as long as that op (`copies.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Literal

import numpy as np

from alpa.dialects import body, ir, mpmd, stablehlo, terminator
from alpa.dialects.attributes import read_part
from alpa.passes.analysis.block_rows import row_of
from alpa.passes.analysis.graph import folds_into_dots, type_bytes
from alpa.passes.analysis.liveness import (
    UPDATES_IN_PLACE,
    Lives,
    in_place_of,
    updates_variable,
)
from alpa.passes.sharding.copies import copies_for_convolutions, copies_for_ops, local_bytes
from alpa.passes.sharding.ops import Cache, Op
from alpa.passes.sharding.shard_graph import ShardGraph
from alpa.passes.solve.sharding.problem import Usage

_VIEWS = frozenset({"stablehlo.reshape", "sdy.sharding_constraint"})
_BRANCHES = frozenset({"stablehlo.case", "stablehlo.if"})
_PLACED = 8
"""The number of temporaries of a fragment that may share the memory of its largest result."""
_SMALL = 4096
"""Bytes of a whole tensor below which it is not worth a row."""

Kind = Literal["states", "inputs", "activations", "gradients", "temporaries", "copies"]


@dataclass(frozen=True, kw_only=True)
class Held:
    """A usage and what kind of value it is."""

    usage: Usage
    kind: Kind


def buffer(
    graph: ShardGraph,
    kind: Kind,
    value: ir.Value,
    span: tuple[int, int],
    copies: int = 1,
    type_: ir.RankedTensorType | None = None,
) -> list[Held]:
    """What copies of a value hold, or of a tensor of a type in its layout, unless it is little."""
    placed, (start, stop) = graph.placed.get(value), span
    if placed is None or stop <= start or type_bytes(type_ or placed.type) < _SMALL:
        return []
    size = local_bytes(graph, placed.layouts, type_ or ir.RankedTensorType(placed.type), copies)
    return [Held(usage=Usage(nodes=(placed.node,), bytes=size, start=start, stop=stop), kind=kind)]


def passing(
    graph: ShardGraph,
    clock: Clock,
    elsewhere: AbstractSet[ir.Value] = frozenset(),
    made_here: AbstractSet[ir.Value] = frozenset(),
) -> Iterator[Held]:
    """What lives inside of fragments only: temporaries and copies.

    Args:
        graph: of the mesh.
        clock: of the fragments.
        elsewhere: results of fragments that are written to donated arguments or accumulators.
        made_here: arguments inside of fragments that other layers of the same stage make.
    """
    key = frozenset(elsewhere)
    for value, span, place in clock.kept.once(key, lambda: _temporaries(clock, key)):
        for one in buffer(graph, "temporaries", value, span):
            if place is None:
                yield one
            else:
                yield replace(one, usage=_where_too_large(graph, one.usage, place))
    read_until = clock.kept.once(
        "views", lambda: {value: clock.until[value] for value in clock.base}
    )
    yield from (
        Held(usage=usage, kind="copies")
        for usage in chain(
            copies_for_ops(graph, clock.at, read_until),
            copies_for_convolutions(graph, clock.at, made_here),
        )
    )


def _temporaries(
    clock: Clock, elsewhere: AbstractSet[ir.Value]
) -> list[tuple[ir.Value, tuple[int, int], ir.Value | None]]:
    """The values of fragments that are worth a row, when they live, and the result in whose place
    they may lie."""
    inside = {**_in_place_of_results(clock, elsewhere), **clock.carried}
    return [
        (value, (start, clock.until[value]), inside.get(value))
        for value, start in clock.made.items()
        if type_bytes(value.type) >= _SMALL
    ]


def _in_place_of_results(
    clock: Clock, elsewhere: AbstractSet[ir.Value]
) -> dict[ir.Value, ir.Value]:
    """By temporary, the result of its fragment in whose place it may lie until that is written.

    Of each fragment the largest result, and the largest temporaries that do not live together. Only
    the program's own results count: those that other fragments read are many, of a training step,
    and a temporary and a result are a pair of nodes, which are dear to search.
    """
    read = elsewhere | {value for fragment in clock.spans for value in fragment.operands}
    inside: dict[ir.Value, ir.Value] = {}
    by_size = sorted(clock.made, key=lambda v: -type_bytes(v.type))
    for fragment, (start, _) in clock.spans.items():
        returned = zip(terminator(body(fragment)).operands, fragment.results, strict=True)
        own = [(v, outer) for v, outer in returned if outer not in read and v in clock.at]
        if not own:
            continue
        value, place = max(own, key=lambda pair: type_bytes(pair[0].type))
        taken: list[tuple[int, int]] = []
        for temporary in by_size:
            if len(taken) == _PLACED:
                break
            begin, stop = clock.made[temporary], clock.until[temporary]
            if begin <= start or stop > clock.at[value]:
                continue
            if all(stop <= a or b <= begin for a, b in taken):
                taken.append((begin, stop))
                inside[temporary] = place
    return inside


def _where_too_large(graph: ShardGraph, usage: Usage, result: ir.Value) -> Usage:
    """What a temporary takes besides the place of a result."""
    placed = graph.placed[result]
    place = local_bytes(graph, placed.layouts, ir.RankedTensorType(placed.type))
    if placed.node == usage.nodes[0]:
        return replace(usage, bytes=np.where(usage.bytes <= place, 0.0, usage.bytes))
    besides = np.where(usage.bytes[:, None] <= place, 0.0, usage.bytes[:, None])
    return replace(usage, nodes=(*usage.nodes, placed.node), bytes=besides)


@dataclass
class Clock(Lives):
    """Visits the ops of a mesh's fragments in program order."""

    ops_of: Mapping[ir.Block, Sequence[Op]]
    free: AbstractSet[ir.Value]
    """what is computed in whatever layout is used"""
    spans: dict[mpmd.FragmentOp, tuple[int, int]] = field(default_factory=dict)
    """when each fragment starts, and when the next one does"""
    at: dict[ir.Value, int] = field(default_factory=dict)
    """by its first result, when an op runs"""
    carried: dict[ir.Value, ir.Value] = field(default_factory=dict)
    """the next values of loops' variables, and the loops' results, in whose places they are"""
    kept: Cache = field(default_factory=Cache)
    """what is made of it: the problems of classes on all meshes share a clock"""
    _returned: set[ir.Value] = field(default_factory=set)
    """what is written into the place of a fragment's result"""

    @classmethod
    def of(cls, graph: ShardGraph) -> Clock:
        """The times of all fragments of a graph."""
        clock = cls(graph.ops_of, graph.free.keys())
        for op in graph.steps:
            if isinstance(op, mpmd.FragmentOp):
                clock._visit_fragment(op)
        return clock

    @property
    def micro_batch(self) -> tuple[int, int]:
        """When the fragments run that do so for each micro-batch."""
        runs = [span for op, span in self.spans.items() if read_part(op) != "update"]
        return (runs[0][0], runs[-1][1]) if runs else (0, 0)

    def op_at(self, time: int) -> ir.OpView | ir.Operation:
        """The op that runs at a time, or the fragment that ends then."""
        fragment = next(op for op, (_, stop) in self.spans.items() if time < stop)
        value = next((value for value, when in self.at.items() if when == time), None)
        return fragment if value is None else ir.OpResult(value).owner

    def _visit_fragment(self, fragment: mpmd.FragmentOp) -> None:
        start = self.now
        returned = terminator(body(fragment)).operands
        for value in returned:
            self._returned.update(
                in_place_of(value, lambda op: isinstance(op, stablehlo.ReshapeOp))
            )
        self._visit(body(fragment))
        self.read(returned)
        self.now += 1
        self.spans[fragment] = (start, self.now)

    def _visit(self, block: ir.Block) -> None:
        for op in self.ops_of[block]:
            self.now += 1
            if op.results:
                self.at[op.results[0]] = self.now
            if isinstance(op.view, stablehlo.WhileOp):
                self._visit_loop(op.view)
                continue
            through = self._through(op)
            # What reads the result later reads the operands then, too.
            if through is None or op.results[0] not in self._readers:
                self.read(op.operands)
            if op.name in _BRANCHES:
                inside = self.now
                for i in range(len(op.view.regions)):
                    self._visit(body(op.view, i))
                self.keep(made_before=inside, read_after=inside)
            for result in op.results:
                self._make(op, result, through)

    def _visit_loop(self, op: stablehlo.WhileOp) -> None:
        start = self.now
        self.enter_loop(op, lambda result: self._write(result, start + 1))
        self.now += 1
        for i in range(len(op.regions)):
            self._visit(body(op, i))
            self.now += 1
            self.read(terminator(body(op, i)).operands)
        overwriting = {
            result
            for one in self.ops_of[body(op, 1)]
            if one.follow is not None or one.name in UPDATES_IN_PLACE
            for result in one.results
        }
        self.carried.update(
            self.next_values(op, lambda value: self.made[value] + (value in overwriting))
        )
        self.keep(made_before=start + 2, read_after=start + 1)

    def _write(self, result: ir.Value, start: int) -> None:
        if result not in self._returned:
            self.write(result, start)

    def _through(self, op: Op) -> Literal["view", "fused"] | None:
        """Whether the result of an op is a view of its operand, or computed where it is read."""
        if op.name in _VIEWS:
            return "view"
        return "fused" if folds_into_dots(op.view) or is_fused(op, self._readers) else None

    def _make(self, op: Op, result: ir.Value, through: Literal["view", "fused"] | None) -> None:
        if op.name == "stablehlo.optimization_barrier":
            self.see_through(result, [op.operands[op.results.index(result)]])
        elif through is not None:
            self.see_through(result, op.operands, fused=through == "fused")
        elif updates_variable(op.view):
            self.see_through(result, op.operands[:1])
        else:
            self._write(result, self.now)
        if result in self.free:
            self.fused.add(result)

    @cached_property
    def _readers(self) -> dict[ir.Value, Op | None]:
        return readers(self.ops_of)


def readers(ops_of: Mapping[ir.Block, Sequence[Op]]) -> dict[ir.Value, Op | None]:
    """Of each value that is read the op that does, None where there are several."""
    only: dict[ir.Value, Op | None] = {}
    for block, ops in ops_of.items():
        for op in (*ops, Op.of(row_of(terminator(block)))):
            for value in op.operands:
                only[value] = None if value in only else op
    return only


def is_fused(op: Op, readers: Mapping[ir.Value, Op | None]) -> bool:
    """Whether an element-wise op is computed inside its only user, also an element-wise one."""
    if op.follow is None or len(op.results) != 1:
        return False
    reader = readers.get(op.results[0])
    return reader is not None and reader.follow is not None
