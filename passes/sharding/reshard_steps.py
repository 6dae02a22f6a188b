"""The collectives of one change of layout, as XLA's partitioner forms them.

`ReshardTable.path` is the cheapest way in steps of one mesh axis each. XLA undoes all axes of a
dimension by one all-gather, and moves several from one dimension to another by one all-to-all.
XLA finds a way with more than one collective only if it is told each layout in between. Otherwise
it may replicate the whole tensor. So `write-reshard-steps` writes those layouts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil, prod
from typing import Literal

from alpa.passes.cost.reshard import Layout, ReshardTable
from alpa.passes.sharding.padding import is_even


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One collective. `bytes` are the result of an all-gather, the operand of any other."""

    kind: Literal["all-gather", "all-to-all", "collective-permute"]
    axes: tuple[int, ...]
    bytes: int
    layout: Layout
    """after it, and after the slices that follow, but those into uneven shards"""


def exchanges(
    table: ReshardTable, source: Layout, target: Layout, shape: Sequence[int], itemsize: int
) -> list[Exchange]:
    """The collectives from one layout to another, in order; slices are none.

    Layouts have one entry per dimension of `shape`, whose rank is the table's.
    """
    if source == target:
        return []
    moved = _moved(source, target)
    if moved:
        sizes = table.mesh.sizes
        ways, local = prod(sizes[a] for a in moved), itemsize
        for size, before, after in zip(shape, source, target, strict=True):
            # XLA pads the dimension that the axes go to.
            grown = ways if len(after) > len(before) else 1
            cut = after if grown > 1 else before
            local *= grown * ceil(size / prod(sizes[a] for a in cut))
        return [Exchange(kind="all-to-all", axes=moved, bytes=local, layout=target)]
    found: list[Exchange] = []
    gathered, before = None, source
    for step in table.path(source, target, shape, itemsize):
        dim = next(d for d, axes in enumerate(before) if axes != step.layout[d])
        before, again = step.layout, gathered == dim
        gathered = dim if step.kind == "all-gather" else None
        if step.kind == "slice":
            # XLA does not cut unevenly at once what a collective brings.
            if found and is_even(shape, table.mesh.sizes, step.layout):
                found[-1] = replace(found[-1], layout=step.layout)
            continue
        axes = step.axes
        if step.kind == "all-gather" and again:
            axes = (*axes, *found.pop().axes)
        found.append(Exchange(kind=step.kind, axes=axes, bytes=int(step.bytes), layout=step.layout))
    return found


def _moved(source: Layout, target: Layout) -> tuple[int, ...]:
    """The axes that only go from the end of one dimension to that of another, in their order."""
    changed = [d for d, axes in enumerate(source) if axes != target[d]]
    if len(changed) != 2:
        return ()
    for one, other in (changed, changed[::-1]):
        moved = source[one][len(target[one]) :]
        if source[one] == (*target[one], *moved) and target[other] == (*source[other], *moved):
            return moved
    return ()
