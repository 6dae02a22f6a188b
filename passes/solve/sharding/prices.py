"""Prices of bytes: problems at them, and the next ones in the search for the best bound.

Every choice k seen so far bounds v by a plane: ``v(lambda) <= cost_k + lambda (bytes_k - limit)``.
Kelley's method moves to the maximum of the lower envelope of the planes, and is unstable. The level
method (Lemarechal, Nemirovskii and Nesterov 1995) moves to the prices closest to the best so far at
which the envelope promises a given share of the possible gain. Both solve small linear programs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from alpa.passes.solve.sharding.mip import new_highs
from alpa.passes.solve.sharding.problem import Memory, Problem
from alpa.passes.solve.sharding.settings import DEFAULT, Settings, Step


def priced(problem: Problem, memory: Memory, prices: Mapping[int, float]) -> Problem:
    """The problem without memory where bytes cost what they are priced, at each time."""
    costs, edges = list(problem.node_costs), list(problem.edges)
    numbers = problem.edge_numbers()
    for moment, price in prices.items():
        if price > 0:
            for nodes, held in memory.row(moment).items():
                if len(nodes) == 1:
                    costs[nodes[0]] = costs[nodes[0]] + price * held
                    continue
                number = numbers[nodes]
                edge = edges[number]
                paid = price * (held if edge.source == nodes[0] else held.T)
                edges[number] = replace(edge, costs=edge.costs + paid)
    return Problem(node_costs=tuple(c.astype(float) for c in costs), edges=tuple(edges))


@dataclass(frozen=True, eq=False)
class Plane:
    """A choice's cost and the bytes that it holds at each time."""

    cost: float
    used: np.ndarray


def next_prices(
    planes: Sequence[Plane],
    at: Sequence[int],
    limit: float,
    centre: np.ndarray,
    bound: float,
    enough: float,
    ceiling: float,
    *,
    settings: Settings = DEFAULT,
) -> tuple[float, np.ndarray] | None:
    """How high v can be, as far as the planes tell, and the prices to try; None where HiGHS fails.

    ``at`` numbers the times that have prices, ``centre`` holds those of ``bound``, the best known.
    A bound of ``enough`` is as good as a higher one. Prices are at most ``ceiling``.
    """
    size = max(limit, 1.0)
    costs = np.array([plane.cost for plane in planes])
    # There is no plane yet where all choices so far took a forbidden pair, and no time has a price
    # before memory was seen to bind.
    used = np.array([plane.used[at] for plane in planes]).reshape(len(planes), len(at))
    excess = (used - limit) / size
    if enough < np.inf:
        costs, excess = np.append(costs, enough), np.vstack([excess, np.zeros(len(at))])
    scale = np.abs(costs).max(initial=0.0) or 1.0
    unit = scale / size
    count = len(at)
    free = [(0.0, ceiling / unit)] * count
    top = _linear_program(
        np.array([-1.0, *np.zeros(count)]),
        np.hstack([np.ones((len(costs), 1)), -excess]),
        costs / scale,
        [(-np.inf, np.inf), *free],
    )
    if top is None:
        return None
    upper = float(top[0]) * scale
    furthest = top[1:] * unit
    if np.any(furthest >= 0.999 * ceiling) or Step.LEVEL not in settings.steps:
        return upper, furthest
    level = (bound + settings.tuning.level * (upper - bound)) / scale
    # min d:  |lambda_t - centre_t| <= d,  cost_k + lambda . excess_k >= level
    beside = np.vstack([np.eye(count), -np.eye(count)])
    near = _linear_program(
        np.array([1.0, *np.zeros(count)]),
        np.vstack(
            [
                np.hstack([np.zeros((len(costs), 1)), -excess]),
                np.hstack([-np.ones((2 * count, 1)), beside]),
            ]
        ),
        np.concatenate([costs / scale - level, centre / unit, -centre / unit]),
        [(0.0, np.inf), *free],
    )
    nearest = furthest if near is None else near[1:] * unit
    # Where v itself is not known to its last part, the planes may promise enough without a step.
    return upper, furthest if np.allclose(nearest, centre, rtol=1e-6, atol=0.0) else nearest


def _linear_program(
    costs: np.ndarray,
    rows: np.ndarray,
    most: np.ndarray,
    bounds: Sequence[tuple[float, float]],
) -> np.ndarray | None:
    """Minimises ``costs . x`` with ``rows x <= most``; None where HiGHS fails."""
    highs, count, size = new_highs(), len(most), len(costs)
    least, greatest = np.array(bounds).T
    highs.addCols(size, costs, least, greatest, 0, [], [], [])
    starts = np.arange(count) * size
    columns = np.tile(np.arange(size), count)
    highs.addRows(count, np.full(count, -np.inf), most, rows.size, starts, columns, rows.ravel())
    highs.run()
    if highs.getModelStatus().name != "kOptimal":
        return None
    return np.array(highs.getSolution().col_value)
