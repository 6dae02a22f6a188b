"""On random programs of up to eight ops the pass finds the optimum of all assignments, under any
memory limit.
"""

from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import alpa.passes
from alpa.dialects import main_function
from alpa.dialects.plan import read_meshes
from alpa.passes.plan.attribute import plan_and_cluster
from alpa.passes.sharding.mesh_problem import MeshProblem
from alpa.passes.sharding.rules import populated
from alpa.passes.solve.sharding import ilp
from alpa.passes.solve.sharding.problem import Problem

BEFORE = "simplify-trivial-ops,layer-cluster{num-layers=1},stage-mesh-partition{cluster=cpu:2x2}"
MOST_CHOICES = 2_000_000


# A dimension that one axis of the mesh can split, but not both; or none: few choices, large
# tensors.
SIZES = st.sampled_from([1026, 999, 1026, 3])


@st.composite
def programs(draw: st.DrawFn) -> str:
    """A chain of products with ops between them; unused values are returned."""
    arguments: list[str] = []
    lines: list[str] = []
    values: list[tuple[str, tuple[int, int]]] = []

    def type_of(shape: tuple[int, ...]) -> str:
        return f"tensor<{'x'.join(map(str, shape))}xf32>"

    def argument(shape: tuple[int, int]) -> str:
        arguments.append(f"%a{len(arguments)}: {type_of(shape)}")
        values.append((f"%a{len(arguments) - 1}", shape))
        return values[-1][0]

    argument((draw(SIZES), draw(SIZES)))
    for number in range(draw(st.integers(1, 8))):
        name, (rows, columns) = values[-1] if draw(st.booleans()) else draw(st.sampled_from(values))
        # Of transposes alone nothing may be left to plan.
        kinds = ["dot", "add", "tanh"] if number == 0 else ["dot", "add", "tanh", "transpose"]
        kind = draw(st.sampled_from(kinds))
        this, same = type_of((rows, columns)), (rows, columns)
        if kind == "dot":
            same = (rows, draw(SIZES))
            other = argument((columns, same[1]))
            types = f"({this}, {type_of((columns, same[1]))}) -> {type_of(same)}"
            text = f"dot_general {name}, {other}, contracting_dims = [1] x [0] : {types}"
        elif kind == "add":
            other = draw(st.sampled_from([n for n, shape in values if shape == same]))
            text = f"add {name}, {other} : {this}"
        elif kind == "tanh":
            text = f"tanh {name} : {this}"
        else:
            same = (columns, rows)
            text = f"transpose {name}, dims = [1, 0] : ({this}) -> {type_of(same)}"
        lines.append(f"%v{number} = stablehlo.{text}")
        values.append((f"%v{number}", same))
    used = {word.strip(",") for line in lines for word in line.split("=", 1)[1].split()}
    ends = [(name, type_of(shape)) for name, shape in values if name not in used]
    types = ", ".join(text for _, text in ends)
    return (
        f"func.func public @main({', '.join(arguments)}) -> ({types}) {{\n"
        + "\n".join(lines)
        + f"\nreturn {', '.join(name for name, _ in ends)} : {types}\n}}"
    )


def problem_of(text: str) -> Problem:
    """The problem of the program's only mesh, unfolded."""
    module = alpa.passes.run(text, BEFORE)
    function = main_function(module)
    plan, cluster = plan_and_cluster(function)
    (mesh,) = read_meshes(function)
    with populated(module) as rule_of, module.context, function.location:
        return MeshProblem.of(function, mesh, cluster, plan, rule_of).problem


def on_nodes(values: np.ndarray, nodes: tuple[int, ...], count: int) -> np.ndarray:
    """An array over some nodes' strategies as one over all nodes'."""
    order = sorted(range(len(nodes)), key=nodes.__getitem__)
    values = values.transpose(order)
    shape = [1] * count
    for node, size in zip(sorted(nodes), values.shape, strict=True):
        shape[node] = size
    return values.reshape(shape)


def costs_and_peaks(problem: Problem) -> tuple[np.ndarray, np.ndarray]:
    """The seconds of every assignment, flat, and the most bytes that it holds at a time."""
    sizes = [costs.size for costs in problem.node_costs]
    count = len(sizes)
    cost = np.zeros(sizes)
    for node, costs in enumerate(problem.node_costs):
        cost = cost + on_nodes(costs, (node,), count)
    for edge in problem.edges:
        cost = cost + on_nodes(edge.costs, (edge.source, edge.target), count)
    peak = np.zeros(sizes)
    for start in {usage.start for usage in problem.usages}:
        held = np.zeros((1,) * count)
        for usage in problem.usages:
            if usage.start <= start < usage.stop:
                held = held + on_nodes(usage.bytes, usage.nodes, count)
        peak = np.maximum(peak, held)
    return cost.ravel(), peak.ravel()


@settings(max_examples=40)
@given(programs(), st.floats(0, 1))
def test_the_solver_finds_the_best_of_all_choices(text, part):
    problem = problem_of(text)
    assume(prod(costs.size for costs in problem.node_costs) <= MOST_CHOICES)
    cost, peak = costs_and_peaks(problem)
    free = ilp.solve(problem)
    assert free.objective == pytest.approx(cost.min(), rel=1e-9)
    assert free.bound == pytest.approx(cost.min(), rel=1e-6)

    # Between the bytes of the smallest assignment and those of the free optimum.
    possible = peak[np.isfinite(cost)]
    limit = float(possible.min() + part * (peak[np.argmin(cost)] - possible.min()))
    limit *= 1 + 1e-9  # Bytes are sums of floats, in one order here and in others there.
    tight = Problem(
        node_costs=problem.node_costs,
        edges=problem.edges,
        usages=problem.usages,
        memory_limit=limit,
    )
    within = ilp.solve(tight)
    best = cost[peak <= limit].min()
    assert within.objective == pytest.approx(best, rel=1e-6)
    assert within.peak_bytes <= limit * (1 + 1e-9)
    assert within.bound <= best * (1 + 1e-6)
