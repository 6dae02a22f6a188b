"""Stages that exceed the memory by their estimates, which hold more than what the planner finds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf

from alpa.passes.base import NoRoomError, NotFasterError
from alpa.passes.stages.clustered import Clustered
from alpa.passes.stages.merge import Stages


@dataclass(kw_only=True)
class Overcommitment:
    """Lets stages exceed the memory, by their estimates, where that is faster."""

    share: float
    """of each device's memory, by which they may exceed it"""
    worth: float
    """the least gain, as a share of a step's seconds"""
    within: float | None = None
    """after the cut: the seconds of a step whose stages do not exceed the memory, infinite where
    none are of use; None if the cut is that one"""

    def cut(self, program: Clustered, find: Callable[[Clustered], Stages]) -> Stages:
        """The stages to take, found with more memory and, if they need it, without. Raises
        PassError."""
        more = replace(program, reserve=program.reserve - self.share)
        try:
            over = find(more)
        except NoRoomError:
            return find(program)
        if _fits(program, over):
            return over  # The best cut for more memory needs no more.
        try:
            within = find(program)
        except (NoRoomError, NotFasterError):
            self.within = inf
            return over
        if over.seconds > (1 - self.worth) * within.seconds:
            return within
        self.within = within.seconds
        return over


def _fits(program: Clustered, stages: Stages) -> bool:
    """Whether stages do not exceed the memory, by their estimates."""
    share, cluster = 1 - program.reserve, program.cluster
    return all(
        peak <= share * cluster.of(mesh.hosts).device.memory
        for mesh, peak in zip(stages.meshes, stages.peak_bytes, strict=False)
    )
