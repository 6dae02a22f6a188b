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
from alpa.passes.sharding.combining import COMBINED_KINDS, combined_with, only_leaves
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
    independent: bool = False
    """whether the compiler may combine it with others"""

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


def predicted_collectives(module: ir.Module) -> list[tuple[Collective, ...]]:
    """For each fragment of a planned module, in program order, what one execution of it runs.

    Raises:
        PassError: there is no plan, or a sharding does not fit its mesh.
    """
    with populated(module):
        return [collectives_of(annotated) for annotated in annotated_fragments(module)]


def collectives_of(annotated: Annotated) -> tuple[Collective, ...]:
    """As `predicted_collectives`, for a fragment whose ops carry their sharding rules."""
    return merged(collectives_in_order(annotated))


def collectives_in_order(annotated: Annotated) -> list[Collective]:
    """The same, one by one in program order."""
    walk = _Walk(annotated)
    walk.visit(body(annotated.fragment), 1)
    end = terminator(body(annotated.fragment))
    for value, result in zip(end.operands, annotated.fragment.results, strict=True):
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
    """Which other collectives one may be combined with."""

    priced: int = 1
    """as how many it is priced"""
    independent: bool = False


_ALONE = _Together()


@dataclass
class _Walk:
    """Visits the ops of a fragment; `found` are its collectives."""

    annotated: Annotated
    found: list[Collective] = field(default_factory=list)
    _tables: dict[int, ReshardTable] = field(default_factory=dict)
    _brought: set[tuple[ir.Value, Layout, int]] = field(default_factory=set)
    # Most ops equal another one. Needs and exchanges are found once for all equal ops.
    _needs: dict[tuple[ShardingRule, tuple[Layout, ...], tuple[Layout, ...]], _Needs] = field(
        default_factory=dict
    )
    _exchanged: dict[tuple[ir.Type, Layout, Layout], list[Exchange]] = field(default_factory=dict)

    def visit(self, block: ir.Block, times: int) -> None:
        """All ops of a block that runs `times` times, but not its terminator."""
        for op in list(block.operations)[:-1]:
            if isinstance(op, sdy.ShardingConstraintOp):
                self.bring(op.operands[0], self.annotated.layout(op.results[0]), times)
            elif isinstance(op, stablehlo.WhileOp):
                inside = times * op_cost.trip_count_or_default(op)
                self._visit_regions(op, op.operands, times, inside)
            elif isinstance(op, sdy.ManualComputationOp):
                self._visit_manual(op, times)
            elif has_own_ops(op):
                self._visit_regions(op, (), times, times)
            else:
                rule = rule_of(op)
                if rule is not None:
                    self._visit_op(op, rule, times)

    def _visit_regions(
        self, op: ir.OpView, starts: Sequence[ir.Value], times: int, inside: int
    ) -> None:
        layouts = [self.annotated.layout(result) for result in op.results]
        for start, layout in zip(starts, layouts, strict=bool(starts)):
            self.bring(start, layout, times)
        for number in range(len(op.regions)):
            self.visit(body(op, number), inside)
            if number > 0 or not starts:  # A loop's first region is its condition.
                for value, layout in zip(
                    terminator(body(op, number)).operands, layouts, strict=True
                ):
                    self.bring(value, layout, inside)

    def _visit_manual(self, op: sdy.ManualComputationOp, times: int) -> None:
        inputs, _ = fixed_shardings(op)
        for operand, sharding in zip(op.operands, inputs, strict=True):
            self.bring(operand, layout_of(op, sharding, self.annotated.mesh), times)
        for one in written_collectives(op, self.annotated.mesh):
            self._add(one.kind, one.axes, one.bytes, times * one.times, _ALONE)

    def _visit_op(self, op: ir.OpView, rule: ShardingRule, times: int) -> None:
        results, operands = list(op.results), list(op.operands)
        layout = self.annotated.layout
        key = (rule, tuple(map(layout, results)), tuple(map(layout, operands)))
        needs = self._needs.get(key)
        if needs is None:
            needs = self._needs[key] = self._needs_of(*key)
        for number, wanted in needs.moved:
            self.bring(operands[number], wanted, times)
        for number, sums in needs.summed:
            result = results[number]
            size = self.annotated.local_bytes(result)
            if len(results) > 1:
                num_bytes = size * self.annotated.ways(sums)
                self._add("all-gather", sums, num_bytes, times, _ALONE)
                continue
            # An op's own sum is priced alone.
            together = self._together(result)._replace(priced=1)
            self._sum(sums, self._scattered_at_once(result, sums), size, times, together)

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
        return _Together(priced, priced > 1 or only_leaves(value, terminator(body(fragment))))

    # Changes of layout

    def bring(self, value: ir.Value, layout: Layout, times: int) -> None:
        """Adds what it takes to bring a value into a layout, once for each layout."""
        source = self.annotated.layout(value)
        if source == layout or (value, layout, times) in self._brought:
            return
        self._brought.add((value, layout, times))
        dims = rank(value)
        axes = unreduced_axes(source, dims)
        source, layout = source[:dims], layout[:dims]
        together = self._together(value)
        if axes:
            scattered = self._scattered(value, axes, source, layout)
            self._sum(axes, scattered, self.annotated.local_bytes(value), times, together)
        for step in self._exchanges(value, source, layout):
            self._add(step.kind, step.axes, step.bytes, times, together)

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
    ) -> None:
        """A reduce-scatter for each dimension, then one all-reduce of what is left."""
        left = sums
        for axes in scattered:
            self._add("reduce-scatter", axes, size, times, together)
            size //= self.annotated.ways(axes)
            left = tuple(axis for axis in left if axis not in axes)
        if left:
            self._add("all-reduce", left, size, times, together)

    def _add(
        self, kind: Kind, axes: tuple[int, ...], size: int, times: int, together: _Together
    ) -> None:
        devices = self.annotated.ways(axes)
        if devices > 1 and size > 0 and times > 0:
            names = tuple(self.annotated.mesh.axis_names[a] for a in axes)
            self.found.append(
                Collective(
                    kind=kind,
                    axes=names,
                    devices=devices,
                    bytes=size,
                    count=times,
                    combined=together.priced,
                    independent=together.independent,
                )
            )
