"""Bytes per device that a planned fragment needs, read off its annotations alone.

Arguments, results that reuse no argument's buffer, and accumulators of gradients are live all the
time. A temporary is live from the op that writes it to its last use. Not written are

* views: constants, iotas, broadcasts, reshapes and constraints that change nothing;
* values that a fusion computes on the fly: element-wise ops, slices and pads that are fused with
  all their users, and transposes that only dots read. A value that is added to an accumulator is
  fused with the addition.

`op_order.py` has the order in which XLA runs the ops, and `convolution_layouts.py` the copies that
the layouts of convolutions cost on GPUs.

An element-wise op writes over an operand that is not used afterwards; a loop, a
dynamic_update_slice and a scatter work in place, and what a loop only reads is not copied. While
one op runs, its operands and its result exist together. On GPUs, a value that several ops read is
written if it is made of others of at least twice its bytes. Before Ampere, XLA does not use Triton:
the exponentials of a softmax are written beside their operand by the kernel that adds them up, and
a matrix product has a workspace.

A reshard needs the buffers that its collectives send and receive. On CPU, a reduce-scatter needs
the whole operand twice, because XLA lowers it to an all-reduce and a slice. On GPUs, a sum that is
an argument is scaled into a buffer of its own before it is reduced (`scale-totals`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from alpa.dialects import body, ir, main_function, sdy, stablehlo, terminator
from alpa.dialects.attributes import read_ints
from alpa.dialects.mpmd_types import mesh_of
from alpa.dialects.plan import read_meshes
from alpa.passes.analysis.graph import folds_into_dots
from alpa.passes.analysis.liveness import (
    UPDATES_IN_PLACE,
    Lives,
    in_place_of,
    updates_variable,
)
from alpa.passes.analysis.op_kinds import (
    BROADCASTS,
    ELEMENTWISE,
    FUSIBLE,
    READS_THROUGH_FUSION,
    SOURCES,
)
from alpa.passes.cost.device import Device
from alpa.passes.cost.reshard import Layout, only_cuts
from alpa.passes.plan import data
from alpa.passes.plan.annotated import Annotated, annotated_fragments, has_own_ops
from alpa.passes.plan.attribute import plan_and_any_cluster
from alpa.passes.plan.op_order import Order, Scheduler, is_collective, reduces
from alpa.passes.sharding.convolution_layouts import argument_of, is_copied, is_transposed
from alpa.passes.sharding.padding import is_even

_CUBLAS_WORKSPACE = 4 * 2**20
"""Bytes that XLA gives each matrix product of cuBLAS before Hopper."""


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
    function = main_function(module)
    _, cluster = plan_and_any_cluster(function)
    devices = {mesh.name: cluster.of(mesh.hosts).device for mesh in read_meshes(function)}
    return [
        _memory_of(annotated, devices[mesh_of(annotated.fragment)])
        for annotated in annotated_fragments(module)
    ]


def _memory_of(annotated: Annotated, device: Device) -> FragmentMemory:
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
        temporaries=predicted_temporaries(annotated, device),
    )


def predicted_temporaries(annotated: Annotated, device: Device) -> int:
    """Bytes per device beside arguments and results, when a fragment needs most."""
    scheduler = Scheduler.of(device)
    return min(_Clock(annotated, device, scheduler, order).peak() for order in scheduler.orders)


@dataclass
class _Clock(Lives):
    """Visits ops in XLA's order; at even times one runs, at odd ones it overwrites operands."""

    annotated: Annotated
    device: Device
    scheduler: Scheduler
    order: Order
    _waiting: Counter[int] = field(default_factory=Counter[int])
    """bytes that arrive at a time, and are transposed at the end"""
    _returned: set[ir.Value] = field(default_factory=set)
    _gathered: dict[ir.Value, Layout] = field(default_factory=dict)
    """what is returned in another layout"""
    _added: set[ir.Value] = field(default_factory=set)
    """what is only returned to be added to an accumulator"""
    scratch: Counter[int] = field(default_factory=Counter[int])
    """bytes that only exist at one time"""
    copies: dict[ir.Value, tuple[int, int]] = field(default_factory=dict)
    """when copies of values in another layout exist"""

    def peak(self) -> int:
        self._find_returned()
        self._visit(body(self.annotated.fragment))
        self.now += 2
        # A collective whose result is only returned ends last.
        self.read(self._started)
        if not self.scheduler.hides_latency:
            self.read(v for v, there in self._gathered.items() if self._arrives_in_place(v, there))
        changes = Counter(self._waiting)
        lives = [(value, start, self.until[value]) for value, start in self.made.items()]
        lives += [(value, start, until) for value, (start, until) in self.copies.items()]
        for value, start, until in lives:
            size = self.annotated.local_bytes(value)
            changes[start] += size
            changes[until] -= size
        live = most = 0
        for time in sorted({*changes, *self.scratch}):
            live += changes[time]
            most = max(most, live + self.scratch[time])
        return most

    def _find_returned(self) -> None:
        """Results of the fragment have their place; an accumulated one is added to its sum."""
        fragment = self.annotated.fragment
        added = {*read_ints(fragment, data.ACCUMULATORS)}
        added -= {*read_ints(fragment, data.EXTRA_RESULTS)}
        end = terminator(body(fragment))
        for i, (value, result) in enumerate(zip(end.operands, fragment.results, strict=True)):
            if self.scheduler.is_gpu and self._is_sent(value, self.annotated.outer_layout(result)):
                self._gathered[value] = self.annotated.outer_layout(result)
                continue
            if i in added and len(list(value.uses)) == 1:
                self._added.add(_before_barrier(value))
            if i not in added:
                self._returned.update(in_place_of(value, self._is_view))

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
            elif self._is_fused(op) and not self._is_kept_for_several(op):
                for result in op.results:
                    self.see_through(result, op.operands, fused=True)
            elif updates_variable(op):
                self.read(op.operands)
                self.see_through(op.results[0], op.operands[:1])
            else:
                self._write(op)

    def _visit_regions(self, op: ir.OpView) -> None:
        start = self.now
        if isinstance(op, stablehlo.WhileOp):
            self.enter_loop(op, lambda result: self._hold(result, start + 1))
        else:
            self.read(op.operands)
            for result in op.results:
                self._hold(result, start + 1)
        for number in range(len(op.regions)):
            self._visit(body(op, number))
            self.now += 2
            self.read(terminator(body(op, number)).operands)
        if isinstance(op, stablehlo.WhileOp):
            for value, result in [*self.next_values(op, self.made.__getitem__)]:
                if self.annotated.layout(value) == self.annotated.layout(result):
                    del self.made[value]
        # What only starts a loop, and is read at its start alone, does not stay.
        self.keep(made_before=start + 2, read_after=start + 1)

    def _write(self, op: ir.OpView) -> None:
        self.read(op.operands)
        overwrites = op.operation.name in ELEMENTWISE | UPDATES_IN_PLACE
        overwrites = overwrites and not self._is_summed_as_written(op)
        for result in op.results:
            self._hold(result, self.now + 1 if overwrites else self.now)
        if self.scheduler.is_gpu and isinstance(op, stablehlo.ConvolutionOp):
            self._convolve(op)
        elif isinstance(op, stablehlo.DotGeneralOp) and not self.scheduler.uses_triton:
            self.scratch[self.now] += _CUBLAS_WORKSPACE
        elif is_collective(op, self.annotated):
            self._send(op)
        elif self._is_padded_whole(op):
            self.scratch[self.now] += self._padded(
                op.results[0], self.annotated.layout(op.operands[0])
            )

    def _send(self, op: ir.OpView) -> None:
        """The buffers of a collective beside its result."""
        source, (result,) = op.operands[0], op.results
        size = self.annotated.local_bytes(source)
        self.scratch[self.now] += self._padded(source, self.annotated.layout(result))
        if self.scheduler.is_gpu:
            there = self.annotated.layout(result)
            if result in self._returned and not self._arrives_in_place(source, there):
                self._arrive(self.annotated.local_bytes(result))
            elif not self.scheduler.hides_latency:
                self.end_with(result, source)
            if reduces(op, self.annotated) and isinstance(source.owner, ir.Block):
                self.scratch[self.now] += size  # the argument, scaled
        elif reduces(op, self.annotated):
            # The whole sum as it is sent; as it arrives, unless that is the result.
            cut = self.annotated.local_bytes(result) < size
            self.scratch[self.now] += 2 * size if cut else size

    def _padded(self, value: ir.Value, layout: Layout) -> int:
        """Bytes of uneven shards with their padding where they are whole, or cut by `layout` only;
        0 for even ones."""
        mesh, here = self.annotated.mesh, self.annotated.layout(value)
        if is_even(ir.RankedTensorType(value.type).shape, mesh.sizes, here):
            return 0
        left = {axis for axes in layout for axis in axes}
        together = tuple(axis for axes in here for axis in axes if axis not in left)
        return self.annotated.local_bytes(value) * self.annotated.ways(together)

    def _arrive(self, size: int) -> None:
        """A returned result arrives along another dimension, to be transposed into its place."""
        if self.scheduler.hides_latency:
            self._waiting[self.now] += size
        else:
            self.scratch[self.now] += size

    def _is_sent(self, value: ir.Value, layout: Layout) -> bool:
        """Whether it takes a collective to bring a value into a layout."""
        return not only_cuts(self.annotated.layout(value), layout)

    def _arrives_in_place(self, value: ir.Value, layout: Layout) -> bool:
        """Whether a collective brings a value into a layout without a transposition.

        What is sent and what arrives are cut along their first dimension, but for those of size 1.
        Another dimension is transposed before and after.
        """
        dims = zip(
            ir.RankedTensorType(value.type).shape,
            self.annotated.layout(value),
            layout,
            strict=False,
        )
        sizes = [(size, before == after) for size, before, after in dims]
        changed = [d for d, (_, same) in enumerate(sizes) if not same]
        return not changed or all(size == 1 for size, _ in sizes[: changed[-1]])

    def _convolve(self, op: stablehlo.ConvolutionOp) -> None:
        """The buffers of a convolution in the layouts of its device."""
        for number, operand in enumerate(op.operands):
            here = argument_of(op, number) or (operand if operand in self._returned else None)
            if here is not None and is_copied(op, number, self.device):
                start, _ = self.copies.get(here, (self.now, 0))
                self.copies[here] = (start, self.now + 1)
        result = op.results[0]
        if is_transposed(op, self.device):
            if result in self._added:
                self.until[result] = self.now + 2
                self.scratch[self.now + 1] += self.annotated.local_bytes(result)
            elif result in self._returned:
                self.write(result, self.now)

    def _hold(self, value: ir.Value, start: int) -> None:
        if value not in self._returned:
            self.write(value, start)
        there = self._gathered.get(value)
        if there is not None and not self._arrives_in_place(value, there):
            self._arrive(self.annotated.local_bytes(value, there))

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
        if self._is_summed_as_written(op):
            return False
        users = {user for result in op.results for user in self._users(result)}
        if name in BROADCASTS:
            users.discard("stablehlo.while")  # A loop's variable starts as one.
        return users <= READS_THROUGH_FUSION

    def _is_kept_for_several(self, op: ir.OpView) -> bool:
        """Whether several ops read a value that is made of others of at least twice its bytes.

        XLA would have to keep these to compute it again: the stream between the layers of a
        transformer would be a sum over all layers before.
        """
        result = op.results[0]
        if not self.scheduler.is_gpu or len([*result.uses]) < 2 or result in self._added:
            return False
        made = [value for value in self.sources(op.operands) if value in self.made]
        size = self.annotated.local_bytes(result)
        return sum(map(self.annotated.local_bytes, made)) >= 2 * size > 0

    def _is_summed_as_written(self, op: ir.OpView) -> bool:
        """Whether an op is an exponential that a softmax adds up, in a kernel that writes both."""
        if self.scheduler.uses_triton or not isinstance(op, stablehlo.ExpOp):
            return False
        users = [*_readers(op.results[0], self._is_kept)]
        return len(users) > 1 and any(isinstance(it, stablehlo.ReduceOp) for it in users)

    def _is_kept(self, op: ir.OpView) -> bool:
        """Whether an op returns its operand, but for its type."""
        return self._is_view(op) or isinstance(op, stablehlo.ConvertOp)

    def _is_slice(self, op: ir.OpView) -> bool:
        """Whether a change of layout only cuts."""
        if not isinstance(op, sdy.ShardingConstraintOp) or self._is_padded_whole(op):
            return False
        return only_cuts(*(self.annotated.layout(v) for v in (op.operands[0], op.results[0])))

    def _is_padded_whole(self, op: ir.OpView) -> bool:
        """Whether XLA for CPUs pads a computed value before it cuts it into uneven shards."""
        if self.scheduler.is_gpu or not isinstance(op, sdy.ShardingConstraintOp):
            return False
        source, result = op.operands[0], op.results[0]
        shape, sizes = ir.RankedTensorType(source.type).shape, self.annotated.mesh.sizes
        here, there = self.annotated.layout(source), self.annotated.layout(result)
        return (
            not isinstance(source.owner, ir.Block)
            and only_cuts(here, there)
            and is_even(shape, sizes, here)
            and not is_even(shape, sizes, there)
        )

    def _users(self, value: ir.Value) -> Iterator[str]:
        """The names of the ops that read a value, through views."""
        for owner in _readers(value, self._is_view):
            yield owner.operation.name


def _before_barrier(value: ir.Value) -> ir.Value:
    """What a barrier passes on as a value (`wait_for_gradients.py`), or the value."""
    maker = None if isinstance(value.owner, ir.Block) else value.owner.opview
    if not isinstance(maker, stablehlo.OptimizationBarrierOp):
        return value
    return maker.operands[ir.OpResult(value).result_number]


def _readers(value: ir.Value, through: Callable[[ir.OpView], bool]) -> Iterator[ir.OpView]:
    """The ops that read a value, directly or through others."""
    for use in value.uses:
        owner = use.owner.opview
        if through(owner):
            yield from _readers(owner.results[0], through)
        else:
            yield owner
