"""Costs of layer classes on many meshes, found side by side in processes of their own.

Posing a mesh's problem takes as long as solving it, so a process does both: it is sent the classes'
programs as text, with their sharding rules, and keeps what it made of them for the next mesh.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache

from alpa.dialects import body, main_function, walk
from alpa.passes.analysis.graph import Graph
from alpa.passes.base import PassError
from alpa.passes.stages.candidates import PRICES, Candidate, Submesh, candidate_of
from alpa.passes.stages.class_costs import ClassCosts, Work
from alpa.passes.stages.class_problem import ClassSolver
from alpa.passes.stages.clustered import Clustered
from alpa.passes.stages.layer_classes import layer_classes
from alpa.passes.stages.remat import rematerialised
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
    worth: int = WORTH
    """ops from which on processes are used"""
    _ended: dict[Submesh, Future[Costs]] = field(default_factory=dict[Submesh, Future[Costs]])

    @cached_property
    def work(self) -> Work:
        """What one device does, by `Device.for_bounds`. Raises as `begin`, and PassError."""
        cluster = self.solver.cluster.for_bounds
        same = cluster is self.solver.cluster
        return _work(self.solver if same else replace(self.solver, cluster=cluster))

    @cached_property
    def one_device(self) -> Candidate:
        """The costs of intervals of layers on one device. Raises as `work`."""
        cluster = self.solver.cluster
        work = self.work if cluster.for_bounds is cluster else _work(self.solver)
        return self.candidate(work.costs, (1, 1, (1,)))

    @cached_property
    def one_device_at_least(self) -> Candidate:
        """Bounds of these costs, an even split of which is a bound. Raises as `work`."""
        return self.candidate(self.work.costs, (1, 1, (1,)))

    def candidate(self, costs: ClassCosts, submesh: Submesh) -> Candidate:
        """The costs of intervals of layers, from those of their classes."""
        return candidate_of(self.solver, costs, submesh)

    def where(self, workers: Workers) -> Workers:
        """The processes if the classes are worth them, else none."""
        ops = sum(1 for _ in walk(self.solver.classes.module.body))
        return workers if ops >= self.worth else Workers(0)

    def begin(self, workers: Workers, submesh: Submesh, enough: float) -> Callable[[], Costs]:
        """Begins to find what the classes cost on a mesh; what is returned waits for it.

        That has the fastest sharding first, then one per price of memory (`ClassProblem.solve`). It
        raises NoPlanError, InfeasibleError, TimeoutError or SolverFailedError. What a mesh came to
        is kept.
        """
        if submesh in self._ended:
            return self._ended[submesh].result
        if workers.count:
            begun = workers.submit(_solve_pickled, self._pickled, submesh, enough)
        else:
            begun = workers.submit(_solve, self.solver, submesh, enough)

        def finish() -> Costs:
            self._ended[submesh] = begun
            return begun.result()

        return finish

    @cached_property
    def _pickled(self) -> bytes:
        return pickle.dumps(replace(self.solver))  # without what it has made of the programs


class LayerCosts:
    """Costs of the layers of one program, as they are and rematerialised, found once.

    They depend on neither the schedule nor the reserve: `alpa` keeps them between its cuts, each of
    which is made on a copy of the same layers.
    """

    def __init__(self, solver: type[ClassSolver] = ClassSolver) -> None:
        self._solver = solver
        self._found: dict[bool, Costing] = {}
        """with and without rematerialisation"""

    def of(self, program: Clustered, workers: Workers, *, remat: bool = False) -> Costing:
        """The costs of a program's layers, which are those of each of its copies."""
        function = program.function
        if not self._found:
            ops = sum(1 for _ in walk(body(function)))
            workers.prepare(__name__, ops=ops, calls=workers.count)
        if remat not in self._found:
            if remat:
                module = rematerialised(function)
                function = main_function(module)
            classes = layer_classes(
                Graph.of(body(function)),
                program.arguments,
                program.results,
                program.num_layers,
                program.cluster,
                program.plan,
            )
            self._found[remat] = Costing(
                solver=self._solver(
                    classes=classes, cluster=program.cluster, plan=program.plan, intra=program.intra
                )
            )
        return self._found[remat]


def _work(solver: ClassSolver) -> Work:
    """What one device does."""
    problem = solver.pose(1, 1, (1,))
    (costs,) = problem.solve(())
    return problem.work(costs)


def _solve(solver: ClassSolver, submesh: Submesh, enough: float) -> Costs:
    try:
        problem = solver.pose(*submesh)
    except PassError as error:
        raise NoPlanError(str(error)) from error
    return problem.solve(PRICES, enough)


def _solve_pickled(pickled: bytes, submesh: Submesh, enough: float) -> Costs:
    solver = _solver(pickled)
    with solver.classes.module.context:
        return _solve(solver, submesh, enough)


@lru_cache(maxsize=2)  # with rematerialised layers, and without
def _solver(pickled: bytes) -> ClassSolver:
    return pickle.loads(pickled)
