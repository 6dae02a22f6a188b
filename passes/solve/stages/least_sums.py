"""The least sums over the stages of a cut, where only layers count."""

from __future__ import annotations

import numpy as np


def least_before(least: np.ndarray) -> np.ndarray:
    """The least sum over stages that cover the layers before each one, [K + 1], of what stages of
    layers i..j add to it at least, [K, K]."""
    layers = len(least)
    found = np.zeros(layers + 1)
    for k in range(layers):
        found[k + 1] = (least[: k + 1, k] + found[: k + 1]).min()
    return found


def least_behind(least: np.ndarray) -> np.ndarray:
    """The same over stages that cover the layers from each one on."""
    layers = len(least)
    found = np.zeros(layers + 1)
    for k in reversed(range(layers)):
        found[k] = (least[k, k:] + found[k + 1 :]).min()
    return found
