"""Solves the sharding problem of the paper (eq. 1, section 4.2), with a bound of the optimum.

Objective: ``min sum_v s_v . c_v + sum_uv s_u . R_uv s_v`` over one-hot ``s_v``, in seconds. Steps
go from cheap to expensive. Each keeps a valid bound and an assignment that is at least as good:

1. ``presolve``: reductions that solve series-parallel graphs outright
2. ``buckets``: bucket elimination, where the graph is narrow
3. ``bound``: dual ascent gives a bound and a choice; where they meet, done; else whatever
   cannot be better than the choice is forbidden, and the rest starts again at 1
4. ``mip``: the linear relaxation, whose duals do the same as 3
5. ``mip``: branch and bound on what is still open

Where the cheapest choice does not fit into memory, ``within`` searches among those that do,
with the steps above for its subproblems.

Fails with ``InfeasibleError`` when no choice is allowed, with ``SolverFailedError`` when HiGHS
does, with ``TimeoutError`` when the time limit comes before any choice.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from math import inf

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.bound import Messages, ascend, dual_bound, prune
from alpa.passes.solve.sharding.buckets import eliminate
from alpa.passes.solve.sharding.mip import branch, relax
from alpa.passes.solve.sharding.presolve import Reduction
from alpa.passes.solve.sharding.problem import (
    Edge,
    InfeasibleError,
    Memory,
    OutOfMemoryError,
    Problem,
    Solution,
    Usage,
    verify,
)
from alpa.passes.solve.sharding.settings import ALL, DEFAULT, Settings, Step, Tuning
from alpa.passes.solve.sharding.within import solve_within

__all__ = [
    "Edge",
    "InfeasibleError",
    "OutOfMemoryError",
    "Problem",
    "Solution",
    "SolverFailedError",
    "Step",
    "Tuning",
    "Usage",
    "solve",
    "verify",
]


@dataclass(frozen=True)
class _Targets:
    deadline: float
    gap: float
    branch_gap: float
    enough: float = inf
    """A bound as high as this is as good as the optimum."""
    settings: Settings = DEFAULT


@dataclass(frozen=True)
class _Found:
    choice: tuple[int, ...]
    value: float
    bound: float


def solve(
    problem: Problem,
    *,
    time_limit: float | None = None,
    relative_gap: float = 1e-9,
    branch_gap: float = 1e-9,
    known: Sequence[int] | None = None,
    enough: float = inf,
    steps: Collection[Step] = ALL,
    tuning: Tuning = DEFAULT.tuning,
) -> Solution:
    """The cheapest choice. Reductions and relaxations go on until the gap is ``relative_gap``;
    where they leave a larger one, ``branch_gap`` is enough; at inf, and without memory, there is no
    branch and bound once a choice is known. ``Solution.status`` says which gap is left.

    After ``time_limit`` seconds the best choice so far is returned with its bound. Deterministic
    but for that. The result costs no more than ``known``, a choice within memory. A bound of
    ``enough`` is as good as the optimum. Only ``steps`` are taken: without one the search is
    weaker, and never wrong.
    Raises ``ValueError`` (not a problem), ``InfeasibleError``, ``TimeoutError``.
    """
    start = time.monotonic()
    problem.check()
    deadline = start + (inf if time_limit is None else time_limit)
    search = _Targets(
        deadline=deadline,
        gap=relative_gap,
        branch_gap=branch_gap,
        enough=enough,
        settings=Settings(steps=steps, tuning=tuning),
    )
    try:
        solution = _solve(problem, search, start)
    except TimeoutError:
        if known is None:
            raise
        solution = _known(problem, known, dual_bound(problem), search, start)
    if known is not None and problem.cost(known) < solution.objective:
        solution = _known(problem, known, solution.bound, search, start)
    verify(problem, solution)
    return solution


def _known(
    problem: Problem,
    choice: Sequence[int],
    bound: float,
    search: _Targets,
    start: float,
    *,
    is_free: bool = False,
) -> Solution:
    """A choice as a solution of which only this bound is proven."""
    objective = problem.cost(choice)
    return Solution(
        choice=tuple(choice),
        objective=objective,
        bound=min(bound, objective),
        is_free=is_free,
        wanted_gap=search.branch_gap,
        peak_bytes=Memory(problem).peak(choice)[0],
        seconds=time.monotonic() - start,
        variables=problem.num_variables,
    )


def _solve(problem: Problem, search: _Targets, start: float) -> Solution:
    """The cheapest assignment within memory that is found before the deadline."""
    if not problem.usages:
        return _solve_free(problem, search, start)

    def solve_free(other: Problem, wanted: float, enough: float = inf) -> Solution:
        return _solve_free(other, replace(search, gap=wanted, enough=enough), start)

    choice, bound, is_free = solve_within(
        problem,
        solve_free,
        deadline=search.deadline,
        free_gap=search.gap,
        gap=search.branch_gap,
        settings=search.settings,
    )
    return _known(problem, choice, bound, search, start, is_free=is_free)


def _solve_free(problem: Problem, search: _Targets, start: float) -> Solution:
    """The cheapest assignment, ignoring memory."""
    reduction = Reduction(problem, search.settings).run(deadline=search.deadline)
    found = _search_cores(problem, reduction, search)
    # The same cost, summed in another order by the reductions: the difference is rounding.
    gap = found.value - found.bound
    bound = found.bound if gap > search.settings.tuning.cost_rounding * abs(found.value) else inf
    objective = problem.cost(found.choice)
    return Solution(
        choice=found.choice,
        objective=objective,
        bound=min(bound, objective),
        wanted_gap=search.branch_gap,
        seconds=time.monotonic() - start,
        variables=problem.num_variables,
    )


def _search_cores(problem: Problem, reduction: Reduction, search: _Targets) -> _Found:
    """Solves the rest of a reduced problem, component by component, and lifts the choices."""
    choices: dict[int, int] = {}
    open_gap = 0.0
    cores = reduction.cores()
    enough = search.enough - reduction.constant if len(cores) == 1 else inf
    search = replace(search, enough=enough)
    for core in cores:
        try:
            found = _search_core(core.problem, search)
        except InfeasibleError as error:
            raise InfeasibleError(tuple(core.nodes[k] for k in error.nodes)) from error
        open_gap += found.value - found.bound
        choices |= core.numbered(found.choice)
    choice = reduction.lift(choices)
    value = problem.cost(choice)
    return _Found(choice, value, value - open_gap)


def _search_core(problem: Problem, search: _Targets) -> _Found:
    settings = search.settings
    steps, tuning = settings.steps, settings.tuning
    found = _tables(problem, tuning.entries) if Step.TABLES in steps else None
    if found is not None:
        return found
    ascent = ascend(
        problem,
        sweeps=tuning.sweeps if Step.ASCENT in steps else 0,
        gap=search.gap,
        deadline=search.deadline,
        enough=search.enough,
        settings=settings,
    )
    best = _Found(ascent.choice, ascent.value, ascent.bound)
    if _closed(best, search) or time.monotonic() > search.deadline:
        return _usable(best)
    smaller = _pruned(ascent.problem, best, settings)
    if smaller is not None:
        return _restart(smaller, best, search)
    shifted = ascent.problem
    if Step.RELAXATION in steps:
        relaxed = relax(shifted, deadline=search.deadline, settings=settings)
        if relaxed is None:
            return _usable(best)
        shifted = relaxed.shifted
        rounded = Messages(problem, settings=settings).improve(relaxed.choice)
        best = _better(best, _Found(rounded, problem.cost(rounded), -inf))
        best = _Found(best.choice, best.value, max(ascent.bound, dual_bound(shifted)))
        if _closed(best, search):
            return best
        smaller = _pruned(shifted, best, settings)
        if smaller is not None:
            return _restart(smaller, best, search)
    if best.value < inf and best.value - best.bound <= search.branch_gap * abs(best.value):
        return best
    whole = branch(
        shifted, deadline=search.deadline, relative_gap=search.branch_gap, settings=settings
    )
    if whole is None:
        return _usable(best)
    found = _Found(whole.choice, problem.cost(whole.choice), max(best.bound, whole.bound))
    return _better(best, found)


def _tables(problem: Problem, max_entries: float) -> _Found | None:
    """The optimum by bucket elimination, None where the tables would be too large."""
    choice = eliminate(problem, max_entries=max_entries)
    if choice is None:
        return None
    value = problem.cost(choice)
    if value == inf:
        raise InfeasibleError(tuple(range(len(problem.node_costs))))
    return _Found(choice, value, value)


def _restart(problem: Problem, best: _Found, search: _Targets) -> _Found:
    """Searches a reduced problem that contains every assignment better than ``best``."""
    try:
        reduction = Reduction(problem, search.settings).run(deadline=search.deadline)
        return _better(best, _search_cores(problem, reduction, search))
    except TimeoutError:
        return best


def _closed(found: _Found, search: _Targets) -> bool:
    if found.value == inf:
        return False
    closed = found.value - found.bound <= search.gap * abs(found.value)
    return closed or found.bound >= search.enough


def _better(old: _Found, new: _Found) -> _Found:
    """The better choice of two; ``new`` was searched for among all that could beat ``old``."""
    best = new if new.value <= old.value else old
    return _Found(best.choice, best.value, min(new.bound, best.value))


def _usable(found: _Found) -> _Found:
    if found.value == inf:
        raise TimeoutError("the time limit came before any allowed choice was found; raise it")
    return found


def _pruned(shifted: Problem, best: _Found, settings: Settings) -> Problem | None:
    """The problem without what cannot beat ``best``; None where that is too little to help."""
    if best.value == inf or Step.FIXING not in settings.steps:
        return None
    slack = best.value - dual_bound(shifted)
    smaller, gone = prune(shifted, slack + 1e-9 * abs(best.value))
    total = sum(int((costs < inf).sum()) for costs in shifted.node_costs)
    return smaller if gone >= max(1, settings.tuning.restart_share * total) else None
