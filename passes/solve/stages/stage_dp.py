"""Cuts layers into pipeline stages on submeshes: the paper's inter-operator DP (eq. 2 to 5).

With ``a_i = t_i + c_i`` (seconds of one micro-batch's forward and backward, and of the transfers
into the stage from both its neighbours, which depend on whether these are on its host) and ``u_i``
(seconds of the update), it minimises

    T = sum_i a_i + (B - 1) max_i a_i + max_i u_i                            (eq. 2, extended)

over all cuts of K layers into stages and all submeshes that use every device and, one after the
other, begin and end inside the same hosts. (Others can be placed as well, but a stage that comes to
lie between two parts of another host has no neighbour on its own.) For fixed bounds
``a_i <= t_max`` and ``u_i <= u_max`` the sum is a DP over (stages s, first layer k, devices d):

    F(s, k, d) = min over j, m of  a[k, j, m] + F(s - 1, j + 1, d - size_m)  (eq. 3)

A stage that has s stages from itself to the last keeps min(B, s) micro-batches in flight under
1F1B, B under GPipe; ``max_in_flight`` says whether memory admits that (eq. 5). Where s matters to
nobody it is left out.

The bounds are not enumerated one by one (eq. 4) but by branch and bound over boxes of (t_max,
u_max): F of a box's upper corner plus the costs of its lower corner bounds every solution in the
box. Exact.

Where only forwards are run, over and over (AlpaServe), ``minimise="throughput"`` takes the cut of
least max_i a_i instead, the time between two results, and among those one of least sum: F for the
smallest bound that admits a cut, found by bisection. Exact as well.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from math import inf
from typing import Literal, get_args

import numpy as np

from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.stages.schedule import in_flight

Objective = Literal["step", "throughput"]

_ROUNDING = 1e-12
"""A box that can improve the best objective by less than this part is closed."""


class NoCutError(ValueError):
    """No cut satisfies the constraints; the message says which of them binds."""


class NoCutInMemoryError(NoCutError):
    """There are cuts, but none of them fits into memory."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Layers ``first`` to ``last`` (inclusive) on ``problem.submeshes[submesh]``."""

    first: int
    last: int
    submesh: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """Times in seconds; index ``[i, j, m]`` is layers i..j (inclusive, i <= j) on submesh m."""

    hosts: int
    devices_per_host: int
    submeshes: tuple[tuple[int, int], ...]
    t: np.ndarray
    """forward and backward of one micro-batch, inf = impossible, [K, K, M]"""
    u: np.ndarray
    """update, once per step, [K, K, M]"""
    max_in_flight: np.ndarray
    """micro-batches in flight that memory admits, 0 = does not fit at all, [K, K, M]"""
    c: np.ndarray
    """transfers from the stage before into one that begins with layer i on submesh m, [K, M, 2]:
    where that is on the same host, and where it is not (see `are_far`); c[0] = 0"""
    num_micro_batches: int
    schedule: Literal["gpipe", "1f1b"]
    num_stages: int | None = None
    """as many stages exactly; None = any number"""
    minimise: Objective = "step"
    """T, or the longest stage"""
    back: np.ndarray | None = None
    """transfers of backwards from the stage behind into one that ends with layer j on submesh m,
    likewise, [K, M, 2]; back[K - 1] = 0; None = no seconds"""

    @property
    def num_layers(self) -> int:
        return self.c.shape[0]

    def check(self) -> None:
        """Raises ``ValueError`` for what is no problem."""
        shape = (self.num_layers, self.num_layers, len(self.submeshes))
        for name in ("t", "u", "max_in_flight"):
            if getattr(self, name).shape != shape:
                raise ValueError(f"{name} must have shape {shape}, not {getattr(self, name).shape}")
        if self.c.shape[1:] != (shape[2], 2) or self.c.size == 0 or self.c[0].any():
            raise ValueError(
                "c needs two entries per layer and submesh, which are 0 for the first layer"
            )
        if self.back is not None and (self.back.shape != self.c.shape or self.back[-1].any()):
            raise ValueError(
                f"back must have shape {self.c.shape}, and be 0 for the last layer; its shape is "
                f"{self.back.shape}"
            )
        if self.num_micro_batches < 1:
            raise ValueError(f"{self.num_micro_batches} micro-batches: at least 1 is needed")
        if self.minimise not in get_args(Objective):
            raise ValueError(f"minimise must be step or throughput, not {self.minimise!r}")
        if self.schedule not in ("gpipe", "1f1b"):
            raise ValueError(f"schedule must be gpipe or 1f1b, not {self.schedule!r}")
        upper = np.triu_indices(self.num_layers)
        transfers = [("c", self.c)] if self.back is None else [("c", self.c), ("back", self.back)]
        for name, values in (("t", self.t[upper]), ("u", self.u[upper]), *transfers):
            if np.isnan(values).any() or (values < 0).any():
                raise ValueError(f"{name} must not be negative or NaN")

    def in_flight(self, stages_to_last: int) -> int:
        """Micro-batches that a stage keeps, by the number of stages from it to the last one."""
        return in_flight(self.schedule, self.num_micro_batches, stages_to_last)

    def objective(self, stages: tuple[Stage, ...]) -> float:
        """What is minimised, of a cut, in seconds."""
        return self.step_seconds(stages) if self.minimise == "step" else max(self.a(stages))

    def are_far(self, devices_before: int, submesh: int) -> tuple[bool, bool] | None:
        """Whether the stages before and behind lie on other hosts, by the devices of all before.

        None for a stage that would lie on parts of two hosts, so that it is placed elsewhere.
        """
        hosts, devices = self.submeshes[submesh]
        start = devices_before % self.devices_per_host
        if start + devices > self.devices_per_host:
            return None
        return start == 0, (start + hosts * devices) % self.devices_per_host == 0

    def a(self, stages: tuple[Stage, ...]) -> list[float]:
        """t + c of each stage, in seconds; inf where one would lie on parts of two hosts."""
        found: list[float] = []
        before = 0
        for s in stages:
            far = self.are_far(before, s.submesh)
            if far is None:
                return [inf] * len(stages)
            c = self.c[s.first, s.submesh, int(far[0])]
            if self.back is not None:
                c = c + self.back[s.last, s.submesh, int(far[1])]
            found.append(float(self.t[s.first, s.last, s.submesh] + c))
            hosts, devices = self.submeshes[s.submesh]
            before += hosts * devices
        return found

    def step_seconds(self, stages: tuple[Stage, ...]) -> float:
        """T of a cut, in seconds."""
        a = self.a(stages)
        u = [float(self.u[s.first, s.last, s.submesh]) for s in stages]
        return sum(a) + (self.num_micro_batches - 1) * max(a) + max(u)


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The best cut; ``evaluations`` counts the DPs that were run."""

    stages: tuple[Stage, ...]
    objective: float
    """what is minimised, in seconds"""
    status: Literal["optimal"] = "optimal"
    evaluations: int


def solve(problem: Problem) -> Solution:
    """The best cut. Raises ``ValueError`` (not a problem) and ``NoCutError``."""
    problem.check()
    table = _Table(problem)
    if problem.minimise == "step":
        stages, evaluations = _shortest_step(problem, table)
    else:
        stages, evaluations = _highest_throughput(table)
    if stages is None:
        raise _infeasible(problem)
    objective = problem.objective(stages)
    solution = Solution(objective=objective, stages=stages, evaluations=evaluations)
    verify(problem, solution)
    return solution


def _highest_throughput(table: _Table) -> tuple[tuple[Stage, ...] | None, int]:
    """The cut of least max a, then of least sum; how many DPs that took."""
    values = _values(table.a)
    best, evaluations = table.cut(inf, inf), 1
    low, high = 0, values.size - 1  # The best cut's max a is one of values[low : high + 1].
    while best is not None and low < high:
        middle = (low + high) // 2
        stages = table.cut(float(values[middle]), inf)
        evaluations += 1
        if stages is None:
            low = middle + 1
        else:
            best, high = stages, middle
    return best, evaluations


def _shortest_step(problem: Problem, table: _Table) -> tuple[tuple[Stage, ...] | None, int]:
    """The cut of least T, and how many DPs that took."""
    a_values = _values(table.a)
    u_values = _values(table.u)
    best: tuple[float, tuple[Stage, ...]] = (inf, ())
    factor = problem.num_micro_batches - 1
    evaluations = 0
    # A box holds the solutions whose maxima are in a_values[a0:a1] and u_values[u0:u1].
    boxes = [(-inf, 0, a_values.size, 0, u_values.size, 0.0)]
    while boxes:
        bound, a0, a1, u0, u1, _ = heapq.heappop(boxes)
        if bound >= best[0] - _ROUNDING * abs(best[0]):
            break
        evaluations += 1
        stages = table.cut(float(a_values[a1 - 1]), float(u_values[u1 - 1]))
        if stages is None:
            continue
        best = min(best, (problem.objective(stages), stages), key=lambda found: found[0])
        a_max, u_max, total = table.maxima(stages)
        a_at = int(np.searchsorted(a_values, a_max))
        u_at = int(np.searchsorted(u_values, u_max))
        # Nothing in the box has a smaller sum, so something better has a smaller maximum.
        a_middle, u_middle, a_same = (a0 + a_at) // 2, (u0 + u_at) // 2, max(a0, a_at)
        parts = (
            (a0, a_middle, u0, u1),
            (a_middle, a_at, u0, u1),
            (a_same, a1, u0, u_middle),
            (a_same, a1, u_middle, u_at),
        )
        for a_from, a_to, u_from, u_to in parts:
            if a_from < a_to and u_from < u_to:
                least = total + factor * float(a_values[a_from]) + float(u_values[u_from])
                heapq.heappush(boxes, (least, a_from, a_to, u_from, u_to, total))
    return best[1] or None, evaluations


def _values(costs: np.ndarray) -> np.ndarray:
    """The finite values, ascending: what a maximum can be."""
    return np.unique(np.append(costs[costs < inf], 0.0))


class _Table:
    """The DP of eq. 3, for any bounds on a stage's time and update.

    Submeshes that look alike from outside (as many hosts and devices) differ in times and memory
    only: of those whose memory admits a stage the fastest stands for all.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        layers, devices = problem.num_layers, problem.hosts * problem.devices_per_host
        self._devices = devices
        possible = (problem.max_in_flight > 0) & (problem.t < inf) & (problem.u < inf)
        if problem.schedule == "gpipe":
            possible &= problem.max_in_flight >= problem.num_micro_batches
        possible &= np.triu(np.ones((layers, layers), dtype=bool))[:, :, None]
        back = np.zeros_like(problem.c) if problem.back is None else problem.back
        # [i, j, m, 2 f + b]: whether the stage before is far, and the one behind; [i, j, m, 4]: it
        # would lie on parts of two hosts.
        c = problem.c[:, None, :, :, None] + back[None, :, :, None, :]
        self.a = np.full((*problem.t.shape, 5), inf)
        self.a[..., :4] = problem.t[..., None] + c.reshape(*problem.t.shape, 4)
        self.a[~possible] = inf
        self.u = np.where(possible, problem.u, inf)
        shapes = list(dict.fromkeys(problem.submeshes))
        self._sizes = [n * m for n, m in shapes]
        self._shape = np.array([shapes.index(submesh) for submesh in problem.submeshes])
        # [g, d]: the last index of `a` on shape g, d being the stage's devices and those behind.
        self._where = np.array(
            [
                [
                    4 if far is None else 2 * far[0] + far[1]
                    for d in range(devices + 1)
                    for far in (problem.are_far(devices - d, problem.submeshes.index(shape)),)
                ]
                for shape in shapes
            ]
        )
        most = min(layers, devices, problem.num_stages or layers)
        self._by_stage = problem.num_stages is not None or (
            problem.schedule == "1f1b"
            and bool((problem.max_in_flight[possible] < problem.in_flight(most)).any())
        )
        self._stages = most if self._by_stage else 1
        # [i, j, m]: as the how-manieth stage from the end memory admits it at most.
        needed = [problem.in_flight(s) if self._by_stage else 0 for s in range(1, self._stages + 1)]
        self._admitted = np.searchsorted(needed, problem.max_in_flight, side="right")

    def cut(self, a_max: float, u_max: float) -> tuple[Stage, ...] | None:
        """The cut of least sum of a under the bounds; None if there is none."""
        layers = self._problem.num_layers
        costs = np.where((self.a <= a_max) & (self.u <= u_max)[..., None], self.a, inf)
        fastest = self._fastest(costs)
        # least[s, k, d]; without stage counts there is one layer of the table that feeds itself.
        least = np.full((self._stages + 1, layers + 1, self._devices + 1), inf)
        least[0, layers, 0] = 0.0
        source = least[:-1] if self._by_stage else least[:1]
        target = least[1:] if self._by_stage else least[:1]
        for k in range(layers - 1, -1, -1):
            for g, size in enumerate(self._sizes):
                rows = fastest[:, k, k:, g]
                (last,) = np.nonzero((rows < inf).any(axis=(0, 2)))
                if size > self._devices or last.size == 0:
                    continue
                count = int(last[-1]) + 1
                stage = rows[:, :count, self._where[g, size:]]
                before = source[:, k + 1 : k + 1 + count, : self._devices + 1 - size]
                found = target[:, k, size:]
                np.minimum(found, (stage + before).min(axis=1), out=found)
        return self._trace(costs, least)

    def _fastest(self, costs: np.ndarray) -> np.ndarray:
        """[s, i, j, g, where]: of the submeshes of shape g that memory admits at stage s."""
        layers = self._problem.num_layers
        found = np.full((self._stages + 1, layers, layers, len(self._sizes), 5), inf)
        i, j, m, where = np.nonzero(costs < inf)
        at = (self._admitted[i, j, m], i, j, self._shape[m], where)
        np.minimum.at(found, at, costs[i, j, m, where])
        # Who may be further from the end may be nearer to it, too.
        return np.minimum.accumulate(found[:0:-1])[::-1]

    def _trace(self, costs: np.ndarray, least: np.ndarray) -> tuple[Stage, ...] | None:
        counts = [self._problem.num_stages] if self._problem.num_stages else range(least.shape[0])
        left = [s for s in counts if s < least.shape[0]]
        if not left:
            return None
        s = min(left, key=lambda s: least[s, 0, self._devices])
        if least[s, 0, self._devices] == inf:
            return None
        k, d = 0, self._devices
        sizes = np.array(self._sizes)[self._shape]
        stages: list[Stage] = []
        while k < self._problem.num_layers:
            s -= self._by_stage
            (mine,) = np.nonzero(sizes <= d)
            stage = costs[k, k:, mine, self._where[self._shape[mine], d]]
            admitted = self._admitted[k, k:, mine] > (s if self._by_stage else 0)
            sums = np.where(admitted, stage, inf) + least[s, k + 1 :, d - sizes[mine]]
            at, last = np.unravel_index(sums.argmin(), sums.shape)
            stages.append(Stage(first=k, last=k + int(last), submesh=int(mine[at])))
            k, d = k + int(last) + 1, d - int(sizes[mine[at]])
        return tuple(stages)

    def maxima(self, stages: tuple[Stage, ...]) -> tuple[float, float, float]:
        """(largest a, largest u, sum of a) of a cut."""
        a = self._problem.a(stages)
        u = [float(self.u[s.first, s.last, s.submesh]) for s in stages]
        return max(a), max(u), sum(a)


def _infeasible(problem: Problem) -> NoCutError:
    """Drops one constraint after the other to find the one that binds."""
    layers, devices = problem.num_layers, problem.hosts * problem.devices_per_host
    shapes = ", ".join(dict.fromkeys(f"{n}x{m}" for n, m in problem.submeshes))
    stages = "" if problem.num_stages is None else f" in {problem.num_stages} stages"
    unlimited = np.full_like(problem.max_in_flight, problem.num_micro_batches)
    free = replace(problem, max_in_flight=unlimited)
    anything = replace(free, t=np.zeros_like(problem.t), u=np.zeros_like(problem.u))
    if _Table(anything).cut(inf, inf) is None:
        return NoCutError(
            f"{layers} layers cannot be cut{stages} so that submeshes of {shapes} use all "
            f"{devices} devices"
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
        f"no cut of {layers} layers{stages} fits into memory with the micro-batches that "
        f"{problem.schedule} keeps in flight ({problem.num_micro_batches} micro-batches); use "
        "1f1b, raise the number of micro-batches so that each is smaller, or add devices"
    )


def verify(problem: Problem, solution: Solution) -> None:
    """Recomputes T, and checks layers, devices and memory. Raises ``VerificationError``."""
    stages = solution.stages
    bounds = [(s.first, s.last) for s in stages]
    firsts = [0, *(last + 1 for _, last in bounds)]
    if firsts[:-1] != [first for first, _ in bounds] or firsts[-1] != problem.num_layers:
        raise VerificationError(f"stages {bounds} are no cut of {problem.num_layers} layers")
    sizes = [n * m for n, m in (problem.submeshes[s.submesh] for s in stages)]
    if sum(sizes) != problem.hosts * problem.devices_per_host:
        raise VerificationError(f"stages use {sum(sizes)} devices, not all of the cluster")
    if problem.num_stages not in (None, len(stages)):
        raise VerificationError(f"{len(stages)} stages, {problem.num_stages} were asked for")
    for number, stage in enumerate(stages):
        needed = problem.in_flight(len(stages) - number)
        fits = problem.max_in_flight[stage.first, stage.last, stage.submesh]
        if fits < needed:
            raise VerificationError(
                f"stage {number} keeps {needed} micro-batches, memory admits {fits}"
            )
    objective = problem.objective(stages)
    if not objective < inf or abs(objective - solution.objective) > 1e-9 * abs(objective):
        raise VerificationError(f"the stages take {objective} s, not {solution.objective} s")
