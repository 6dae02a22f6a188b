"""What the tests of stages share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest

from alpa.passes.stages.class_problem import ClassSolver
from alpa.passes.stages.options import PRICES, Option, option_of

Costed = Callable[..., list[Option]]


@pytest.fixture(scope="session")
def costed() -> Costed:
    """All options of a submesh in these shapes, the fastest of each first."""

    def find(
        solver: ClassSolver,
        hosts: int,
        devices: int,
        shapes: Sequence[tuple[int, ...]],
        remat: float = 0.0,
    ) -> list[Option]:
        prices = PRICES if hosts * devices > 1 else ()
        return [
            replace(option_of(solver, costs, hosts, devices, shape), remat=remat)
            for shape in shapes
            for costs in solver.pose(hosts, devices, shape).solve(prices)
        ]

    return find
