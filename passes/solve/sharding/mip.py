"""The sharding ILP and its linear relaxation, in matrix form for cvxpy, solved by HiGHS.

Variables: ``x_v`` in {0, 1}^S_v per node, ``e_uv`` >= 0 per edge and allowed pair (paper, section
4.2; e is integral where x is). With both marginals of e tied to x, not only e <= x, the relaxation
is that of the local polytope, which is integral on most programs:

    min  sum_v c_v . x_v + sum_uv R_uv . e_uv
    s.t. sum_i x_v(i) = 1                                   for each node
         sum_j e_uv(i, j) = x_u(i),  sum_i e_uv(i, j) = x_v(j)   for each edge
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING, Any, cast

import numpy as np

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.problem import Edge, InfeasibleError, Memory, Problem
from alpa.passes.solve.sharding.settings import DEFAULT, Settings

if TYPE_CHECKING:
    import cvxpy as cp
    import scipy.sparse as sp  # pyright: ignore[reportMissingTypeStubs]


@dataclass(frozen=True, eq=False)
class Branched:
    """The best assignment that branch and bound found, and what it proved."""

    choice: tuple[int, ...]
    bound: float
    """seconds"""


@dataclass(frozen=True, eq=False)
class Relaxed:
    """The linear relaxation: an assignment read off it, and the costs shifted by its duals."""

    choice: tuple[int, ...]
    shifted: Problem


@dataclass(frozen=True, eq=False)
class _Matrices:
    costs: np.ndarray
    simplex: sp.csr_matrix
    marginals: sp.csr_matrix
    offsets: np.ndarray
    pairs: list[np.ndarray]
    scale: float


def relax(problem: Problem, *, deadline: float, settings: Settings = DEFAULT) -> Relaxed | None:
    """Solves the linear relaxation, without memory; None if the deadline came first."""
    import cvxpy as cp  # noqa: PLC0415 - costs seconds, and most problems never come here

    matrices = _matrices(problem, settings)
    x = cp.Variable(matrices.costs.size, nonneg=True)
    tied = cast("Any", matrices.marginals @ x == 0)
    stats = _run(matrices, x, [matrices.simplex @ x == 1, tied], deadline, {})
    if not stats or x.value is None:
        return None
    shift = cast("np.ndarray", cast("Any", matrices.marginals).T @ np.asarray(tied.dual_value))
    shifted = _split(problem, matrices, (matrices.costs + shift) / matrices.scale)
    return Relaxed(_argmax(matrices, np.asarray(x.value)), shifted)


def branch(
    problem: Problem,
    *,
    deadline: float,
    relative_gap: float,
    times: Iterable[int] = (),
    max_nodes: int | None = None,
    enough: float | None = None,
    settings: Settings = DEFAULT,
) -> Branched | None:
    """Solves the MIP by branch and bound; None if the deadline came before any solution.

    The memory limit holds at these ``times`` only. The search also ends after ``max_nodes``, and at
    a choice that costs no more than ``enough``.
    """
    import cvxpy as cp  # noqa: PLC0415 - costs seconds, and most problems never come here

    matrices = _matrices(problem, settings)
    count = int(matrices.offsets[-1])
    x = cp.Variable(count, boolean=True)
    e = cp.Variable(matrices.costs.size - count, nonneg=True)
    both: Any = cp.hstack([x, e])  # pyright: ignore[reportUnknownMemberType]
    constraints: list[Any] = [matrices.simplex @ both == 1, matrices.marginals @ both == 0]
    moments = list(times)
    if moments:
        # In parts of the limit, as far as that is above a byte.
        held = _held(problem, matrices, moments)
        constraints.append(held @ both <= min(problem.memory_limit, 1.0))
    options: dict[str, Any] = {
        "mip_rel_gap": relative_gap,
        "mip_feasibility_tolerance": 1e-9,
    }
    if max_nodes is not None:
        # A dive for a good choice: strong branching and restarts are for proofs.
        options |= {
            "mip_max_nodes": max_nodes,
            "mip_pscost_minreliable": 0,
            "mip_allow_restart": False,
        }
    if enough is not None:
        options["objective_target"] = enough * matrices.scale
    stats = _run(matrices, both, constraints, deadline, options)
    if not stats or x.value is None:
        return None
    bound = float(stats.extra_stats.mip_dual_bound) / matrices.scale
    return Branched(_argmax(matrices, np.asarray(x.value)), bound)


def _run(
    matrices: _Matrices,
    x: cp.Expression,
    constraints: list[Any],
    deadline: float,
    options: dict[str, Any],
) -> Any:
    import cvxpy as cp  # noqa: PLC0415 - see branch

    left = deadline - time.monotonic()
    if left <= 0:
        return None
    if left < inf:
        options = {**options, "time_limit": left}
    model = cp.Problem(cp.Minimize(matrices.costs @ x), constraints)
    try:
        with warnings.catch_warnings():
            # cvxpy warns when the time limit ends the search; the status says so as well.
            warnings.filterwarnings("ignore", "Solution may be inaccurate", UserWarning)
            run = cast("Any", model.solve)  # pyright: ignore[reportUnknownMemberType]
            run(solver=cp.HIGHS, highs_options={"random_seed": 0, "threads": 1, **options})
    except cp.SolverError as error:
        raise SolverFailedError(f"HiGHS failed on the sharding ILP: {error}") from error
    if model.status in (cp.USER_LIMIT, cp.OPTIMAL_INACCURATE):
        return model.solver_stats if "mip_rel_gap" in options else None
    if model.status == cp.INFEASIBLE and "presolve" not in options:
        # Its presolve takes some problems that have solutions for infeasible (HiGHS issue 3090).
        return _run(matrices, x, constraints, deadline, {**options, "presolve": "off"})
    if model.status == cp.INFEASIBLE:
        raise InfeasibleError(tuple(range(matrices.offsets.size - 1)))
    if model.status != cp.OPTIMAL:
        raise SolverFailedError(f"HiGHS found the sharding ILP {model.status}")
    return model.solver_stats


def _matrices(problem: Problem, settings: Settings) -> _Matrices:
    """Costs and the constraint rows; forbidden strategies get a huge cost, forbidden pairs none."""
    # It costs start-up time.
    import scipy.sparse as sp  # noqa: PLC0415 # pyright: ignore[reportMissingTypeStubs]

    sizes = np.array([costs.size for costs in problem.node_costs])
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    count = int(offsets[-1])
    pairs = [np.argwhere(edge.costs < inf) for edge in problem.edges]
    costs = np.concatenate(
        [
            *problem.node_costs,
            *(e.costs[p[:, 0], p[:, 1]] for e, p in zip(problem.edges, pairs, strict=True)),
        ]
    )
    largest = float(np.abs(costs).max(initial=0.0))
    scale = settings.tuning.largest_cost / largest if largest > 0 else 1.0
    row, column = 0, count
    r: list[np.ndarray] = []
    c: list[np.ndarray] = []
    v: list[np.ndarray] = []
    for edge, pair in zip(problem.edges, pairs, strict=True):
        here = column + np.arange(len(pair))
        for axis, end in enumerate((edge.source, edge.target)):
            r += [row + pair[:, axis], row + np.arange(sizes[end])]
            c += [here, offsets[end] + np.arange(sizes[end])]
            v += [np.ones(len(pair)), -np.ones(sizes[end])]
            row += int(sizes[end])
        column += len(pair)
    simplex = sp.csr_matrix(
        (np.ones(count), (np.repeat(np.arange(sizes.size), sizes), np.arange(count))),
        shape=(sizes.size, column),
    )
    marginals = sp.csr_matrix(
        (_joined(v), (_joined(r).astype(int), _joined(c).astype(int))), shape=(row, column)
    )
    return _Matrices(costs * scale, simplex, marginals, offsets, pairs, scale)


def _held(problem: Problem, matrices: _Matrices, times: Sequence[int]) -> sp.csr_matrix:
    """What the columns hold at each time, as a part of the limit where that is above 1."""
    # It costs start-up time.
    import scipy.sparse as sp  # noqa: PLC0415 # pyright: ignore[reportMissingTypeStubs]

    memory, unit = Memory(problem), max(problem.memory_limit, 1.0)
    numbers = problem.edge_numbers()
    first = matrices.offsets[-1] + np.cumsum([0, *map(len, matrices.pairs)])
    held = np.zeros((len(times), matrices.costs.size))
    for row, moment in zip(held, times, strict=True):
        for nodes, size in memory.row(moment).items():
            if len(nodes) == 1:
                row[matrices.offsets[nodes[0]] : matrices.offsets[nodes[0] + 1]] += size / unit
            else:
                number = numbers[nodes]
                there = size if problem.edges[number].source == nodes[0] else size.T
                row[first[number] : first[number + 1]] += there[*matrices.pairs[number].T] / unit
    return sp.csr_matrix(held)


def _joined(parts: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(parts) if parts else np.zeros(0)


def _argmax(matrices: _Matrices, x: np.ndarray) -> tuple[int, ...]:
    """Each node's strategy of largest weight."""
    ends = matrices.offsets.tolist()
    return tuple(int(x[begin:end].argmax()) for begin, end in pairwise(ends))


def _split(problem: Problem, matrices: _Matrices, costs: np.ndarray) -> Problem:
    """A problem with the costs of the matrix form's columns."""
    ends = matrices.offsets.tolist()
    edges: list[Edge] = []
    at = ends[-1]
    for edge, pair in zip(problem.edges, matrices.pairs, strict=True):
        shifted = np.full(edge.costs.shape, inf)
        shifted[pair[:, 0], pair[:, 1]] = costs[at : at + len(pair)]
        edges.append(Edge(edge.source, edge.target, shifted))
        at += len(pair)
    nodes = tuple(costs[begin:end] for begin, end in pairwise(ends))
    return Problem(node_costs=nodes, edges=tuple(edges))
