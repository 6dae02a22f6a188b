"""Live buffers of a mesh over time: the memory rows of its sharding problem.

Time counts the ops of the mesh's fragments in program order. A value holds the bytes of its
shard, which depend on its node's strategy, from the op that makes it to its last use:

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

Copies in other layouts, made for one op, live as long as that op (`copies.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

import numpy as np

from alpa.dialects import body, ir, mpmd, stablehlo, terminator
from alpa.dialects.attributes import Argument, read_part
from alpa.passes.analysis.graph import folds_into_dots, type_bytes
from alpa.passes.analysis.liveness import Lives
from alpa.passes.sharding.copies import LocalBytes, copies_for_ops
from alpa.passes.sharding.ops import Op
from alpa.passes.sharding.shard_graph import ShardGraph
from alpa.passes.sharding.versions import Versions
from alpa.passes.solve.sharding.problem import Usage

_VIEWS = frozenset({"stablehlo.reshape", "sdy.sharding_constraint"})
_CONTROL_FLOW = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})
_PLACED = 8
"""The number of temporaries of a fragment that may share the memory of its largest result."""
_SMALL = 4096
"""Bytes of a whole tensor below which it is not worth a row."""


@dataclass(frozen=True, kw_only=True)
class Residence:
    """What outlives fragments: micro-batches of a step, versions of values, and who is donated."""

    num_micro_batches: int
    versions: Versions
    donated: frozenset[ir.Value]
    """results of fragments that take the place of a donated argument"""
    sums: Mapping[ir.Value, ir.RankedTensorType] = field(
        default_factory=dict[ir.Value, ir.RankedTensorType]
    )
    """by result of a fragment that is returned as a sum over the micro-batches, the sum's type"""


Kind = Literal["states", "inputs", "activations", "gradients", "temporaries", "copies"]


@dataclass(frozen=True, kw_only=True)
class Held:
    """A usage and what kind of value it is."""

    usage: Usage
    kind: Kind


def held(
    graph: ShardGraph,
    arguments: Sequence[tuple[ir.Value, Argument]],
    fragments: Sequence[mpmd.FragmentOp],
    transfers: Sequence[ir.Value],
    residence: Residence,
) -> list[Held]:
    """The usages of one mesh: its arguments, what transfers bring to it, and its fragments."""
    batches, versions = residence.num_micro_batches, residence.versions
    accumulated = {
        result
        for fragment in fragments
        if batches > 1 and read_part(fragment) == "backward"
        for result in fragment.results
    }
    clock = _Clock(graph.ops_of)
    spans = [clock.visit_fragment(fragment) for fragment in fragments]
    end = clock.now
    last = {
        operand: max(stop, 0)
        for fragment, (_, stop) in zip(fragments, spans, strict=True)
        for operand in fragment.operands
    }
    found: list[Held] = []
    sizes = LocalBytes(graph)

    def add(
        kind: Kind,
        value: ir.Value,
        start: int,
        stop: int,
        copies: int = 1,
        type_: ir.RankedTensorType | None = None,
    ) -> None:
        usage = _usage(sizes, value, start, stop, copies, type_)
        if usage is not None:
            found.append(Held(usage=usage, kind=kind))

    for value, attributes in arguments:
        stays = attributes.role != "batch" or batches > 1
        kind = "inputs" if attributes.role == "batch" else "states"
        copies = batches if kind == "inputs" else 1
        add(kind, value, 0, end if stays else last.get(value, end), copies)
    first: dict[ir.Value, int] = {}
    for fragment, (start, _) in zip(fragments, spans, strict=True):
        for operand in fragment.operands:
            first.setdefault(operand, start)
    for value in transfers:
        start = max(0, first.get(value, end) - 1)
        add("activations", value, start, last.get(value, end), versions.of(value))
    for fragment, (start, stop) in zip(fragments, spans, strict=True):
        part = read_part(fragment)
        for result in fragment.results:
            if result in residence.donated:
                continue
            sum_type = residence.sums.get(result)
            kind = "activations" if part == "forward" else "gradients"
            if result in accumulated:
                add("gradients", result, 0, end, type_=sum_type)
            elif sum_type is None:
                add(kind, result, start, last.get(result, end), versions.of(result))
            else:
                add(kind, result, 0, end, type_=sum_type)
                copies = versions.of(result) if result in last else 1
                add(kind, result, start, last.get(result, stop), copies)
    read = residence.donated | accumulated | set(last)
    inside = _in_place_of_results(clock, fragments, spans, read)
    for value, start in clock.made.items():
        usage = _usage(sizes, value, start, clock.until[value], 1)
        if usage is not None and value in inside:
            usage = _where_too_large(sizes, usage, inside[value])
        if usage is not None:
            found.append(Held(usage=usage, kind="temporaries"))
    read_until = {value: clock.until[value] for value in clock.base}
    for usage in copies_for_ops(sizes, clock.at, read_until):
        found.append(Held(usage=usage, kind="copies"))
    return found


def _in_place_of_results(
    clock: _Clock,
    fragments: Sequence[mpmd.FragmentOp],
    spans: Sequence[tuple[int, int]],
    read: AbstractSet[ir.Value],
) -> dict[ir.Value, ir.Value]:
    """By temporary, the result of its fragment in whose place it may lie until that is written.

    Of each fragment the largest result, and the largest temporaries that do not live together. Only
    the program's own results count: those that other fragments read are many, of a training step,
    and a temporary and a result are a pair of nodes, which are dear to search.
    """
    inside: dict[ir.Value, ir.Value] = {}
    for fragment, (start, _) in zip(fragments, spans, strict=True):
        results = [
            (type_bytes(value.type), value, outer)
            for value, outer in zip(
                terminator(body(fragment)).operands, fragment.results, strict=True
            )
            if outer not in read and value in clock.at
        ]
        if not results:
            continue
        _, value, outer = max(results, key=lambda one: one[0])
        written = clock.at[value]
        lives = sorted(
            (
                (-type_bytes(v.type), begin, clock.until[v], v)
                for v, begin in clock.made.items()
                if start < begin and clock.until[v] <= written
            ),
            key=lambda one: one[:3],
        )
        taken: list[tuple[int, int]] = []
        for _, begin, stop, temporary in lives:
            if len(taken) == _PLACED:
                break
            if all(stop <= a or b <= begin for a, b in taken):
                taken.append((begin, stop))
                inside[temporary] = outer
    return inside


def _where_too_large(sizes: LocalBytes, usage: Usage, result: ir.Value) -> Usage | None:
    """What a temporary takes besides the place of a result."""
    placed = sizes.graph.placed.get(result)
    if placed is None:
        return usage
    place = sizes.of(placed.layouts, ir.RankedTensorType(placed.type))
    if placed.node == usage.nodes[0]:
        return replace(usage, bytes=np.where(usage.bytes <= place, 0.0, usage.bytes))
    besides = np.where(usage.bytes[:, None] <= place, 0.0, usage.bytes[:, None])
    return replace(usage, nodes=(*usage.nodes, placed.node), bytes=besides)


def _usage(
    sizes: LocalBytes,
    value: ir.Value,
    start: int,
    stop: int,
    copies: int,
    type_: ir.RankedTensorType | None = None,
) -> Usage | None:
    """What a value, or a tensor of a type in its layout, holds; None where that is too little."""
    placed = sizes.graph.placed.get(value)
    if placed is None or stop <= start or type_bytes(type_ or placed.type) < _SMALL:
        return None
    held = sizes.of(placed.layouts, type_ or ir.RankedTensorType(placed.type), copies)
    return Usage(nodes=(placed.node,), bytes=held, start=start, stop=stop)


@dataclass
class _Clock(Lives):
    """Visits ops in program order."""

    ops_of: Mapping[ir.Block, Sequence[Op]]
    _returned: set[ir.Value] = field(default_factory=set)
    """what is written into the place of a fragment's result"""
    at: dict[ir.Value, int] = field(default_factory=dict)
    """by its first result, when an op runs"""
    watched: int = -1
    op: ir.OpView | None = None
    """that runs at the watched time"""

    def visit_fragment(self, fragment: mpmd.FragmentOp) -> tuple[int, int]:
        start = self.now
        returned = terminator(body(fragment)).operands
        for value in returned:
            self._returned.add(value)
            while isinstance(op := value.owner, stablehlo.ReshapeOp):
                value = op.operands[0]
                self._returned.add(value)
        self._visit(body(fragment))
        self.read(returned)
        self.now += 1
        return start, self.now

    def _visit(self, block: ir.Block) -> None:
        for op in self.ops_of[block]:
            self.now += 1
            if self.now == self.watched:
                self.op = op.view
            if op.results:
                self.at[op.results[0]] = self.now
            self.read(op.operands)
            if op.name in _CONTROL_FLOW:
                inside = self.now
                for i in range(len(op.view.regions)):
                    self._visit(body(op.view, i))
                self.keep(made_before=inside, read_after=inside)
            for result in op.results:
                self._make(op, result)

    def _make(self, op: Op, result: ir.Value) -> None:
        if op.name in _VIEWS or folds_into_dots(op.view):
            self.see_through(result, op.operands[:1])
        elif is_fused(op, self._readers):
            self.see_through(result, op.operands)
        elif result not in self._returned:
            self.write(result, self.now)

    @cached_property
    def _readers(self) -> dict[ir.Value, Op | None]:
        return readers(self.ops_of)


def op_at(
    ops_of: Mapping[ir.Block, Sequence[Op]], fragments: Sequence[mpmd.FragmentOp], time: int
) -> ir.OpView:
    """The op that runs at a time, or the fragment that ends then."""
    clock = _Clock(ops_of)
    for fragment in fragments:
        clock.watched = time
        _, stop = clock.visit_fragment(fragment)
        if clock.op is not None:
            return clock.op
        if time < stop:
            return fragment
    return fragments[-1]


def readers(ops_of: Mapping[ir.Block, Sequence[Op]]) -> dict[ir.Value, Op | None]:
    """Of each value that is read the op that does, None where there are several."""
    only: dict[ir.Value, Op | None] = {}
    for block, ops in ops_of.items():
        for op in (*ops, Op.of(terminator(block))):
            for value in op.operands:
                only[value] = None if value in only else op
    return only


def is_fused(op: Op, readers: Mapping[ir.Value, Op | None]) -> bool:
    """Whether an element-wise op is computed inside its only user, also an element-wise one."""
    if op.follow is None or len(op.results) != 1:
        return False
    reader = readers.get(op.results[0])
    return reader is not None and reader.follow is not None
