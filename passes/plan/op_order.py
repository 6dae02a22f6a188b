"""The orders in which XLA may run the ops of a planned fragment, and when collectives end.

On CPU, ops run depth-first: from the results backwards, first the operand with the most bytes
behind it. A value that is needed late, such as a reduced gradient in an update, is computed late.
Gradients of activations are computed before those of weights, and stay live until then.

On GPUs, XLA tries several orders and takes the one that needs the least memory: here depth-first
and post-order. In each of them a collective starts as soon as its operand exists, which is the
beginning for an argument. When it ends depends on the GPU:

* Before Hopper, when its result is first read. A result that is only returned is not read before
  the end of the module, so that many operands of collectives may exist at once.
* From Hopper on, XLA's latency-hiding scheduler runs one collective at a time. It takes those that
  depend on arguments alone first, so that all reduced gradients of an update exist at once. What
  no collective needs runs beside the last one: products that give gradients of weights come
  after all gradients of activations, which wait for them. Results that have to be transposed for
  their place wait until the end of the module.

A sum that is an argument is scaled before it is reduced (`scale-totals`): its reduction depends on
an op, and stays in its place before Hopper.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from alpa.dialects import ir, sdy, walk
from alpa.passes.cost.device import Device
from alpa.passes.cost.presets import COMPUTE_CAPABILITY, has_triton
from alpa.passes.cost.reshard import only_cuts
from alpa.passes.plan.annotated import Annotated, has_own_ops, rank
from alpa.passes.sharding.sums import unreduced_axes

HOPPER = (9, 0)
Order = Callable[[ir.Block, Annotated], Sequence[ir.OpView]]


def post_order(block: ir.Block, annotated: Annotated) -> list[ir.OpView]:
    """The ops that a block's results need, in the order of results and operands."""
    *_, end = block.operations
    order: dict[ir.OpView, None] = {}
    path = [(end, iter(_makers(end, block)))]
    while path:
        op, makers = path[-1]
        maker = next((it for it in makers if it not in order), None)
        if maker is not None:
            path.append((maker, iter(_makers(maker, block))))
        else:
            order[op] = None
            path.pop()
    return list(order)[:-1]


def depth_first(block: ir.Block, annotated: Annotated) -> list[ir.OpView]:
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


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """How XLA orders the ops of a module for a device, and which kernels it uses."""

    orders: tuple[Order, ...]
    """of which it takes that with the least memory"""
    is_gpu: bool
    uses_triton: bool = True
    """whether a softmax is one kernel, and matrix products need no workspace of cuBLAS"""
    hides_latency: bool = False
    """whether it runs one collective at a time"""

    @classmethod
    def of(cls, device: Device) -> Scheduler:
        """The scheduler for a device. A GPU without a description counts as one of the newest."""
        if device.name == "CPU":
            return cls(orders=(depth_first,), is_gpu=False)
        generation = COMPUTE_CAPABILITY.get(device.name, HOPPER)
        hides_latency = generation >= HOPPER
        return cls(
            orders=tuple(
                _collectives_first(
                    _needed_first(order) if hides_latency else order, scaled_sums=hides_latency
                )
                for order in (depth_first, post_order)
            ),
            is_gpu=True,
            uses_triton=has_triton(device.name),
            hides_latency=hides_latency,
        )


def _needed_first(order: Order) -> Order:
    """An order in which what no collective needs comes after all others."""

    def reordered(block: ir.Block, annotated: Annotated) -> list[ir.OpView]:
        ops = order(block, annotated)
        needed = set[ir.OpView]()
        for op in reversed(ops):
            if op in needed or is_collective(op, annotated):
                needed |= {op, *_makers(op, block)}
        return sorted(ops, key=lambda op: op not in needed)

    return reordered


def _collectives_first(order: Order, *, scaled_sums: bool) -> Order:
    """An order in which each collective comes as soon as its operand exists.

    A collective on the result of another one stays in its place, and so do, without `scaled_sums`,
    those that reduce arguments.
    """

    def reordered(block: ir.Block, annotated: Annotated) -> list[ir.OpView]:
        ops = order(block, annotated)
        after: dict[ir.OpView | None, list[ir.OpView]] = defaultdict(list)
        for op in ops:
            if not is_collective(op, annotated):
                continue
            maker = op.operands[0].owner
            if not isinstance(maker, ir.Block):
                if maker.operation.block == block and not is_collective(maker.opview, annotated):
                    after[maker.opview].append(op)
            elif scaled_sums or not reduces(op, annotated):
                after[None].append(op)
        moved = {op for early in after.values() for op in early}
        found = list(after[None])
        for op in ops:
            if op not in moved:
                found += [op, *after[op]]
        return found

    return reordered


def is_collective(op: ir.OpView, annotated: Annotated) -> bool:
    """Whether a constraint sends data: it reduces its operand, or does more than cut it."""
    if not isinstance(op, sdy.ShardingConstraintOp):
        return False
    source, target = (annotated.layout(value) for value in (op.operands[0], op.results[0]))
    return reduces(op, annotated) or not only_cuts(source, target)


def reduces(op: ir.OpView, annotated: Annotated) -> bool:
    """Whether a constraint adds up its operand over devices."""
    if not isinstance(op, sdy.ShardingConstraintOp):
        return False
    source = op.operands[0]
    return bool(unreduced_axes(annotated.layout(source), rank(source)))


def _makers(op: ir.OpView, block: ir.Block) -> list[ir.OpView]:
    """The ops of a block that make what an op reads, also inside of it."""
    readers = [op]
    if has_own_ops(op):
        readers += [inner for region in op.regions for b in region.blocks for inner in walk(b)]
    owners = (value.owner for reader in readers for value in reader.operands)
    found = (o.opview for o in owners if not isinstance(o, ir.Block) and o.operation.block == block)
    return list(dict.fromkeys(found))
