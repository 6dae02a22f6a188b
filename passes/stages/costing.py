"""Costs of layer classes on many meshes, found side by side in processes of their own.

Posing a mesh's problem takes as long as solving it, so a process does both: it is sent the classes'
programs as bytecode, with their sharding rules, and keeps what it made of them for the next mesh.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from pathlib import Path
from typing import Any, Literal, cast, get_args

import numpy as np

from alpa.dialects import body, main_function, walk
from alpa.passes.analysis.graph import Graph
from alpa.passes.base import PassError
from alpa.passes.sharding.mesh_problem import Shared
from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.stages.candidates import LAST_PRICE, PRICES, Candidate, candidate_of
from alpa.passes.stages.class_costs import ClassCosts, Costs, LeastSeconds, Work
from alpa.passes.stages.class_problem import TIME_LIMIT, ClassSolver, Submesh
from alpa.passes.stages.clustered import Clustered
from alpa.passes.stages.costs_folder import CostsFolder
from alpa.passes.stages.layer_classes import layer_classes
from alpa.passes.stages.remat import rematerialised
from alpa.passes.tried import SubmeshOutcome, TriedSubmesh
from alpa.passes.workers import Workers

Question = Literal["bound", "costs", "least"]

_SLOW = 2.0
"""On a mesh on which forward runs take so many times an even split, backward runs are not bounded:
the bound of the forward runs is high enough for almost all stage searches."""
_CLOSE = 0.05
"""Of an even split: sweeps that raise the bound by less end the ascent."""


@dataclass(frozen=True, kw_only=True, eq=False)
class _Answer:
    """What a mesh came to, and whether no solver was stopped by its time limit."""

    found: Costs | LeastSeconds
    in_time: bool = True
    is_kept: bool = False
    """whether the folder has it"""


class NoPlanError(ValueError):
    """An op cannot be on a mesh; the message is that of its located error."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Costing:
    """Costs of a solver's classes, wherever there is a process to find them."""

    solver: ClassSolver
    folder: CostsFolder | None = None
    """where answers are kept for later searches"""
    before: Costing | None = None
    """of the same layers before they were rematerialised"""
    read: list[Submesh] = field(default_factory=list[Submesh])
    """the meshes whose answers were in the folder"""
    _begun: dict[tuple[Question, Submesh], Future[_Answer]] = field(
        default_factory=dict[tuple[Question, Submesh], "Future[_Answer]"]
    )
    """by what was asked of which mesh"""
    _ended: dict[tuple[Question, Submesh], Future[_Answer]] = field(
        default_factory=dict[tuple[Question, Submesh], "Future[_Answer]"]
    )
    """those of them that somebody has waited for"""
    _last: dict[Submesh, Future[Any]] = field(default_factory=dict[Submesh, "Future[Any]"])
    """what was asked last of a mesh; its problem is where that was found"""

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

    def where(self, workers: Workers, meshes: int) -> Workers:
        """The processes if so many meshes of the classes are worth them, else none."""
        return workers.worth(walk(self.solver.classes.module.body), meshes)

    def prepare(self, workers: Workers, submeshes: Sequence[Submesh]) -> None:
        """Has processes read the classes' programs while this one finds what one device does, and
        pose the forward parts on a mesh each: that is what is asked first."""
        if self.folder is not None:  # It may have all answers.
            return
        for submesh in submeshes[: workers.count]:
            self._last[submesh] = workers.submit(_prepared, self._sent, submesh)

    def begin(self, workers: Workers, submesh: Submesh, enough: float) -> Callable[[], Costs]:
        """Begins to find what the classes cost on a mesh; what is returned waits for it.

        That has the fastest sharding first, then one per price of memory. It raises NoPlanError,
        InfeasibleError, TimeoutError or SolverFailedError, and FolderError if the folder cannot be
        used. What a mesh came to is kept.

        Args:
            enough: see `ClassProblem.solve`.
        """
        wait = self._begin(workers, "costs", submesh, enough)
        return lambda: cast("Costs", wait())

    def begin_bound(
        self, workers: Workers, submesh: Submesh, even: np.ndarray
    ) -> Callable[[], LeastSeconds]:
        """Begins to bound what the classes take on a mesh from below, with what they send.

        It is waited for and kept as what `begin` gives, and raises the same.

        Args:
            even: [2, C], the seconds of one forward and one backward run of each class, split
                evenly.
        """
        wait = self._begin(workers, "bound", submesh, even.tolist())
        return lambda: cast("LeastSeconds", wait())

    def begin_least(self, workers: Workers, submesh: Submesh) -> Callable[[], ClassCosts]:
        """Begins to find what the classes cost on a mesh in the sharding that holds least.

        It is waited for and kept as what `begin` gives, and raises the same.
        """
        wait = self._begin(workers, "least", submesh, None)
        return lambda: cast("Costs", wait())[0]

    def knows(self, what: Question, submesh: Submesh) -> bool:
        """Whether the answer is kept."""
        return (what, submesh) in self._ended

    def outcomes(self, submesh: Submesh) -> dict[Question, BaseException | None]:
        """The questions about a mesh that have an answer, with the error that is the answer."""
        ended = {what: self._ended.get((what, submesh)) for what in get_args(Question)}
        return {what: it.exception() for what, it in ended.items() if it is not None}

    def _begin(
        self, workers: Workers, what: Question, submesh: Submesh, given: object
    ) -> Callable[[], Costs | LeastSeconds]:
        if (what, submesh) in self._ended:
            ended = self._ended[what, submesh]
            return lambda: ended.result().found
        begun = self._begun.get((what, submesh))
        if begun is None or _is_lost(begun):
            begun = self._begun[what, submesh] = self._search(workers, what, submesh, given)

        def finish() -> Costs | LeastSeconds:
            self._ended[what, submesh] = begun
            answer = begun.result()
            if self.folder is not None and answer.in_time and not answer.is_kept:
                self.folder.write(self.folder.file(what, submesh, given), answer.found)
            return answer.found

        return finish

    def _search(
        self, workers: Workers, what: Question, submesh: Submesh, given: object
    ) -> Future[_Answer]:
        """Takes an answer from the folder, or begins to find it."""
        if self.folder is not None:
            kept = self.folder.read(self.folder.file(what, submesh, given))
            if kept is not None:
                if what == "costs":
                    self.read.append(submesh)
                return Workers(0).submit(_Answer, found=kept, is_kept=True)
        here = there = partial(_answer, self.solver, what, submesh, given)
        if workers.count:
            there = partial(_answer_sent, self._sent, what, submesh, given)
        known = (it._last.get(submesh) for it in (self, self.before) if it is not None)
        near = next((last for last in known if last is not None), None)
        begun = self._last[submesh] = workers.share(there, here=here, near=near)
        return begun

    @cached_property
    def _sent(self) -> tuple[bytes, ...]:
        """What a process needs to know of the classes: those of `before` first, if there are any,
        which it may know already."""
        before = () if self.before is None else self.before._sent
        solver = replace(self.solver, before=None)  # without what it has made of the programs
        works = solver.classes.known_works(solver.cluster.device)
        return *before, pickle.dumps((solver, works))


class LayerCosts:
    """Costs of the layers of one program, as they are and rematerialised, found once.

    They depend on neither the schedule nor the reserve: `alpa` keeps them between its cuts, each of
    which is made on a copy of the same layers. Only whether there are prices of memory depends on
    the schedule of the first cut (`Candidate.is_small`).
    """

    def __init__(
        self, solver: type[ClassSolver] = ClassSolver, *, folder: Path | None = None
    ) -> None:
        """Finds nothing yet; with a folder, answers are read from it and written to it."""
        self._solver = solver
        self._folder = folder
        self.shared = Shared()
        """by all problems of the program"""
        self._found: dict[tuple[int, bool], Costing] = {}
        """by the kind of hosts, with and without rematerialisation"""
        self._offered: dict[tuple[int, Submesh], bool] = {}
        """the meshes that cuts could use, by the kind of hosts, and whether there was no other"""

    def of(self, program: Clustered, *, kind: int = 0, remat: bool = False) -> Costing:
        """The costs of a program's layers on a kind of hosts, which are those of each of its
        copies."""
        function = program.function
        if (kind, remat) not in self._found:
            cluster = program.cluster.kinds[kind]
            plain = self._found.get((kind, False)) if remat else None
            before = None if plain is None else plain.solver
            if remat:
                known = None if before is None else before.classes.class_of
                module = rematerialised(function, known)
                function = main_function(module)
            classes = layer_classes(
                Graph.of(body(function)),
                program.arguments,
                program.results,
                program.num_layers,
                cluster,
                program.plan,
                self.shared,
                program.given,
                None if before is None else before.classes.class_of,
            )
            solver = self._solver(
                classes=classes,
                cluster=cluster,
                plan=program.plan,
                intra=program.intra,
                before=before,
            )
            folder = self._folder and CostsFolder(path=self._folder, solver=solver)
            self._found[kind, remat] = Costing(solver=solver, folder=folder, before=plain)
        return self._found[kind, remat]

    def known(self, *, kind: int = 0, remat: bool = False) -> Costing | None:
        """The same, if they were asked for before."""
        return self._found.get((kind, remat))

    def offer(self, kind: int, submesh: Submesh, *, is_only: bool) -> None:
        """Notes that a cut may use a mesh. If it is the only one, bounds are enough."""
        self._offered[kind, submesh] = is_only or self._offered.get((kind, submesh), False)

    def tried(self) -> tuple[TriedSubmesh, ...]:
        """What became of the meshes that cuts could use."""
        return tuple(self._tried(*one, is_only=it) for one, it in self._offered.items())

    def _tried(self, kind: int, submesh: Submesh, *, is_only: bool) -> TriedSubmesh:
        costings = [it for (number, _), it in self._found.items() if number == kind]
        outcome, reason = _outcome(submesh, costings, is_only=is_only)
        solver = costings[0].solver
        layers = len(solver.classes.class_of)
        return TriedSubmesh(
            hosts=submesh[0],
            devices=submesh[1],
            logical_shape=submesh[2],
            device=solver.cluster.device.name,
            num_candidates=layers * (layers + 1) // 2,
            outcome=outcome,
            reason=reason,
        )

    @property
    def read(self) -> int:
        """How many meshes had their costs in the folder."""
        return sum(len(one.read) for one in self._found.values())


def _outcome(
    submesh: Submesh, costings: Iterable[Costing], *, is_only: bool
) -> tuple[SubmeshOutcome, str]:
    """What became of a mesh, and why if it was not costed, from the costs of its layers as they are
    and rematerialised."""
    if submesh[:2] == (1, 1):
        return "costed", ""  # All bounds come from one device.
    answers = [(what, it) for one in costings for what, it in one.outcomes(submesh).items()]
    failures = [it for _, it in answers if isinstance(it, TimeoutError | SolverFailedError)]
    if failures:
        return "dropped", str(failures[0])
    if ("costs", None) in answers:
        return "costed", ""
    refusals = [it for _, it in answers if it is not None]
    if refusals:
        return "infeasible", str(refusals[0])
    if is_only:
        return "only", "every cut uses it"
    bound = "compute and collectives" if answers else "compute"
    return "pruned", f"no cut that uses it is faster, by lower bounds of its {bound}"


def _is_lost(begun: Future[_Answer]) -> bool:
    """Whether a search that nobody waited for was cancelled, or ended with its process."""
    if not begun.done() or begun.cancelled():
        return begun.cancelled()
    return isinstance(begun.exception(), SolverFailedError)


def _work(solver: ClassSolver) -> Work:
    """What one device does."""
    problem = solver.pose(*solver.one_device)
    (costs,) = problem.solve(())
    solver.keep(solver.one_device, problem, is_solved=True)
    return problem.work(costs)


def _answer(solver: ClassSolver, what: Question, submesh: Submesh, given: Any) -> _Answer:
    try:
        if what == "bound":
            return _bound(solver, submesh, np.array(given))
        if what == "least":
            return _least(solver, submesh)
        return _solve(solver, submesh, given)
    except PassError as error:
        raise NoPlanError(str(error)) from error


def _bound(solver: ClassSolver, submesh: Submesh, even: np.ndarray) -> _Answer:
    problem, both = solver.posed.get(submesh) or solver.pose(*submesh), even.sum(axis=0)
    forward = np.maximum(even[0], problem.least_seconds("forward", _CLOSE * even[0]))
    least = forward + even[1]
    layers = np.array([len(one.layers) for one in solver.classes.classes])
    is_slow = bool(layers @ forward > _SLOW * layers @ even[0])
    if not is_slow:
        least = np.maximum(least, problem.least_seconds("backward", _CLOSE * both))
    solver.keep(submesh, problem, is_solved=False, is_slow=is_slow)
    return _Answer(found=LeastSeconds(seconds=least))


def _solve(solver: ClassSolver, submesh: Submesh, enough: float) -> _Answer:
    problem = solver.posed.get(submesh) or solver.pose(*submesh)
    began = time.monotonic()
    found = problem.solve(PRICES, enough, lambda it: _is_small(solver, it, submesh))
    solver.keep(submesh, problem, is_solved=True)
    return _Answer(found=found, in_time=time.monotonic() - began < TIME_LIMIT)


def _least(solver: ClassSolver, submesh: Submesh) -> _Answer:
    problem = solver.posed.get(submesh) or solver.pose(*submesh)
    began = time.monotonic()
    found = problem.solve((LAST_PRICE,))[1:]
    solver.keep(submesh, problem, is_solved=True)
    return _Answer(found=found, in_time=time.monotonic() - began < TIME_LIMIT)


def _is_small(solver: ClassSolver, costs: ClassCosts, submesh: Submesh) -> bool:
    """Whether all stages fill little of the memory, in any cut."""
    candidate = candidate_of(solver, costs, submesh)
    return candidate.is_small(solver.cluster.device.memory, solver.plan)


def _answer_sent(sent: tuple[bytes, ...], what: Question, submesh: Submesh, given: Any) -> _Answer:
    solver = _solver(sent)
    with solver.classes.module.context:
        return _answer(solver, what, submesh, given)


def _prepared(sent: tuple[bytes, ...], submesh: Submesh) -> None:
    solver = _solver(sent)
    # Where an op cannot be on a mesh, the answer for the mesh says so.
    with solver.classes.module.context, suppress(PassError):
        solver.classes.read(solver.cluster.device)
        problem = solver.pose(*submesh)
        problem.pose_until("forward")
        solver.keep(submesh, problem, is_solved=False)


@lru_cache(maxsize=8)  # for each kind of hosts with rematerialised layers, and without
def _solver(sent: tuple[bytes, ...]) -> ClassSolver:
    *before, mine = sent
    if not before:
        solver, works = pickle.loads(mine)
    else:
        plain = _solver(tuple(before))
        with plain.classes.module.context:
            solver, works = pickle.loads(mine)
        solver = solver.behind(plain)
    solver.classes.take_works(solver.cluster.device, works)
    return solver
