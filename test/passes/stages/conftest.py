"""Fixtures for the tests of stages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from alpa.passes.stages.candidates import PRICES, Candidate, candidate_of
from alpa.passes.stages.class_problem import ClassSolver

Costed = Callable[..., list[Candidate]]


@pytest.fixture(scope="session")
def costed() -> Costed:
    """All stage candidates of a submesh in these shapes, the fastest of each first."""

    def find(
        solver: ClassSolver,
        hosts: int,
        devices: int,
        shapes: Sequence[tuple[int, ...]],
        remat: float = 0.0,
    ) -> list[Candidate]:
        prices = PRICES if hosts * devices > 1 else ()
        return [
            replace(candidate_of(solver, costs, (hosts, devices, shape)), remat=remat)
            for shape in shapes
            for costs in solver.pose(hosts, devices, shape).solve(prices)
        ]

    return find
