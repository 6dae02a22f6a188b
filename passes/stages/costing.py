"""Costs of layer classes on many meshes, found side by side in processes of their own.

Posing a mesh's problem takes as long as solving it, so a process does both: it is sent the classes'
programs as text, with their sharding rules, and keeps what it made of them for the next mesh.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from alpa.dialects import walk
from alpa.dialects.attributes import Plan
from alpa.passes.base import PassError
from alpa.passes.cost.cluster import Cluster
from alpa.passes.sharding.baselines import Intra
from alpa.passes.sharding.rules import rule_of
from alpa.passes.stages.class_costs import ClassCosts
from alpa.passes.stages.class_problem import ClassSolver, solver_of
from alpa.passes.stages.layer_classes import ClassesText
from alpa.passes.workers import Workers

WORTH = 2_000
"""Ops of all classes that are worth a process, which takes about 1 s to start."""

Costs = list[ClassCosts]


class NoPlanError(ValueError):
    """An op cannot be on a mesh; the message is that of its located error."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Costing:
    """Costs of a solver's classes, wherever there is a process to find them."""

    solver: ClassSolver
    workers: Workers
    worth: int = WORTH
    """ops from which on the workers are used"""

    def begin(
        self,
        hosts: int,
        devices: int,
        shape: tuple[int, ...],
        prices: Sequence[float],
        enough: float,
    ) -> Callable[[], Costs]:
        """Begins to find what the classes cost on a mesh; what is returned waits for it.

        That has the fastest choice first, then one per price of memory (`ClassProblem.solve`). It
        raises NoPlanError, InfeasibleError, TimeoutError or SolverFailedError.
        """
        mesh = (hosts, devices, shape)
        if self.processes == 0:
            return Workers(0).submit(_solve, self.solver, mesh, prices, enough).result
        given = (self._text, self.solver.cluster, self.solver.plan, self.solver.intra)
        return self.workers.submit(_solve_text, given, mesh, prices, enough).result

    @cached_property
    def processes(self) -> int:
        """How many work side by side; with 0 what is begun is found at once."""
        ops = sum(1 for one in self.solver.classes.classes for _ in walk(one.module.body))
        return self.workers.count if ops >= self.worth else 0

    @cached_property
    def _text(self) -> ClassesText:
        return ClassesText.of(self.solver.classes)


_Mesh = tuple[int, int, tuple[int, ...]]
_Given = tuple[ClassesText, Cluster, Plan, Intra]


def _solve(solver: ClassSolver, mesh: _Mesh, prices: Sequence[float], enough: float) -> Costs:
    try:
        problem = solver.pose(*mesh)
    except PassError as error:
        raise NoPlanError(str(error)) from error
    return problem.solve(prices, enough)


def _solve_text(given: _Given, mesh: _Mesh, prices: Sequence[float], enough: float) -> Costs:
    solver = _solver(given)
    with solver.classes.classes[0].module.context:
        return _solve(solver, mesh, prices, enough)


@lru_cache(maxsize=2)  # with rematerialised layers, and without
def _solver(given: _Given) -> ClassSolver:
    text, cluster, plan, intra = given
    classes = text.parse()
    with classes.classes[0].module.context:
        return solver_of(classes, cluster, plan, intra, (rule_of,) * len(classes.classes))
