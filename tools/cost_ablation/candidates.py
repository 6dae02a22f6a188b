"""Different strategies of a program on one mesh, and what each cost model says of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from alpa import passes
from alpa.dialects import ir, main_function, separate
from alpa.dialects.plan import MeshAssignment, Plan, read_meshes
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.equation import Equation, measured_epsilon
from alpa.passes.plan.attribute import plan_and_cluster
from alpa.passes.sharding import tapas
from alpa.passes.sharding.baselines import Intra, restrict
from alpa.passes.sharding.batch_dims import BatchDims
from alpa.passes.sharding.decoder import annotate
from alpa.passes.sharding.fold import fold, unfold
from alpa.passes.sharding.mesh_problem import MeshProblem
from alpa.passes.sharding.rules import RuleOf, populated
from alpa.passes.solve.sharding import ilp
from alpa.passes.solve.sharding.problem import InfeasibleError
from alpa.passes.solve.tapas.search import solve
from alpa.tools.plan_ranking.plans import RankedPlan

GAMMAS = (1.0, 0.5, 0.25, 0.1)
"""From which gamma is chosen."""
BY_EQUATION = "tapas, equation"
"""The strategy with the least messages. Compute is free by the equation, so that this strategy
repeats on every device what others split."""
BASELINES: tuple[Intra, ...] = ("data-parallel", "zero2", "zero3", "heuristic", "megatron")
_TO_ONE_MESH = (
    "combine-micro-batches,simplify-trivial-ops,split-loops,layer-cluster{{num-layers=1}},"
    "stage-mesh-partition{{cluster={} num-stages=1 mesh-shape={}}},place-gradient-reductions"
)
_RANDOM_TRIES = 40


def equations(cluster: Cluster) -> dict[str, Equation | None]:
    """The cost models by name: those of table 2, with each gamma, and Alpa's own."""
    epsilon = measured_epsilon(cluster.intra_host)
    models: dict[str, Equation | None] = {
        "baseline": Equation(constants=True),
        "CF": Equation(),
    }
    for gamma in GAMMAS:
        models[f"GO {gamma:g}"] = Equation(gamma=gamma)
        models[f"EC {gamma:g}"] = Equation(gamma=gamma, epsilon=epsilon)
    return models | {"alpa": None}


@dataclass(frozen=True, kw_only=True, eq=False)
class Strategies:
    """Different strategies of one program, by name, and the program on its mesh."""

    module: ir.Module
    choices: Mapping[str, tuple[int, ...]]

    @classmethod
    def of(cls, program: str, cluster: str, *, shape: str, count: int, seed: int) -> Strategies:
        """So many: by TAPAS, the baselines, and with random layouts of the parameters.

        Raises:
            ir.MLIRError: the program cannot be on the mesh.
            ValueError: there are too few.
        """
        module = passes.run(program, _TO_ONE_MESH.format(cluster, shape))
        with populated(module) as rule_of:
            maker = _Maker(module, rule_of)
            choices = maker.make(count, seed)
        return cls(module=module, choices=choices)

    @cached_property
    def costs(self) -> dict[str, dict[str, float]]:
        """Seconds of each strategy, by cost model."""
        cluster = plan_and_cluster(main_function(self.module))[1]
        found: dict[str, dict[str, float]] = {}
        with populated(self.module) as rule_of:
            for name, equation in equations(cluster).items():
                problem = _Maker(self.module, rule_of).posed(equation).problem
                found[name] = {one: problem.cost(choice) for one, choice in self.choices.items()}
        return found

    def plans(self) -> list[RankedPlan]:
        """The plan of each strategy."""
        made: list[RankedPlan] = []
        for name, choice in self.choices.items():
            copy = separate(self.module.operation)
            function = main_function(copy)
            with copy.context, ir.Location.unknown(), populated(copy) as rule_of:
                mesh = _Maker(copy, rule_of).posed()
                annotate(function, [(mesh, list(choice))])
            plan = Plan.read(function) or Plan()
            with copy.context:
                replace(plan, predicted_peak_bytes=(0,)).write(function)
            made.append(RankedPlan(name=name, module=passes.run(copy, "insert-cross-mesh-reshard")))
        return made


@dataclass(frozen=True, eq=False)
class _Maker:
    """Poses the problem of a module's mesh, and makes strategies of it."""

    module: ir.Module
    rule_of: RuleOf

    def posed(self, equation: Equation | None = None) -> MeshProblem:
        function = main_function(self.module)
        plan, cluster = plan_and_cluster(function)
        assignment: MeshAssignment
        (assignment,) = read_meshes(function)
        cluster = replace(cluster, equation=equation)
        return MeshProblem.of(function, assignment, cluster, plan, self.rule_of)

    def make(self, count: int, seed: int) -> dict[str, tuple[int, ...]]:
        found: dict[tuple[int, ...], str] = {}

        def add(name: str, choice: tuple[int, ...]) -> None:
            found.setdefault(choice, name)

        mesh = self.posed()
        for name, equation in (("tapas", None), (BY_EQUATION, Equation())):
            mesh = self.posed(equation)
            decisions, tensors = tapas.decisions(mesh), tapas.tensors(mesh)
            found_by_tapas = solve(mesh.problem, decisions=decisions, tensors=tensors)
            add(name, found_by_tapas.solution.choice)
        function = main_function(self.module)
        batch = BatchDims(function, self.rule_of)
        for intra in BASELINES:
            mesh = self.posed()
            restrict(mesh.graph, intra, batch, mesh.tensors())
            add(intra, _cheapest(mesh))
        for number in range(_RANDOM_TRIES):
            if len(found) >= count:
                break
            mesh = self.posed()
            _restrict_randomly(mesh, np.random.default_rng([seed, number]))
            try:
                add(f"random {number}", _cheapest(mesh))
            except InfeasibleError:
                continue
        if len(found) < count:
            raise ValueError(f"the program has {len(found)} different strategies, not {count}")
        return {name: choice for choice, name in list(found.items())[:count]}


def _cheapest(mesh: MeshProblem) -> tuple[int, ...]:
    small, node_class = fold(mesh.problem)
    found = ilp.solve(small, branch_gap=1e-2, time_limit=20.0)
    return tuple(unfold(found.choice, node_class))


def _restrict_randomly(mesh: MeshProblem, generator: np.random.Generator) -> None:
    """Fixes the layouts of some parameters. Those of one type are laid out alike."""
    share = float(generator.choice([0.3, 0.6, 1.0]))
    drawn: dict[str, int | None] = {}
    for value, kind in mesh.tensors().states.items():
        placed = mesh.graph.placed[value]
        name = str(value.type)
        if name not in drawn:
            chosen = generator.random() < share
            drawn[name] = int(generator.integers(len(placed.layouts))) if chosen else None
        layout = drawn[name]
        if kind == "parameter" and layout is not None and len(placed.layouts) > 1:
            mesh.graph.allow_only(placed.node, [layout])
