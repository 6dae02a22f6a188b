"""Cuts for meshes with several stages: layers move from the busiest mesh to others.

The stage DP takes the longest stage for all stages of its mesh, each with an even share of the
memory. So it gives a mesh with one long stage no less than one with two, and a stage that needs
little memory leaves its share to no other. From the DP's cut, one layer at a time moves from a
stage of the busiest mesh to one of another mesh, or a stage of the busiest mesh takes costs of less
seconds and more memory, as long as each mesh as a whole fits. Each step makes the busiest meshes
less busy. The caller simulates all cuts on the way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import isfinite

from alpa.passes.schedules.work import WorkLists
from alpa.passes.solve.stages.problem import Problem, Stage

Stages = tuple[Stage, ...]

_STEPS = 12
"""The most cuts for one of the DP: gpt-2.6b on 4 meshes of 2 V100s needs 4 under DualPipeV."""
_GAIN = 1e-6
"""The least share of a mesh's seconds that a step gains."""


@dataclass(frozen=True, kw_only=True)
class Balance:
    """Looks for cuts whose busiest meshes are less busy."""

    schedule: WorkLists
    problem: Problem
    usable: Sequence[int]
    """the submeshes of the problem that stages may take, all of one kind"""
    fits: Callable[[int, Stages], bool]
    """whether the stages of a mesh fit into its memory, by its number and all stages"""

    def cuts(self, stages: Stages) -> Iterator[Stages]:
        """Cuts with fewer seconds on the busiest mesh, each made of the one before."""
        for _ in range(_STEPS):
            busy = self._busy(stages)
            better = [
                (its, other)
                for other in self._steps(stages, busy)
                if _is_less(its := sorted(self._busy(other), reverse=True), busy)
            ]
            if not better:
                return
            _, stages = min(better, key=lambda it: it[0])
            yield stages

    def _busy(self, stages: Stages) -> list[float]:
        """Seconds of each mesh for a micro-batch."""
        busy = [0.0] * self.schedule.num_meshes
        for stage, seconds in enumerate(self.problem.a(stages)):
            busy[self.schedule.mesh_of[stage]] += seconds
        return busy

    def _steps(self, stages: Stages, busy: Sequence[float]) -> Iterator[Stages]:
        """Cuts that differ in one layer of the busiest mesh, or in what one of its stages is."""
        meshes = range(len(busy))
        most, least = max(meshes, key=busy.__getitem__), min(meshes, key=busy.__getitem__)
        mesh_of = self.schedule.mesh_of
        for s in (s for s, mesh in mesh_of.items() if mesh == most):
            yield from self._chosen(stages, [s])
            near = [t for t, mesh in mesh_of.items() if mesh != most]
            for t in (t for t in near if mesh_of[t] == least or abs(t - s) == 1):
                if stages[s].first < stages[s].last:
                    yield from self._chosen(_moved(stages, s, t), [t, s])

    def _chosen(self, stages: Stages, changed: Sequence[int]) -> Iterator[Stages]:
        """With the fastest submeshes for some of the stages, one after the other, that fit."""
        for s in changed:
            found = self._fastest(stages, s)
            if found is None:
                return
            stages = found
        if all(self.fits(mesh, stages) for mesh in range(self.schedule.num_meshes)):
            yield stages

    def _fastest(self, stages: Stages, s: int) -> Stages | None:
        seconds = self.problem.t[stages[s].first, stages[s].last]
        for m in sorted(self.usable, key=seconds.__getitem__):
            found = (*stages[:s], replace(stages[s], submesh=m), *stages[s + 1 :])
            if isfinite(seconds[m]) and self.fits(self.schedule.mesh_of[s], found):
                return found
        return None


def _moved(stages: Stages, source: int, target: int) -> Stages:
    """One layer less in one stage, one more in another; those in between move by a layer."""
    found = list(stages)
    step = 1 if target < source else -1
    for s in range(min(source, target), max(source, target) + 1):
        first, last = found[s].first, found[s].last
        begins = s != (target if step > 0 else source)
        ends = s != (source if step > 0 else target)
        found[s] = replace(found[s], first=first + step * begins, last=last + step * ends)
    return tuple(found)


def _is_less(ordered: Sequence[float], busy: Sequence[float]) -> bool:
    """Whether the busiest meshes are less busy; the first sequence is in descending order."""
    for mine, other in zip(ordered, sorted(busy, reverse=True), strict=True):
        if abs(mine - other) > _GAIN * other:
            return mine < other
    return False
