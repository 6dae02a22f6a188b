"""Cuts a sequence of ops into many small layers, at the places where few bytes cross.

A layer ends at the first such place behind its least FLOPs. In a network of equal blocks, that is
the same place of each block, or of each half: a transformer's layers are all its attentions and all
its feed-forward parts, or all its blocks. So there are as many kinds of layers as without the cut
inside of blocks, and each is small: costs of sharded layers are found once per kind, and pipeline
stages may end at many places.
"""

from __future__ import annotations

from bisect import bisect_left

import numpy as np

_PER_LAYER = 2
"""Layers have at least the FLOPs of the mean one over this, if there were as many as may be: the
attention of a block has a third of its FLOPs or more."""


def solve(flops: np.ndarray, crossing: np.ndarray, most_bytes: float, most: int) -> tuple[int, ...]:
    """The first ops of up to `most` layers.

    Of the least FLOPs that give so few layers, the smallest part of all FLOPs is taken.

    Args:
        flops: of each op, [K].
        crossing: bytes that each op and all ops behind it receive from ops before it, [K].
        most_bytes: what may cross where a layer begins.
        most: at least 1.
    """
    sums = np.concatenate([[0.0], np.cumsum(flops)])
    if not sums[-1]:
        return (0,)
    places = np.flatnonzero(crossing <= most_bytes)
    parts = range(_PER_LAYER * most, 0, -1)
    every = (_starts(sums, places, float(sums[-1]) / part) for part in parts)
    return next(starts for starts in every if len(starts) <= most)


def _starts(sums: np.ndarray, places: np.ndarray, least: float) -> tuple[int, ...]:
    """The first ops of layers of at least so many FLOPs; `sums` are those before each op."""
    before: list[float] = sums[places].tolist()
    starts, begin, end = [0], 0.0, float(sums[-1])
    while True:
        at = bisect_left(before, begin + least)
        if at == len(before) or end - before[at] < least:
            return tuple(starts)
        starts.append(places.item(at))
        begin = before[at]
