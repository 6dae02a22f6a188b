"""How long one device takes for an op, or for a share of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from alpa.dialects import body, ir
from alpa.passes.analysis import op_work
from alpa.passes.analysis.block_rows import Row
from alpa.passes.analysis.op_work import Work
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import Device, Share
from alpa.passes.cost.presets import has_triton


def block_works(
    block: ir.Block,
    device: Device,
    known: dict[ir.Block, list[Work]] | None = None,
    rows: Sequence[Row] | None = None,
) -> list[Work]:
    """The work of each op of a block but its terminator, in order. Ideal ones fuse nothing.

    `known` keeps the work of the blocks in regions. `rows` are those of the block, if they have
    been read.
    """
    if device.efficiency is None:
        return op_work.unfused(list(block.operations)[:-1])
    triton = has_triton(device.name)
    return op_work.fused(block, converts_in_dots=triton, known=known, rows=rows)[:-1]


def work_seconds(
    work: Work, device: Device, share: Share = 1.0, *, byte_share: Share | None = None
) -> Share:
    """Seconds for a share of an op's work, its bytes at a share of their own if there is one. Its
    kernels are started whatever the share."""
    seconds = device.seconds(
        work.flops, work.bytes, work.dtype, share, work.kind, byte_share=byte_share
    )
    return work.kernels * device.launch + seconds


def total_seconds(works: Iterable[Work], device: Device) -> float:
    """Seconds for the work of ops, one after the other."""
    times = Counter(works)
    return sum(n * float(work_seconds(work, device)) for work, n in times.items())


def computation_seconds(computation: ir.OpView, cluster: Cluster) -> float:
    """The seconds of all ops of a computation, one after the other."""
    return total_seconds(block_works(body(computation), cluster.device), cluster.device)
