"""Cuts layers into stages on meshes that are there already, where state that is held stays.

A program that takes the state of another one is cut for that one's meshes. Mesh q of Q takes the
layers i..j or none, in the order of the meshes; what it reads of the held state and finds on
another mesh has to be moved there. Of all cuts those that move the fewest bytes are taken, and of
those the one that takes the least time by the costs of `stage_dp`:

    lexicographic min ( sum_q moved[i_q, j_q, q],  objective )

with T or max a as the objective. A mesh without layers counts as if it were a stage: the
micro-batches in flight are those of as many stages as there are meshes, and neighbours are near or
far as the meshes of the whole list are.

Bytes are a shortest path from (first mesh, first layer). Along the transitions of shortest paths
the sets of undominated (sum a, max a, max u) are built from the last mesh on: T and max a grow with
each of the three, so the best cut is among them. Exact.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from math import inf

import numpy as np

from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.stages import stage_dp
from alpa.passes.solve.stages.stage_dp import NoCutError, NoCutInMemoryError, Stage


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A mesh that is there: which of the costs' submeshes it is, in all ways of using it, and
    whether the meshes before and behind it are on other hosts."""

    submeshes: tuple[int, ...]
    before_is_far: bool
    behind_is_far: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class Problem:
    """`costs` as of `stage_dp`, whose `num_stages` is not used."""

    costs: stage_dp.Problem
    meshes: tuple[Mesh, ...]
    moved: np.ndarray
    """bytes that layers i..j on mesh q read and that are held elsewhere, [K, K, Q]"""

    def check(self) -> None:
        """Raises ``ValueError`` for what is no problem."""
        self.costs.check()
        layers = self.costs.num_layers
        shape = (layers, layers, len(self.meshes))
        if not self.meshes or self.moved.shape != shape:
            raise ValueError(f"moved must have shape {shape}, not {self.moved.shape}")
        if (self.moved < 0).any():
            raise ValueError("moved must not be negative")
        count = len(self.costs.submeshes)
        if any(not mesh.submeshes or max(mesh.submeshes) >= count for mesh in self.meshes):
            raise ValueError(f"every mesh must be one of the {count} submeshes")

    def a(self, stage: Stage, mesh: int) -> float:
        """t + c of a stage on a mesh, in seconds; inf where it cannot be there."""
        costs, on = self.costs, self.meshes[mesh]
        at = stage.first, stage.last, stage.submesh
        if costs.max_in_flight[at] < costs.in_flight(len(self.meshes) - mesh):
            return inf
        seconds = costs.t[at] + costs.c[stage.first, stage.submesh, int(on.before_is_far)]
        if costs.back is not None:
            seconds += costs.back[stage.last, stage.submesh, int(on.behind_is_far)]
        return float(seconds)

    def u(self, stage: Stage) -> float:
        """The update of a stage, in seconds."""
        return float(self.costs.u[stage.first, stage.last, stage.submesh])

    def objective(self, total: float, a_max: float, u_max: float) -> float:
        """What is to be least of (sum a, max a, max u), in seconds."""
        if self.costs.minimise == "throughput":
            return a_max
        return total + (self.costs.num_micro_batches - 1) * a_max + u_max


@dataclass(frozen=True, kw_only=True)
class Solution:
    """The best cut: its stages and the mesh of each; `step_seconds` is its T."""

    stages: tuple[Stage, ...]
    meshes: tuple[int, ...]
    moved: float
    """bytes of held state"""
    step_seconds: float


@dataclass(frozen=True)
class _Label:
    """One way to put the layers from some one on onto the meshes from some one on."""

    total: float
    a_max: float
    u_max: float
    stages: tuple[tuple[int, Stage], ...]

    def after(self, a: float, u: float, stage: tuple[int, Stage]) -> _Label:
        """With a stage before it."""
        return _Label(a + self.total, max(a, self.a_max), max(u, self.u_max), (stage, *self.stages))


def solve(problem: Problem) -> Solution:
    """The best cut. Raises ``ValueError`` (not a problem) and ``NoCutError``."""
    problem.check()
    layers, last = problem.costs.num_layers, len(problem.meshes)
    stages = _stages(problem)
    # least[q, k]: bytes moved by meshes q.. for layers k..
    least = np.full((last + 1, layers + 1), inf)
    least[last, layers] = 0.0
    labels: dict[tuple[int, int], list[_Label]] = {(last, layers): [_Label(0.0, 0.0, 0.0, ())]}
    for q in range(last - 1, -1, -1):
        for k in range(layers, -1, -1):
            ways = [(0.0, k), *((float(problem.moved[k, j, q]), j + 1) for j in range(k, layers))]
            ways = [way for way in ways if way[1] == k or (q, k, way[1] - 1) in stages]
            least[q, k] = min(moved + least[q + 1, to] for moved, to in ways)
            if least[q, k] == inf:
                continue
            found: list[_Label] = []
            for moved, to in ways:
                if moved + least[q + 1, to] > least[q, k]:
                    continue
                rest = labels[q + 1, to]
                here = stages.get((q, k, to - 1), []) if to > k else []
                found += rest if to == k else []
                found += [label.after(a, u, (q, s)) for a, u, s in here for label in rest]
            labels[q, k] = _undominated(found)
    if least[0, 0] == inf:
        raise _infeasible(problem)
    best = min(labels[0, 0], key=lambda it: problem.objective(it.total, it.a_max, it.u_max))
    factor = problem.costs.num_micro_batches - 1
    solution = Solution(
        stages=tuple(stage for _, stage in best.stages),
        meshes=tuple(mesh for mesh, _ in best.stages),
        moved=float(least[0, 0]),
        step_seconds=best.total + factor * best.a_max + best.u_max,
    )
    verify(problem, solution)
    return solution


def _stages(problem: Problem) -> dict[tuple[int, int, int], list[tuple[float, float, Stage]]]:
    """By mesh, first and last layer: the ways of running them there, with a and u of each."""
    found: dict[tuple[int, int, int], list[tuple[float, float, Stage]]] = {}
    for q, mesh in enumerate(problem.meshes):
        for i in range(problem.costs.num_layers):
            for j in range(i, problem.costs.num_layers):
                for m in mesh.submeshes:
                    stage = Stage(first=i, last=j, submesh=m)
                    a, u = problem.a(stage, q), problem.u(stage)
                    if a < inf and u < inf:
                        found.setdefault((q, i, j), []).append((a, u, stage))
    return found


def _undominated(labels: list[_Label]) -> list[_Label]:
    """Those that no other is at least as good as in all three."""
    kept: list[_Label] = []
    for label in sorted(labels, key=lambda it: (it.total, it.a_max, it.u_max)):
        if not any(it.a_max <= label.a_max and it.u_max <= label.u_max for it in kept):
            kept.append(label)
    return kept


def _infeasible(problem: Problem) -> NoCutError:
    costs = problem.costs
    what = f"no cut of {costs.num_layers} layers for the {len(problem.meshes)} given meshes"
    usable = sorted({m for mesh in problem.meshes for m in mesh.submeshes})
    times = (costs.t + costs.u[:, :, :])[:, :, usable]
    layers = range(costs.num_layers)
    if all((times[k, k] < inf).any() for k in layers):
        return NoCutInMemoryError(
            f"{what} fits into memory with the micro-batches that {costs.schedule} keeps in flight "
            f"({costs.num_micro_batches} micro-batches); use smaller ones, or other meshes"
        )
    return NoCutError(f"{what} is possible: a layer has no plan on any of them")


def verify(problem: Problem, solution: Solution) -> None:
    """Recomputes T and bytes, and checks layers and meshes. Raises ``VerificationError``."""
    pairs = list(zip(solution.stages, solution.meshes, strict=True))
    bounds = [(stage.first, stage.last) for stage in solution.stages]
    firsts = [0, *(last + 1 for _, last in bounds)]
    if firsts[:-1] != [first for first, _ in bounds] or firsts[-1] != problem.costs.num_layers:
        raise VerificationError(f"stages {bounds} are no cut of {problem.costs.num_layers} layers")
    if any(a >= b for a, b in pairwise(solution.meshes)):
        raise VerificationError(f"meshes {solution.meshes} are not in their order")
    if any(stage.submesh not in problem.meshes[q].submeshes for stage, q in pairs):
        raise VerificationError("a stage is not on the mesh that it is said to be on")
    a = [problem.a(stage, q) for stage, q in pairs]
    u = [problem.u(stage) for stage, _ in pairs]
    seconds = sum(a) + (problem.costs.num_micro_batches - 1) * max(a) + max(u)
    if not seconds < inf or abs(seconds - solution.step_seconds) > 1e-9 * seconds:
        raise VerificationError(f"the stages take {seconds} s, not {solution.step_seconds} s")
    moved = sum(float(problem.moved[s.first, s.last, q]) for s, q in pairs)
    if moved != solution.moved:
        raise VerificationError(f"the stages move {moved} bytes, not {solution.moved}")
