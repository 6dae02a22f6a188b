"""The axes of a mesh that a collective of a manual computation is over."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from math import prod

import numpy as np

from alpa.dialects import ir
from alpa.passes.base import PassError


def collective_axes(op: ir.OpView, names: Sequence[str], sizes: Sequence[int]) -> tuple[int, ...]:
    """The numbers of the axes, of those with two devices or more.

    Args:
        op: the collective, whose groups are of devices numbered row by row.
        names: of the mesh's axes.
        sizes: devices along each.

    Raises:
        PassError: its groups are not those of axes of the mesh.
    """
    real = [axis for axis, size in enumerate(sizes) if size > 1]
    if "source_target_pairs" in op.attributes:
        pairs = np.array(ir.DenseIntElementsAttr(op.attributes["source_target_pairs"]))
        ends = np.array(np.unravel_index(pairs, tuple(sizes)))
        moved = (ends[..., 0] != ends[..., 1]).any(axis=1)
        return tuple(axis for axis in real if moved[axis])
    groups = op.attributes["replica_groups"]
    if not isinstance(groups, ir.DenseIntElementsAttr):
        # jax 0.12 names the axes, in an attribute that has no Python class.
        return tuple(axis for axis in real if f'"{names[axis]}"' in str(groups))
    wanted = {frozenset(group) for group in np.array(groups).tolist()}
    for count in range(len(real) + 1):
        for axes in combinations(real, count):
            if _groups(axes, sizes) == wanted:
                return axes
    raise PassError(
        op,
        f"groups {np.array(groups).tolist()} are not the devices along axes of the mesh "
        f"{dict(zip(names, sizes, strict=True))}; write the collective over named axes of the mesh",
    )


def _groups(axes: tuple[int, ...], sizes: Sequence[int]) -> set[frozenset[int]]:
    others = [axis for axis in range(len(sizes)) if axis not in axes]
    devices = np.arange(prod(sizes)).reshape(sizes).transpose(*others, *axes)
    size = prod(sizes[axis] for axis in axes)
    return {frozenset(group) for group in devices.reshape(-1, size).tolist()}
