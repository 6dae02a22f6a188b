"""The sharding ILP and its linear relaxation in matrix form, solved by HiGHS.

Variables: ``x_v`` in {0, 1}^S_v per node, ``e_uv`` >= 0 per edge and allowed pair (paper, section
4.2; e is integral where x is). With both marginals of e tied to x, not only e <= x, the relaxation
is that of the local polytope, which is integral on most programs:

    min  sum_v c_v . x_v + sum_uv R_uv . e_uv
    s.t. sum_i x_v(i) = 1                                   for each node
         sum_j e_uv(i, j) = x_u(i),  sum_i e_uv(i, j) = x_v(j)   for each edge
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from math import inf
from typing import TYPE_CHECKING

import numpy as np

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.problem import Edge, InfeasibleError, Memory, Problem
from alpa.passes.solve.sharding.settings import DEFAULT, Settings

if TYPE_CHECKING:
    import highspy


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


def relax(problem: Problem, *, deadline: float, settings: Settings = DEFAULT) -> Relaxed | None:
    """Solves the linear relaxation, without memory; None if the deadline came first."""
    form = _Form(problem, settings)
    highs = form.start()
    if not _run(highs, deadline) or highs.getModelStatus().name != "kOptimal":
        return None
    duals = np.array(highs.getSolution().row_dual)
    # Those of the first rows would move costs between nodes.
    duals[: len(problem.node_costs)] = 0.0
    paid = np.bincount(form.columns, form.values * duals[form.rows])
    return Relaxed(form.assignment(highs), form.with_costs(form.costs - paid))


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
    form = _Form(problem, settings)
    highs = form.start(mip_rel_gap=relative_gap, mip_feasibility_tolerance=1e-9)
    if max_nodes is not None:
        # A dive for a good choice: strong branching and restarts are for proofs.
        highs.setOptionValue("mip_max_nodes", max_nodes)
        highs.setOptionValue("mip_pscost_minreliable", 0)
        highs.setOptionValue("mip_allow_restart", False)
    if enough is not None:
        highs.setOptionValue("objective_target", enough * form.scale)
    count = form.begins[-1]
    highs.changeColsIntegrality(count, np.arange(count), np.ones(count, np.uint8))
    for moment in times:
        # In parts of the limit, as far as that is above a byte.
        held = form.held(moment) / max(problem.memory_limit, 1.0)
        columns = np.flatnonzero(held)
        most = min(problem.memory_limit, 1.0)
        highs.addRow(-inf, most, columns.size, columns, held[columns])
    if not _run(highs, deadline) or not highs.getInfo().primal_solution_status:
        return None
    return Branched(form.assignment(highs), highs.getInfo().mip_dual_bound / form.scale)


def new_highs(**options: bool | float) -> highspy.Highs:
    """HiGHS that prints nothing and runs the same each time.

    All of them have one thread: HiGHS refuses to run with another number than the first of a
    process.
    """
    import highspy  # noqa: PLC0415 - costs start-up time, and most problems never come here

    highs = highspy.Highs()
    for name, value in (options | {"output_flag": False, "random_seed": 0, "threads": 1}).items():
        highs.setOptionValue(name, value)
    return highs


def _run(highs: highspy.Highs, deadline: float) -> bool:
    """Whether there was time to run at all; raises ``InfeasibleError``."""
    left = deadline - time.monotonic()
    if left <= 0:
        return False
    highs.setOptionValue("time_limit", highs.getRunTime() + left)
    highs.run()
    status = highs.getModelStatus().name
    if status in ("kInfeasible", "kUnboundedOrInfeasible"):
        _, presolve = highs.getOptionValue("presolve")
        if presolve == "off":
            raise InfeasibleError(())
        # Its presolve takes some problems that have solutions for infeasible (HiGHS issue 3090).
        highs.setOptionValue("presolve", "off")
        highs.clearSolver()
        return _run(highs, deadline)
    if status not in ("kOptimal", "kTimeLimit", "kSolutionLimit", "kObjectiveTarget"):
        raise SolverFailedError(f"HiGHS failed on the sharding ILP: {status}")
    return True


class _Form:
    """A problem in matrix form: costs of the columns (x, e), and entries of the rows, which come to
    1 for each node and to 0 for each marginal. Forbidden pairs are no columns; all strategies are.
    """

    def __init__(self, problem: Problem, settings: Settings) -> None:
        self._problem = problem
        sizes = [costs.size for costs in problem.node_costs]
        self._pairs = [np.argwhere(edge.costs < inf) for edge in problem.edges]
        """allowed ones of each edge, as its columns"""
        self.begins: list[int] = np.cumsum([0, *sizes]).tolist()
        """where each node's columns begin, and the edges'"""
        pairs = zip(problem.edges, self._pairs, strict=True)
        costs = [*problem.node_costs, *(edge.costs[*pair.T] for edge, pair in pairs)]
        self.costs = np.concatenate(costs)
        self.scale = settings.tuning.largest_cost / (np.abs(self.costs).max(initial=0.0) or 1.0)
        self.costs = self.costs * self.scale
        row, column = len(sizes), self.begins[-1]
        entries = [(np.repeat(np.arange(row), sizes), np.arange(column), np.ones(column))]
        for edge, pair in zip(problem.edges, self._pairs, strict=True):
            here = np.arange(column, column + len(pair))
            column += here.size
            for axis, end in enumerate((edge.source, edge.target)):
                own = np.arange(sizes[end])
                entries.append((row + pair[:, axis], here, np.ones(here.size)))
                entries.append((row + own, self.begins[end] + own, -np.ones(own.size)))
                row += own.size
        self.rows, self.columns, self.values = (
            np.concatenate(parts) for parts in zip(*entries, strict=True)
        )

    def start(self, **options: bool | float) -> highspy.Highs:
        """The linear relaxation, ready to run."""
        highs, size = new_highs(**options), self.costs.size
        highs.addCols(size, self.costs, np.zeros(size), np.full(size, inf), 0, [], [], [])
        order, lengths = np.argsort(self.rows, kind="stable"), np.bincount(self.rows)
        sums = (np.arange(lengths.size) < len(self._problem.node_costs)).astype(float)
        highs.addRows(
            lengths.size,
            sums,
            sums,
            order.size,
            np.cumsum(lengths) - lengths,
            self.columns[order],
            self.values[order],
        )
        return highs

    def held(self, moment: int) -> np.ndarray:
        """The bytes of each column at a time."""
        numbers = self._problem.edge_numbers()
        ends = self._edge_ends()
        held = np.zeros(self.costs.size)
        for nodes, size in Memory(self._problem).row(moment).items():
            if len(nodes) == 1:
                held[self.begins[nodes[0]] : self.begins[nodes[0] + 1]] += size
            else:
                number = numbers[nodes]
                there = size if self._problem.edges[number].source == nodes[0] else size.T
                held[ends[number] : ends[number + 1]] += there[*self._pairs[number].T]
        return held

    def assignment(self, highs: highspy.Highs) -> tuple[int, ...]:
        """Each node's strategy of largest weight."""
        weights = np.array(highs.getSolution().col_value)
        return tuple(int(weights[i:j].argmax()) for i, j in pairwise(self.begins))

    def with_costs(self, costs: np.ndarray) -> Problem:
        """The problem with such costs of the columns."""
        costs = costs / self.scale
        edges: list[Edge] = []
        ends = pairwise(self._edge_ends())
        for edge, pair, (i, j) in zip(self._problem.edges, self._pairs, ends, strict=True):
            shifted = np.full(edge.costs.shape, inf)
            shifted[*pair.T] = costs[i:j]
            edges.append(Edge(edge.source, edge.target, shifted))
        nodes = tuple(costs[i:j] for i, j in pairwise(self.begins))
        return Problem(node_costs=nodes, edges=tuple(edges))

    def _edge_ends(self) -> list[int]:
        return np.cumsum([self.begins[-1], *map(len, self._pairs)]).tolist()
