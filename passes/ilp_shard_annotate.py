"""Gives every value of a planned program a sharding on its mesh.

Each mesh has one integer linear program, over its forward, backward and update fragments together
(`sharding/mesh_problem.py`, `solve/sharding/ilp.py`). With `intra=tapas` the search of TAPAS solves
the same problem (`sharding/tapas.py`, `solve/tapas/`). The cost of a step is roofline compute, the
all-reduces of partial sums, and resharding between producers and consumers. If an op takes an
operand in a sharding other than the one it was made in, an `sdy.sharding_constraint` shows the
reshard. A state's new value has the sharding of the old one.

The program's own shardings are kept: those in the types of arguments and those of
`sdy.sharding_constraint`s. `sdy.manual_computation` is one node whose shardings are fixed.

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<64x8xf32>>
    !w = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>>
    sdy.mesh @mesh_0 = <["axis0"=2]>
    func.func public @main(%x: !x, %w: !w) -> !x attributes {
        topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>>,
        alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>,
                        logical_shape = array<i64: 2>}],
        alpa.plan = {cluster = "cpu:1x2", num_micro_batches = 1 : i64, schedule = "gpipe",
                     predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
      %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x, %w)
          {alpa.part = "forward"} (%a: tensor<64x8xf32>, %b: tensor<8x8xf32>) {
        %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
          : (tensor<64x8xf32>, tensor<8x8xf32>) -> tensor<64x8xf32>
        mpmd.return %0 : tensor<64x8xf32>
      } : (!x, !w) -> !x
      return %y : !x
    }

**After**::

    sdy.mesh @mesh_0 = <["axis0"=2]>
    func.func public @main(
        %x: !mpmd.mesh_tensor<"mesh_0", tensor<64x8xf32>, sharding=<@mesh_0, [{"axis0"}, {}]>>,
        %w: !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>, sharding=<@mesh_0, [{}, {}]>>)
        -> !mpmd.mesh_tensor<"mesh_0", tensor<64x8xf32>, sharding=<@mesh_0, [{"axis0"}, {}]>>
        attributes {…, alpa.solver = [{…, mesh = "mesh_0", …, status = "optimal", …}], …} {
      %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x, %w)
          {alpa.compute_seconds = …, alpa.part = "forward", alpa.seconds = …} (%a: …, %b: …) {
        %0 = stablehlo.dot_general %a, %b, contracting_dims = [1] x [0]
            {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0"}, {}]>]>}
          : (tensor<64x8xf32>, tensor<8x8xf32>) -> tensor<64x8xf32>
        mpmd.return %0 : tensor<64x8xf32>
      } : …
      return %y : …
    }

**Requires**: fragments on meshes, as `stage-mesh-partition` leaves them.

**Ensures**: every op and every mesh tensor has a sharding. `alpa.solver` on `@main` says for each
mesh what is proven. `alpa.seconds` of each fragment is the predicted time of one run by the same
costs, and `alpa.compute_seconds` that of its ops alone, split evenly over the devices. If the
plan's schedule splits backwards, `predicted_peak_bytes` are those of their two parts, which
`split-backward` makes later (`plan/split_mesh.py`).

**Options**: see the fields.

**Fails when** a custom call with side effects has no sharding rule, no assignment fits into the
memory of the mesh's devices (`sharding/liveness.py`), or the plan's cluster is unknown. It also
fails when `time-limit` or `gap` is negative, `min-support` or `min-size` is less than 2, or `gamma`
or a number of `epsilon` is not greater than 0 and at most 1. With
`intra=tapas` it fails when no ranked candidate fits into the memory, or when the exhaustive search
ends before its list is proven.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from math import inf
from typing import ClassVar, Literal

from alpa.dialects import func, ir, walk
from alpa.dialects.plan import SolverReport, read_meshes, write_solver_reports
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.base import (
    NoRoomError,
    NotFasterError,
    Pass,
    PassError,
    Remark,
    check_kind,
    option,
)
from alpa.passes.cost.equation import Equation, parse_epsilon
from alpa.passes.plan.attribute import plan_and_any_cluster
from alpa.passes.plan.backward_halves import halves_of
from alpa.passes.plan.split_mesh import SplitMesh
from alpa.passes.schedules.planned import splits_backward
from alpa.passes.sharding import tapas
from alpa.passes.sharding.baselines import Intra, is_baseline, restrict
from alpa.passes.sharding.batch_dims import BatchDims
from alpa.passes.sharding.decoder import annotate
from alpa.passes.sharding.fold import fold, unfold
from alpa.passes.sharding.forced_results import force_results
from alpa.passes.sharding.mesh_problem import MeshProblem, Shared
from alpa.passes.sharding.rules import populated
from alpa.passes.sharding.solved import Solved
from alpa.passes.sharding.tapas import Answer
from alpa.passes.solve.errors import SolverFailedError
from alpa.passes.solve.sharding.problem import (
    InfeasibleError,
    Memory,
    OutOfMemoryError,
    Problem,
    Solution,
    Solver,
    verify,
)
from alpa.passes.solve.tapas.mining import LEAST, MIN_SIZE
from alpa.passes.solve.tapas.settings import Settings, Variant
from alpa.passes.workers import Workers, workers_of

UNTIED_VARIABLES = 50_000
"""The most variables with which equal layers are untied. 16 layers of BERT with their training have
39,733, and untying them adds 0.5 s to 1.8 s."""


@dataclass(frozen=True, kw_only=True)
class IlpShardAnnotate(Pass):
    """Gives every value a sharding by an integer linear program per mesh."""

    name: ClassVar[str] = "ilp-shard-annotate"
    intra: Intra = option(
        "auto",
        "`auto` searches all strategies; `tapas` searches them as TAPAS does; `data-parallel`, "
        "`zero2`, `zero3`, `heuristic`, `megatron`, `megatron-zero2` and `none` are the paper's "
        "baselines",
    )
    fold: bool = option(
        True,
        "gives equal layers equal shardings, so that the problem does not grow with depth, and "
        "lets them differ where the whole problem is small and the result fits into memory; "
        "`false` solves the whole problem, and a remark gives the cost of folding",
    )
    time_limit: float = option(
        20.0,
        "seconds for each mesh, after which the best one found is taken, with its gap in a remark",
    )
    gap: float = option(
        2e-2,
        "if the optimum is hard to prove, an assignment that is proven to cost at most this share "
        "more is accepted",
    )
    tapas_variant: Variant = option(
        "pruned",
        "of `intra=tapas`: `pruned` searches each repeated subgraph once, and the best branches; "
        "`exhaustive` searches the whole problem until its list is proven",
    )
    min_support: int | Literal["auto"] = option(
        "auto",
        "of `intra=tapas`: how often a subgraph is repeated at least; `auto`: the number of "
        "layers, or two less if the first and the last layer differ from the others",
    )
    min_size: int = option(MIN_SIZE, "of `intra=tapas`: the nodes of a repeated subgraph, at least")
    costs: Literal["roofline", "tapas"] = option(
        "roofline",
        "`roofline` is the time of compute and collectives; `tapas` is the paper's equation of "
        "messages alone, also for the seconds of the plan's fragments",
    )
    gamma: float = option(
        1.0, "of `costs=tapas`: the share of messages in backward and update that nothing hides"
    )
    epsilon: str = option(
        "",
        "of `costs=tapas`: the efficiency of collectives, such as all-reduce:0.5,all-gather:1; "
        "1 for those that are not listed",
    )
    processes: int | Literal["auto"] = option(
        "auto",
        "further processes that solve large problems of several meshes in parallel; `auto`: one "
        "for each core but one, `0`: none",
    )
    solved: Solved | None = None
    """what runs of the pass on other cuts of the same program have found"""
    shared: Shared | None = None
    """with other problems of the same program"""
    workers: Workers | None = None
    """processes of the driver, which are not ended; None: its own"""
    within: float = inf
    """from the planner: seconds of a step; where a mesh alone takes so long, none is of use"""
    solver: Solver | None = None
    """a caller's own, in place of `ilp.solve`; `time-limit` and `gap` are not for it"""

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = check_input(module, is_checked=self.is_checked)
        for name, value in (("time-limit", self.time_limit), ("gap", self.gap)):
            if value < 0:
                raise PassError(function, f"{name} is {value:g}; at least 0")
        for name, value in (("min-support", self.min_support), ("min-size", self.min_size)):
            if isinstance(value, int) and value < LEAST:
                raise PassError(function, f"{name} is {value}; at least {LEAST}")
        if self.solver is not None and self.intra == "tapas":
            text = "intra=tapas is a solver, and another one is given; leave out one of them"
            raise PassError(function, text)
        plan, cluster = plan_and_any_cluster(function)
        equation = self._equation(function)
        assignments: list[tuple[MeshProblem, list[int]]] = []
        reports: list[SolverReport] = []
        meshes = read_meshes(function)
        halves = halves_of(module) if splits_backward(plan.schedule) else None
        with populated(module) as rule_of, workers_of(self.workers, self.processes) as workers:
            if len(meshes) == 1 and self.intra != "tapas":
                workers = Workers(0)  # This process would only wait for others.
            workers = workers.worth(walk(module.body), len(meshes))
            workers.prepare("alpa.passes.solve.sharding.ilp", "highspy", calls=len(meshes))
            batch = BatchDims(function, rule_of) if is_baseline(self.intra) else None
            posed: list[tuple[MeshProblem, Callable[[], Callable[[], Answer]]]] = []
            shared, solved = self.shared or Shared(), self.solved or Solved()
            for assignment in meshes:
                its = replace(cluster.of(assignment.hosts), equation=equation)
                at = function, assignment, its, plan, rule_of, shared
                mesh = (
                    MeshProblem.of(*at)
                    if halves is None
                    else replace(SplitMesh.of(*at), halves=halves)
                )
                for location, text in mesh.graph.remarks:
                    remark(location, text)
                force_results(function, mesh.graph)
                if batch is not None:
                    restrict(mesh.graph, self.intra, batch, mesh.tensors())
                # Each mesh is posed while those before it are being solved.
                posed.append((mesh, self._search(mesh, solved, workers)))
            # Later stages keep less for micro-batches in flight.
            tied = [(mesh, begin()) for mesh, begin in reversed(posed)]
            answers: list[tuple[MeshProblem, Answer]] = []
            for number, (mesh, untie) in enumerate(reversed(tied)):
                self.show(f"{number} of {len(posed)} meshes", number, len(posed))
                answers.append((mesh, untie()))
            for mesh, answer in answers:
                choice, report = answer(remark)
                reports.append(report)
                assignments.append((mesh, choice))
        annotate(function, assignments)
        write_solver_reports(function, reports)
        peaks = tuple(report.peak_bytes for report in reports)
        replace(plan, predicted_peak_bytes=peaks).write(function)

    def _equation(self, function: func.FuncOp) -> Equation | None:
        if self.costs == "roofline":
            return None
        try:
            return Equation(gamma=self.gamma, epsilon=parse_epsilon(self.epsilon))
        except ValueError as error:
            raise PassError(function, str(error)) from error

    def _search(
        self, mesh: MeshProblem, solved: Solved, workers: Workers
    ) -> Callable[[], Callable[[], Answer]]:
        """Starts the search of a mesh's assignment, unless it may be that of a mesh before. The
        result does so if it is not. What that gives waits for the end of the search, and starts to
        untie equal layers. The answer waits for the end of both."""
        if self.intra != "tapas":
            small, node_class = fold(mesh.problem)
            # Others may still get better, where equal layers are untied.
            is_last = mesh.problem.num_variables > UNTIED_VARIABLES
            begun = self._begun(small, solved, workers, of=mesh if is_last else None)
            return lambda: partial(self._solved, mesh, node_class, begun(), solved, workers)
        settings = Settings(
            variant=self.tapas_variant, min_support=self.min_support, min_size=self.min_size
        )
        answer = tapas.search(
            mesh, settings, time_limit=self.time_limit, gap=self.gap, workers=workers
        )
        return lambda: lambda: answer

    def _begun(
        self,
        problem: Problem,
        solved: Solved,
        workers: Workers,
        known: Sequence[int] | None = None,
        of: MeshProblem | None = None,
    ) -> Callable[[], Future[Solution]]:
        """See `Solved.once`. Raises NotFasterError if the solution for a mesh is known at once, and
        of no use."""
        from alpa.passes.solve.sharding import ilp  # noqa: PLC0415 - costs start-up time

        def begin() -> Future[Solution]:
            if self.solver is not None:  # It may hold what cannot be sent to a process.
                return Workers(0).submit(_checked, self.solver, problem)
            settings = {"time_limit": self.time_limit, "branch_gap": self.gap, "known": known}
            found = workers.share(partial(ilp.solve, problem, **settings))
            if of is not None and found.done() and found.exception() is None:
                self._check_useful(of, found.result())
            return found

        start = None if known is None else tuple(known)
        return solved.once(problem, (self.time_limit, self.gap, start), begin)

    def _check_useful(self, mesh: MeshProblem, solution: Solution) -> None:
        """Raises NotFasterError for a mesh that takes too long."""
        if solution.objective >= self.within:
            text = f"{mesh.name} alone takes {solution.objective:.4g} s per step"
            raise NotFasterError(mesh.function, text, bound=solution.objective)

    def _untied(
        self, problem: Problem, choice: Sequence[int], solved: Solved, workers: Workers
    ) -> Callable[[], Solution | None]:
        """Starts to find what is better than an assignment that shards equal layers alike, or a
        proof that it is good enough. The result is None if the problem is large, or memory decides.

        Without memory, large problems are solved in seconds. What is found holds if it fits, and
        its bound holds anyway.
        """
        if problem.num_variables > UNTIED_VARIABLES:
            return lambda: None
        begun = self._begun(replace(problem, usages=()), solved, workers, choice)()

        def wait() -> Solution | None:
            free = begun.result()
            peak = Memory(problem).peak(free.choice)[0]
            if peak > problem.memory_limit:
                peak, objective = Memory(problem).peak(choice)[0], problem.cost(choice)
                bound = min(free.bound, objective)
                free = replace(free, choice=tuple(choice), objective=objective, bound=bound)
                if free.status == "time_limit":
                    return None
            found = replace(free, peak_bytes=peak)
            verify(problem, found)
            return found

        return wait

    def _solved(
        self,
        mesh: MeshProblem,
        node_class: Sequence[int],
        of_folded: Future[Solution],
        solved: Solved,
        workers: Workers,
    ) -> Answer:
        """Waits for the folded problem, and starts what is left to do: to untie equal layers, or,
        without `fold`, to solve the whole problem."""
        with _located(mesh):
            folded = of_folded.result()
            choice = unfold(folded.choice, node_class)
            tied = replace(folded, choice=tuple(choice))
            if len(set(node_class)) == len(node_class):
                return partial(self._answer, mesh, tied, None)
            if self.fold:
                wait = self._untied(mesh.problem, choice, solved, workers)
            else:
                wait = self._begun(mesh.problem, solved, workers, choice)().result
        return partial(self._answer, mesh, tied, wait)

    def _answer(
        self,
        mesh: MeshProblem,
        tied: Solution,
        wait: Callable[[], Solution | None] | None,
        remark: Remark,
    ) -> tuple[list[int], SolverReport]:
        """A mesh's assignment, of the whole problem.

        Args:
            mesh: the mesh.
            tied: the one in which equal layers are alike.
            wait: gives a better one, if there is one; None: no layers are equal.
            remark: what a user is told.
        """
        with _located(mesh):
            untied = None if wait is None else wait()
        solution, is_whole = untied or tied, wait is None or untied is not None
        self._check_useful(mesh, solution)
        of_tied = "" if is_whole else " of plans that shard equal layers alike"
        if solution.status == "time_limit":
            remark(
                mesh.function.location,
                f"{mesh.name}: time-limit reached with a plan of {solution.objective:.3g} s "
                f"per step, at most {solution.gap:.1%} above the optimum{of_tied}",
            )
        if wait is not None and not self.fold:
            remark(
                mesh.function.location,
                f"{mesh.name}: tying equal layers would cost "
                f"{tied.objective / solution.objective - 1:.2%} of the step",
            )
        folded = None if wait is None else tied
        report = mesh.report(self.intra, solution, is_whole=is_whole, folded=folded)
        return list(solution.choice), report


@contextmanager
def _located(mesh: MeshProblem) -> Generator[None]:
    """Errors of solvers as located ones."""
    try:
        yield
    except OutOfMemoryError as error:
        raise mesh.out_of_memory(error) from error
    except TimeoutError as error:  # No assignment that fits was found in time.
        message = f"no sharding for {mesh.name}: {error}"
        raise NoRoomError(mesh.function, message, missing=None) from error
    except (InfeasibleError, SolverFailedError) as error:
        raise PassError(mesh.function, f"no sharding for {mesh.name}: {error}") from error


def _checked(solver: Solver, problem: Problem) -> Solution:
    """What a caller's solver finds. Raises VerificationError if it is wrong."""
    solution = solver(problem)
    check_kind("what the solver returns", solution, Solution)
    verify(problem, solution)
    return solution
