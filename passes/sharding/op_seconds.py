"""How long one device takes for an op, or for a share of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

from alpa.dialects import body, ir
from alpa.passes.analysis import op_work
from alpa.passes.analysis.block_rows import Row, rows_of
from alpa.passes.analysis.graph import blocks_in, contents
from alpa.passes.analysis.op_work import Work
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import Device, Share
from alpa.passes.cost.presets import has_triton
from alpa.passes.sharding.rules import SHARDING_RULE

_WITH_BLOCKS = frozenset({"stablehlo.while", "stablehlo.case", "stablehlo.if"})
"""Ops whose work is that of the blocks in their regions."""


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


class Works:
    """The work of the ops of computations and fragments; that of equal loops is found once."""

    def __init__(self) -> None:
        self._inside: dict[Hashable, list[list[Work] | None]] = {}
        """of the blocks in the regions of ops that read nothing from around them: a loop stays the
        same where layers are merged"""

    def of(
        self,
        block: ir.Block,
        device: Device,
        nested: dict[ir.Block, list[Work]] | None = None,
        rows: Sequence[Row] | None = None,
    ) -> list[Work]:
        """`block_works` of a block that reads no values from around it.

        `nested` is given the work of the blocks in regions.
        """
        rows = rows_of(block) if rows is None else rows
        known: dict[ir.Block, list[Work]] = {}
        alone = list(_alone(rows, device))
        for op, its in alone:
            earlier = zip(blocks_in(op), self._inside.get(its, ()), strict=False)
            known.update((inner, works) for inner, works in earlier if works is not None)
        works = block_works(block, device, known, rows)
        for op, its in alone:
            self._inside[its] = list(map(known.get, blocks_in(op)))
        if nested is not None:
            nested.update(known)
        return works

    def seconds(self, computation: ir.OpView, cluster: Cluster) -> float:
        """The seconds of all ops of a computation, one after the other."""
        return total_seconds(self.of(body(computation), cluster.device), cluster.device)


def _alone(rows: Iterable[Row], device: Device) -> Iterator[tuple[ir.OpView, Hashable]]:
    """The loops and branches that read nothing from around them, each with all that the work in its
    regions depends on.

    Sharding rules are no part of that: only some blocks have them.
    """
    for row in rows:
        if row.name in _WITH_BLOCKS:
            inside: Any = contents(row.op, lambda _: 0, {}, SHARDING_RULE)
            if not _reads_around(inside):
                types = tuple([value.type for value in (*row.operands, *row.results)])
                kind = device.efficiency is None, has_triton(device.name)
                yield row.op, (*kind, row.name, types, inside)


def _reads_around(inside: Any) -> bool:
    """Whether ops read values from outside of the regions that they are in.

    `inside` are the attributes and regions of an op (`graph.contents`), where values of these
    regions have negative numbers.
    """
    return any(
        max(read, default=-1) >= 0 or _reads_around(deeper) for _, read, _, deeper in inside[1:]
    )
