"""Finds the costs of sharded layers on a mesh: the numbers behind t_intra of the paper.

For one logical mesh, the sharding problems of all classes of layers (`layer_classes.py`) and the
resharding between them are one integer linear program. Equal layers take equal strategies, so the
program is as large as one layer of each class, however many layers there are. Its assignment gives
each layer's seconds and bytes, and each link's seconds. The cost of a stage is the sum of those. It
is the cost of a real assignment. A stage could cost less at its ends, where no neighbour has to
match.

A baseline restricts these problems, too (`sharding/baselines.py`). For `heuristic`, which starts at
the arguments of the program, values from other layers count as arguments, so the costs are an
estimate.

A price per byte that stays (states, gradient accumulators, activations in flight) makes the same
program find assignments that need less memory: higher prices give slower, smaller stages.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import pairwise
from math import inf

import numpy as np

from alpa.dialects import body, mpmd
from alpa.dialects.attributes import Part, read_part
from alpa.dialects.plan import Plan
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.sharding.baselines import Intra, is_baseline, restrict
from alpa.passes.sharding.batch_dims import BatchDims
from alpa.passes.sharding.call_seconds import call_arguments
from alpa.passes.sharding.fold import fold, unfold
from alpa.passes.solve.sharding.problem import Problem, Usage
from alpa.passes.solve.sharding.terms import Terms
from alpa.passes.stages.class_batches import class_batches
from alpa.passes.stages.class_costs import ClassCosts, Work
from alpa.passes.stages.class_part import ClassPart, Posing
from alpa.passes.stages.exchange import End, exchanged_values
from alpa.passes.stages.layer_classes import LayerClasses, Link

Submesh = tuple[int, int, tuple[int, ...]]
"""Hosts, devices of each, and the logical shape."""

PARTS = ("forward", "backward", "update")
GAP = 3e-2
"""The gap of these solutions. `ilp-shard-annotate` solves the chosen stages again."""
_KEPT = 8
"""Problems of meshes that a solver keeps."""
TIME_LIMIT = 30.0
"""Seconds for each mesh and price. The best assignment until then is used. An idle core needs a
tenth of it; if time ends a search, the stages depend on the load of the machine."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassSolver:
    """Costs of all classes on any logical mesh."""

    classes: LayerClasses
    cluster: Cluster
    plan: Plan
    intra: Intra = "auto"
    before: ClassSolver | None = None
    """of the same layers before they were rematerialised"""

    @cached_property
    def posed(self) -> OrderedDict[Submesh, ClassProblem]:
        """Problems that are kept, see `keep`."""
        return OrderedDict()

    @cached_property
    def twins(self) -> list[int | None]:
        """The class of `before` with an equal program, if there is one."""
        if self.before is None:
            return [None] * len(self.classes.classes)
        others = self.before.classes.classes
        return [
            next((n for n, other in enumerate(others) if one.has_program_of(other)), None)
            for one in self.classes.classes
        ]

    def behind(self, plain: ClassSolver) -> ClassSolver:
        """The same for rematerialised layers, beside what `plain` has made of them as they were."""
        classes = replace(self.classes, shared=plain.classes.shared)
        return replace(self, before=plain, classes=classes)

    @cached_property
    def exchanged(self) -> dict[End, np.ndarray]:
        """How many values of each kind stages exchange."""
        return exchanged_values(self.classes)

    @cached_property
    def call_arguments(self) -> np.ndarray:
        """[3, C]: the arguments and results of each class's forward, backward and update."""
        found = np.zeros((len(PARTS), len(self.classes.classes)))
        for number, layer in enumerate(self.classes.classes):
            for op in body(layer.function).operations:
                if isinstance(op, mpmd.FragmentOp):
                    row = PARTS.index(read_part(op) or "")
                    found[row, number] += call_arguments(op, self.plan.num_micro_batches)
        return found

    @cached_property
    def batches(self) -> Sequence[BatchDims]:
        """The dimensions of each class's values that come from the batch."""
        return class_batches(self.classes)

    @property
    def one_device(self) -> Submesh:
        """With the axes that the program names, if it does."""
        names = self.classes.axis_names
        return 1, 1, (1,) if names is None else (1,) * len(names)

    def keep(
        self, submesh: Submesh, problem: ClassProblem, *, is_solved: bool, is_slow: bool = False
    ) -> None:
        """Keeps a problem for the next question about its mesh, or if it is solved, for twins of
        its classes. Those that are solved make room for others first, and so do those of slow
        meshes, which are seldom asked about again."""
        self.posed[submesh] = problem
        if is_solved or is_slow:
            self.posed.move_to_end(submesh, last=False)
        if len(self.posed) > _KEPT or (is_solved and self.before is not None):
            self.posed.popitem(last=False)

    def pose(self, hosts: int, devices: int, shape: tuple[int, ...]) -> ClassProblem:
        """The problem of a mesh. Classes share what their twins have posed, if that is kept."""
        names, shared = self.classes.axis_names, self.classes.shared
        mesh = LogicalMesh.of(self.cluster, hosts, devices, shape, names)
        readers = self.classes.readers(self.cluster.device)
        known = self._before_on((hosts, devices, shape))
        return ClassProblem(
            solver=self,
            posings=[
                known.posings[twin]
                if known is not None and twin is not None
                else Posing(layer, shared.graph(mesh, self.cluster, reader), self.plan)
                for layer, reader, twin in zip(
                    self.classes.classes, readers, self.twins, strict=True
                )
            ],
        )

    def _before_on(self, submesh: Submesh) -> ClassProblem | None:
        """The problem of `before` on a mesh, if it is kept and classes may share its parts."""
        before = self.before
        if before is None or before.cluster != self.cluster:
            return None
        # Baselines restrict what was posed by batch dimensions, which come from other classes, too.
        return None if is_baseline(self.intra) else before.posed.get(submesh)


@dataclass(frozen=True, kw_only=True, eq=False)
class ClassProblem:
    """All classes on one mesh. Made by `ClassSolver`.

    It is posed when it is first asked for something, which raises PassError where an op cannot be
    on the mesh.
    """

    solver: ClassSolver
    posings: list[Posing]

    def least_seconds(self, part: Part, close: np.ndarray) -> np.ndarray:
        """[C]: what one run of each part up to `part` takes at least in all, see `Posing`, where
        the bound is raised as long as it gains as much as `close`, [C].

        Nothing behind these parts is posed for it, so asking it first is cheapest.
        """
        each = zip(self.posings, close.tolist(), strict=True)
        return np.array([posing.least_seconds(part, near) for posing, near in each])

    def pose_until(self, part: Part) -> None:
        """Poses each part up to `part`, and nothing behind these."""
        for posing in self.posings:
            posing.until(part)

    @cached_property
    def parts(self) -> list[ClassPart]:
        """The classes."""
        intra = self.solver.intra
        parts: list[ClassPart] = []
        for number, posing in enumerate(self.posings):
            if is_baseline(intra):
                posed = posing.whole()
                restrict(posed.graph, intra, self.solver.batches[number], posed.tensors())
            parts.append(posing.part)
        return parts

    @cached_property
    def offset(self) -> list[int]:
        """Node v of class c is node `offset[c] + v`."""
        return np.cumsum([0, *(len(part.graph.costs) for part in self.parts)]).tolist()

    @cached_property
    def links(self) -> dict[Link, tuple[int, int, np.ndarray]]:
        """Ends, and seconds of one crossing; ends may be equal."""
        links: dict[Link, tuple[int, int, np.ndarray]] = {}
        for link in self.solver.classes.links:
            reader, producer = self.parts[link.reader], self.parts[link.producer]
            source, target = producer.results[link.result], reader.arguments[link.argument]
            matrix = reader.graph.reshard_seconds(source.layouts, target.layouts, target.type)
            ends = self.offset[link.producer] + source.node, self.offset[link.reader] + target.node
            links[link] = (*ends, matrix)
        return links

    def solve(
        self,
        prices: Sequence[float],
        enough: float = inf,
        is_small: Callable[[ClassCosts], bool] = lambda _: False,
    ) -> list[ClassCosts]:
        """The costs of the fastest assignment, and of the best one for each price of memory.

        If every assignment takes more than `enough` seconds per step, one of them alone. The
        fastest one alone if it `is_small`: then no price is worth it.

        Raises:
            InfeasibleError: no assignment is allowed.
            TimeoutError: none was found in time.
            SolverFailedError: the solver failed.
        """
        from alpa.passes.solve.sharding import pareto  # noqa: PLC0415 - costs start-up time

        # What is alike in different classes is tied as it would be in the whole program.
        small, node_class = fold(self._problem(), like=self._problem(each_once=True))

        @cache
        def costs(choice: tuple[int, ...]) -> ClassCosts:
            return self._costs(unfold(choice, node_class))

        found = pareto.solve(
            small,
            prices,
            gap=GAP,
            time_limit=TIME_LIMIT,
            enough=enough,
            is_small=lambda choice: is_small(costs(choice)),
        )
        return list(map(costs, found))

    def work(self, costs: ClassCosts) -> Work:
        """The work of each class, from the problem and the costs of one device."""
        return Work(costs=costs, by_factors=[part.factors() for part in self.parts])

    def _problem(self, *, each_once: bool = False) -> Problem:
        """All layers, or one of each class and of each kind of link."""

        def times(count: int, costs: np.ndarray) -> np.ndarray:
            return costs if count == 1 else count * costs  # Equal nodes share arrays.

        terms = Terms()
        held: dict[int, np.ndarray] = {}
        for number, part in enumerate(self.parts):
            count = 1 if each_once else len(self.solver.classes.classes[number].layers)
            for costs in part.graph.costs:
                terms.add_node(times(count, costs))
            for (_, node), size in part.resident.items():
                at = self.offset[number] + node
                held[at] = held.get(at, 0.0) + count * size
            for (a, b), matrix in part.graph.edges.items():
                terms.add((self.offset[number] + a, self.offset[number] + b), times(count, matrix))
        for link, (source, target, matrix) in self.links.items():
            count = 1 if each_once else len(self.solver.classes.links[link])
            runs = 1 if link.part == "update" else self.solver.plan.num_micro_batches
            terms.add((source, target), times(count * runs, matrix))
        return Problem(
            node_costs=tuple(terms.nodes),
            edges=terms.edge_list(),
            usages=tuple(
                Usage(nodes=(at,), bytes=size, start=0, stop=1) for at, size in held.items()
            ),
            memory_limit=float(self.solver.cluster.device.memory),
        )

    def _costs(self, choice: Sequence[int]) -> ClassCosts:
        """The costs of an assignment, class by class."""
        mine = [choice[begin:end] for begin, end in pairwise(self.offset)]
        columns = [part.costs(own) for part, own in zip(self.parts, mine, strict=True)]
        links = {
            link: float(matrix[choice[source], choice[target]])
            for link, (source, target, matrix) in self.links.items()
        }
        exchanged: dict[End, float] = {}
        for end in self.solver.exchanged:
            is_sent, c, number = end
            part = self.parts[c]
            placed = (part.results if is_sent else part.arguments)[number]
            # The one that is made while the one before is on its way (`sharding/versions.py`).
            versions = min(2, self.solver.plan.num_micro_batches) if is_sent else 1
            exchanged[end] = versions * part.held(placed, mine[c])
        return ClassCosts(by_class=np.array(columns).T, links=links, exchanged=exchanged)
