"""Solutions that equal meshes of several cuts share."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import replace

import numpy as np
import pytest

from alpa.dialects import ir, parse
from alpa.passes.ilp_shard_annotate import IlpShardAnnotate
from alpa.passes.sharding.solved import Solved
from alpa.passes.solve.sharding import ilp
from alpa.passes.solve.sharding.problem import Edge, Problem, Solution, Usage

PROGRAM = """
sdy.mesh @mesh_0 = <["x"=2]>
func.func @main(
    %x: !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>>)
    -> !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>> attributes {
      topology = #mpmd.topology<<"mesh_0" : <["x"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>,
                      logical_shape = array<i64: 2>}],
      alpa.plan = {cluster = "cpu:1x2", num_micro_batches = 1 : i64, schedule = "1f1b",
                   accumulate_dtype = "f32", estimated_step_seconds = 0.0 : f64,
                   estimated_step_bound = 0.0 : f64, predicted_step_seconds = 0.0 : f64,
                   predicted_peak_bytes = array<i64>}} {
  %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> (%x) (%arg0: tensor<8x8xf32>) {
    %1 = stablehlo.dot_general %arg0, %arg0, contracting_dims = [1] x [0]
        : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    mpmd.return %1 : tensor<8x8xf32>
  } : (!mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>>)
      -> !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>>
  return %0 : !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>>
}
"""


def problem(**others: object) -> Problem:
    """Two nodes with an edge and a usage."""
    given = Problem(
        node_costs=(np.array([1.0, 2.0]), np.array([0.0, 1.0])),
        edges=(Edge(0, 1, np.array([[0.0, 3.0], [3.0, 0.0]])),),
        usages=(Usage(nodes=(0,), bytes=np.array([4.0, 2.0]), start=0, stop=2),),
        memory_limit=8.0,
    )
    return replace(given, **others)


def test_equal_problems_have_equal_digests() -> None:
    assert problem().digest() == problem().digest()


@pytest.mark.parametrize(
    "other",
    [
        {"node_costs": (np.array([1.0, 2.0]), np.array([0.0, 1.5]))},
        {"node_costs": (np.array([1.0, 2.0, 0.0]), np.array([1.0]))},
        {"edges": (Edge(1, 0, np.array([[0.0, 3.0], [3.0, 0.0]])),)},
        {"edges": (Edge(0, 1, np.array([[0.0, 3.0], [3.0, 0.5]])),)},
        {"usages": (Usage(nodes=(1,), bytes=np.array([4.0, 2.0]), start=0, stop=2),)},
        {"usages": (Usage(nodes=(0,), bytes=np.array([4.0, 2.0]), start=1, stop=2),)},
        {"usages": ()},
        {"memory_limit": 9.0},
    ],
    ids=["cost", "sizes", "direction", "edge", "node", "time", "none", "limit"],
)
def test_other_problems_have_other_digests(other: dict[str, object]) -> None:
    assert problem(**other).digest() != problem().digest()


def ended(result: Solution | Exception) -> Future[Solution]:
    future: Future[Solution] = Future()
    if isinstance(result, Exception):
        future.set_exception(result)
    else:
        future.set_result(result)
    return future


def test_what_failed_or_has_not_ended_is_searched_again() -> None:
    solved, given, solution = Solved(), problem(usages=()), ilp.solve(problem(usages=()))
    failed = ended(TimeoutError("no time"))
    assert solved.once(given, "", lambda: failed)() is failed
    found = solved.once(given, "", lambda: ended(solution))()
    assert found.result() is solution
    assert solved.once(given, "", lambda: failed)() is found


HALF = Usage(nodes=(0,), bytes=np.array([2.0, 1.0]), start=0, stop=2)
LARGE = Usage(nodes=(0,), bytes=np.array([9.0, 2.0]), start=0, stop=2)


@pytest.mark.parametrize(
    ("first", "other", "solutions"),
    [(problem(), problem(usages=(HALF,)), 1), (problem(), problem(usages=(LARGE,)), 2)],
    ids=["fits", "too large"],
)
def test_the_solution_of_equal_costs_is_shared_if_it_fits(
    first: Problem, other: Problem, solutions: int
) -> None:
    solved, calls = Solved(), list[Problem]()

    def found(given: Problem) -> Solution:
        def begin() -> Future[Solution]:
            calls.append(given)
            return ended(ilp.solve(given))

        return solved.once(given, "", begin)().result()

    assert found(first).is_free
    shared, alone = found(other), ilp.solve(other)
    assert len(calls) == solutions
    assert (shared.objective, shared.bound) == (alone.objective, alone.bound)
    assert shared.peak_bytes == alone.peak_bytes


def test_a_solution_that_memory_decides_is_not_shared() -> None:
    solved, tight = Solved(), problem(usages=(LARGE,))
    assert not ilp.solve(tight).is_free
    solved.once(tight, "", lambda: ended(ilp.solve(tight)))()
    best = solved.once(problem(), "", lambda: ended(ilp.solve(problem())))().result()
    assert best.objective == ilp.solve(problem()).objective < ilp.solve(tight).objective
    again = solved.once(problem(usages=(HALF,)), "", lambda: ended(TimeoutError("never called")))()
    assert again.result().choice == best.choice


def test_a_mesh_that_another_cut_has_is_not_solved_again(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Problem] = []
    solve = ilp.solve

    def counted(given: Problem, **options: object) -> Solution:
        calls.append(given)
        return solve(given, **options)

    monkeypatch.setattr(ilp, "solve", counted)

    def planned(solved: Solved | None) -> str:
        module = parse(PROGRAM)
        with module.context, ir.Location.unknown():
            IlpShardAnnotate(processes=0, solved=solved).run(module, lambda _, __: None)
        return str(module)

    solved = Solved()
    first, alone = planned(solved), len(calls)
    assert alone > 0
    assert planned(solved) == first
    assert len(calls) == alone
    assert planned(None) == first
    assert len(calls) == 2 * alone
