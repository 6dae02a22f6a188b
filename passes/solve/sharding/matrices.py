"""What presolve finds of an edge's matrix, which is the same for equal ones."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

import numpy as np


class Normalised(NamedTuple):
    """A matrix whose rows and then columns have lost what they cost at least."""

    rows: np.ndarray | None
    """what each row costs at least, inf if it is forbidden; None for nothing"""
    columns: np.ndarray | None
    rest: np.ndarray
    """0 where a row or a column is forbidden"""
    most: float
    """of the rest"""
    scale: float
    """the largest absolute value before that is finite"""


def normalised(costs: np.ndarray) -> Normalised:
    """Splits a matrix into what its rows, its columns and its pairs cost."""
    rows, rest = _without_least(costs)
    columns, rest = _without_least(rest.T)
    return Normalised(rows, columns, rest.T, rest.max(), _scale(costs))


def _without_least(costs: np.ndarray) -> tuple[np.ndarray | None, np.ndarray]:
    """The least of each row, None if all are 0, and the matrix without it."""
    least = costs.min(axis=1)
    if not least.any():
        return None, costs
    forbidden = least == inf
    if not forbidden.any():
        return least, costs - least[:, None]
    rest = np.where(forbidden[:, None], 0.0, costs) - np.where(forbidden, 0.0, least)[:, None]
    return least, rest


def _scale(costs: np.ndarray) -> float:
    """The largest absolute value of a matrix that is finite."""
    most = costs.max()
    if most < inf:
        return max(most, -costs.min())
    return np.abs(costs).max(initial=0.0, where=costs < inf)


def least_difference(costs: np.ndarray) -> np.ndarray:
    """``[a, b]``: min over j of ``costs[a, j] - costs[b, j]``, where forbidden counts as inf.

    Where a is forbidden b cannot be worse; where only b is, it is infinitely worse. Where a is
    forbidden throughout the result is large instead of inf, for it is added to such -inf.
    """
    # The least of whole matrices, one per j, is found faster than that of many short rows.
    costs = np.ascontiguousarray(costs.T)
    forbidden = costs == inf
    if not forbidden.any():
        return (costs[:, :, None] - costs[:, None, :]).min(axis=0)
    difference = np.where(forbidden, 0.0, costs)[:, :, None] - costs[:, None, :]
    return np.where(forbidden[:, :, None], 1e300, difference).min(axis=0)
