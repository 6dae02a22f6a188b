"""The sharding problem within a memory limit: Lagrangian relaxation, then branch and bound.

With a price ``lambda_t >= 0`` per byte at time t, the relaxed problem

    v(lambda) = min over choices of  cost + sum_t lambda_t (bytes_t - limit)

is a sharding problem without memory, solved exactly; v is a lower bound, and its maximum over
lambda that of the best convex relaxation (Geoffrion 1974). Kelley's cutting planes find it: each
choice seen so far bounds v by a plane. Times become rows when a choice first breaks the limit
there. Feasible choices come out on the way and are improved node by node. What gap is left is
closed by HiGHS on the strategies that a better choice may still take.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

import numpy as np
from scipy.optimize import linprog

from alpa.passes.solve.shard_bound import ascend, dual_bound, neighbours, prune
from alpa.passes.solve.shard_lp import SolverFailedError, branch
from alpa.passes.solve.shard_problem import (
    Edge,
    InfeasibleError,
    Memory,
    OutOfMemoryError,
    Problem,
    Solution,
)

SolveFree = Callable[[Problem], Solution]
"""Solves a problem without memory."""

_ROUNDS = 100
_SWEEPS = 200


@dataclass
class _State:
    problem: Problem
    memory: Memory
    solve_free: SolveFree
    deadline: float
    gap: float
    rows: dict[int, dict[int, np.ndarray]]
    seen: list[tuple[float, np.ndarray]]
    """(cost, bytes at each of memory's times) of each choice found"""
    best: tuple[int, ...] | None = None
    value: float = inf
    bound: float = -inf
    prices: dict[int, float] | None = None
    """of the best bound"""

    @property
    def done(self) -> bool:
        return self.closed or time.monotonic() > self.deadline

    @property
    def closed(self) -> bool:
        return self.value < inf and self.value - self.bound <= self.gap * abs(self.value)


def solve_within(
    problem: Problem, free: Solution, solve_free: SolveFree, *, deadline: float, gap: float
) -> tuple[tuple[int, ...], float]:
    """The cheapest choice within memory, as far as the deadline lets, and a bound.

    ``free`` is the solution without the limit, which breaks it. Raises ``OutOfMemoryError``, and
    ``TimeoutError`` where no choice within memory was found in time.
    """
    state = _State(problem, Memory(problem), solve_free, deadline, gap, {}, [])
    state.bound = free.bound
    _see(state, free.choice)
    _maximise_bound(state)
    if not state.done:
        _branch(state)
    if state.best is None:
        raise TimeoutError(
            "the time limit came before any choice within memory was found; raise it"
        )
    return state.best, min(state.bound, state.value)


def _see(state: _State, choice: tuple[int, ...]) -> bool:
    """Notes a choice: a plane, perhaps a new row, perhaps the best so far. Whether it fits."""
    used = state.memory.over_time(choice)
    state.seen.append((state.problem.cost(choice), used))
    worst = int(np.argmax(used))
    if used[worst] > state.problem.memory_limit:
        moment = int(state.memory.times[worst])
        if moment not in state.rows:
            _add_row(state, moment)
        return False
    better = improve_within(state.problem, state.memory, choice)
    cost = state.problem.cost(better)
    if cost < state.value:
        state.best, state.value = better, cost
        # What costs more by itself can go. Costs that stand for "never" spoil the arithmetic.
        slack = cost - dual_bound(state.problem)
        pruned, _ = prune(state.problem, slack + 1e-9 * abs(cost))
        state.problem = replace(state.problem, node_costs=pruned.node_costs, edges=pruned.edges)
    return True


def _add_row(state: _State, moment: int) -> None:
    """Adds a time's row; raises where no choice fits then."""
    row = state.memory.row(moment)
    state.rows[moment] = row
    problem = state.problem
    least = Problem(
        node_costs=tuple(
            np.where(np.isfinite(costs), row.get(v, 0.0), inf)
            for v, costs in enumerate(problem.node_costs)
        ),
        edges=tuple(
            replace(e, costs=np.where(np.isfinite(e.costs), 0.0, inf)) for e in problem.edges
        ),
    )
    found = state.solve_free(least)
    if found.bound > problem.memory_limit * (1 + 1e-12):
        held = {v: float(b[found.choice[v]]) for v, b in row.items()}
        largest = sorted(held, key=lambda v: -held[v])[:8]
        raise OutOfMemoryError(found.bound, problem.memory_limit, moment, tuple(largest))
    _see(state, found.choice)


def _maximise_bound(state: _State) -> None:
    limit, size = state.problem.memory_limit, _unit(state.problem)
    ceiling = 10 * max(abs(state.bound), 1e-30) / size
    index = {int(t): i for i, t in enumerate(state.memory.times)}
    for _ in range(_ROUNDS):
        if state.done:
            return
        moments = list(state.rows)
        columns = [index[t] for t in moments]
        # max theta:  theta - sum_t lambda_t (bytes_kt - limit) <= cost_k  for each choice k
        excess = np.array([used[columns] for _, used in state.seen]) - limit
        costs = np.array([cost for cost, _ in state.seen])
        scale = np.abs(costs).max() or 1.0
        unit = scale / size
        master = linprog(
            np.array([-1.0, *np.zeros(len(moments))]),
            A_ub=np.hstack([np.ones((len(costs), 1)), -excess / size]),
            b_ub=costs / scale,
            bounds=[(None, None), *[(0.0, ceiling / unit)] * len(moments)],
            method="highs",
        )
        if not master.success:
            return
        upper = -master.fun * scale
        prices = {t: float(p) * unit for t, p in zip(moments, master.x[1:], strict=True)}
        if upper - state.bound <= 0.1 * state.gap * abs(upper) and state.best is not None:
            return
        found = state.solve_free(_priced(state.problem, state.rows, prices))
        value = found.bound - limit * sum(prices.values())
        if value > state.bound:
            state.bound, state.prices = value, prices
        known = len(state.rows)
        _see(state, found.choice)
        at_ceiling = any(price >= 0.999 * ceiling for price in prices.values())
        if at_ceiling:
            ceiling *= 10
        elif value >= upper - 1e-9 * abs(upper) and len(state.rows) == known:
            return


def _priced(
    problem: Problem, rows: dict[int, dict[int, np.ndarray]], prices: dict[int, float]
) -> Problem:
    costs = [c.astype(float) for c in problem.node_costs]
    for moment, price in prices.items():
        if price > 0:
            for node, held in rows[moment].items():
                costs[node] = costs[node] + price * held
    return Problem(node_costs=tuple(costs), edges=problem.edges)


def improve_within(problem: Problem, memory: Memory, choice: tuple[int, ...]) -> tuple[int, ...]:
    """Changes one node at a time while that lowers the cost and fits into memory."""
    around = neighbours(problem)
    mine: list[list[int]] = [[] for _ in problem.node_costs]
    for number, usage in enumerate(problem.usages):
        mine[usage.node].append(number)
    now, used = list(choice), memory.over_time(choice)
    for _ in range(20):
        changed = False
        for node, costs in enumerate(problem.node_costs):
            for number, axis, other in around[node]:
                costs = costs + problem.edges[number].costs.take(now[other], axis=1 - axis)
            for strategy in np.argsort(costs, kind="stable"):
                if not costs[strategy] < costs[now[node]]:
                    break
                after = used.copy()
                for number in mine[node]:
                    held = problem.usages[number].bytes
                    span = slice(memory.first[number], memory.end[number])
                    after[span] += held[strategy] - held[now[node]]
                if after.max(initial=0.0) <= problem.memory_limit:
                    now[node], used, changed = int(strategy), after, True
                    break
        if not changed:
            break
    return tuple(now)


def _unit(problem: Problem) -> float:
    """Bytes that count as one to the LP solver."""
    return max(problem.memory_limit, 1.0)


def _branch(state: _State) -> None:
    """Closes the gap by branch and bound on the strategies that a better choice may take."""
    problem = state.problem
    if state.prices is not None and state.best is not None:
        problem = _without_dear(state, problem, state.prices)
    smaller, kept = without_forbidden(problem)
    while True:
        rows = [
            {v: held[kept[v]] / _unit(problem) for v, held in row.items()}
            for row in state.rows.values()
        ]
        try:
            found = branch(
                smaller,
                deadline=state.deadline,
                relative_gap=state.gap,
                rows=rows,
                capacity=problem.memory_limit / _unit(problem),
            )
        except InfeasibleError as error:
            if state.best is not None:
                raise SolverFailedError("HiGHS found no choice where one is known") from error
            raise _no_joint_choice(state) from error
        if found is None:
            return
        choice = tuple(int(k[np.argmax(x)]) for k, x in zip(kept, found.weights, strict=True))
        cost = problem.cost(choice)
        if not cost - found.bound <= max(state.gap, 1e-6) * abs(cost) and not state.done:
            raise SolverFailedError(
                f"HiGHS proved {found.bound} s for a choice that costs {cost} s"
            )
        known = len(state.rows)
        _see(state, choice)
        state.bound = min(max(state.bound, found.bound), state.value)
        if len(state.rows) == known:
            return


def _no_joint_choice(state: _State) -> OutOfMemoryError:
    """Each time fits by itself, but not all with the same choice."""
    limit = state.problem.memory_limit
    cheapest = min(state.seen, key=lambda seen: float(seen[1].max()))[1]
    moment = int(state.memory.times[int(np.argmax(cheapest))])
    least = {v: float(held.min()) for v, held in state.memory.row(moment).items()}
    largest = sorted(least, key=lambda v: -least[v])[:8]
    return OutOfMemoryError(float(np.nextafter(limit, inf)), limit, moment, tuple(largest))


def _without_dear(state: _State, problem: Problem, prices: dict[int, float]) -> Problem:
    """Forbids what no better choice than the best can take, by the bound at these prices."""
    smaller, kept = without_forbidden(problem)
    rows = {t: {v: held[kept[v]] for v, held in row.items()} for t, row in state.rows.items()}
    priced = _priced(smaller, rows, prices)
    shifted = ascend(priced, sweeps=_SWEEPS, gap=0.0, deadline=state.deadline).problem
    bound = dual_bound(shifted) - problem.memory_limit * sum(prices.values())
    allowed, _ = prune(shifted, state.value - bound + 1e-9 * abs(state.value))
    nodes = [np.full(costs.shape, inf) for costs in problem.node_costs]
    for v, costs in enumerate(allowed.node_costs):
        chosen = kept[v][np.isfinite(costs)]
        nodes[v][chosen] = problem.node_costs[v][chosen]
    edges: list[Edge] = []
    for small, whole in zip(allowed.edges, problem.edges, strict=True):
        at = np.ix_(kept[whole.source], kept[whole.target])
        costs = np.full(whole.costs.shape, inf)
        costs[at] = np.where(np.isfinite(small.costs), whole.costs[at], inf)
        edges.append(replace(whole, costs=costs))
    return replace(problem, node_costs=tuple(nodes), edges=tuple(edges))


def without_forbidden(problem: Problem) -> tuple[Problem, list[np.ndarray]]:
    """The problem without strategies that are forbidden or have no allowed partner on an edge.

    Also gives the numbers that each node's strategies had. Memory is left out.
    """
    allowed = [np.isfinite(costs) for costs in problem.node_costs]
    matrices = [np.isfinite(edge.costs) for edge in problem.edges]
    changed = True
    while changed:
        changed = False
        for edge, matrix in zip(problem.edges, matrices, strict=True):
            here = matrix & allowed[edge.source][:, None] & allowed[edge.target]
            for node, partner in ((edge.source, here.any(axis=1)), (edge.target, here.any(axis=0))):
                if (allowed[node] & ~partner).any():
                    allowed[node] = allowed[node] & partner
                    changed = True
    kept = [np.flatnonzero(mask) for mask in allowed]
    edges = tuple(
        replace(e, costs=e.costs[np.ix_(kept[e.source], kept[e.target])]) for e in problem.edges
    )
    nodes = tuple(c[k] for c, k in zip(problem.node_costs, kept, strict=True))
    return Problem(node_costs=nodes, edges=edges), kept
