"""Captures the sharding problems that the passes pose for zoo programs.

While the stage search runs here, in this process alone, ``pareto.solve`` is replaced by a function
that keeps the problem.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import inf
from unittest.mock import patch

import numpy as np

from alpa import passes
from alpa.dialects import main_function, parse
from alpa.dialects.plan import read_meshes
from alpa.passes.ilp_shard_annotate import IlpShardAnnotate
from alpa.passes.plan.attribute import plan_and_cluster
from alpa.passes.sharding.fold import fold
from alpa.passes.sharding.mesh_problem import MeshProblem
from alpa.passes.sharding.rules import populated
from alpa.passes.solve.sharding import ilp, pareto
from alpa.passes.solve.sharding.fit import without_oversized
from alpa.passes.solve.sharding.problem import Memory, OutOfMemoryError, Problem
from alpa.tools import zoo
from alpa.tools.bench.cases import Case


@dataclass(frozen=True, kw_only=True)
class Posed:
    """A zoo program on a cluster."""

    program: str
    cluster: str
    micro_batch_size: int
    num_micro_batches: int
    searches: bool = False
    """whether to capture the stage search's problems instead of one mesh's"""
    keep: int = 1
    """the number of the stage search's largest problems to keep"""
    room: float | None = None
    """lowers the memory limit to this part of the way from the least bytes to those of the cheapest
    assignment"""

    @property
    def name(self) -> str:
        """The name of its cases' files."""
        kind = "prices" if self.searches else "mesh"
        if self.room is not None:
            kind = f"tight{100 * self.room:.0f}"
        cluster = self.cluster.removesuffix(",ideal").replace(":", "-")
        return f"{self.program}-{cluster}-{kind}"


def _mesh(program: str, cluster: str, size: int, count: int) -> Posed:
    return Posed(program=program, cluster=cluster, micro_batch_size=size, num_micro_batches=count)


def _search(program: str, cluster: str, size: int, count: int, keep: int = 1) -> Posed:
    return replace(_mesh(program, cluster, size, count), searches=True, keep=keep)


def _tight(program: str, cluster: str, size: int, count: int, room: float) -> Posed:
    return replace(_mesh(program, cluster, size, count), room=room)


# Ideal clusters, so that the problems stay the same when a preset's measured figures change.
POSED = (
    _mesh("gpt-tiny", "cpu:1x4", 4, 4),
    _mesh("moe-tiny", "cpu:2x4", 4, 4),
    _mesh("t5-tiny", "cpu:2x4", 4, 4),
    _mesh("wresnet-tiny", "cpu:1x8", 4, 4),
    _mesh("unet-tiny", "cpu:2x4", 4, 4),
    _mesh("llama-tiny", "cpu:1x4", 4, 4),
    _mesh("gpt-1.3b", "v100-16gb:1x4,ideal", 2, 512),
    _mesh("gpt-2.6b", "v100-16gb:1x8,ideal", 8, 128),
    _mesh("gpt-15b", "h100:4x8,ideal", 8, 128),
    _mesh("gpt-39b", "h100:8x8,ideal", 8, 128),
    _mesh("moe-1.3b", "v100-16gb:1x4,ideal", 8, 128),
    _mesh("moe-2.4b", "v100-16gb:1x8,ideal", 8, 128),
    _mesh("moe-10b", "v100-16gb:2x8,ideal", 8, 128),
    _mesh("moe-70b", "h100:8x8,ideal", 8, 128),
    _mesh("wresnet-2b", "v100-16gb:1x8,ideal", 32, 48),
    _mesh("wresnet-13b", "v100-16gb:8x8,ideal", 32, 48),
    _mesh("t5-large", "v100-16gb:1x8,ideal", 8, 16),
    _mesh("t5-3b", "h100:2x8,ideal", 8, 16),
    _mesh("unet-256m", "v100-16gb:1x8,ideal", 8, 8),
    _mesh("llama-8b", "h100:1x8,ideal", 1, 64),
    _mesh("llama-8b", "h100:8x8,ideal", 8, 64),
    _tight("gpt-tiny", "cpu:1x4", 4, 4, 0.3),
    _tight("gpt-tiny", "cpu:1x4", 4, 4, 0.05),
    _tight("moe-tiny", "cpu:2x4", 4, 4, 0.3),
    _tight("moe-tiny", "cpu:2x4", 4, 4, 0.05),
    _tight("llama-tiny", "cpu:1x4", 4, 4, 0.3),
    _tight("unet-tiny", "cpu:2x4", 4, 4, 0.3),
    _tight("wresnet-tiny", "cpu:1x8", 4, 4, 0.1),
    _tight("t5-tiny", "cpu:2x4", 4, 4, 0.1),
    _tight("moe-2.4b", "v100-16gb:1x8,ideal", 8, 128, 0.2),
    _tight("gpt-15b", "h100:4x8,ideal", 8, 128, 0.2),
    _search("gpt-2.6b", "v100-16gb:1x8,ideal", 8, 128),
    _search("gpt-15b", "v100-16gb:4x8,ideal", 8, 128),
    _search("moe-2.4b", "v100-16gb:1x8,ideal", 8, 128),
    _search("moe-27b", "v100-16gb:4x8,ideal", 8, 128, 2),
    _search("wresnet-4b", "v100-16gb:2x8,ideal", 32, 48, 2),
    _search("wresnet-13b", "v100-16gb:8x8,ideal", 32, 48, 2),
    _search("t5-large", "v100-16gb:1x8,ideal", 8, 16),
    _search("unet-256m", "v100-16gb:1x8,ideal", 8, 8),
    _search("llama-8b", "h100:4x8,ideal", 8, 64),
)


def pose(posed: Posed) -> Iterator[Case]:
    """Yields the cases of a program on a cluster, the largest first."""
    program = zoo.get(posed.program)
    text = program.lower(posed.micro_batch_size)
    if posed.searches:
        yield from _prices(posed, text)
    else:
        yield _one_mesh(posed, text)


def _one_mesh(posed: Posed, text: str) -> Case:
    """Poses the problem of the whole program on one mesh as `ilp-shard-annotate` does, folded."""
    parts = (
        "simplify-trivial-ops",
        "layer-cluster{num-layers=1}",
        f"stage-mesh-partition{{cluster={posed.cluster} num-stages=1 schedule=1f1b "
        f"num-micro-batches={posed.num_micro_batches} processes=0}}",
        "place-gradient-reductions",
    )
    module = passes.run(parse(text), ",".join(parts))
    function = main_function(module)
    plan, cluster = plan_and_cluster(function)
    (mesh,) = read_meshes(function)
    with populated(module) as rule_of, module.context, function.location:
        problem, _ = fold(MeshProblem.of(function, mesh, cluster, plan, rule_of).problem)
    bare = replace(problem, usages=())
    cheapest = ilp.solve(bare, time_limit=30.0, relative_gap=0.02, branch_gap=0.02)
    peak = Memory(problem).peak(cheapest.choice)[0]
    if posed.room is not None:
        limit = _least(problem) * (1 - posed.room) + peak * posed.room
        problem = replace(problem, memory_limit=limit)
    binds = peak > problem.memory_limit
    return Case(
        name=posed.name,
        kind="memory" if binds else "free",
        problem=problem,
        gap=IlpShardAnnotate().gap,
    )


def _least(problem: Problem) -> float:
    """The bytes that any assignment needs, as far as nodes tell one by one."""
    try:
        without_oversized(replace(problem, memory_limit=0.0))
    except OutOfMemoryError as error:
        return error.needed
    return 0.0


def _prices(posed: Posed, text: str) -> list[Case]:
    """Captures the largest problems with dual prices of the stage search."""
    taken: list[Case] = []
    solve = pareto.solve

    def take(
        problem: Problem,
        prices: Sequence[float],
        *,
        gap: float,
        time_limit: float,
        enough: float = inf,
    ) -> list[tuple[int, ...]]:
        taken.append(
            Case(
                name=posed.name,
                kind="prices",
                problem=problem,
                gap=gap,
                prices=tuple(prices),
                enough=enough,
            )
        )
        return solve(problem, prices, gap=gap, time_limit=time_limit, enough=enough)

    parts = (
        "simplify-trivial-ops",
        "layer-cluster",
        f"stage-mesh-partition{{cluster={posed.cluster} schedule=1f1b "
        f"num-micro-batches={posed.num_micro_batches} processes=0}}",
    )
    with patch.object(pareto, "solve", take):
        passes.run(parse(text), ",".join(parts))
    largest = np.argsort([-case.problem.num_variables for case in taken], kind="stable")
    return [
        replace(taken[k], name=f"{posed.name}{number or ''}")
        for number, k in enumerate(largest[: posed.keep].tolist())
    ]
