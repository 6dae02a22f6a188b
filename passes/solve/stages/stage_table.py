"""The DP of the paper's eq. 3 over layers, stages and devices, for any bounds of a stage's times.

    F(s, k, d) = min over j, m of  a[k, j, m] + F(s - 1, j + 1, d - size_m)

is the least sum of a with which layers k.. form s stages on the last d devices. `stage_dp.py` says
what else the table tracks, and looks for the bounds.

Four things keep it small. Only stages that may be in a better cut than a known one are looked at
(`step_bounds.py`). Devices are counted in the largest unit of which each submesh has a whole
number. Only possible stages at possible places are held, and none that another one dominates
(`entries.py`). And only numbers of devices are tried that leave enough of them for the layers
before and behind: near the best cut, these are few.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from math import gcd, inf
from typing import NamedTuple

import numpy as np

from alpa.passes.solve.stages.entries import MOVED, NOWHERE, Entries, Times
from alpa.passes.solve.stages.least_sums import least_before, least_behind
from alpa.passes.solve.stages.moves import Moves
from alpa.passes.solve.stages.placement import Group
from alpa.passes.solve.stages.problem import OTHER, Given, Problem, Stage
from alpa.passes.solve.stages.step_bounds import StepBounds


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


class Table:
    """The DP of eq. 3, for any bounds on a stage's time and update.

    Submeshes of the same kind (equal hosts and devices, or the same given mesh) differ only in
    times and memory. Of those whose memory admits a stage, the fastest represents the kind. `d`
    counts devices, or given meshes.
    """

    def __init__(self, problem: Problem, enough: float = inf) -> None:
        """Of cuts of less than `enough` seconds."""
        problem = self._problem = _in_units(problem)
        layers, given = problem.num_layers, problem.given
        self._width = problem.num_devices if given is None else len(given.far)
        each = tuple(zip(problem.kinds, problem.submeshes, strict=True))
        kinds = each if given is None else given.mesh_of
        # The largest kind comes first, see `Entries`.
        firsts = [kinds.index(kind) for kind in dict.fromkeys(kinds)]
        firsts.sort(key=lambda m: -problem.sizes[m])
        number = {kinds[m]: g for g, m in enumerate(firsts)}
        self._kind = np.array([number[kind] for kind in kinds])
        self._sizes = [problem.sizes[m] if given is None else 1 for m in firsts]
        self._enough = enough
        # Memory that every stage needs; what depends on the number of stages is in `_admitted`.
        if given is not None:
            least = np.array([problem.in_flight(self._width - q) for q in given.mesh_of])
        else:
            least = np.array(problem.num_micro_batches if problem.schedule == "gpipe" else 1)
        possible = (problem.max_in_flight >= least) & (problem.t < inf) & (problem.u < inf)
        possible &= np.triu(np.ones((layers, layers), dtype=bool))[:, :, None]
        self.moved = 0.0
        self.evaluations = 0
        """how often `cut` ran"""
        self.cuts: dict[tuple[Stage, ...], None] = {}
        """those that were found"""
        # [k, d]: whether the first of the last d meshes may stay without layers.
        self._may_be_empty = np.zeros((layers + 1, self._width + 1), dtype=bool)
        if given is not None:
            possible, self._may_be_empty, self.moved = _fewest_bytes(given, possible)
        self._segments = self._groups_behind()
        self._several = self._segments if len(self._segments) > 1 else []
        """if there are several: hosts of one kind are all used, others may stay idle"""
        self._counts_devices = given is None
        self._ends = np.array([0, *(d for it in self._segments for d in it.starts.tolist())])
        """the devices behind the ends of hosts"""
        # [w, g, d]: the place of a stage on kind g, d being its devices and those behind, in a
        # block that keeps its order (w = 0), or whose stages are moved (w = 1).
        where = self._places(firsts, first=False)
        # The same for the first stage on a group.
        where_first = self._places(firsts, first=True)
        places = np.unique(np.concatenate([where.ravel(), where_first.ravel(), [NOWHERE]]))
        self._where = places.searchsorted(where)
        self._where_first = places.searchsorted(where_first)
        self._moves = self._all_moves(nowhere=len(places) - 1)
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
        self._admitted[~possible] = 0
        self._times = [Times.of(problem.t, problem.c, problem.back, places[:-1])]
        if problem.hidden is not None:
            seen, beside = problem.shares(1 - problem.hidden), problem.shares(problem.hidden)
            self._times.append(Times.of(problem.t, *seen, places[:-1]))
            self._times.append(Times.of(np.zeros_like(problem.t), *beside, places[:-1]))
        self._entries, self.least_steps = self._every_entry()
        """[M], what T of a cut with a stage on each submesh is at least; inf where it is not less
        than `enough`"""

    @property
    def b_values(self) -> np.ndarray:
        """What the largest b of a cut can be, ascending."""
        return np.unique(np.append(self._entries.b, 0.0))

    @property
    def u_values(self) -> np.ndarray:
        """What the largest u of a cut can be, ascending."""
        return np.unique(np.append(self._entries.u, 0.0))

    def _every_entry(self) -> tuple[Entries, np.ndarray]:
        """All possible stages at all places, and `least_steps`."""
        problem, sizes = self._problem, np.array(self._sizes)
        by_kind = self._kind.argsort(kind="stable")  # as in `Entries`
        i, j, m = np.nonzero(self._admitted[:, :, by_kind])
        m = by_kind[m]
        step = StepBounds(problem, self._width)
        if self._enough < inf:
            t, u = problem.t[i, j, m], problem.u[i, j, m]
            least = step.of(i, j, sizes[self._kind[m]], t[:, None], t[:, None], u)
            useful = least[:, 0] < self._enough
            i, j, m = i[useful], j[useful], m[useful]
        g = self._kind[m]
        useful = self._leaves_enough(i, j, g, self._devices(i, j, g))
        i, j, m, g = i[useful], j[useful], m[useful], g[useful]
        a, b = self._seconds(lambda times: times.at(i, j, m))
        u = problem.u[i, j, m]
        least = step.of(i, j, sizes[g], a, b, u)
        stage, place = np.nonzero(least < self._enough)
        steps = np.full(len(problem.submeshes), inf)
        np.minimum.at(steps, m[stage], least[stage, place])
        entries = Entries.undominated(
            i=i[stage],
            j=j[stage],
            g=g[stage],
            place=place,
            admitted=self._admitted[i, j, m][stage],
            a=a[stage, place],
            b=b[stage, place],
            u=u[stage],
            step=least[stage, place],
        )
        return entries, steps

    def _seconds(self, found: Callable[[Times], np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """a and b of stages (`Problem.a`, `Problem.b`)."""
        a, *both = map(found, self._times)
        return a, np.maximum(*both) if both else a

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
                    places[it.begin] = NOWHERE
        shares = any(min(it.hosts, it.devices_per_host) > 1 for it in problem.groups)
        if problem.given is not None or not shares:
            return np.array([in_order])
        inside = np.array(
            [[self._segment(m, d) is not None for d in range(self._width + 1)] for m in firsts]
        )
        if not first:
            inside[:, [it.begin for it in self._several]] = False
        return np.stack([in_order, np.where(inside, MOVED, NOWHERE)])

    def _all_moves(self, nowhere: int) -> Moves:
        """From w and the devices behind a stage to w and those with it."""
        sizes, each = np.array(self._sizes), self._width + 1
        w, g, d = np.nonzero(self._where != nowhere)
        state = w * each + d
        found = [np.stack([g, self._where[w, g, d], d, state - sizes[g], state])]
        for it in self._several:
            # The group before has blocks of its own: each may keep its order or be moved.
            w, g, start = np.nonzero(self._where_first[:, :, it.starts] != nowhere)
            start = it.starts[start]
            place, source = self._where_first[w, g, start], w * each + start - sizes[g]
            begin = np.full_like(start, it.begin)
            found += [
                np.stack([g, place, begin, source, begin + v * each])
                for v in range(len(self._where))
            ]
        moves = np.concatenate(found, axis=1).T
        return Moves.of(moves, nowhere, self._width, len(self._where) * each)

    def _segment(self, m: int, d: int) -> _Segment | None:
        """The group on which a stage on submesh m lies, of the last d devices; None if there is
        none."""
        size, kind = self._problem.sizes[m], self._problem.kinds[m]
        for segment in self._segments:
            if segment.end <= d - size and d <= segment.begin and segment.group.kind == kind:
                return segment
        return None

    def _place(self, m: int, d: int, first: bool) -> int:
        """The place of a stage on submesh m, of the last d devices or meshes."""
        problem, given = self._problem, self._problem.given
        if given is not None:
            if given.mesh_of[m] != self._width - d:
                return NOWHERE
            before, behind = given.far[given.mesh_of[m]]
            return 3 * before + behind
        segment = self._segment(m, d)
        ways = segment and problem.ways(segment.group, segment.begin - d, m)
        if not segment or not ways:
            return NOWHERE
        before, behind = ways
        if first and segment is not self._segments[-1]:
            before = OTHER
        if d - problem.sizes[m] == segment.end > 0:
            behind = OTHER
        return 3 * before + behind

    def cut(self, b_max: float, u_max: float, enough: float = inf) -> tuple[Stage, ...] | None:
        """The cut of least sum of a under the bounds; None if there is none. Stages of which no cut
        takes less than `enough` seconds need not be looked at."""
        self.evaluations += 1
        layers, every = self._problem.num_layers, self._entries
        entries = every.at((every.b <= b_max) & (every.u <= u_max) & (every.step < enough))
        stages = entries.i, entries.j, entries.g
        low, high = devices = self._devices(*stages)
        if low[0] > high[0] or not entries.i.size:
            return None
        if self._counts_devices:
            entries = entries.at(self._leaves_enough(*stages, devices))
        # least[w, k, d, s]; without stage counts there is one s of the table that feeds itself.
        counts = self._stages + 1 if self._by_stage else 1
        table = np.full((counts, layers + 1, len(self._where) * (self._width + 1)), inf)
        least = table.reshape(counts, layers + 1, len(self._where), -1).transpose(2, 1, 3, 0)
        least[:, layers, 0, 0] = 0.0
        least[:, layers, self._may_be_empty[layers], 0] = 0.0
        behind = table.reshape(counts, -1)
        sums = self._moves.by_layer(entries, low, high, layers)
        for k in range(layers - 1, -1, -1):
            if k in sums:
                most = min(self._stages, layers - k)  # stages of the layers from k on
                entry, source, starts, target = sums[k]
                found = behind[:most].take(source, axis=1) + entries.a[entry]
                if self._by_stage:
                    found[np.arange(most)[:, None] >= entries.admitted[entry]] = inf
                to = table[1 : most + 1, k] if self._by_stage else table[:, k]
                to[:, target] = np.minimum.reduceat(found, starts, axis=1)
            for d in np.nonzero(self._may_be_empty[k])[0]:
                least[0, k, d, 0] = min(least[0, k, d, 0], least[0, k, d - 1, 0])
            if len(least) > 1:
                least[:, k, self._ends] = least[:, k, self._ends].min(axis=0)
        for it in self._several[:-1]:  # The groups before it may be left out.
            whole = least[:, 0, self._width]
            np.minimum(whole, least[:, 0, it.begin], out=whole)
        found = self._trace(b_max, u_max, least)
        if found is not None:
            self.cuts[found] = None
        return found

    def _devices(
        self, i: np.ndarray, j: np.ndarray, g: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """The fewest and the most devices that layers k.. can be on, [K + 1] each, if stages of
        layers i..j on submeshes of kind g are allowed, in the order of `Entries`.

        Layers before and behind need some, whether hosts between them stay idle or not.
        """
        layers, width = self._problem.num_layers, self._width
        if not self._counts_devices:
            return np.zeros(layers + 1, int), np.full(layers + 1, width)
        fewest = np.full((layers, layers), inf)
        fewest[i, j] = np.array(self._sizes)[g]  # The last one stays, which is the smallest.
        low = np.minimum(least_behind(fewest), width + 1)
        high = np.maximum(width - least_before(fewest), -1)
        return low.astype(int), high.astype(int)

    def _leaves_enough(
        self, i: np.ndarray, j: np.ndarray, g: np.ndarray, devices: tuple[np.ndarray, np.ndarray]
    ) -> np.ndarray:
        """Whether layers before and behind such stages can be on what is left."""
        (low, high), size = devices, np.array(self._sizes)[g]
        first, last = np.maximum(low[i], low[j + 1] + size), np.minimum(high[i], high[j + 1] + size)
        return first <= last

    def _trace(self, b_max: float, u_max: float, least: np.ndarray) -> tuple[Stage, ...] | None:
        counts = [self._problem.num_stages] if self._problem.num_stages else range(least.shape[3])
        left = [s for s in counts if s < least.shape[3]]
        if not left:
            return None
        s = min(left, key=lambda s: least[0, 0, self._width, s])
        if least[0, 0, self._width, s] == inf:
            return None
        k, d, w = 0, self._width, 0
        begins = [it.begin for it in self._several]
        sizes = np.array(self._sizes)[self._kind]
        stages: list[Stage] = []
        while k < self._problem.num_layers:
            if self._may_be_empty[k, d] and least[0, k, d, s] == least[0, k, d - 1, s]:
                d -= 1
                continue
            if k == 0:
                d = next((b for b in begins if least[0, 0, b, s] == least[0, 0, d, s]), d)
            segment = next((it for it in self._several if it.begin == d), None)
            s -= self._by_stage
            found: list[tuple[float, int, int, np.ndarray]] = []
            where = self._where if segment is None else self._where_first
            for start in [d] if segment is None else segment.starts.tolist():
                (mine,) = np.nonzero(sizes <= start)
                admitted = self._admitted[k, k:, mine] > (s if self._by_stage else 0)
                admitted &= self._problem.u[k, k:, mine] <= u_max
                for v in range(len(least)) if start in self._ends else [w]:
                    places = where[v, self._kind[mine], start]
                    a, b = self._seconds(partial(Times.of_first, k=k, m=mine, place=places))
                    sums = np.where(admitted & (b <= b_max), a, inf)
                    sums += least[v, k + 1 :, start - sizes[mine], s]
                    found.append((float(sums.min()), v, start, sums))
            _, w, start, sums = min(found, key=lambda one: one[0])
            at, last = np.unravel_index(sums.argmin(), sums.shape)
            (mine,) = np.nonzero(sizes <= start)
            stages.append(Stage(first=k, last=k + int(last), submesh=int(mine[at])))
            k, d = k + int(last) + 1, start - int(sizes[mine[at]])
        return tuple(stages)


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
