"""The stage candidates of a logical mesh, with costs or with lower bounds of costs.

It takes seconds to find the costs on a mesh. So they are found in steps, and only if the DP's cut
uses a candidate whose costs are not found yet:

1. Bounds: each op is split along the axes that divide some factor of it, nothing is sent
   (`class_costs.Work`), and memory is split evenly. No sharding of any interval of layers takes
   less.
2. Bounds of forward and backward runs with what they send, by dual ascent. They take a fraction of
   the time of the next step.
3. The costs of shardings that a solver found: the fastest, and some that hold less
   (`candidates.PRICES`).
4. The costs of the sharding that holds least, on the meshes of step 3, if no cut fits.

If the cut rematerialises layers, step 2 follows for these, then the costs of the layers as they
are, then those of rematerialised ones. Until then, their seconds are estimated: those of the layers
as they are, plus an even split of what is computed again.

The costs that are found stand for all shardings on that mesh, though other shardings of an interval
may be better (see `search.py` for what this proves).
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Hashable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np

from alpa.dialects.plan import Plan
from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.problem import InfeasibleError
from alpa.passes.stages.candidates import Candidate, remat_bounds, with_shares
from alpa.passes.stages.class_costs import ClassCosts, LeastSeconds
from alpa.passes.stages.class_problem import Submesh
from alpa.passes.stages.costing import Costing, NoPlanError, Question
from alpa.passes.workers import Workers

_QUESTIONS: tuple[tuple[bool, Question], ...] = (
    (False, "bound"),
    (True, "bound"),
    (False, "costs"),
    (True, "costs"),
)
"""What is asked of a mesh, in this order, and whether of rematerialised layers; for what is asked
where no cut fits, see `begin_least`."""
_NEAR = 0.1
"""A mesh that takes at most this share longer than another one is about as fast."""
HOPELESS = 4.0
"""A mesh on which all layers take so many times an even split is not searched further."""


@dataclass(kw_only=True, eq=False)
class OneDevice:
    """The costs of the layers on one device of a kind: all bounds come from them."""

    kind: int
    """of hosts"""
    costing_of: Callable[[bool], Costing]
    """gives the costs of the layers as they are, or rematerialised"""
    known: Callable[[bool], Costing | None]
    """the same, if an earlier search of these layers asked for them"""
    plan: Plan
    """of this search; that of the costs may have another schedule"""
    may_rematerialise: bool
    workers: Workers
    again: Candidate | None = None
    """with all layers rematerialised, once `rematerialise` has run"""

    @property
    def candidate(self) -> Candidate:
        """With no layer rematerialised."""
        return self.costing_of(False).one_device

    def rematerialise(self) -> None:
        """Sets `again`. Raises as `Costing.work`."""
        self.again = replace(self.costing_of(True).one_device, remat=1.0)

    def split(self, remat: bool, sizes: tuple[int, ...], least: LeastSeconds | None) -> ClassCosts:
        """Bounds of the costs of a mesh of these axes: the work split, and what runs take at
        least."""
        costs = self.costing_of(remat).work.split(sizes)
        if least is None:
            return costs
        forward, backward, *others = costs.by_class
        backward = np.maximum(backward, least.seconds - forward)
        return replace(costs, by_class=np.array([forward, backward, *others]))

    def remat_bounds(self, fastest: Candidate, least: LeastSeconds | None) -> list[Candidate]:
        """Bounds of a mesh's candidates that rematerialise layers, from its fastest candidate."""
        plain = self.costing_of(False).one_device_at_least
        if self.again is None:
            return remat_bounds(fastest, plain)
        costing, submesh = self.costing_of(True), fastest.submesh
        seconds = None
        if least is not None:
            seconds = costing.candidate(self.split(True, submesh[2], least), submesh).seconds
        return remat_bounds(fastest, plain, costing.one_device_at_least, seconds)


@dataclass(kw_only=True, eq=False)
class MeshCandidates:
    """A submesh in one logical shape, and what it offers the stage DP."""

    number: int
    """of the mesh, in the search"""
    submesh: Submesh
    one: OneDevice
    dropped: list[str] = field(default_factory=list[str])
    """why no costs are known, though there may be a plan"""
    is_only: bool = False
    """all stages are on it in any case, so bounds are enough"""
    _found: dict[bool, list[Candidate]] = field(default_factory=dict[bool, list[Candidate]])
    """without rematerialisation, the fastest first, and with it, as far as the costs are known"""
    _least: dict[bool, LeastSeconds] = field(default_factory=dict[bool, LeastSeconds])
    """without rematerialisation and with it, as far as bounds were found"""
    _narrowest: dict[bool, Candidate | None] = field(default_factory=dict[bool, "Candidate | None"])
    """the candidate that holds least, without rematerialisation and with it, as far as it was
    asked for; None if no solver found it"""
    _finish: Callable[[], None] | None = None
    """waits for a search that has begun"""
    _made: dict[Hashable, Sequence[Candidate]] = field(
        default_factory=dict[Hashable, Sequence[Candidate]]
    )
    """the candidates, by what was known when they were made"""

    def __post_init__(self) -> None:
        if self.num_devices == 1:
            self._found[False] = [replace(self.one.candidate, submesh=self.submesh)]

    @property
    def num_devices(self) -> int:
        """The number of devices of the submesh."""
        return self.submesh[0] * self.submesh[1]

    @property
    def is_known(self) -> bool:
        """Whether costs are known, with rematerialised layers or without."""
        return bool(self._found)

    def candidates(self) -> Sequence[Candidate]:
        """All candidates: with costs as far as these are known, else with bounds."""
        known = (
            self.is_only,
            *map(tuple, (self._found, self._least, self._narrowest)),
            self.one.again,
        )
        if known not in self._made:
            self._made = {known: self._make()}
        return self._made[known]

    def _make(self) -> list[Candidate]:
        if self.is_only:
            return [replace(self._split(), is_bound=False)]
        plain, narrow = self._plain(), self._narrow(False)
        if True in self._found:
            again = with_shares(plain, self._found[True])
            return [*plain, *again, *narrow, *with_shares(narrow, self._narrow(True))]
        plain = [*plain, *narrow]
        if not self.one.may_rematerialise or plain[0].problem or self._is_small():
            return plain
        return [*plain, *self.one.remat_bounds(plain[0], self._least.get(True))]

    def is_like(self, other: MeshCandidates) -> bool:
        """Whether the other is an equal submesh, no bound is known of both, and they are about
        equally fast."""
        if self.submesh[:2] != other.submesh[:2] or self._least or other._least:
            return False
        mine, others = self._plain()[0], other._plain()[0]
        return bool(mine.seconds[0, -1] <= (1 + _NEAR) * others.seconds[0, -1])

    def recall(self) -> bool:
        """Takes what an earlier search of these layers found, and says if that was new."""
        if self.num_devices == 1:
            return False
        found = False
        for remat, what in _QUESTIONS:
            if self._has(remat, what) or (remat and self.one.again is None):
                continue
            costing = self.one.known(remat)
            if costing is not None and costing.knows(what, self.submesh):
                self._asked(remat, what)()
                found = True
        return found

    def _has(self, remat: bool, what: Question) -> bool:
        """Whether it is known."""
        return remat in self._found or (what == "bound" and remat in self._least)

    def begin(self, *, remat: bool) -> None:
        """Begins to find the next bounds or costs that are not known. `remat`: those that matter
        for rematerialised layers, too."""
        if self._finish is None:
            self._finish = self._begun(remat)

    def finish(self) -> None:
        """Waits for what `begin` asked for."""
        assert self._finish is not None, "nothing was begun"
        self._finish()
        self._finish = None

    def begin_least(self) -> Callable[[], None] | None:
        """Begins to find the sharding that holds least, where it was not asked for, and memory
        may be short. What is returned waits for it; None if nothing was begun."""
        if self.num_devices == 1 or self._is_small():
            return None
        possible = [remat for remat, found in self._found.items() if not found[0].problem]
        waits = [self._asked_for_least(it) for it in possible if it not in self._narrowest]
        if not waits:
            return None

        def finish() -> None:
            for wait in waits:
                wait()

        return finish

    def _asked_for_least(self, remat: bool) -> Callable[[], None]:
        costing = self.one.costing_of(remat)
        wait = costing.begin_least(self.one.workers, self.submesh)

        def finish() -> None:
            self._narrowest[remat] = None
            try:
                found = costing.candidate(wait(), self.submesh)
            except (TimeoutError, SolverFailedError) as error:
                self.dropped.append(str(error))
            else:
                self._narrowest[remat] = replace(found, remat=float(remat))

        return finish

    def _narrow(self, remat: bool) -> list[Candidate]:
        found = self._narrowest.get(remat)
        return [] if found is None else [found]

    def _begun(self, remat: bool) -> Callable[[], None]:
        if self.num_devices == 1:
            assert self.one.again is not None, "one device is rematerialised before its mesh"
            self._found[True] = [replace(self.one.again, submesh=self.submesh)]
            return lambda: None
        unknown = (it for it in _QUESTIONS if (remat or not it[0]) and not self._has(*it))
        return self._asked(*next(unknown))

    def _asked(self, remat: bool, what: Question) -> Callable[[], None]:
        """Begins to find an answer. What is returned waits for it."""
        costing, sizes = self.one.costing_of(remat), self.submesh[2]
        split = self._candidate(self.one.split(False, sizes, None))
        if what == "bound":
            even = self.one.split(remat, sizes, None).by_class[:2]
            wait_for_bound = costing.begin_bound(self.one.workers, self.submesh, even)

            def finish_bound() -> None:
                with self._ends(remat, split):
                    self._least[remat] = wait_for_bound()

            return finish_bound
        runs, whole = costing.solver.plan.num_micro_batches, self.one.candidate
        even = float(runs * whole.seconds[0, -1] + whole.update[0, -1]) / self.num_devices
        enough = HOPELESS * even
        wait = costing.begin(self.one.workers, self.submesh, enough)

        def finish() -> None:
            with self._ends(remat, split):
                candidates = [costing.candidate(costs, self.submesh) for costs in wait()]
                self._found[remat] = [replace(it, remat=float(remat)) for it in candidates]

        return finish

    @contextmanager
    def _ends(self, remat: bool, split: Candidate) -> Generator[None]:
        """Where there is no answer, there is no plan on the mesh: all costs are infinite."""
        try:
            yield
        except (NoPlanError, InfeasibleError, TimeoutError, SolverFailedError) as error:
            if isinstance(error, TimeoutError | SolverFailedError):
                self.dropped.append(str(error))
            never = np.full_like(split.seconds, np.inf)
            none = replace(split, seconds=never, update=never, problem=str(error))
            self._found[remat] = [replace(none, remat=float(remat))]

    def _is_small(self) -> bool:
        """Whether memory is no reason to rematerialise layers."""
        found = self._found.get(False)
        memory = self.one.costing_of(False).solver.cluster.device.memory
        return bool(found) and found[0].is_small(memory, self.one.plan)

    def _plain(self) -> list[Candidate]:
        """Those without rematerialisation."""
        return self._found.get(False) or [self._split()]

    def _split(self) -> Candidate:
        """Bounds of the fastest sharding."""
        costs = self.one.split(False, self.submesh[2], self._least.get(False))
        return replace(self._candidate(costs), is_bound=True)

    def _candidate(self, costs: ClassCosts) -> Candidate:
        return self.one.costing_of(False).candidate(costs, self.submesh)
