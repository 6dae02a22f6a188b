"""Cuts layers into pipeline stages on submeshes: the paper's inter-operator DP (eq. 2 to 5).

`problem.py` says what T is and which cuts are allowed. For fixed bounds ``b_i <= t_max`` and
``u_i <= u_max`` the least sum of a is a DP over (stages s, first layer k, devices d):

    F(s, k, d) = min over j, m of  a[k, j, m] + F(s - 1, j + 1, d - size_m)  (eq. 3)

which `stage_table.py` computes.

With several groups of hosts, d counts the devices of all groups behind; a stage lies inside one
group. The first stage on a group begins at any of its hosts, so that the hosts before it stay idle,
and the first groups may be left out.

The DP tracks the number of stages s only if memory depends on it, or if it is fixed. Over several
hosts it also tracks whether the stages of a block keep their order (`placement.py`): only in a
block whose stages are moved may one lie on parts of two hosts, and each of its transfers counts as
the slower kind.

The bounds are not enumerated one by one (eq. 4) but by branch and bound over boxes of (t_max,
u_max): F of a box's upper corner plus the costs of its lower corner bounds every solution in the
box. The result is optimal for the given costs, up to a relative 1e-12.

It begins with the best cut whose stages end with every fourth layer, found in the same way. Only
stages that may be in a better cut are looked at then (`step_bounds.py`).

For serving (AlpaServe), ``minimise="throughput"`` minimises max_i b_i, the time between two
results, and breaks ties by the smallest sum of a: it evaluates F for the smallest bound that admits
a cut, which it finds by bisection. This is exact, too.

Restrictions of the problem keep the DP:

* ``equal_layers``: every number of stages that the submeshes admit is solved with all other stages
  forbidden, and the best cut is taken.
* ``equal_meshes``: each mesh and number of stages is solved by itself, those first that can take
  least. One is left out if the least sum of t, split evenly over its stages, takes as long as the
  best cut.
* ``given``: d counts the meshes that are left, and a mesh may stay without layers. First the fewest
  bytes that layers k.. on the last d meshes move are found, a shortest path; then only stages and
  empty meshes on such paths are allowed.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

import numpy as np

from alpa.passes.schedules.planned import label, needs_number
from alpa.passes.solve.stages.least_sums import least_before
from alpa.passes.solve.stages.problem import (
    NoCutError,
    NoCutInMemoryError,
    Problem,
    Solution,
    Stage,
    verify,
)
from alpa.passes.solve.stages.stage_table import Table

_ROUNDING = 1e-12
"""A box is closed if it can improve the best objective by at most this relative amount."""
_APART = 4
"""Layers between those with which stages of the first cut may end."""
_WORTH = 1.1
"""Numbers of stages are left out with which T is at least so many times the best one. The caller
simulates all cuts that were found; one whose T is too long by more than that is not among them."""


def solve(problem: Problem) -> Solution:
    """The best cut. Raises ``ValueError`` (not a problem) and ``NoCutError``."""
    problem.check()
    if problem.equal_layers:
        return _best_of_equal(problem)
    meshes = problem.equal_meshes
    found = _best_cut(problem) if meshes is None else _best_of_equal_meshes(problem, meshes)
    if found is None:
        raise _infeasible(problem)
    return found


def solve_below(problem: Problem, enough: float) -> Solution | None:
    """The best cut whose objective is less than `enough`; None if there is none. Raises
    ``ValueError`` (not a problem)."""
    problem.check()
    found = _best_cut(problem, enough)
    return None if found is None or found.objective >= enough else found


def least_steps(problem: Problem, stages: int, enough: float) -> np.ndarray:
    """What T is at least if a cut of so many stages has one on a submesh, [M], in seconds; inf
    where no cut of less than `enough` has."""
    if _number_is_open(problem):
        problem = replace(problem, num_stages=stages)
    return Table(problem, enough).least_steps


def _best_cut(problem: Problem, enough: float = inf) -> Solution | None:
    """The best cut; None if there is none, or none of less than `enough`."""
    first = _first(problem, enough)
    if _number_is_open(problem):
        return _best_of_numbers(problem, first, enough)
    if first is None:
        return _solve(problem, enough)
    better = _solve(problem, first.objective)
    return _best([first] if better is None else [first, better])


def _number_is_open(problem: Problem) -> bool:
    """Whether each number of stages is a problem of its own."""
    is_open = problem.num_stages is None and problem.given is None
    return is_open and needs_number(problem.schedule)


def _numbers(problem: Problem) -> Iterator[Problem]:
    """The problem with each number of stages."""
    for count in range(1, min(problem.num_layers, problem.num_devices) + 1):
        yield replace(problem, num_stages=count)


def _first(problem: Problem, enough: float) -> Solution | None:
    """The best cut whose stages end with every `_APART`-th layer, counted from the last one; None
    if there is none of less than `enough`, or if it says nothing: of given meshes, fewest bytes are
    best."""
    layers = problem.num_layers
    ends = list(range(layers - 1, -1, -_APART)[::-1])
    if len(ends) == layers or problem.minimise != "step" or problem.given is not None:
        return None
    firsts = [0, *(end + 1 for end in ends[:-1])]
    runs = np.ix_(firsts, ends)
    found = _best_cut(
        replace(
            problem,
            t=problem.t[runs],
            u=problem.u[runs],
            max_in_flight=problem.max_in_flight[runs],
            c=problem.c[firsts],
            back=problem.back[ends],
        ),
        enough,
    )
    if found is None:
        return None
    return _renumbered(found, first=firsts, last=ends)


def _best_of_numbers(problem: Problem, first: Solution | None, enough: float) -> Solution | None:
    """The best cut of all numbers of stages, under a schedule whose memory depends on them."""
    found: list[Solution] = [] if first is None else [first]
    for one in _numbers(problem):
        cut = _solve(one, min(enough, _WORTH * min((it.objective for it in found), default=inf)))
        found += [] if cut is None else [cut]
    return _best(found) if found else None


def _best_of_equal(problem: Problem) -> Solution:
    """The best cut into equal stages, whatever their number."""
    devices = problem.num_devices
    counts = {devices // size for size in problem.sizes if devices % size == 0}
    found: list[Solution] = []
    reason = ""
    for count in sorted(counts):
        if count <= problem.num_layers and problem.num_stages in (None, count):
            equal = _equal(problem, count)
            cut = _solve(equal)
            if cut is not None:
                found.append(cut)
            elif not found:
                # Report the error of the largest count, whose stages are smallest.
                reason = str(_infeasible(equal))
    if not found:
        wanted = "" if problem.num_stages is None else f"{problem.num_stages} "
        whole = "+".join(f"{group.hosts}x{group.devices_per_host}" for group in problem.groups)
        reason = reason or (
            f"no number of stages up to {problem.num_layers}, the layers, cuts {whole} devices "
            f"into equal submeshes of {_shapes(problem)}"
        )
        raise NoCutError(f"no {wanted}stages of equally many layers: {reason}")
    return _best(found)


def _best_of_equal_meshes(problem: Problem, meshes: Sequence[int]) -> Solution | None:
    """The best cut into any number of stages, all on one of the meshes."""
    (group,) = problem.groups
    every: list[tuple[float, Problem, list[int]]] = []
    for mesh in dict.fromkeys(meshes):
        mine = [m for m, other in enumerate(meshes) if other == mesh]
        size = problem.sizes[mine[0]]
        alone = replace(
            problem,
            submeshes=tuple(problem.submeshes[m] for m in mine),
            t=problem.t[:, :, mine],
            u=problem.u[:, :, mine],
            max_in_flight=problem.max_in_flight[:, :, mine],
            c=problem.c[:, mine],
            back=problem.back[:, mine],
            hidden=None if problem.hidden is None else problem.hidden[mine],
            kind_of=None if problem.kind_of is None else (group.kind,) * len(mine),
            equal_meshes=None,
        )
        least = float(least_before(alone.t.min(axis=2))[-1])
        for count in range(1, min(problem.num_layers, group.num_devices // size) + 1):
            hosts, in_part = divmod(count * size, group.devices_per_host)
            if in_part or problem.num_stages not in (None, count):
                continue
            one = replace(alone, groups=(group._replace(hosts=hosts),), num_stages=count)
            each_b, _, each = problem.weights(count)
            bound = least if problem.minimise == "step" else 0.0
            every.append((bound * (each + each_b / count), one, mine))
    found: list[Solution] = []
    best = inf
    for bound, one, mine in sorted(every, key=lambda it: it[0]):
        if bound >= best:
            break
        cut = _solve(one, best)
        if cut is not None and cut.objective < best:
            found.append(_renumbered(cut, submesh=mine))
            best = cut.objective
    if not found:
        return None
    solution = _best(found)
    verify(problem, solution)
    return solution


def _renumbered(solution: Solution, **numbers: Sequence[int]) -> Solution:
    """A solution of a part of a problem with the numbers that the whole has, by the stages'
    fields."""
    cuts = [
        tuple(
            replace(stage, **{name: its[getattr(stage, name)] for name, its in numbers.items()})
            for stage in cut
        )
        for cut in (solution.stages, *solution.others)
    ]
    return replace(solution, stages=cuts[0], others=tuple(cuts[1:]))


def _best(found: Sequence[Solution]) -> Solution:
    """The best one, with the cuts of all."""
    best = min(found, key=lambda solution: solution.objective)
    every = [cut for solution in found for cut in (solution.stages, *solution.others)]
    return replace(
        best,
        evaluations=sum(solution.evaluations for solution in found),
        others=tuple(cut for cut in every if cut != best.stages),
    )


def _equal(problem: Problem, count: int) -> Problem:
    """The same with ``count`` stages, all others than equal ones taking infinite time."""
    layers = problem.num_layers
    length = np.arange(layers)[None, :] - np.arange(layers)[:, None] + 1
    equal = (length == layers // count) | (length == -(-layers // count))
    allowed = equal[:, :, None] & (np.array(problem.sizes) * count == problem.num_devices)
    return replace(problem, t=np.where(allowed, problem.t, inf), num_stages=count)


def _solve(problem: Problem, enough: float = inf) -> Solution | None:
    """The best cut; None if there is none, or it is known that none is better than `enough`."""
    if problem.minimise == "step":
        table = Table(problem, enough)
        stages = _shortest_step(problem, table, enough)
    else:
        table = Table(problem)
        stages = _highest_throughput(table)
    if stages is None:
        return None
    solution = Solution(
        objective=problem.objective(stages),
        stages=stages,
        moved=table.moved,
        evaluations=table.evaluations,
        others=tuple(cut for cut in table.cuts if cut != stages),
    )
    for cut in (stages, *solution.others):
        verify(problem, replace(solution, stages=cut, objective=problem.objective(cut)))
    return solution


def _highest_throughput(table: Table) -> tuple[Stage, ...] | None:
    """The cut of least max b, then of least sum of a."""
    values = table.b_values
    best = table.cut(inf, inf)
    low, high = 0, values.size - 1  # The best cut's max b is one of values[low : high + 1].
    while best is not None and low < high:
        middle = (low + high) // 2
        stages = table.cut(float(values[middle]), inf)
        if stages is None:
            low = middle + 1
        else:
            best, high = stages, middle
    return best


def _shortest_step(problem: Problem, table: Table, enough: float) -> tuple[Stage, ...] | None:
    """The cut of least T; None if there is none, or none of less than `enough`."""
    b_values = table.b_values
    u_values = table.u_values
    best: tuple[float, tuple[Stage, ...]] = (enough, ())
    each_b, each_u, each = problem.weights()
    sums = _Sums()

    def room(total: float, b_least: float, u_least: float) -> tuple[int, int]:
        """How many values of b and of u a better cut with this sum, or a larger one, may have as
        its maxima. The others: what max b and max u count in T at least."""
        left = best[0] - each * total
        most_b = (left - u_least) / each_b if each_b else inf
        return _below(b_values, most_b), _below(u_values, (left - b_least) / each_u)

    # A box holds the solutions whose maxima are in b_values[b0:b1] and u_values[u0:u1], and whose
    # sum is at least `total`.
    boxes = [(-inf, 0.0, 0, b_values.size, 0, u_values.size)]
    while boxes:
        bound, total, b0, b1, u0, u1 = heapq.heappop(boxes)
        limit = best[0] - _ROUNDING * abs(best[0]) if best[0] < inf else inf
        if bound >= limit:
            break
        b_least, u_least = each_b * float(b_values[b0]), each_u * float(u_values[u0])
        b1, u1 = map(min, (b1, u1), room(total, b_least, u_least))
        if b0 >= b1 or u0 >= u1:
            continue
        corner = float(b_values[b1 - 1]), float(u_values[u1 - 1])
        if each * sums.least(*corner) + b_least + u_least >= limit:
            continue
        stages = table.cut(*corner, limit)
        if stages is None:
            sums.add(*corner, inf)
            continue
        best = min(best, (problem.objective(stages), stages), key=lambda found: found[0])
        b_max, u_max, total = problem.maxima(stages)
        sums.add(*corner, total)
        b1, u1 = map(min, (b1, u1), room(total, b_least, u_least))
        # One of its maxima is smaller than that of these stages.
        b_at, u_at = min(b1, _below(b_values, b_max)), min(u1, _below(u_values, u_max))
        b_middle, u_middle, b_same = (b0 + b_at) // 2, (u0 + u_at) // 2, max(b0, b_at)
        parts = (
            (b0, b_middle, u0, u1),
            (b_middle, b_at, u0, u1),
            (b_same, b1, u0, u_middle),
            (b_same, b1, u_middle, u_at),
        )
        for b_from, b_to, u_from, u_to in parts:
            if b_from < b_to and u_from < u_to:
                least = each_b * float(b_values[b_from]) + each_u * float(u_values[u_from])
                part = (each * total + least, total, b_from, b_to, u_from, u_to)
                heapq.heappush(boxes, part)
    return best[1] or None


class _Sums:
    """The least sums of a that were found under bounds of b and u; inf where there is no cut."""

    def __init__(self) -> None:
        self._found = np.empty((0, 3))

    def add(self, b_max: float, u_max: float, total: float) -> None:
        self._found = np.append(self._found, [[b_max, u_max, total]], axis=0)

    def least(self, b_max: float, u_max: float) -> float:
        """A lower bound of the sum under these bounds: the largest under looser ones."""
        b, u, total = self._found.T
        return float(total[(b >= b_max) & (u >= u_max)].max(initial=0.0))


def _below(values: np.ndarray, limit: float) -> int:
    """How many of the values, which ascend, are below a limit."""
    return int(np.searchsorted(values, limit))


def _infeasible(problem: Problem) -> NoCutError:
    """Drops one constraint after the other to find the one that binds. Where each number of stages
    is a problem of its own, it is that of the last one that memory does not admit, else of 1."""
    if _number_is_open(problem):
        errors = [_infeasible(one) for one in _numbers(problem)]
        by_memory = [error for error in errors if isinstance(error, NoCutInMemoryError)]
        return [errors[0], *by_memory][-1]
    layers, devices = problem.num_layers, problem.num_devices
    stages = "" if problem.num_stages is None else f" in {problem.num_stages} stages"
    batches = f"({problem.num_micro_batches} micro-batches)"
    in_flight = (
        f"fits into memory with the micro-batches that {label(problem.schedule)} keeps in flight"
    )
    unlimited = np.full_like(problem.max_in_flight, problem.num_micro_batches)
    free = replace(problem, max_in_flight=unlimited)
    if problem.given is not None:
        what = f"no cut of {layers} layers for the {len(problem.given.far)} given meshes"
        if Table(free).cut(inf, inf) is None:
            return NoCutError(f"{what} is possible: a layer has no plan on any of them")
        return NoCutInMemoryError(
            f"{what} {in_flight} {batches}; use smaller ones, or other meshes"
        )
    anything = replace(free, t=np.zeros_like(problem.t), u=np.zeros_like(problem.u))
    if Table(anything).cut(inf, inf) is None:
        return NoCutError(
            f"{layers} layers cannot be cut{stages} so that submeshes of {_shapes(problem)} use "
            f"all {devices} devices"
        )
    if Table(free).cut(inf, inf) is None:
        return NoCutError(
            f"no cut of {layers} layers{stages} uses all {devices} devices: too many stages have "
            "no plan on their submesh (infinite time)"
        )
    one = np.where(problem.max_in_flight > 0, problem.num_micro_batches, 0)
    if Table(replace(problem, max_in_flight=one)).cut(inf, inf) is None:
        return NoCutInMemoryError(
            f"no cut of {layers} layers{stages} fits into memory, even with one micro-batch in "
            f"flight; add devices or use smaller micro-batches ({devices} devices now)"
        )
    return NoCutInMemoryError(
        f"no cut of {layers} layers{stages} {in_flight} {batches}; use 1f1b, raise the number of "
        "micro-batches so that each is smaller, or add devices"
    )


def _shapes(problem: Problem) -> str:
    return ", ".join(dict.fromkeys(f"{n}x{m}" for n, m in problem.submeshes))
