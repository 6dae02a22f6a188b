"""Which layers go on which meshes: the stage DP over costs of sharded stages, found as needed.

Each submesh in each logical shape offers the DP stage candidates, with costs if they are known,
otherwise with bounds (`mesh_candidates.py`). The DP is solved, the costs behind the bounds that its
cut uses are found, and so on until a cut uses known costs only. Other processes find what the
search is about to ask for.

What is proven: the DP's cut has the least T of all cuts, by these costs. The first solution, where
only one device's costs are known, is a bound: no cut has a smaller T, whatever its shardings are,
if transfers between stages take what is estimated (`boundary.py`).

What is estimated: the costs of a stage are those of shardings that fit all layers of a class
(`class_problem.py`). Such shardings exist, but a stage may have better ones, above all at its ends.
How much better is known only for the stages of the final plan, from `ilp-shard-annotate`; the
bound limits it for all others.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import inf, prod

from alpa.dialects.plan import Dropped
from alpa.passes.base import NoRoomError, NotFasterError, PassError
from alpa.passes.schedules.planned import chunks_of, splits_backward
from alpa.passes.schedules.split_memory import CountsOfStages, counts_of_stages
from alpa.passes.solve.errors import SolverFailedError, VerificationError
from alpa.passes.solve.sharding.problem import InfeasibleError
from alpa.passes.solve.stages import stage_dp
from alpa.passes.solve.stages.placement import orders
from alpa.passes.solve.stages.problem import (
    NoCutError,
    NoCutInMemoryError,
    Problem,
    Solution,
    Stage,
)
from alpa.passes.stages.candidates import Candidate, stage_problem
from alpa.passes.stages.class_problem import Submesh
from alpa.passes.stages.clustered import Clustered
from alpa.passes.stages.costing import Costing, LayerCosts
from alpa.passes.stages.host_orders import HostOrders, NoFasterCutError
from alpa.passes.stages.mesh_candidates import MeshCandidates, OneDevice
from alpa.passes.stages.refusals import problems, shortage
from alpa.passes.workers import Workers

Further = Callable[
    [Problem, tuple[Stage, ...], Sequence[Candidate], Sequence[int]], Iterable[tuple[Stage, ...]]
]
"""Cuts that are made of the DP's; gets the candidates, and the numbers of those whose costs are
known."""
Restriction = Callable[[Problem, Sequence[int]], Problem]
"""Restricts the stage DP; gets for each submesh of the problem the number of its mesh."""

_ROUNDS = 2
"""Questions for each process and for this one between two stage DPs, if there are so many. With
one, a DP follows each of many short questions; with three, more of the answers are of no use."""
_FAR = 1.05
"""Meshes with which a step takes so many times the best one, by bounds, are not asked ahead: with
1.1, Wide-ResNet-13B's search asked for more that was of no use than it saved. With 1.005, shapes of
one mesh were asked for one after the other in gpt-oss's search."""

_FULL = 0.4
"""Of the memory of all devices: if all layers hold more, few shardings fit, since none splits all
tensors evenly."""

_Offer = tuple[Candidate, MeshCandidates]


@dataclass(frozen=True, kw_only=True)
class Cut:
    """Stages in their order, the candidate and the number of the mesh of each, and T."""

    stages: tuple[Stage, ...]
    candidates: tuple[Candidate, ...]
    meshes: tuple[int, ...]
    kinds: tuple[int, ...]
    """of the hosts of each stage"""
    each: tuple[float, ...]
    """seconds of a stage for one micro-batch, with its transfers"""
    beside: tuple[float, ...]
    """seconds of those transfers that run beside its work"""
    updates: tuple[float, ...]
    """seconds of its update"""
    seconds: float
    bound: float
    """of T: that of the first solution, which knows the costs of one device only"""
    dropped: tuple[Dropped, ...]
    """meshes that were left out"""
    others: tuple[Cut, ...] = ()
    """cuts that the DP found on the way, whose costs are known, too"""


@dataclass(frozen=True, kw_only=True)
class Search:
    """The stage DP over some submeshes, with the costs of those that it uses."""

    program: Clustered
    costs: LayerCosts
    workers: Workers
    submeshes: Sequence[tuple[int, Submesh]]
    """with the kind of their hosts"""
    most_stages: int | None
    restrict: Restriction
    further: Further | None = None
    """adds to `Cut.others`"""
    may_be_idle: bool = False
    """whether hosts of one kind may stay idle"""

    def run(self) -> Cut:
        """The cut with the least T by these costs.

        Raises:
            PassError: there is none.
            NotFasterError: none takes less than is of use (`Clustered.within`).
            VerificationError: a solver is wrong.
        """
        always = self.program.remat == "layer"

        def one_device(kind: int) -> OneDevice:
            def costing_of(remat: bool) -> Costing:
                return self.costs.of(self.program, kind=kind, remat=remat or always)

            return OneDevice(
                kind=kind,
                costing_of=costing_of,
                known=lambda remat: self.costs.known(kind=kind, remat=remat or always),
                plan=self.program.plan,
                may_rematerialise=self.program.remat == "auto",
                workers=costing_of(False).where(self.workers, len(self.submeshes)),
            )

        ones = [one_device(kind) for kind in range(len(self.program.left))]
        largest = sorted(self.submeshes, key=lambda it: -prod(it[1][:2]))
        for one in ones:
            if len(self.submeshes) > 1:
                mine = [submesh for kind, submesh in largest if kind == one.kind]
                one.costing_of(False).prepare(one.workers, mine)
            self._planned_on_one_device(lambda one=one: one.candidate)
        every = [
            MeshCandidates(one=ones[kind], number=n, submesh=it)
            for n, (kind, it) in enumerate(self.submeshes)
        ]
        meshes = every
        bound: float | None = None
        hosts = self._host_orders()
        only = self._only(ones, meshes)
        if only is not None and not self._may_not_fit(only.one):
            meshes, only = [only], None
        self._offer(meshes)
        pending: list[MeshCandidates] = []
        while True:
            offers = [(it, mesh) for mesh in meshes for it in mesh.candidates()]
            candidates = [it for it, _ in offers]
            try:
                problem, solution = self._solved(offers, hosts)
                stages = solution.stages
            except NoCutInMemoryError as error:
                if self._narrower(meshes):
                    continue
                if only is None:
                    text = f"{error}. {shortage(self.program, candidates)}"
                    raise NoRoomError(self.program.function, text, missing=0.0) from error
                # Costs of classes hold a little more than is needed: the sharding program decides.
                meshes, only = [only], None
                self._offer(meshes)
                continue
            except NoCutError as error:
                text = f"{error}{problems(candidates)}"
                raise PassError(self.program.function, text) from error
            except NoFasterCutError as error:
                raise self._not_faster(error.bound) from error
            seconds = problem.step_seconds(stages)
            least = seconds if chunks_of(problem.schedule) == 1 else problem.even_seconds
            if least >= self.program.within:
                raise self._not_faster(least)
            bound = seconds if bound is None else bound
            used = [offers[stage.submesh] for stage in stages]
            unknown = _unknown(used)
            if not unknown:
                dropped = tuple(dict.fromkeys(_dropped(every)))
                cut = _cut(problem, stages, offers, _verified(bound, seconds), dropped)
                others = [*solution.others, *self._further(problem, stages, offers)]
                known = [
                    _cut(problem, other, offers, cut.bound, dropped)
                    for other in others
                    if not _unknown([offers[stage.submesh] for stage in other])
                ]
                return replace(cut, others=tuple(known))
            if self._recall(ones, every):
                continue
            again = dict.fromkeys(m.one for it, m in used if it.is_bound and it.remat)
            again = [one for one in again if one.again is None]
            if again:
                # Bounds nearer to the costs, because the cut uses them.
                for one in again:
                    self._planned_on_one_device(one.rematerialise)
                continue
            # Together with meshes that the search is about to ask for.
            alike = (m for m in meshes if any(m.is_like(other) for other in unknown))
            wanted = {**dict.fromkeys(alike, False), **unknown}
            for mesh, remat in wanted.items():
                mesh.begin(remat=remat)
            if self._memory_may_bind(ones):
                # The search will ask for it, and this process has time now.
                for one in ones:
                    if one.again is None:
                        self._planned_on_one_device(one.rematerialise)
            awaited = dict.fromkeys([*wanted, *pending])
            pending = self._begin_next(problem, stages, offers, awaited, ones[0].workers)
            for mesh in awaited:
                mesh.finish()
                known = sum(one.is_known for one in every)
                self.program.show(f"costs of {known} of at most {len(every)} meshes")

    def _narrower(self, meshes: Sequence[MeshCandidates]) -> bool:
        """Finds the shardings that hold least on the meshes whose costs are known. Whether there
        was anything to find."""
        begun = [finish for mesh in meshes if (finish := mesh.begin_least()) is not None]
        for finish in begun:
            finish()
        return bool(begun)

    def _not_faster(self, least: float) -> NotFasterError:
        text = f"each cut is estimated to take at least {least:.4g} s per step"
        return NotFasterError(self.program.function, text, bound=least)

    def _further(
        self, problem: Problem, stages: tuple[Stage, ...], offers: Sequence[_Offer]
    ) -> Iterable[tuple[Stage, ...]]:
        if self.further is None:
            return ()
        known = [n for n, (it, _) in enumerate(offers) if not it.is_bound and not it.problem]
        return self.further(problem, stages, [it for it, _ in offers], known)

    def _offer(self, meshes: Sequence[MeshCandidates]) -> None:
        """Notes what the cut may use."""
        for mesh in meshes:
            self.costs.offer(mesh.one.kind, mesh.submesh, is_only=mesh.is_only)

    def _recall(self, ones: Sequence[OneDevice], meshes: Sequence[MeshCandidates]) -> bool:
        """Whether an earlier search of these layers found costs that this one did not know."""
        again = [one for one in ones if one.may_rematerialise and one.again is None]
        again = [one for one in again if one.known(True) is not None]
        for one in again:
            self._planned_on_one_device(one.rematerialise)
        recalled = [mesh.recall() for mesh in meshes]
        return bool(again) or any(recalled)

    def _begin_next(
        self,
        problem: Problem,
        stages: tuple[Stage, ...],
        offers: Sequence[_Offer],
        wanted: Collection[MeshCandidates],
        workers: Workers,
    ) -> list[MeshCandidates]:
        """Begins with what the search is about to ask for: of the meshes with which a step takes
        least, by bounds, so many that no process waits while the wanted ones are found, and while
        the next stage DP is solved.

        They are waited for behind that DP, so that what is known does not depend on the processes'
        speed.
        """
        found: dict[MeshCandidates, None] = {}
        if not workers.count or problem.equal_meshes is not None:
            return []
        least = stage_dp.least_steps(problem, len(stages), _FAR * problem.step_seconds(stages))
        most = -len(wanted) % workers.places + (_ROUNDS - 1) * workers.places
        for number in least.argsort(kind="stable").tolist():
            if least[number] == inf or len(found) == most:
                break
            candidate, mesh = offers[number]
            remat = candidate.remat > 0
            if not candidate.is_bound or mesh.num_devices == 1 or mesh in wanted or mesh in found:
                continue
            if not remat or mesh.one.again is not None:
                mesh.begin(remat=remat)
                found[mesh] = None
        return list(found)

    def _host_orders(self) -> HostOrders | None:
        """Of hosts of several kinds."""
        kinds = [(kind.hosts, kind.devices_per_host) for kind in self.program.left]
        return HostOrders(orders(kinds), self.program.within) if len(kinds) > 1 else None

    def _solved(
        self, offers: Sequence[_Offer], hosts: HostOrders | None
    ) -> tuple[Problem, Solution]:
        """The problem of some candidates, and its solution, or that of an order of hosts whose
        costs are not known yet. Raises `NoCutError`."""
        program = self.program
        problem = self.restrict(
            stage_problem(
                [it for it, _ in offers],
                [mesh.one.kind for _, mesh in offers],
                program.boundary,
                program.left,
                program.cluster.links_to_others,
                program.plan,
                self._counts,
            ),
            [mesh.number for _, mesh in offers],
        )
        if hosts is None or problem.given is not None:
            return problem, stage_dp.solve(problem)

        def is_known(stages: tuple[Stage, ...]) -> bool:
            return not _unknown([offers[stage.submesh] for stage in stages])

        return problem, hosts.solve(problem, is_known)

    @cached_property
    def _counts(self) -> CountsOfStages | None:
        """What a stage may hold, if the schedule splits backwards."""
        program, plan = self.program, self.program.plan
        if not (program.trains and splits_backward(plan.schedule)):
            return None
        devices = sum(kind.num_devices for kind in program.left)
        most = self.most_stages or min(program.num_layers, devices)
        least = 1 if self.most_stages is None else most
        numbers = tuple(range(least, most + 1))
        return counts_of_stages(plan.schedule, plan.num_micro_batches, numbers)

    def _planned_on_one_device(self, find: Callable[[], object]) -> None:
        """Finds costs on one device. Raises PassError where there are none."""
        try:
            find()
        except (InfeasibleError, TimeoutError, SolverFailedError) as error:
            message = f"the layers cannot be planned on one device: {error}"
            raise PassError(self.program.function, message) from error

    def _only(
        self, ones: Sequence[OneDevice], meshes: Sequence[MeshCandidates]
    ) -> MeshCandidates | None:
        """The one mesh of all devices, if a single stage can take no other one."""
        if len(ones) > 1 or self.may_be_idle:
            return None
        (cluster,), (one,) = self.program.left, ones
        single = self.most_stages == 1 or len(one.candidate.seconds) == 1
        shape = cluster.hosts, cluster.devices_per_host
        whole = [mesh for mesh in meshes if mesh.submesh[:2] == shape]
        return replace(whole[0], is_only=True) if single and len(whole) == 1 else None

    def _may_not_fit(self, one: OneDevice) -> bool:
        """Whether a single stage on all devices, which are of one kind, may have to rematerialise
        layers."""
        (cluster,) = self.program.left
        fits = one.candidate.max_in_flight(cluster.device.memory)[0, -1]
        return one.may_rematerialise and fits < self.program.plan.num_micro_batches

    def _memory_may_bind(self, ones: Sequence[OneDevice]) -> bool:
        """Whether all layers fill two fifths of all devices with one micro-batch in flight."""
        one = ones[0]
        held = one.candidate.fixed_bytes[0, -1] + one.candidate.activation_bytes[0, -1]
        whole = sum(kind.num_devices * kind.device.memory for kind in self.program.left)
        return one.may_rematerialise and bool(held >= _FULL * whole)


def _unknown(used: Sequence[_Offer]) -> dict[MeshCandidates, bool]:
    """The meshes of a cut whose costs are not known, and whether with rematerialised layers."""
    found: dict[MeshCandidates, bool] = {}
    for candidate, mesh in used:
        if candidate.is_bound:
            found[mesh] = found.get(mesh, False) or candidate.remat > 0
    return found


def _cut(
    problem: Problem,
    stages: tuple[Stage, ...],
    offers: Sequence[_Offer],
    bound: float,
    dropped: tuple[Dropped, ...],
) -> Cut:
    used = [offers[stage.submesh] for stage in stages]
    return Cut(
        stages=stages,
        candidates=tuple(it for it, _ in used),
        meshes=tuple(mesh.number for _, mesh in used),
        kinds=tuple(mesh.one.kind for _, mesh in used),
        each=tuple(problem.a(stages)),
        beside=tuple(problem.beside(stages)),
        updates=tuple(float(problem.u[s.first, s.last, s.submesh]) for s in stages),
        seconds=problem.step_seconds(stages),
        bound=bound,
        dropped=dropped,
    )


def _verified(bound: float, seconds: float) -> float:
    """A bound of T, without rounding errors. Raises VerificationError if it is none."""
    if bound > (1 + 1e-6) * seconds:
        raise VerificationError(
            f"the stage search found a cut of {seconds!r} s, which is below its bound, {bound!r} s"
        )
    return min(bound, seconds)


def _dropped(meshes: Sequence[MeshCandidates]) -> Iterator[Dropped]:
    """Meshes whose costs no solver found: a cut that uses them may be better."""
    for mesh in meshes:
        hosts, devices, shape = mesh.submesh
        for reason in mesh.dropped:
            seen = "x".join(map(str, shape))
            what = f"a submesh of {hosts}x{devices} devices seen as {seen}"
            yield Dropped(what=what, reason=reason)
