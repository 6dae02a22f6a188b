"""The stage candidates of a logical mesh, and what is known of their costs.

It takes seconds to find the costs on a mesh, so they are found in steps, and only if the DP uses
what is not known yet:

1. Bounds: each op is split along the axes that divide some factor of it, nothing is sent
   (`class_costs.Work`), and memory is split evenly. No sharding of any interval of layers takes
   less.
2. The costs of shardings that a solver found: the fastest, and some that hold less
   (`candidates.PRICES`).
3. The same with rematerialised layers. Until these are found, their seconds are estimated: those
   of the shardings of step 2, plus an even split of what is computed again.

The costs that are found stand for all shardings on that mesh, though other shardings of an interval
may be better (`search.py` says what is proven then).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.problem import InfeasibleError
from alpa.passes.stages.candidates import (
    Candidate,
    Submesh,
    impossible,
    remat_bounds,
    with_shares,
)
from alpa.passes.stages.costing import Costing, NoPlanError
from alpa.passes.workers import Workers

_NEAR = 0.1
"""A mesh that takes at most this share longer than another one is about as fast."""
HOPELESS = 4.0
"""A mesh on which all layers take so many times an even split is not searched further."""


@dataclass(kw_only=True, eq=False)
class OneDevice:
    """The costs of the layers on one device: all bounds come from them."""

    costing: Costing
    remat_costing: Callable[[], Costing]
    """gives the costs of the same layers rematerialised"""
    may_rematerialise: bool
    workers: Workers
    again: Candidate | None = None
    """with all layers rematerialised, once `rematerialise` has run"""

    @property
    def candidate(self) -> Candidate:
        """With no layer rematerialised."""
        return self.costing.one_device

    def rematerialise(self) -> None:
        """Sets `again`. Raises as `Costing.work`."""
        self.again = replace(self.remat_costing().one_device, remat=1.0)


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
    """all stages are on it anyway, so that bounds do for costs"""
    _plain: list[Candidate] | None = None
    """those without rematerialisation, the fastest first; None: not found yet"""
    _remat: list[Candidate] | None = None
    """those with rematerialisation"""
    _finish: Callable[[], None] | None = None
    """waits for a search that has begun"""

    @classmethod
    def of(cls, one: OneDevice, number: int, submesh: Submesh) -> MeshCandidates:
        """The candidates of a mesh; those of one device are known already."""
        mesh = cls(number=number, submesh=submesh, one=one)
        if mesh.num_devices == 1:
            mesh._plain = [replace(one.candidate, shape=submesh[2])]
        return mesh

    @property
    def num_devices(self) -> int:
        """The number of devices of the submesh."""
        return self.submesh[0] * self.submesh[1]

    @property
    def is_known(self) -> bool:
        """Whether the costs without rematerialisation are known."""
        return self._plain is not None

    def candidates(self) -> list[Candidate]:
        """All candidates: with costs as far as these are known, else with bounds."""
        if self.is_only:
            return [replace(self._split(), is_bound=False)]
        plain = self._plain or [self._split()]
        if self._remat is not None:
            return [*plain, *with_shares(plain, self._remat)]
        if not self.one.may_rematerialise or plain[0].problem:
            return plain
        return [*plain, *remat_bounds(plain[0], self.one.candidate, self.one.again)]

    def is_like(self, other: MeshCandidates) -> bool:
        """Whether it is the same submesh, as much is known of it, and it is about as fast."""
        if self.submesh[:2] != other.submesh[:2] or self._remat is not None:
            return False
        mine, others = ((mesh._plain or [mesh._split()])[0] for mesh in (self, other))
        near = mine.seconds[0, -1] <= (1 + _NEAR) * others.seconds[0, -1]
        return bool(near and self.is_known == other.is_known)

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
            self._remat = [replace(self.one.again, shape=self.submesh[2])]
            return lambda: None
        costing = self.one.remat_costing() if self.is_known else self.one.costing
        least = self._split()
        micro_batches = costing.solver.plan.num_micro_batches
        enough = HOPELESS * float(micro_batches * least.seconds[0, -1] + least.update[0, -1])
        wait = costing.begin(self.one.workers, self.submesh, enough)
        remat = 1.0 if self.is_known else 0.0

        def finish() -> None:
            try:
                costed = [costing.candidate(costs, self.submesh) for costs in wait()]
                found = [replace(candidate, remat=remat) for candidate in costed]
            except (NoPlanError, InfeasibleError) as error:
                found = [self._impossible(str(error))]
            except (TimeoutError, SolverFailedError) as error:
                self.dropped.append(str(error))
                found = [self._impossible(str(error))]
            if remat:
                self._remat = found
            else:
                self._plain = found

        return finish

    def _impossible(self, problem: str) -> Candidate:
        return impossible(len(self.one.candidate.seconds), self.submesh, problem)

    def _split(self) -> Candidate:
        """Bounds of the fastest sharding."""
        costing = self.one.costing
        costs = costing.work.split(self.submesh[2])
        return replace(costing.candidate(costs, self.submesh), is_bound=True)
