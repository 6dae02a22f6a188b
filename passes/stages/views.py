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
from alpa.passes.stages.class_costs import ClassCosts, Work
from alpa.passes.stages.costing import Costing, NoPlanError
from alpa.passes.stages.options import (
    PRICES,
    Option,
    impossible,
    option_of,
    remat_bounds,
    with_shares,
)

_NEAR = 0.1
"""What takes so much longer is about as fast: its turn will come."""
HOPELESS = 4.0
"""A mesh on which all layers take so many times an even split is not searched further."""


def logical_shapes(
    hosts: int, devices: int, rank: int, *, ordered: bool = False
) -> list[tuple[int, ...]]:
    """How a submesh may be seen: as one axis, or all factorings in two that differ.

    Inside a host all links are equal, so that only the sizes count; over hosts the last axis has
    neighbours. `ordered`: the axes mean different things, so that (a, b) and (b, a) differ and an
    axis of size 1 is a choice, too.
    """
    count = hosts * devices
    if ordered:
        return [(count // a, a) for a in range(devices, 0, -1) if devices % a == 0]
    if hosts == 1:
        if rank == 1 or count < 4:
            return [(count,)]
        return [(a, count // a) for a in range(2, count) if count % a == 0 and a * a <= count] or [
            (count,)
        ]
    return [(hosts * devices // a, a) for a in range(devices, 1, -1) if devices % a == 0] or [
        (hosts, devices)
    ]


@dataclass(kw_only=True, eq=False)
class OneDevice:
    """What the layers cost without sharding: all bounds come from it."""

    costing: Costing
    remat_costing: Callable[[], Costing]
    """of the same layers rematerialised"""
    may_rematerialise: bool
    option: Option
    work: Work
    again: Option | None = None
    """with all layers rematerialised, once that is known"""

    @classmethod
    def of(
        cls, costing: Costing, remat_costing: Callable[[], Costing], *, may_rematerialise: bool
    ) -> OneDevice:
        """Raises PassError, InfeasibleError, TimeoutError or SolverFailedError."""
        problem = costing.solver.pose(1, 1, (1,))
        (costs,) = problem.solve(())
        return cls(
            costing=costing,
            remat_costing=remat_costing,
            may_rematerialise=may_rematerialise,
            option=option_of(costing.solver, costs, 1, 1, (1,)),
            work=problem.work(costs),
        )

    def rematerialise(self) -> None:
        """Makes `again` known. Raises as `of`."""
        solver = self.remat_costing().solver
        (costs,) = solver.pose(1, 1, (1,)).solve(())
        self.again = replace(option_of(solver, costs, 1, 1, (1,)), remat=1.0)


@dataclass(kw_only=True, eq=False)
class View:
    """A submesh seen in one logical shape."""

    hosts: int
    devices: int
    shape: tuple[int, ...]
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
    def of(cls, one: OneDevice, hosts: int, devices: int, shape: tuple[int, ...]) -> View:
        """One device is known already, but for what it is to keep."""
        view = cls(hosts=hosts, devices=devices, shape=shape, one=one)
        if hosts * devices == 1:
            view._plain = [replace(one.option, shape=shape)]
        return view

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

    @property
    def submesh(self) -> tuple[int, int]:
        """Hosts, and devices of each."""
        return self.hosts, self.devices

    @property
    def is_known(self) -> bool:
        """Whether its costs without rematerialisation are."""
        return self._plain is not None

    def is_like(self, other: View) -> bool:
        """Whether it is the same submesh, of which as much is known, and about as fast."""
        if self.submesh != other.submesh or self._remat is not None:
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
        if self.hosts * self.devices == 1:
            assert self.one.again is not None, "one device is rematerialised before its view"
            self._remat = [replace(self.one.again, shape=self.shape)]
            return lambda: None
        costing = self.one.remat_costing() if self.is_known else self.one.costing
        least = self._split()
        micro_batches = costing.solver.plan.num_micro_batches
        enough = HOPELESS * float(micro_batches * least.seconds[0, -1] + least.update[0, -1])
        found = costing.begin(self.hosts, self.devices, self.shape, PRICES, enough)
        remat = 1.0 if self.is_known else 0.0

        def finish() -> None:
            try:
                options = [replace(self._option(costing, costs), remat=remat) for costs in found()]
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
        return impossible(
            len(self.one.option.seconds), self.hosts, self.devices, self.shape, problem
        )

    def _split(self) -> Option:
        """What its fastest sharding does not undercut."""
        costs = self.one.work.split(self.shape)
        return replace(self._option(self.one.costing, costs), is_bound=True)

    def _option(self, costing: Costing, costs: ClassCosts) -> Option:
        return option_of(costing.solver, costs, self.hosts, self.devices, self.shape)
