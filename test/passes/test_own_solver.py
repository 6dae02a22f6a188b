"""`solver=` of `run` and `add_to`: a caller's solver of sharding problems, which is checked."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import pytest

import alpa.passes
from alpa.dialects import ir, main_function, parse, passmanager
from alpa.dialects.plan import read_solver_reports
from alpa.passes.solve.errors import VerificationError
from alpa.passes.solve.sharding import ilp
from alpa.passes.solve.sharding.problem import InfeasibleError, Memory, Problem, Solution

PROGRAM = """\
func.func @main(%x: tensor<64x8xf32>, %w: tensor<8x8xf32>) -> tensor<64x8xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<64x8xf32>, tensor<8x8xf32>) -> tensor<64x8xf32>
  return %0 : tensor<64x8xf32>
}
"""
PIPELINE = "alpa{cluster=cpu:1x2}"


def exhaustive(problem: Problem) -> Solution:
    """The cheapest of all choices within memory."""
    begin, memory = time.monotonic(), Memory(problem)
    choices = np.ndindex(*(costs.size for costs in problem.node_costs))
    within = [it for it in choices if memory.peak(it)[0] <= problem.memory_limit]
    choice = min(within, key=problem.cost)
    cost = problem.cost(choice)
    return Solution(
        choice=choice,
        objective=cost,
        bound=cost,
        peak_bytes=memory.peak(choice)[0],
        seconds=time.monotonic() - begin,
        variables=problem.num_variables,
    )


def test_another_optimal_solver_gives_a_plan_of_the_same_cost() -> None:
    problems: list[Problem] = []

    def solver(problem: Problem) -> Solution:
        problems.append(problem)
        return exhaustive(problem)

    def objectives(module: ir.Module) -> list[float]:
        return [it.objective for it in read_solver_reports(main_function(module))]

    ours = objectives(alpa.passes.run(PROGRAM, PIPELINE))
    assert objectives(alpa.passes.run(PROGRAM, PIPELINE, solver=solver)) == pytest.approx(ours)
    assert problems
    # A solver that knows no bound may say 0.
    assert all(min(costs.min() for costs in it.node_costs) >= 0 for it in problems)

    count = len(problems)
    module = parse(PROGRAM)
    manager = passmanager.PassManager("builtin.module", context=module.context)
    alpa.passes.add_to(manager, PIPELINE, solver=solver)
    manager.run(module.operation)
    assert objectives(module) == pytest.approx(ours)
    assert len(problems) > count


def test_a_worse_choice_is_the_plan_with_its_gap() -> None:
    def worse(problem: Problem) -> Solution:
        best = ilp.solve(problem)
        choices = np.ndindex(*(costs.size for costs in problem.node_costs))
        other = next(it for it in choices if best.objective < problem.cost(it) < np.inf)
        return replace(
            best,
            choice=other,
            objective=problem.cost(other),
            peak_bytes=Memory(problem).peak(other)[0],
        )

    said: list[str] = []
    module = alpa.passes.run(
        PROGRAM, PIPELINE, solver=worse, on_remark=lambda _, text: said.append(text)
    )
    (report,) = read_solver_reports(main_function(module))
    assert report.objective > report.bound
    assert any("above the optimum" in text for text in said)


def test_a_wrong_solution_is_refused() -> None:
    def wrong(problem: Problem) -> Solution:
        best = ilp.solve(problem)
        return replace(best, objective=best.objective / 2, bound=0.0)

    with pytest.raises(VerificationError, match="the solution costs"):
        alpa.passes.run(PROGRAM, PIPELINE, solver=wrong)
    with pytest.raises(TypeError, match="what the solver returns is None"):
        alpa.passes.run(PROGRAM, PIPELINE, solver=lambda problem: None)  # pyright: ignore


def test_what_it_raises_comes_out_or_refuses_the_program() -> None:
    def broken(problem: Problem) -> Solution:
        raise KeyError("boom")

    def infeasible(problem: Problem) -> Solution:
        raise InfeasibleError((0,))

    with pytest.raises(KeyError, match="boom"):
        alpa.passes.run(PROGRAM, PIPELINE, solver=broken)
    with pytest.raises(ir.MLIRError, match="no sharding for mesh_0: node 0 has no strategy"):
        alpa.passes.run(PROGRAM, PIPELINE, solver=infeasible)


def test_tapas_is_a_solver_itself() -> None:
    with pytest.raises(ir.MLIRError, match="intra=tapas is a solver, and another one is given"):
        alpa.passes.run(PROGRAM, "alpa{cluster=cpu:1x2 intra=tapas}", solver=exhaustive)
