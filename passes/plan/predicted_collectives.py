"""The collectives that a planned fragment will run, read off its annotations alone.

* An op whose sharding rule has a sharded reduction factor leaves partial sums: an all-reduce of
  its result, unless the result is annotated as unreduced. A reduction of several values at once
  (argmax) gathers the devices' partial results instead.
* A change of layout - an `sdy.sharding_constraint`, or a result that an op cannot make from its
  operands as they lie - takes the cheapest path of slices, all-gathers and all-to-alls
  (`cost/reshard.py`).
* An all-reduce whose only use is a constraint that shards the result along the reduced axes is a
  reduce-scatter over these, and an all-reduce over the others.
* Bringing an unreduced value into another layout is a reduce-scatter for each dimension that is cut
  and an all-reduce over the other axes (`lower-partial-sums`), then a path.

A loop's body counts once per trip if the trip count is known. All branches count.
`alpa.tools.check_plan` shows the differences from XLA.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from alpa.dialects import body, ir, sdy, stablehlo, terminator
from alpa.dialects.sharding import ShardingRule
from alpa.passes.analysis import op_cost
from alpa.passes.analysis.graph import element_bytes
from alpa.passes.cost.collectives import share_of_start
from alpa.passes.cost.reshard import Layout, ReshardTable
from alpa.passes.plan.annotated import (
    Annotated,
    annotated_fragments,
    has_own_ops,
    rank,
)
from alpa.passes.sharding.combining import COMBINED_KINDS, combined_with
from alpa.passes.sharding.layouts import layout_of
from alpa.passes.sharding.manual import Kind, fixed_shardings, written_collectives
from alpa.passes.sharding.padding import is_even
from alpa.passes.sharding.reshard_steps import Exchange, exchanges
from alpa.passes.sharding.rules import populated, rule_of
from alpa.passes.sharding.strategies import axes_of_factors
from alpa.passes.sharding.sums import unreduced_axes


@dataclass(frozen=True, kw_only=True)
class Collective:
    """Collectives of one kind and size.

    `bytes` are what one device holds of the full array: the result of an all-gather, the operand
    of any other. `devices` is the size of a group, `count` how often one execution runs it.
    """

    kind: Kind
    axes: tuple[str, ...]
    devices: int
    bytes: int
    count: int
    combined: int = 1
    """with how many others each is priced, 1 if alone (`sharding/combining.py`)"""

    @property
    def payload(self) -> int:
        """Bytes of all of them."""
        return self.bytes * self.count

    @property
    def sent(self) -> float:
        """Bytes that each device sends on a ring.

        The sum stays the same if a collective over two axes is split into one for each axis, or an
        all-reduce into a reduce-scatter and an all-gather.
        """
        part = 1.0 if self.kind == "collective-permute" else 1 - 1 / self.devices
        return self.payload * part * (2 if self.kind == "all-reduce" else 1)

    @property
    def result_bytes(self) -> float:
        """Bytes of the result of one of them, on one device."""
        return self.bytes / (self.devices if self.kind == "reduce-scatter" else 1)

    @property
    def starts(self) -> float:
        """How many starts the search prices them with."""
        if self.combined == 1 or self.kind not in COMBINED_KINDS:
            return self.count
        return self.count * share_of_start(self.result_bytes, self.combined)


class Placed(NamedTuple):
    """A collective of a fragment, and with which others of the fragment it may be combined."""

    collective: Collective
    key: tuple[object, ...] | None = None
    """equal for those that one collective can replace, as long as none waits for another; None if
    it stays alone"""
    waits_for: int = 0
    """bit i: for the i-th collective of the fragment"""
    op: ir.OpView | None = None
    """that needs it; of a returned value the one that makes it, None if that is an argument"""


def predicted_collectives(module: ir.Module) -> list[tuple[Collective, ...]]:
    """For each fragment of a planned module, in program order, what one execution of it runs.

    Raises:
        PassError: there is no plan, or a sharding does not fit its mesh.
    """
    with populated(module):
        return [collectives_of(annotated) for annotated in annotated_fragments(module)]


def collectives_of(annotated: Annotated) -> tuple[Collective, ...]:
    """As `predicted_collectives`, for a fragment whose ops carry their sharding rules."""
    return merged(it.collective for it in collectives_in_order(annotated))


def collectives_in_order(annotated: Annotated) -> list[Placed]:
    """The same, one by one in program order."""
    walk = _Walk(annotated)
    walk.visit(body(annotated.fragment), 1)
    end = terminator(body(annotated.fragment))
    for value, result in zip(end.operands, annotated.fragment.results, strict=True):
        walk.now = None if isinstance(value.owner, ir.Block) else value.owner.opview
        walk.bring(value, annotated.outer_layout(result), 1)
    return walk.found


def merged(collectives: Iterable[Collective]) -> tuple[Collective, ...]:
    """Adds up the counts of equal ones; in the order of kinds, largest first."""
    counts: Counter[Collective] = Counter()
    for c in collectives:
        counts[replace(c, count=1)] += c.count
    found = [replace(c, count=count) for c, count in counts.items()]
    return tuple(sorted(found, key=lambda c: (c.kind, -c.bytes, c.axes)))


@dataclass(frozen=True)
class _Needs:
    """What an op needs, by number: operands in other layouts, results that are reduced."""

    moved: tuple[tuple[int, Layout], ...]
    """the layout that the op wants an operand in"""
    summed: tuple[tuple[int, tuple[int, ...]], ...]
    """the axes over which the parts of a result are summed up"""


class _Together(NamedTuple):
    """How the collectives on one value are combined with those on others."""

    priced: int = 1
    """as how many each is priced"""
    key: tuple[object, ...] | None = None
    """what those that are combined have in common beside their kind and axes; None: never"""


_ALONE = _Together()


@dataclass
class _Walk:
    """Visits the ops of a fragment; `found` are its collectives."""

    annotated: Annotated
    found: list[Placed] = field(default_factory=list)
    now: ir.OpView | None = None
    """the op that is visited"""
    _tables: dict[int, ReshardTable] = field(default_factory=dict)
    # The collectives that a value waits for, as `Placed.waits_for`, if any; those in a layout too.
    _waits: dict[ir.Value, int] = field(default_factory=dict)
    _brought: dict[tuple[ir.Value, Layout, int], int] = field(default_factory=dict)
    _block: ir.Block | None = None
    """the region that is visited; None: the fragment's own block"""
    # Most ops equal another one. Needs and exchanges are found once for all equal ops.
    _needs: dict[tuple[ShardingRule, tuple[Layout, ...], tuple[Layout, ...]], _Needs] = field(
        default_factory=dict
    )
    _exchanged: dict[tuple[ir.Type, Layout, Layout], list[Exchange]] = field(default_factory=dict)

    def visit(self, block: ir.Block, times: int) -> None:
        """All ops of a block that runs `times` times, but not its terminator."""
        for op in list(block.operations)[:-1]:
            waits, self.now = self._waits_of(op.operands), op
            if isinstance(op, sdy.ShardingConstraintOp):
                waits |= self.bring(op.operands[0], self.annotated.layout(op.results[0]), times)
            elif isinstance(op, stablehlo.WhileOp):
                inside = times * op_cost.trip_count_or_default(op)
                waits = self._visit_regions(op, op.operands, waits, times, inside)
            elif isinstance(op, sdy.ManualComputationOp):
                waits = self._visit_manual(op, waits, times)
            elif has_own_ops(op):
                waits = self._visit_regions(op, (), waits, times, times)
            else:
                rule = rule_of(op)
                if rule is not None:
                    waits = self._visit_op(op, rule, waits, times)
            self._let_wait(op.results, waits)

    def _waits_of(self, values: Iterable[ir.Value]) -> int:
        """The collectives that one of the values waits for."""
        waits = 0
        if self._waits:
            for value in values:
                waits |= self._waits.get(value, 0)
        return waits

    def _let_wait(self, values: Iterable[ir.Value], waits: int) -> None:
        if waits:
            for value in values:
                self._waits[value] = waits

    def _visit_regions(
        self, op: ir.OpView, starts: Sequence[ir.Value], waits: int, times: int, inside: int
    ) -> int:
        """Returns `waits`, the collectives that the operands wait for, and those of the regions."""
        layouts = [self.annotated.layout(result) for result in op.results]
        for start, layout in zip(starts, layouts, strict=bool(starts)):
            waits |= self.bring(start, layout, times)
        outer = self._block
        for number in range(len(op.regions)):
            region = self._block = body(op, number)
            self._let_wait(region.arguments, waits)
            self.visit(region, inside)
            ends = terminator(region).operands
            waits |= self._waits_of(ends)
            if number > 0 or not starts:  # A loop's first region is its condition.
                for value, layout in zip(ends, layouts, strict=True):
                    waits |= self.bring(value, layout, inside)
        self._block = outer
        return waits

    def _visit_manual(self, op: sdy.ManualComputationOp, waits: int, times: int) -> int:
        inputs, _ = fixed_shardings(op)
        for operand, sharding in zip(op.operands, inputs, strict=True):
            waits |= self.bring(operand, layout_of(op, sharding, self.annotated.mesh), times)
        for one in written_collectives(op, self.annotated.mesh):
            waits = self._add(one.kind, one.axes, one.bytes, times * one.times, _ALONE, waits)
        return waits

    def _visit_op(self, op: ir.OpView, rule: ShardingRule, waits: int, times: int) -> int:
        """Returns `waits`, the collectives that the operands wait for, and the op's own ones."""
        results, operands = list(op.results), list(op.operands)
        layout = self.annotated.layout
        key = (rule, tuple(map(layout, results)), tuple(map(layout, operands)))
        needs = self._needs.get(key)
        if needs is None:
            needs = self._needs[key] = self._needs_of(*key)
        for number, wanted in needs.moved:
            waits |= self.bring(operands[number], wanted, times)
        own = 0
        for number, sums in needs.summed:
            result = results[number]
            size = self.annotated.local_bytes(result)
            if len(results) > 1:
                num_bytes = size * self.annotated.ways(sums)
                own |= self._add("all-gather", sums, num_bytes, times, _ALONE, waits)
                continue
            # An op's own sum is priced alone.
            together = self._together(result)._replace(priced=1)
            scattered = self._scattered_at_once(result, sums)
            own |= self._sum(sums, scattered, size, times, together, waits)
        return waits | own

    def _needs_of(
        self, rule: ShardingRule, results: Sequence[Layout], operands: Sequence[Layout]
    ) -> _Needs:
        """What an op with this rule needs if its results and operands have these layouts."""
        axes = self._axes_of_factors(rule, results, operands)
        kept = [
            unreduced_axes(layout, len(dims))
            for layout, dims in zip(results, rule.results, strict=True)
        ]
        moved: list[tuple[int, Layout]] = []
        for number, (here, dims) in enumerate(zip(operands, rule.operands, strict=True)):
            wanted = tuple(tuple(a for f in dim for a in axes.get(f, ())) for dim in dims)
            unreduced = unreduced_axes(here, len(dims))
            if unreduced and unreduced in kept:
                wanted = (*wanted, unreduced)
            if here != wanted:
                moved.append((number, wanted))
        split = {a for f in rule.reduction for a in axes.get(f, ())}
        sums = [tuple(sorted(split - {*unreduced})) for unreduced in kept]
        return _Needs(tuple(moved), tuple((r, over) for r, over in enumerate(sums) if over))

    def _axes_of_factors(
        self, rule: ShardingRule, results: Sequence[Layout], operands: Sequence[Layout]
    ) -> dict[int, tuple[int, ...]]:
        """The axes that split each factor: as in the results, or in operands if it is summed."""
        axes: dict[int, tuple[int, ...]] = {}
        for layout, dims in zip(results, rule.results, strict=True):
            for factor, on in axes_of_factors(rule, self.annotated.mesh.sizes, dims, layout):
                axes.setdefault(factor, on)
        used = {a for on in axes.values() for a in on}
        for layout, dims in zip(operands, rule.operands, strict=True):
            for factor, on in axes_of_factors(rule, self.annotated.mesh.sizes, dims, layout):
                if factor in rule.reduction and factor not in axes and not used & {*on}:
                    axes[factor] = on
                    used.update(on)
        fixed = rule.need_replication | rule.permutation
        return {factor: on for factor, on in axes.items() if factor not in fixed}

    def _together(self, value: ir.Value) -> _Together:
        mesh, fragment = self.annotated.mesh, self.annotated.fragment
        if not mesh.combines:
            return _ALONE
        priced = combined_with(value, fragment, mesh)
        return _Together(priced, (self._block, ir.RankedTensorType(value.type).element_type))

    # Changes of layout

    def bring(self, value: ir.Value, layout: Layout, times: int) -> int:
        """Adds what it takes to bring a value into a layout, once for each layout.

        Returns the collectives that the value in this layout waits for.
        """
        source = self.annotated.layout(value)
        waits = self._waits.get(value, 0)
        if source == layout:
            return waits
        key = (value, layout, times)
        if key in self._brought:
            return self._brought[key]
        dims = rank(value)
        axes = unreduced_axes(source, dims)
        source, layout = source[:dims], layout[:dims]
        together = self._together(value)
        if axes:
            scattered = self._scattered(value, axes, source, layout)
            size = self.annotated.local_bytes(value)
            waits = self._sum(axes, scattered, size, times, together, waits)
        for step in self._exchanges(value, source, layout):
            waits = self._add(step.kind, step.axes, step.bytes, times, together, waits)
        self._brought[key] = waits
        return waits

    def _exchanges(self, value: ir.Value, source: Layout, target: Layout) -> list[Exchange]:
        if source == target or not source:
            return []
        type_ = ir.RankedTensorType(value.type)
        key = (type_, source, target)
        if key not in self._exchanged:
            if type_.rank not in self._tables:
                self._tables[type_.rank] = ReshardTable(self.annotated.mesh, type_.rank)
            table, itemsize = self._tables[type_.rank], element_bytes(type_.element_type)
            self._exchanged[key] = exchanges(table, source, target, tuple(type_.shape), itemsize)
        return self._exchanged[key]

    # Sums

    def _scattered_at_once(self, result: ir.Value, sums: tuple[int, ...]) -> list[tuple[int, ...]]:
        """The axes of a sum along which its only use, a constraint, shards it; else none.

        They count as one reduce-scatter. On GPUs it is an all-reduce of as many bytes unless the
        axes are all those of the sum and cut one dimension.
        """
        uses = list(result.uses)
        if len(uses) != 1 or not isinstance(uses[0].owner, sdy.ShardingConstraintOp):
            return []
        target = self.annotated.layout(uses[0].owner.results[0])
        found = self._scattered(result, sums, self.annotated.layout(result), target)
        at_once = tuple(axis for axis in sums if any(axis in axes for axes in found))
        return [at_once] if at_once else []

    def _scattered(
        self, value: ir.Value, sums: tuple[int, ...], source: Layout, target: Layout
    ) -> list[tuple[int, ...]]:
        """The axes of a sum that a change of layout adds to each dimension, if it only cuts."""
        dims = rank(value)
        if len(target) != dims or self._exchanges(value, source[:dims], target):
            return []
        shape = ir.RankedTensorType(value.type).shape if dims else ()
        if not is_even(shape, self.annotated.mesh.sizes, target):
            return []  # XLA scatters no sum onto uneven shards.
        before = {axis for axes in source[:dims] for axis in axes}
        added = (tuple(a for a in sums if a in axes and a not in before) for axes in target)
        return [axes for axes in added if axes]

    def _sum(
        self,
        sums: tuple[int, ...],
        scattered: Sequence[tuple[int, ...]],
        size: int,
        times: int,
        together: _Together,
        waits: int,
    ) -> int:
        """A reduce-scatter for each dimension, then one all-reduce of what is left.

        Returns `waits`, the collectives that the operand waits for, and the new ones.
        """
        left = sums
        for axes in scattered:
            waits = self._add("reduce-scatter", axes, size, times, together, waits)
            size //= self.annotated.ways(axes)
            left = tuple(axis for axis in left if axis not in axes)
        if left:
            waits = self._add("all-reduce", left, size, times, together, waits)
        return waits

    def _add(
        self,
        kind: Kind,
        axes: tuple[int, ...],
        size: int,
        times: int,
        together: _Together,
        waits: int,
    ) -> int:
        devices = self.annotated.ways(axes)
        if devices == 1 or size == 0 or times == 0:
            return waits
        names = tuple(self.annotated.mesh.axis_names[a] for a in axes)
        collective = Collective(
            kind=kind,
            axes=names,
            devices=devices,
            bytes=size,
            count=times,
            combined=together.priced,
        )
        joins = together.key is not None and kind in COMBINED_KINDS
        key = (kind, names, together.key) if joins else None
        self.found.append(Placed(collective, key, waits, self.now))
        return waits | 1 << (len(self.found) - 1)
