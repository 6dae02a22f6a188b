"""The logical views of submeshes, and what is known of what they offer the stage DP.

It takes seconds to find a view's costs, so they are found in steps, and only if the DP uses what is
not known yet:

1. Bounds: each op is split along the axes that divide some factor of it, nothing is sent
   (`class_costs.Work`), and memory is split evenly. No sharding of any interval of layers takes
   less.
2. The costs of shardings that a solver found: the fastest, and some that hold less
   (`options.PRICES`).
3. The same with rematerialised layers. Before, they take what the shardings of step 2 take and an
   even split of what is computed again, which is an estimate of the fastest ones.

Once costs are found, they are taken for those of the view, though other shardings of an interval
may be better (`search.py` says what is proven then).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.problem import InfeasibleError
from alpa.passes.stages.costing import Costing, NoPlanError
from alpa.passes.stages.options import (
    Option,
    Submesh,
    impossible,
    remat_bounds,
    with_shares,
)
from alpa.passes.workers import Workers

_NEAR = 0.1
"""What takes so much longer is about as fast: its turn will come."""
HOPELESS = 4.0
"""A mesh on which all layers take so many times an even split is not searched further."""


@dataclass(kw_only=True, eq=False)
class OneDevice:
    """What the layers cost without sharding: all bounds come from it."""

    costing: Costing
    remat_costing: Callable[[], Costing]
    """of the same layers rematerialised"""
    may_rematerialise: bool
    workers: Workers
    again: Option | None = None
    """with all layers rematerialised, once that is known"""

    @property
    def option(self) -> Option:
        """With no layer rematerialised."""
        return self.costing.one_device

    def rematerialise(self) -> None:
        """Makes `again` known. Raises as `Costing.work`."""
        self.again = replace(self.remat_costing().one_device, remat=1.0)


@dataclass(kw_only=True, eq=False)
class View:
    """A submesh seen in one logical shape."""

    submesh: Submesh
    one: OneDevice
    dropped: list[str] = field(default_factory=list[str])
    """why no costs of it are known, though there may be a plan on it"""
    is_only: bool = False
    """there is no other choice, so that its bound is as good as its costs"""
    _plain: list[Option] | None = None
    """known without rematerialisation, the fastest first"""
    _remat: list[Option] | None = None
    """known with it"""
    _finish: Callable[[], None] | None = None
    """waits for what was begun"""

    @classmethod
    def of(cls, one: OneDevice, submesh: Submesh) -> View:
        """One device is known already, but for what it is to keep."""
        view = cls(submesh=submesh, one=one)
        if view.num_devices == 1:
            view._plain = [replace(one.option, shape=submesh[2])]
        return view

    @property
    def num_devices(self) -> int:
        """Of the submesh."""
        return self.submesh[0] * self.submesh[1]

    @property
    def is_known(self) -> bool:
        """Whether its costs without rematerialisation are."""
        return self._plain is not None

    def options(self) -> list[Option]:
        """What it offers, as far as is known, and bounds of the rest."""
        if self.is_only:
            return [replace(self._split(), is_bound=False)]
        plain = self._plain or [self._split()]
        if self._remat is not None:
            return [*plain, *with_shares(plain, self._remat)]
        if not self.one.may_rematerialise or plain[0].problem:
            return plain
        return [*plain, *remat_bounds(plain[0], self.one.option, self.one.again)]

    def is_like(self, other: View) -> bool:
        """Whether it is the same submesh, of which as much is known, and about as fast."""
        if self.submesh[:2] != other.submesh[:2] or self._remat is not None:
            return False
        mine, others = ((view._plain or [view._split()])[0] for view in (self, other))
        near = mine.seconds[0, -1] <= (1 + _NEAR) * others.seconds[0, -1]
        return bool(near and self.is_known == other.is_known)

    def begin(self) -> None:
        """Begins to find what is not known yet."""
        if self._finish is None:
            self._finish = self._begun()

    def finish(self) -> None:
        """Waits for what was begun."""
        assert self._finish is not None, "nothing was begun"
        self._finish()
        self._finish = None

    def _begun(self) -> Callable[[], None]:
        if self.num_devices == 1:
            assert self.one.again is not None, "one device is rematerialised before its view"
            self._remat = [replace(self.one.again, shape=self.submesh[2])]
            return lambda: None
        costing = self.one.remat_costing() if self.is_known else self.one.costing
        least = self._split()
        micro_batches = costing.solver.plan.num_micro_batches
        enough = HOPELESS * float(micro_batches * least.seconds[0, -1] + least.update[0, -1])
        found = costing.begin(self.one.workers, self.submesh, enough)
        remat = 1.0 if self.is_known else 0.0

        def finish() -> None:
            try:
                options = [
                    replace(costing.option(costs, self.submesh), remat=remat) for costs in found()
                ]
            except (NoPlanError, InfeasibleError) as error:
                options = [self._impossible(str(error))]
            except (TimeoutError, SolverFailedError) as error:
                self.dropped.append(str(error))
                options = [self._impossible(str(error))]
            if remat:
                self._remat = options
            else:
                self._plain = options

        return finish

    def _impossible(self, problem: str) -> Option:
        return impossible(len(self.one.option.seconds), self.submesh, problem)

    def _split(self) -> Option:
        """What its fastest sharding does not undercut."""
        costing = self.one.costing
        costs = costing.work.split(self.submesh[2])
        return replace(costing.option(costs, self.submesh), is_bound=True)
