"""The logical views of submeshes, and what is known of what they offer the stage DP.

To know a view's costs takes seconds, so it is asked for them step by step, and only where the DP
uses what is not known yet:

1. at first no view takes less than its work split along the axes that divide something of each op,
   with nothing sent (`class_costs.Work`), nor holds less than an even split;
2. then its shardings are known, the fastest and those that hold less (`options.PRICES`);
3. then the same with rematerialised layers, which until then were the fastest sharding with what
   is computed again split evenly.

Each step only raises what was assumed. So when a cut uses nothing but known costs, no other cut is
better: what is taken for a bound here is one of all layers together, and for a part of them, whose
share of the optimum may be any, the best estimate there is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from alpa.passes.solve.shard_problem import InfeasibleError, SolverFailedError
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
            except (NoPlanError, InfeasibleError, TimeoutError, SolverFailedError) as error:
                count = len(self.one.option.seconds)
                where = (self.hosts, self.devices, self.shape)
                options = [impossible(count, *where, str(error))]
            if remat:
                self._remat = options
            else:
                self._plain = options

        return finish

    def _split(self) -> Option:
        """What its fastest sharding does not undercut."""
        costs = self.one.work.split(self.shape)
        return replace(self._option(self.one.costing, costs), is_bound=True)

    def _option(self, costing: Costing, costs: ClassCosts) -> Option:
        return option_of(costing.solver, costs, self.hosts, self.devices, self.shape)
