"""How long one device takes for an op, or for a share of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

from alpa.dialects import body, ir
from alpa.passes.analysis import op_work
from alpa.passes.analysis.block_rows import Row, rows_of
from alpa.passes.analysis.graph import block_recipe, blocks_in
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
    """The work of the ops of computations and fragments, found once for equal ones."""

    def __init__(self) -> None:
        self._works: dict[Hashable, tuple[list[Work], list[list[Work] | None]]] = {}
        """of a block, and of the blocks in its ops' regions as far as its own comes from theirs"""
        self._inside: dict[Hashable, list[list[Work] | None]] = {}
        """of the blocks in the regions of ops that read nothing from around them: a loop stays the
        same where layers are merged"""
        self._seconds: dict[Hashable, tuple[Device, float]] = {}
        """by the id of a device, which is kept here so that no other device gets its id"""

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
        return self._of(_key(block, device, rows), block, device, rows, nested)

    def seconds(self, computation: ir.OpView, cluster: Cluster) -> float:
        """The seconds of all ops of a computation, one after the other."""
        block, device = body(computation), cluster.device
        rows = rows_of(block)
        key = _key(block, device, rows)
        at = id(device), key
        found = self._seconds.get(at)  # Comparing recipes takes time, so each is looked up once.
        if found is None:
            seconds = total_seconds(self._of(key, block, device, rows), device)
            found = self._seconds[at] = device, seconds
        return found[1]

    def _of(
        self,
        key: _Key,
        block: ir.Block,
        device: Device,
        rows: Sequence[Row],
        nested: dict[ir.Block, list[Work]] | None = None,
    ) -> list[Work]:
        found = self._works.get(key)
        owners = [row for row in rows if len(row.op.regions)]
        inside = [it for row in owners for it in blocks_in(row.op)]
        if found is None:
            known: dict[ir.Block, list[Work]] = {}
            alone = list(_alone(key, rows))
            for op, its in alone:
                earlier = zip(blocks_in(op), self._inside.get(its, ()), strict=False)
                known.update((inner, works) for inner, works in earlier if works is not None)
            works = block_works(block, device, known, rows)
            for op, its in alone:
                self._inside[its] = list(map(known.get, blocks_in(op)))
            found = self._works[key] = works, list(map(known.get, inside))
        if nested is not None:
            for inner, its in zip(inside, found[1], strict=True):
                if its is not None:
                    nested[inner] = its
        return found[0]


class _Key(NamedTuple):
    """All that `block_works` depends on."""

    is_ideal: bool
    has_triton: bool
    recipe: tuple[Any, ...]
    """the types of the block's arguments, then what each op computes (`block_recipe`)"""


def _key(block: ir.Block, device: Device, rows: Sequence[Row]) -> _Key:
    """Sharding rules are no part of it: only some blocks have them."""
    recipe = block_recipe(block, ignored=SHARDING_RULE, rows=rows)
    return _Key(device.efficiency is None, has_triton(device.name), cast("tuple[Any, ...]", recipe))


def _alone(key: _Key, rows: Sequence[Row]) -> Iterator[tuple[ir.OpView, Hashable]]:
    """The loops and branches that read nothing from around them, each with all that the work in its
    regions depends on."""
    for row, (*_, types, inside) in zip(rows, key.recipe[1:], strict=True):
        if row.name in _WITH_BLOCKS and not _reads_around(inside):
            given = tuple([value.type for value in row.operands])
            yield row.op, (key.is_ideal, key.has_triton, row.name, given, types, inside)


def _reads_around(inside: Any) -> bool:
    """Whether ops read values from outside of the regions that they are in.

    `inside` are the attributes and regions of an op (`graph.contents`), where values of these
    regions have negative numbers.
    """
    return any(
        max(read, default=-1) >= 0 or _reads_around(deeper) for _, read, _, deeper in inside[1:]
    )
