"""Bytes per device that a planned fragment needs, read off its annotations alone.

Arguments, results that reuse no argument's buffer, and accumulators of gradients are live all the
time. A temporary is live from the op that writes it to its last use. Not written are

* views: constants, iotas, broadcasts, reshapes and constraints that change nothing;
* values that a fusion computes on the fly: element-wise ops, slices and pads that are fused with
  all their users, and transposes that only dots read. A value that is added to an accumulator is
  fused with the addition.

On CPU, ops run in XLA's depth-first order, not in program order: from the results backwards, first
the operand with the most bytes behind it. A value that is needed late, such as a reduced gradient
in an update, is computed late. Gradients of activations are computed before those of weights, and
stay live until then. On other devices ops run in program order, where a rematerialised layer is
computed just before it is needed; but arguments that are sums are reduced at the start, because XLA
starts collectives as early as it can.

An element-wise op writes over an operand that is not used afterwards; a loop, a
dynamic_update_slice and a scatter work in place, and what a loop only reads is not copied. While
one op runs, its operands and its result exist together. A reshard needs the buffers that its
collectives send and receive. A reduce-scatter needs the whole operand, because XLA lowers it on CPU
to an all-reduce and a slice.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from alpa.dialects import body, ir, main_function, sdy, stablehlo, terminator, walk
from alpa.dialects.attributes import read_ints
from alpa.passes.analysis.graph import folds_into_dots
from alpa.passes.analysis.liveness import Lives
from alpa.passes.analysis.op_kinds import (
    BROADCASTS,
    ELEMENTWISE,
    FUSIBLE,
    READS_THROUGH_FUSION,
    SOURCES,
)
from alpa.passes.cost.reshard import only_cuts
from alpa.passes.plan import data
from alpa.passes.plan.annotated import Annotated, annotated_fragments, has_own_ops, rank
from alpa.passes.plan.attribute import plan_and_cluster
from alpa.passes.sharding.sums import unreduced_axes

_IN_PLACE = frozenset({"stablehlo.dynamic_update_slice", "stablehlo.scatter", "stablehlo.while"})


@dataclass(frozen=True, kw_only=True)
class FragmentMemory:
    """Bytes per device while one fragment runs; `temporaries` at the fullest time."""

    arguments: int
    results: int
    aliased: int
    temporaries: int

    @property
    def peak(self) -> int:
        return self.arguments + self.results - self.aliased + self.temporaries


def predicted_memory(module: ir.Module) -> list[FragmentMemory]:
    """For each fragment of a planned module that `export-stages` has run on, in program order.

    Before the export nobody knows accumulators and donated arguments: none are counted then.

    Raises:
        PassError: there is no plan, or a sharding does not fit its mesh.
    """
    _, cluster = plan_and_cluster(main_function(module))
    order = _depth_first if cluster.device.name == "CPU" else _in_program_order
    return [_memory_of(annotated, order) for annotated in annotated_fragments(module)]


def _memory_of(annotated: Annotated, order: _Order) -> FragmentMemory:
    fragment = annotated.fragment
    block = body(fragment)
    results = [
        annotated.local_bytes(value, annotated.outer_layout(outer))
        for value, outer in zip(terminator(block).operands, fragment.results, strict=True)
    ]
    arguments = [annotated.local_bytes(value) for value in block.arguments]
    accumulated = [results[i] for i in read_ints(fragment, data.ACCUMULATORS)]
    donated = [arguments[i] for i in read_ints(fragment, data.DONATED)]
    extra = [results[i] for i in read_ints(fragment, data.EXTRA_RESULTS)]
    return FragmentMemory(
        arguments=sum(arguments) + sum(accumulated),
        results=sum(results) + sum(extra),
        aliased=sum(accumulated) + sum(donated),
        temporaries=_Clock(annotated, order).peak(),
    )


_Order = Callable[[ir.Block, Annotated], Sequence[ir.OpView]]


@dataclass
class _Clock(Lives):
    """Visits ops in XLA's order; at even times one runs, at odd ones it overwrites operands."""

    annotated: Annotated
    order: _Order
    _returned: set[ir.Value] = field(default_factory=set)
    _added: set[ir.Value] = field(default_factory=set)
    """what is only returned to be added to an accumulator"""
    scratch: dict[int, int] = field(default_factory=dict)
    """bytes that only exist at one time"""

    def peak(self) -> int:
        self._find_returned()
        self._visit(body(self.annotated.fragment))
        changes: Counter[int] = Counter()
        for value, start in self.made.items():
            size = self.annotated.local_bytes(value)
            changes[start] += size
            changes[self.until[value]] -= size
        live = most = 0
        for time in sorted({*changes, *self.scratch}):
            live += changes[time]
            most = max(most, live + self.scratch.get(time, 0))
        return most

    def _find_returned(self) -> None:
        """Results of the fragment have their place; an accumulated one is added to its sum."""
        fragment = self.annotated.fragment
        added = {*read_ints(fragment, data.ACCUMULATORS)}
        added -= {*read_ints(fragment, data.EXTRA_RESULTS)}
        end = terminator(body(fragment))
        for i, value in enumerate(end.operands):
            if i in added and len(list(value.uses)) == 1:
                self._added.add(value)
            while i not in added:
                self._returned.add(value)
                if isinstance(value.owner, ir.Block) or not self._is_view(value.owner):
                    break
                value = value.owner.operands[0]

    def _visit(self, block: ir.Block) -> None:
        for op in self.order(block, self.annotated):
            self.now += 2
            if has_own_ops(op):
                self._visit_regions(op)
            elif self._is_view(op):
                self.see_through(op.results[0], op.operands[:1])
            elif isinstance(op, stablehlo.OptimizationBarrierOp):
                for operand, result in zip(op.operands, op.results, strict=True):
                    self.see_through(result, [operand])
            elif self._is_fused(op):
                for result in op.results:
                    self.see_through(result, op.operands)
            elif _updates_loop_variable(op):
                self.read(op.operands)
                self.see_through(op.results[0], op.operands[:1])
            else:
                self._write(op)

    def _visit_regions(self, op: ir.OpView) -> None:
        start = self.now
        self.read(op.operands)
        for number, result in enumerate(op.results):
            if _is_loop_constant(op, number):
                self.see_through(result, [op.operands[number]])
            else:
                self._hold(result, start + 1)
        for number in range(len(op.regions)):
            if op.operation.name == "stablehlo.while":
                for argument, result in zip(body(op, number).arguments, op.results, strict=True):
                    self.see_through(argument, [result])
            self._visit(body(op, number))
            self.now += 2
            self.read(terminator(body(op, number)).operands)
        # What only starts a loop, and is read at its start alone, does not stay.
        self.keep(made_before=start + 2, read_after=start + 1)

    def _write(self, op: ir.OpView) -> None:
        self.read(op.operands)
        overwrites = op.operation.name in ELEMENTWISE | _IN_PLACE
        for result in op.results:
            self._hold(result, self.now + 1 if overwrites else self.now)
        if isinstance(op, sdy.ShardingConstraintOp):
            source = op.operands[0]
            if _reduces(op, self.annotated):
                # The whole sum as it is sent; as it arrives, unless that is the result.
                size = self.annotated.local_bytes(source)
                cut = self.annotated.local_bytes(op.results[0]) < size
                self.scratch[self.now] = 2 * size if cut else size

    def _hold(self, value: ir.Value, start: int) -> None:
        if value not in self._returned:
            self.write(value, start)

    def _is_view(self, op: ir.OpView) -> bool:
        if isinstance(op, sdy.ShardingConstraintOp):
            return self.annotated.layout(op.operands[0]) == self.annotated.layout(op.results[0])
        return isinstance(op, stablehlo.ReshapeOp)

    def _is_fused(self, op: ir.OpView) -> bool:
        """Whether an op is computed inside its users."""
        name = op.operation.name
        if name in SOURCES or folds_into_dots(op):
            return True
        if name not in FUSIBLE and not self._is_slice(op):
            return False
        if op.results[0] in self._added:
            return True
        users = {user for result in op.results for user in self._users(result)}
        if name in BROADCASTS:
            users.discard("stablehlo.while")  # A loop's variable starts as one.
        return users <= READS_THROUGH_FUSION

    def _is_slice(self, op: ir.OpView) -> bool:
        """Whether a change of layout only cuts."""
        if not isinstance(op, sdy.ShardingConstraintOp):
            return False
        return only_cuts(*(self.annotated.layout(v) for v in (op.operands[0], op.results[0])))

    def _users(self, value: ir.Value) -> Iterator[str]:
        """The names of the ops that read a value, through views."""
        for use in value.uses:
            owner = use.owner
            if self._is_view(owner):
                yield from self._users(owner.results[0])
            else:
                yield owner.operation.name


def _is_loop_constant(op: ir.OpView, number: int) -> bool:
    """Whether a loop only reads a variable."""
    if not isinstance(op, stablehlo.WhileOp):
        return False
    block = body(op, 1)
    return terminator(block).operands[number] == block.arguments[number]


def _updates_loop_variable(op: ir.OpView) -> bool:
    """Whether an op writes a part of a loop's variable, whose next value it makes."""
    if op.operation.name not in _IN_PLACE or len(op.results) != 1:
        return False
    block, variable = op.operation.block, op.operands[0]
    if variable.owner != block or not isinstance(block.owner.opview, stablehlo.WhileOp):
        return False
    number = ir.BlockArgument(variable).arg_number
    uses = [(use.owner, use.operand_number) for use in op.results[0].uses]
    return uses == [(terminator(block), number)]


def _in_program_order(block: ir.Block, annotated: Annotated) -> list[ir.OpView]:
    """The ops of a block, those first that reduce its arguments."""
    ops = list(block.operations)[:-1]
    late: list[ir.OpView] = []
    early: list[ir.OpView] = []
    for op in ops:
        first = _reduces(op, annotated) and isinstance(op.operands[0].owner, ir.Block)
        (early if first else late).append(op)
    return early + late


def _reduces(op: ir.OpView, annotated: Annotated) -> bool:
    """Whether a constraint adds up its operand over devices."""
    if not isinstance(op, sdy.ShardingConstraintOp):
        return False
    source = op.operands[0]
    return bool(unreduced_axes(annotated.layout(source), rank(source)))


def _depth_first(block: ir.Block, annotated: Annotated) -> list[ir.OpView]:
    """The ops that a block's results need, operands first.

    Of several operands those come first that have more bytes behind them, counted once for each
    path. XLA's `DFSMemoryScheduler` compares numbers of users before that.
    """
    *ops, end = block.operations
    makers = {op: _makers(op, block) for op in [*ops, end]}
    behind: dict[ir.OpView, int] = {}
    total = 0
    for op in ops:
        size = sum(annotated.local_bytes(result) for result in op.results)
        total += size
        behind[op] = min(total, size + sum(behind[maker] for maker in makers[op]))
    order: dict[ir.OpView, None] = {}
    path = [end]
    while path:
        waiting = [maker for maker in makers[path[-1]] if maker not in order]
        if waiting:
            path.append(max(waiting, key=lambda maker: behind[maker]))
        else:
            order[path.pop()] = None
    return list(order)[:-1]


def _makers(op: ir.OpView, block: ir.Block) -> list[ir.OpView]:
    """The ops of a block that make what an op reads, also inside of it."""
    readers = [op]
    if has_own_ops(op):
        readers += [inner for region in op.regions for b in region.blocks for inner in walk(b)]
    owners = (value.owner for reader in readers for value in reader.operands)
    found = (o.opview for o in owners if not isinstance(o, ir.Block) and o.operation.block == block)
    return list(dict.fromkeys(found))
