from __future__ import annotations

import gzip
import json
from itertools import product

import numpy as np
import pytest

from alpa.passes.solve.sharding import ilp
from alpa.passes.solve.sharding.problem import Memory
from alpa.tools import solve
from alpa.tools.bench.__main__ import main
from alpa.tools.bench.planted import plant


@pytest.mark.parametrize("seed", range(4))
def test_the_planted_assignment_is_optimal(seed):
    planted = plant(6, seed)
    problem = solve.read_case(planted.document)
    memory = Memory(problem)
    best = min(
        problem.cost(choice)
        for choice in product(*(range(costs.size) for costs in problem.node_costs))
        if memory.peak(choice)[0] <= problem.memory_limit
    )
    assert best == planted.optimum == problem.cost(planted.choice)
    assert memory.peak(planted.choice)[0] <= problem.memory_limit


def test_a_planted_instance_is_not_easy():
    planted = plant(2000, 0)
    problem = solve.read_case(planted.document)
    used = Memory(problem).over_time(planted.choice)
    assert (used == problem.memory_limit).sum() == planted.binding == 100
    assert planted.cheapest >= 1.2 * planted.optimum
    cheapest = [int(costs.argmin()) for costs in problem.node_costs]
    assert problem.cost(cheapest) == planted.cheapest


def test_plant_writes_a_case(tmp_path, capsys):
    file = tmp_path / "case.json.gz"
    assert main(["plant", str(file), "--nodes", "50", "--seed", "3"]) == 0
    planted = plant(50, 3)
    assert f"optimum {planted.optimum}" in capsys.readouterr().out
    assert json.loads(gzip.decompress(file.read_bytes())) == planted.document
    assert solve.main([str(file), "--time-limit", "20"]) == 0
    assert f"objective: {planted.optimum}\n" in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_large_planted_instances_within_a_percent(seed):
    planted = plant(40_000, seed)
    problem = solve.read_case(planted.document)
    found = ilp.solve(problem, time_limit=60.0)
    assert np.isfinite(found.bound)
    assert planted.optimum <= found.objective <= 1.01 * planted.optimum
    assert found.bound <= planted.optimum
