"""The stage candidates of a logical mesh, with costs or with lower bounds of costs.

It takes seconds to find the costs on a mesh. So they are found in steps, and only if the DP's cut
uses a candidate whose costs are not found yet:

1. Bounds: each op is split along the axes that divide some factor of it, nothing is sent
   (`class_costs.Work`), and memory is split evenly. No sharding of any interval of layers takes
   less.
2. On a slow mesh, bounds of the forward parts with what they send, by dual ascent. On any other
   mesh this step is left out.
3. The costs of shardings that a solver found: the fastest, and some that hold less
   (`candidates.PRICES`).
4. The same with rematerialised layers. Until these are found, their seconds are estimated: those
   of the shardings of step 3, plus an even split of what is computed again.

The costs that are found stand for all shardings on that mesh, though other shardings of an interval
may be better (see `search.py` for what this proves).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from alpa.dialects.plan import Plan
from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.problem import InfeasibleError
from alpa.passes.stages.candidates import Candidate, Submesh, remat_bounds, with_shares
from alpa.passes.stages.class_costs import ClassCosts
from alpa.passes.stages.costing import Costing, ForwardBound, NoPlanError
from alpa.passes.workers import Workers

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

    def remat_bounds(self, fastest: Candidate) -> list[Candidate]:
        """Bounds of a mesh's candidates that rematerialise layers, from its fastest candidate."""
        plain = self.costing_of(False).one_device_at_least
        again = None if self.again is None else self.costing_of(True).one_device_at_least
        return remat_bounds(fastest, plain, again)


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
    _forward: ForwardBound | None = None
    """of the mesh, if it is slow"""
    _finish: Callable[[], None] | None = None
    """waits for a search that has begun"""

    def __post_init__(self) -> None:
        if self.num_devices == 1:
            self._found[False] = [replace(self.one.candidate, submesh=self.submesh)]

    @property
    def num_devices(self) -> int:
        """The number of devices of the submesh."""
        return self.submesh[0] * self.submesh[1]

    def candidates(self) -> list[Candidate]:
        """All candidates: with costs as far as these are known, else with bounds."""
        if self.is_only:
            return [replace(self._split(), is_bound=False)]
        plain = self._plain()
        if True in self._found:
            return [*plain, *with_shares(plain, self._found[True])]
        if not self.one.may_rematerialise or plain[0].problem or self._is_small():
            return plain
        return [*plain, *self.one.remat_bounds(plain[0])]

    def is_like(self, other: MeshCandidates) -> bool:
        """Whether the other is an equal submesh with equally known costs that is about as fast."""
        if self.submesh[:2] != other.submesh[:2] or True in self._found:
            return False
        mine, others = self._plain()[0], other._plain()[0]
        near = mine.seconds[0, -1] <= (1 + _NEAR) * others.seconds[0, -1]
        return bool(near and mine.is_bound == others.is_bound)

    def recall(self) -> bool:
        """Takes the costs that an earlier search of these layers found, and says if there were
        any."""
        before = len(self._found), self._forward
        while self._is_known():
            self.begin()
            self.finish()
        return before != (len(self._found), self._forward)

    def _is_known(self) -> bool:
        remat = False in self._found
        if self.num_devices == 1 or True in self._found or (remat and self.one.again is None):
            return False
        costing = self.one.known(remat)
        is_first = not remat and self._forward is None
        return costing is not None and costing.knows(self.submesh, or_bound=is_first)

    def begin(self) -> None:
        """Begins to find the next costs that are not known."""
        if self._finish is None:
            self._finish = self._begun()

    def finish(self) -> None:
        """Waits for the costs that `begin` asked for."""
        assert self._finish is not None, "nothing was begun"
        self._finish()
        self._finish = None

    def _begun(self) -> Callable[[], None]:
        if self.num_devices == 1:
            assert self.one.again is not None, "one device is rematerialised before its mesh"
            self._found[True] = [replace(self.one.again, submesh=self.submesh)]
            return lambda: None
        remat = False in self._found
        costing = self.one.costing_of(remat)
        costs = self.one.costing_of(False).work.split(self.submesh[2])
        least = self._candidate(costs)
        micro_batches = costing.solver.plan.num_micro_batches
        enough = HOPELESS * float(micro_batches * least.seconds[0, -1] + least.update[0, -1])
        even = None if remat or self._forward is not None else costs.by_class[0]
        wait = costing.begin(self.one.workers, self.submesh, enough, even)

        def finish() -> None:
            try:
                found = wait()
                if isinstance(found, ForwardBound):
                    self._forward = found
                    return
                costed = [costing.candidate(costs, self.submesh) for costs in found]
            except (NoPlanError, InfeasibleError, TimeoutError, SolverFailedError) as error:
                if isinstance(error, TimeoutError | SolverFailedError):
                    self.dropped.append(str(error))
                never = np.full_like(least.seconds, np.inf)
                costed = [
                    replace(least, seconds=never, update=never, is_bound=False, problem=str(error))
                ]
            self._found[remat] = [replace(candidate, remat=float(remat)) for candidate in costed]

        return finish

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
        costs = self.one.costing_of(False).work.split(self.submesh[2])
        if self._forward is not None:
            forward, *others = costs.by_class
            forward = np.maximum(forward, self._forward.seconds)
            costs = replace(costs, by_class=np.array([forward, *others]))
        return replace(self._candidate(costs), is_bound=True)

    def _candidate(self, costs: ClassCosts) -> Candidate:
        return self.one.costing_of(False).candidate(costs, self.submesh)
