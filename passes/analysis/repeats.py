"""Tandem repeats of a sequence: stretches of which each element equals the one a period on.

All maximal ones are found in O(n log^2 n), by comparing elements that are a multiple of the period
apart (Main and Lorentz 1984) with tables of windows of the lengths 1, 2, 4, ... (Karp, Miller and
Rosenberg 1972).
"""

from __future__ import annotations

import numpy as np


def maximal_repeats(signatures: np.ndarray) -> np.ndarray:
    """All (start, stop, period) where each signature equals that one period on, at least one period
    long; none can be extended.

    A repeat of period p holds a multiple of p and its successor, so that comparing these finds it.
    """
    size = signatures.size
    anchors = [np.arange(0, size - period, period) for period in range(1, size // 2 + 1)]
    if not anchors:
        return np.empty((0, 3), dtype=np.int64)
    period = np.repeat(np.arange(1, len(anchors) + 1), [a.size for a in anchors])
    here = np.concatenate(anchors)
    equal = signatures[here] == signatures[here + period]
    here, period = here[equal], period[equal]
    start, stop = here.copy(), here + period
    windows = _windows(signatures)
    for level in reversed(range(len(windows))):
        window, length = windows[level], 1 << level
        # Beyond the end every window differs from one that begins before it.
        equal = window[stop - period] == window[np.minimum(stop, size)]
        stop = np.where(equal, stop + length, stop)
        before = np.maximum(start - length, 0)
        equal = (start >= length) & (window[before] == window[before + period])
        start = np.where(equal, before, start)
    long_enough = stop - start >= 2 * period
    return np.unique(np.stack((start, stop, period), axis=1)[long_enough], axis=0)


def _windows(signatures: np.ndarray) -> list[np.ndarray]:
    """For each position, a number for the window of 1, 2, 4, ... signatures that begins there.

    The last position stands for the end, where windows are empty.
    """
    size = signatures.size
    windows = [np.append(signatures, -1)]
    while 1 << len(windows) <= size:
        length = 1 << (len(windows) - 1)
        last = windows[-1]
        following = last[np.minimum(np.arange(size + 1) + length, size)]
        pairs = (last + 1) * (size + 2) + following + 1
        windows.append(np.unique(pairs, return_inverse=True)[1])
    return windows
