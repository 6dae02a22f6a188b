"""Segments of a rematerialised layer: where it is cut, and the order of its backward part.

A layer of the clustering may hold several blocks of a network. If its whole forward part is
computed again before its backward ops, the activations of all blocks live at the same time. Cut
where few bytes cross, it is computed again in segments, the last one first:

    %b1, %d1 = optimization_barrier %b, %d        // %b: kept at the cut, %d: a cotangent
    ... = the ops after %b, again, and their backward ops, which make %d2
    %a1, %d3 = optimization_barrier %a, %d2       // %a: what enters the layer
    ... = the ops up to %b, again, and their backward ops

What crosses a cut is a result of the forward part, as what enters a layer is. `segment_dp` chooses
the cuts: they minimise K * (bytes kept) + (bytes of the largest segment). K is the number of
layers: under 1F1B, the first of S stages has K / S layers and S micro-batches in flight, so it
keeps K times what a layer keeps, whatever S is, but computes one segment at a time. (GPipe keeps
more.) Bytes are those of whole tensors, as if sharding divided both terms equally. A segment's
bytes are those of its values that backward ops read.

The order is made on demand, so each op runs as late as it can. The barrier makes a segment wait for
the backward ops after it, for compilers that schedule ops themselves. The first segment that runs
waits in the same way for the cotangents that the layer gets from those behind it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field

import numpy as np

from alpa.dialects import ir
from alpa.passes.analysis.graph import Graph, type_bytes, used_values
from alpa.passes.analysis.op_kinds import BROADCASTS, SOURCES, SUMS
from alpa.passes.solve.layers import segment_dp

Gate = tuple[ir.Value, ...]
"""Values that are read through a barrier from here on"""


@dataclass(frozen=True, kw_only=True)
class Cuts:
    """Where a layer is cut."""

    after: tuple[int, ...] = ()
    """the last op of each segment but the last one, by its number in the forward part"""
    kept: frozenset[int] = frozenset()
    """the values that cross"""


def least_memory(
    graph: Graph, again: Sequence[int], wanted: Collection[int], weight: float
) -> Cuts:
    """The cuts of a forward part that minimise K * kept bytes + the largest segment's bytes.

    A position is a candidate if fewer bytes cross it than the one before, and no more than the one
    after.

    Args:
        again: the ops that are computed again, in order.
        wanted: the values that backward ops read.
        weight: of what is kept.
    """
    place = {o: n for n, o in enumerate(again, start=1)}
    free = _free(graph, again)
    made = [v for o in again if o not in free for v in graph.results[o]]
    size = np.array([graph.bytes[v] for v in made], dtype=float)
    born = np.array([place[graph.producer[v]] for v in made], dtype=int)
    read = np.array(
        [max((place[u] for u in graph.users[v] if u in place), default=0) for v in made], dtype=int
    )
    read = np.maximum(read, born)
    changes = np.zeros(len(again) + 2)
    np.add.at(changes, born, size)
    np.subtract.at(changes, read, size)
    crossing = np.cumsum(changes)[: len(again) + 1]
    inside = range(1, len(again))
    narrow = [p for p in inside if crossing[p] < crossing[p - 1] and crossing[p] <= crossing[p + 1]]
    if not narrow:
        return Cuts()
    needed = np.isin(made, list(wanted))
    positions = [0, *narrow, len(again)]
    between = np.searchsorted(positions, born)
    """of each value the number of the first position behind its op"""

    def sums(counted: np.ndarray) -> np.ndarray:
        """By position, the bytes of counted values that are made after it."""
        made_at = np.bincount(between, size * counted, minlength=len(positions))
        return made_at[::-1].cumsum()[::-1] - made_at

    kept, held = (
        np.stack([sums(which(end)) for end in positions], axis=1)
        for which in (
            lambda end: (born <= end) & (read > end),
            lambda end: (born <= end) & (read <= end) & needed,
        )
    )
    found = segment_dp.solve(segment_dp.Problem(kept=kept, held=held, weight=weight))
    ends = [positions[cut] for cut in found.cuts]
    spans = zip(made, born.tolist(), read.tolist(), strict=True)
    return Cuts(
        after=tuple(again[end - 1] for end in ends),
        kept=frozenset(v for v, first, last in spans if any(first <= end < last for end in ends)),
    )


def _free(graph: Graph, ops: Sequence[int]) -> set[int]:
    """Constants, and what is broadcast from them: made again in each segment, and never written."""
    found: set[int] = set()
    for o in ops:
        name = graph.ops[o].operation.name
        if name in SOURCES or (
            name in BROADCASTS and all(graph.producer[v] in found for v in graph.operands[o])
        ):
            found.add(o)
    return found


def in_order(
    graph: Graph,
    again: Sequence[int],
    cuts: Cuts,
    own: Sequence[ir.OpView],
    returned: Set[ir.Value],
    activations: Set[ir.Value],
    cotangents: Sequence[ir.Value],
) -> Iterator[ir.OpView | Gate]:
    """The ops of a backward part, each as late as its readers allow, with gates between segments.

    Args:
        graph: the forward part's ops.
        again: those that are computed again.
        own: the backward part's own ops, in order.
        returned: the values that the backward part returns.
        activations: what is there anyway and differs between micro-batches.
        cotangents: what the backward part reads of others.
    """
    free = _free(graph, again)
    segment = [-1 if o in free else bisect_left(cuts.after, o) for o in again]
    entering = [dict[ir.Value, None]() for _ in range(len(cuts.after) + 1)]
    for o, number in zip(again, segment, strict=True):
        if number >= 0:
            read = (graph.values[v] for v in graph.operands[o])
            entering[number].update(dict.fromkeys(v for v in read if v in activations))
    demand = _Demand.of([graph.ops[o] for o in again], segment, own, entering, cotangents)
    used = {p for producers in demand.producers for p in producers}
    first, last = len(again), len(demand.ops)
    # What is returned as the forward part makes it comes last: nothing here waits for it.
    for o in (*range(first, last), *range(first)):
        if (o >= first and o not in used) or not returned.isdisjoint(demand.ops[o].results):
            yield from demand.run(o)


@dataclass(frozen=True, kw_only=True)
class _Demand:
    """Ops, and which of them have run."""

    ops: list[ir.OpView]
    producers: list[list[int]]
    """the ops that make what an op reads, those of later segments first"""
    segment: list[int]
    """of an op that is computed again; -1 for others"""
    first_own: int
    entering: Sequence[Collection[ir.Value]]
    """by segment, the activations from which it is computed"""
    awaited: tuple[ir.Value, ...]
    """the cotangents of which more is made than sums"""
    done: set[int] = field(default_factory=set[int])
    opened: set[int] = field(default_factory=set[int])
    """segments of which an op has run"""

    @classmethod
    def of(
        cls,
        again: Sequence[ir.OpView],
        segment: Sequence[int],
        own: Sequence[ir.OpView],
        entering: Sequence[Collection[ir.Value]],
        cotangents: Sequence[ir.Value],
    ) -> _Demand:
        ops = [*again, *own]
        segment = [*segment, *(-1 for _ in own)]
        maker: dict[ir.Value, int] = {r: o for o, op in enumerate(ops) for r in op.results}
        producers: list[list[int]] = []
        first: list[int] = []  # the first segment that an op needs
        read: set[ir.Value] = set()  # by own ops that are no sums
        for o, op in enumerate(ops):
            used = used_values(op)
            if o >= len(again) and op.operation.name not in SUMS:
                read.update(used)
            mine = dict.fromkeys(maker[value] for value in used if value in maker)
            producers.append(sorted(mine, key=lambda p: -first[p]))
            needs = [first[p] for p in mine]
            first.append(min([*needs, segment[o] if segment[o] >= 0 else len(ops)]))
        return cls(
            ops=ops,
            producers=producers,
            segment=segment,
            first_own=len(again),
            entering=entering,
            awaited=tuple(v for v in cotangents if v in read),
        )

    def run(self, last: int) -> Iterator[ir.OpView | Gate]:
        """The ops that have not run, from those that an op needs to the op itself."""
        path = [last]
        while path:
            o = path[-1]
            waiting = [p for p in self.producers[o] if p not in self.done]
            if waiting:
                path.append(waiting[0])
                continue
            path.pop()
            if o in self.done:
                continue
            number = self.segment[o]
            if number >= 0 and number not in self.opened:
                awaited = self._cotangent(path) if self.opened else self.awaited
                if awaited and self.entering[number]:
                    yield (*self.entering[number], *awaited)
                self.opened.add(number)
            self.done.add(o)
            yield self.ops[o]

    def _cotangent(self, path: Sequence[int]) -> tuple[ir.Value, ...]:
        """What the nearest of the backward ops that wait for a segment reads of others that ran."""
        for o in reversed(path):
            # A sum with a gradient of another segment waits for nothing.
            if o < self.first_own or self.ops[o].operation.name in SUMS:
                continue
            ran = {p for p in self.producers[o] if p >= self.first_own and p in self.done}
            made = {value for p in ran for value in self.ops[p].results}
            for value in self.ops[o].operands:
                if value in made and not _is_splat(value):
                    return (value,)
        return ()


def _is_splat(value: ir.Value) -> bool:
    """Whether a value is a constant, or broadcast from a scalar."""
    op = ir.OpResult(value).owner
    name = op.operation.name
    return name in SOURCES or (name in BROADCASTS and type_bytes(op.operands[0].type) <= 8)
