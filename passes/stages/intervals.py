"""Numbers of layers, and of pairs of layers, as numbers of intervals of layers: arrays [K, K]."""

from __future__ import annotations

import numpy as np


def pairs_inside(pairs: np.ndarray) -> np.ndarray:
    """``[i, j]``: the sum of ``pairs[a, b]`` with i <= a <= b <= j."""
    return np.triu(pairs)[::-1].cumsum(axis=0)[::-1].cumsum(axis=1)


def intervals(values: np.ndarray) -> np.ndarray:
    """``[i, j]``: the sum of values i to j inclusive; meaningless where j < i."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[None, 1:] - total[:-1, None]


def largest(values: np.ndarray) -> np.ndarray:
    """``[i, j]``: the largest of values i to j inclusive; 0 where j < i."""
    return np.maximum.accumulate(np.triu(np.tile(values, (len(values), 1))), axis=1)
