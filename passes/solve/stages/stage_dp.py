"""Cuts layers into pipeline stages on submeshes: the paper's inter-operator DP (eq. 2 to 5).

`problem.py` says what T is and which cuts are allowed. For fixed bounds ``b_i <= t_max`` and
``u_i <= u_max`` the least sum of a is a DP over (stages s, first layer k, devices d):

    F(s, k, d) = min over j, m of  a[k, j, m] + F(s - 1, j + 1, d - size_m)  (eq. 3)

Devices are counted in the largest unit of which each submesh has a whole number.

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

For serving (AlpaServe), ``minimise="throughput"`` minimises max_i b_i, the time between two
results, and breaks ties by the smallest sum of a: it evaluates F for the smallest bound that admits
a cut, which it finds by bisection. This is exact, too.

Restrictions of the problem keep the DP:

* ``equal_layers``: every number of stages that the submeshes admit is solved with all other stages
  forbidden, and the best cut is taken.
* ``given``: d counts the meshes that are left, and a mesh may stay without layers. First the fewest
  bytes that layers k.. on the last d meshes move are found, a shortest path; then only stages and
  empty meshes on such paths are allowed.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import replace
from math import gcd, inf
from typing import NamedTuple

import numpy as np

from alpa.passes.schedules.planned import label, needs_number
from alpa.passes.solve.stages.placement import Group
from alpa.passes.solve.stages.problem import (
    OTHER,
    Given,
    NoCutError,
    NoCutInMemoryError,
    Problem,
    Solution,
    Stage,
    verify,
)

_MOVED, _NOWHERE = 9, 10
"""Last indices of `_Table.a`: in a block whose stages are moved; where no stage can lie."""
_ROUNDING = 1e-12
"""A box is closed if it can improve the best objective by at most this relative amount."""


def solve(problem: Problem) -> Solution:
    """The best cut. Raises ``ValueError`` (not a problem) and ``NoCutError``."""
    problem.check()
    if problem.equal_layers:
        return _best_of_equal(problem)
    is_open = problem.num_stages is None and problem.given is None
    return (
        _best_of_numbers(problem) if is_open and needs_number(problem.schedule) else _solve(problem)
    )


def _best_of_numbers(problem: Problem) -> Solution:
    """The best cut of all numbers of stages, under a schedule whose memory depends on them."""
    found: list[Solution] = []
    refused: NoCutError | None = None
    for count in range(1, min(problem.num_layers, problem.num_devices) + 1):
        try:
            found.append(_solve(replace(problem, num_stages=count)))
        except NoCutInMemoryError as error:
            refused = error
        except NoCutError as error:
            refused = refused or error
    if not found:
        assert refused is not None, "there is at least one layer"
        raise refused
    return _best(found)


def _best_of_equal(problem: Problem) -> Solution:
    """The best cut into equal stages, whatever their number."""
    devices = problem.num_devices
    counts = {devices // size for size in problem.sizes if devices % size == 0}
    found: list[Solution] = []
    reason = ""
    for count in sorted(counts):
        if count <= problem.num_layers and problem.num_stages in (None, count):
            try:
                found.append(_solve(_equal(problem, count)))
            except NoCutError as error:
                # Report the error of the largest count, whose stages are smallest.
                reason = str(error)
    if not found:
        wanted = "" if problem.num_stages is None else f"{problem.num_stages} "
        whole = "+".join(f"{group.hosts}x{group.devices_per_host}" for group in problem.groups)
        reason = reason or (
            f"no number of stages up to {problem.num_layers}, the layers, cuts {whole} devices "
            f"into equal submeshes of {_shapes(problem)}"
        )
        raise NoCutError(f"no {wanted}stages of equally many layers: {reason}")
    return _best(found)


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


def _solve(problem: Problem) -> Solution:
    table = _Table(problem)
    find = _shortest_step if problem.minimise == "step" else _highest_throughput
    stages = find(problem, table)
    if stages is None:
        raise _infeasible(problem)
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


def _highest_throughput(_: Problem, table: _Table) -> tuple[Stage, ...] | None:
    """The cut of least max b, then of least sum of a."""
    values = _values(table.b)
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


def _shortest_step(problem: Problem, table: _Table) -> tuple[Stage, ...] | None:
    """The cut of least T."""
    b_values = _values(table.b)
    u_values = _values(table.u)
    best: tuple[float, tuple[Stage, ...]] = (inf, ())
    # Where their number is open, T weighs alike for all numbers of stages (`needs_number`).
    each_b, each_u, each = problem.weights(problem.counted_stages or 1)
    # A box holds the solutions whose maxima are in b_values[b0:b1] and u_values[u0:u1].
    boxes = [(-inf, 0, b_values.size, 0, u_values.size)]
    sums = _Sums()
    while boxes:
        bound, b0, b1, u0, u1 = heapq.heappop(boxes)
        enough = best[0] - _ROUNDING * abs(best[0])
        if bound >= enough:
            break
        corner = float(b_values[b1 - 1]), float(u_values[u1 - 1])
        least = each_b * float(b_values[b0]) + each_u * float(u_values[u0])
        if each * sums.least(*corner) + least >= enough:
            continue
        stages = table.cut(*corner)
        if stages is None:
            sums.add(*corner, inf)
            continue
        best = min(best, (problem.objective(stages), stages), key=lambda found: found[0])
        b_max, u_max, total = problem.maxima(stages)
        sums.add(*corner, total)
        # What is better has a maximum that leaves room for this sum, the least in the box.
        left = best[0] - each * total
        most_b = (left - each_u * float(u_values[u0])) / each_b if each_b else inf
        b1 = min(b1, _below(b_values, most_b))
        u1 = min(u1, _below(u_values, (left - each_b * float(b_values[b0])) / each_u))
        # And one of its maxima is smaller than that of these stages.
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
                heapq.heappush(boxes, (each * total + least, b_from, b_to, u_from, u_to))
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


def _values(costs: np.ndarray) -> np.ndarray:
    """The finite values, ascending: what a maximum can be."""
    return np.unique(np.append(costs[costs < inf], 0.0))


def _in_units(problem: Problem) -> Problem:
    """The same with devices counted in the largest unit that all submeshes are multiples of, if it
    is a part of a host or whole hosts."""
    unit = gcd(*problem.sizes)
    groups: list[Group] = []
    for group in problem.groups:
        devices = group.devices_per_host
        if unit % devices == 0 and group.num_devices % unit == 0:
            groups.append(Group(group.kind, group.num_devices // unit, 1))
        elif devices % unit == 0:
            groups.append(Group(group.kind, group.hosts, devices // unit))
        else:
            return problem
    per_host = {group.kind: group.devices_per_host for group in groups}
    return replace(
        problem,
        groups=tuple(groups),
        submeshes=tuple(
            (max(1, size // unit // per_host[kind]), min(size // unit, per_host[kind]))
            for size, kind in zip(problem.sizes, problem.kinds, strict=True)
        ),
    )


class _Segment(NamedTuple):
    """A group of hosts, and how many devices are behind its end and its begin."""

    group: Group
    end: int
    begin: int

    @property
    def starts(self) -> np.ndarray:
        """The devices from each of its hosts on."""
        return np.arange(self.end, self.begin, self.group.devices_per_host) + (
            self.group.devices_per_host
        )


class _Table:
    """The DP of eq. 3, for any bounds on a stage's time and update.

    Submeshes of the same kind (equal hosts and devices, or the same given mesh) differ only in
    times and memory. Of those whose memory admits a stage, the fastest represents the kind. `d`
    counts devices, or given meshes.
    """

    def __init__(self, problem: Problem) -> None:
        problem = self._problem = _in_units(problem)
        layers, given = problem.num_layers, problem.given
        self._width = problem.num_devices if given is None else len(given.far)
        each = tuple(zip(problem.kinds, problem.submeshes, strict=True))
        kinds = each if given is None else given.mesh_of
        firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        self._kind = np.array([list(dict.fromkeys(kinds)).index(kind) for kind in kinds])
        self._sizes = [problem.sizes[m] if given is None else 1 for m in firsts]
        # Memory that every stage needs; what depends on the number of stages is in `_admitted`.
        if given is not None:
            least = np.array([problem.in_flight(self._width - q) for q in given.mesh_of])
        else:
            least = np.array(problem.num_micro_batches if problem.schedule == "gpipe" else 1)
        possible = (problem.max_in_flight >= least) & (problem.t < inf) & (problem.u < inf)
        possible &= np.triu(np.ones((layers, layers), dtype=bool))[:, :, None]
        self.moved = 0.0
        self.evaluations = 0
        self.cuts: dict[tuple[Stage, ...], None] = {}
        """those that were found"""
        """how often `cut` ran"""
        # [k, d]: whether the first of the last d meshes may stay without layers.
        self._may_be_empty = np.zeros((layers + 1, self._width + 1), dtype=bool)
        if given is not None:
            possible, self._may_be_empty, self.moved = _fewest_bytes(given, possible)
        # [i, j, m, 3 f + b]: how near the stage before is, and the one behind (`Problem.ways`);
        # then _MOVED, and _NOWHERE.
        self.a = _with_transfers(problem.t, problem.c, problem.back, possible)
        self.b = self.a
        if problem.hidden is not None:
            seen = problem.t, *problem.shares(1 - problem.hidden)
            hidden = np.zeros_like(problem.t), *problem.shares(problem.hidden)
            self.b = np.maximum(*(_with_transfers(*it, possible) for it in (seen, hidden)))
        self.u = np.where(possible, problem.u, inf)
        self._segments = self._groups_behind()
        self._several = self._segments if len(self._segments) > 1 else []
        """if there are several: hosts of one kind are all used, others may stay idle"""
        self._ends = np.array([0, *(d for it in self._segments for d in it.starts.tolist())])
        """the devices behind the ends of hosts"""
        # [w, g, d]: the last index of `a` on kind g, d being the stage's devices and those behind,
        # in a block that keeps its order (w = 0), or whose stages are moved (w = 1).
        self._where = self._places(firsts, first=False)
        # The same for the first stage on a group.
        self._where_first = self._places(firsts, first=True)
        most = min(layers, self._width, problem.num_stages or layers)
        self._by_stage = problem.num_stages is not None or (
            given is None
            and problem.schedule in ("1f1b", "eager-1f1b")
            and bool((problem.max_in_flight[possible] < problem.in_flight(most)).any())
        )
        self._stages = most if self._by_stage else 1
        # [i, j, m]: the largest number of stages from this one to the last that memory admits.
        needed = [problem.in_flight(s) if self._by_stage else 0 for s in range(1, self._stages + 1)]
        # A user's own schedule may keep fewer on an earlier stage: it counts as the later one.
        at_least = np.maximum.accumulate(needed)
        self._admitted = np.searchsorted(at_least, problem.max_in_flight, side="right")
        self._possible = self._entries()

    def _entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Of all possible stages at all places: their places in what `_fastest` makes, a, b, u."""
        i, j, m, where = np.nonzero(self.a < inf)
        at = (self._admitted[i, j, m], i, j, self._kind[m], where)
        return (
            np.ravel_multi_index(at, self._fastest_shape),
            self.a[i, j, m, where],
            self.b[i, j, m, where],
            self.u[i, j, m],
        )

    @property
    def _fastest_shape(self) -> tuple[int, ...]:
        layers = self._problem.num_layers
        return self._stages + 1, layers, layers, len(self._sizes), _NOWHERE + 1

    def _groups_behind(self) -> list[_Segment]:
        """The groups of hosts from the last to the first; none for given meshes."""
        found: list[_Segment] = []
        end = 0
        for group in reversed(self._problem.groups if self._problem.given is None else ()):
            found.append(_Segment(group, end, end + group.num_devices))
            end += group.num_devices
        return found

    def _places(self, firsts: Sequence[int], *, first: bool) -> np.ndarray:
        """[w, g, d]: see `_where`."""
        problem = self._problem
        in_order = [[self._place(m, d, first) for d in range(self._width + 1)] for m in firsts]
        if not first:
            for it in self._several:  # A first stage is on it, or none.
                for places in in_order:
                    places[it.begin] = _NOWHERE
        shares = any(min(it.hosts, it.devices_per_host) > 1 for it in problem.groups)
        if problem.given is not None or not shares:
            return np.array([in_order])
        inside = np.array(
            [[self._segment(m, d) is not None for d in range(self._width + 1)] for m in firsts]
        )
        if not first:
            inside[:, [it.begin for it in self._several]] = False
        return np.stack([in_order, np.where(inside, _MOVED, _NOWHERE)])

    def _segment(self, m: int, d: int) -> _Segment | None:
        """The group on which a stage on submesh m lies, of the last d devices; None if there is
        none."""
        size, kind = self._problem.sizes[m], self._problem.kinds[m]
        for segment in self._segments:
            if segment.end <= d - size and d <= segment.begin and segment.group.kind == kind:
                return segment
        return None

    def _place(self, m: int, d: int, first: bool) -> int:
        """The last index of `a` for a stage on submesh m, of the last d devices or meshes."""
        problem, given = self._problem, self._problem.given
        if given is not None:
            if given.mesh_of[m] != self._width - d:
                return _NOWHERE
            before, behind = given.far[given.mesh_of[m]]
            return 3 * before + behind
        segment = self._segment(m, d)
        ways = segment and problem.ways(segment.group, segment.begin - d, m)
        if not segment or not ways:
            return _NOWHERE
        before, behind = ways
        if first and segment is not self._segments[-1]:
            before = OTHER
        if d - problem.sizes[m] == segment.end > 0:
            behind = OTHER
        return 3 * before + behind

    def cut(self, b_max: float, u_max: float) -> tuple[Stage, ...] | None:
        """The cut of least sum of a under the bounds; None if there is none."""
        self.evaluations += 1
        layers = self._problem.num_layers
        fastest = self._fastest(b_max, u_max)
        possible = (fastest[0] < inf).any(axis=-1)
        # least[w, s, k, d]; without stage counts there is one s of the table that feeds itself.
        least = np.full((len(self._where), self._stages + 1, layers + 1, self._width + 1), inf)
        least[:, 0, layers, 0] = 0.0
        least[:, 0, layers, self._may_be_empty[layers]] = 0.0
        source = least[:, :-1] if self._by_stage else least[:, :1]
        target = least[:, 1:] if self._by_stage else least[:, :1]
        for k in range(layers - 1, -1, -1):
            most = min(self._stages, layers - k)  # stages of the layers from k on
            for g, size in enumerate(self._sizes):
                last = np.flatnonzero(possible[k, :, g])
                if size > self._width or last.size == 0:
                    continue
                count = int(last[-1]) + 1 - k
                rows = fastest[:most, k, k : k + count, g]
                for w, where in enumerate(self._where):
                    before = source[w, :most, k + 1 : k + 1 + count]
                    stage = rows[..., where[g, size:]]
                    found = target[w, :most, k, size:]
                    sums = stage + before[..., : self._width + 1 - size]
                    np.minimum(found, sums.min(axis=1), out=found)
                    for it in self._several:
                        starts = it.starts[it.starts >= size]
                        stage = rows[..., self._where_first[w, g, starts]]
                        found = (stage + before[..., starts - size]).min(axis=(1, 2), initial=inf)
                        all_w = target[:, :most, k, it.begin]
                        np.minimum(all_w, found, out=all_w)
            for d in np.nonzero(self._may_be_empty[k])[0]:
                least[0, 0, k, d] = min(least[0, 0, k, d], least[0, 0, k, d - 1])
            if len(least) > 1:
                least[:, :, k, self._ends] = least[:, :, k, self._ends].min(axis=0)
        for it in self._several[:-1]:  # The groups before it may be left out.
            whole = least[:, :, 0, self._width]
            np.minimum(whole, least[:, :, 0, it.begin], out=whole)
        found = self._trace(b_max, u_max, least)
        if found is not None:
            self.cuts[found] = None
        return found

    def _fastest(self, b_max: float, u_max: float) -> np.ndarray:
        """[s, i, j, g, where]: of the submeshes of kind g that memory admits at stage s, under the
        bounds. Without stage counts there is one s."""
        places, a, b, u = self._possible
        found = np.full(self._fastest_shape, inf)
        allowed = (b <= b_max) & (u <= u_max)
        np.minimum.at(found.reshape(-1), places[allowed], a[allowed])
        # A stage that fits far from the last stage also fits closer to it.
        for s in range(self._stages - 1, 0, -1):
            np.minimum(found[s], found[s + 1], out=found[s])
        return found[1:]

    def _trace(self, b_max: float, u_max: float, least: np.ndarray) -> tuple[Stage, ...] | None:
        counts = [self._problem.num_stages] if self._problem.num_stages else range(least.shape[1])
        left = [s for s in counts if s < least.shape[1]]
        if not left:
            return None
        s = min(left, key=lambda s: least[0, s, 0, self._width])
        if least[0, s, 0, self._width] == inf:
            return None
        k, d, w = 0, self._width, 0
        begins = [it.begin for it in self._several]
        sizes = np.array(self._sizes)[self._kind]
        stages: list[Stage] = []
        while k < self._problem.num_layers:
            if self._may_be_empty[k, d] and least[0, s, k, d] == least[0, s, k, d - 1]:
                d -= 1
                continue
            if k == 0:
                d = next((b for b in begins if least[0, s, 0, b] == least[0, s, 0, d]), d)
            segment = next((it for it in self._several if it.begin == d), None)
            s -= self._by_stage
            found: list[tuple[float, int, int, np.ndarray]] = []
            where = self._where if segment is None else self._where_first
            for start in [d] if segment is None else segment.starts.tolist():
                (mine,) = np.nonzero(sizes <= start)
                admitted = self._admitted[k, k:, mine] > (s if self._by_stage else 0)
                for v in range(len(least)) if start in self._ends else [w]:
                    at = k, slice(k, None), mine, where[v, self._kind[mine], start]
                    allowed = admitted & (self.b[at] <= b_max) & (self.u[k, k:, mine] <= u_max)
                    sums = np.where(allowed, self.a[at], inf)
                    sums += least[v, s, k + 1 :, start - sizes[mine]]
                    found.append((float(sums.min()), v, start, sums))
            _, w, start, sums = min(found, key=lambda one: one[0])
            at, last = np.unravel_index(sums.argmin(), sums.shape)
            (mine,) = np.nonzero(sizes <= start)
            stages.append(Stage(first=k, last=k + int(last), submesh=int(mine[at])))
            k, d = k + int(last) + 1, start - int(sizes[mine[at]])
        return tuple(stages)


def _with_transfers(
    t: np.ndarray, into: np.ndarray, back: np.ndarray, possible: np.ndarray
) -> np.ndarray:
    """[i, j, m, where]: the seconds of possible stages with transfers from both sides."""
    slower = into.max(axis=2)[:, None] + back.max(axis=2)[None]
    if into.shape[2] == OTHER:  # There is no other group.
        into, back = (np.append(x, x[..., -1:], axis=2) for x in (into, back))
    both = into[:, None, :, :, None] + back[None, :, :, None, :]
    found = np.full((*t.shape, _NOWHERE + 1), inf)
    found[..., :_MOVED] = t[..., None] + both.reshape(*t.shape, _MOVED)
    found[..., _MOVED] = t + slower
    found[~possible] = inf
    return found


def _fewest_bytes(given: Given, possible: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """The possible stages [K, K, M] on cuts that move the fewest bytes of held state; whether the
    first of the last d meshes may stay empty when layers k.. are left, [K + 1, Q + 1]; the bytes.
    """
    layers, count = possible.shape[0], len(given.far)
    allowed = np.zeros_like(possible)
    may_be_empty = np.zeros((layers + 1, count + 1), dtype=bool)
    # The bytes that layers k.. move on the meshes behind q.
    behind = np.append(np.full(layers, inf), 0.0)
    for q in reversed(range(count)):
        mine = possible & (np.array(given.mesh_of) == q)
        moved = np.where(mine.any(axis=2), given.moved[:, :, q], inf) + behind[1:]
        least = np.minimum(behind, np.append(moved.min(axis=1), inf))
        allowed |= mine & (moved == least[:-1, None])[:, :, None]
        may_be_empty[:, count - q] = behind == least
        behind = least
    return allowed, may_be_empty, float(behind[0])


def _infeasible(problem: Problem) -> NoCutError:
    """Drops one constraint after the other to find the one that binds."""
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
        if _Table(free).cut(inf, inf) is None:
            return NoCutError(f"{what} is possible: a layer has no plan on any of them")
        return NoCutInMemoryError(
            f"{what} {in_flight} {batches}; use smaller ones, or other meshes"
        )
    anything = replace(free, t=np.zeros_like(problem.t), u=np.zeros_like(problem.u))
    if _Table(anything).cut(inf, inf) is None:
        return NoCutError(
            f"{layers} layers cannot be cut{stages} so that submeshes of {_shapes(problem)} use "
            f"all {devices} devices"
        )
    if _Table(free).cut(inf, inf) is None:
        return NoCutError(
            f"no cut of {layers} layers{stages} uses all {devices} devices: too many stages have "
            "no plan on their submesh (infinite time)"
        )
    one = np.where(problem.max_in_flight > 0, problem.num_micro_batches, 0)
    if _Table(replace(problem, max_in_flight=one)).cut(inf, inf) is None:
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
