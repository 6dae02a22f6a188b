"""The search for the number of micro-batches, and for the schedule."""

from __future__ import annotations

import pytest

from alpa.dialects import ir, parse
from alpa.passes.pipelines.clock import Clock
from alpa.passes.pipelines.diagnostics import Diagnostic, Place
from alpa.runtime.micro_batches import best_number, divisors, from_the_middle
from alpa.runtime.planning import PlanningError, Settings, plan

BATCH = 8


def program(micro_batch_size: int) -> str:
    """Two layers y = (x w0) w1 with their gradients and SGD."""
    x, w = f"tensor<{micro_batch_size}x256xf32>", "tensor<256x256xf32>"
    types = {"x w": (x, w, x), "x x": (x, x, w)}

    def dot(a: str, b: str, kind: str, dims: str) -> str:
        left, right, out = types[kind]
        return (
            f"stablehlo.dot_general %{a}, %{b}, contracting_dims = {dims} "
            f": ({left}, {right}) -> {out}"
        )

    return f"""
func.func public @main(
    %w0: {w} {{alpa.role = "state", tf.aliasing_output = 0 : i32}},
    %w1: {w} {{alpa.role = "state", tf.aliasing_output = 1 : i32}},
    %x: {x} {{alpa.role = "batch", alpa.batch_dim = 0 : i64}})
    -> ({w} {{alpa.result = "state:0"}}, {w} {{alpa.result = "state:1"}}) {{
  %h = {dot("x", "w0", "x w", "[1] x [0]")}
  %y = {dot("h", "w1", "x w", "[1] x [0]")}
  %g1 = {dot("h", "y", "x x", "[0] x [0]")}
  %d = {dot("y", "w1", "x w", "[1] x [1]")}
  %g0 = {dot("x", "d", "x x", "[0] x [0]")}
  %n0 = stablehlo.subtract %w0, %g0 : {w}
  %n1 = stablehlo.subtract %w1, %g1 : {w}
  return %n0, %n1 : {w}, {w}
}}
"""


def lower(number: int) -> ir.Module:
    return parse(program(BATCH // number))


def problem(text: str) -> PlanningError:
    return PlanningError((Diagnostic("error", Place("-"), text),))


def test_all_divisors_from_the_middle_outwards() -> None:
    assert [divisors(n) for n in (1, 9, 12)] == [[1], [1, 3, 9], [1, 2, 3, 4, 6, 12]]
    assert divisors(1_000_000_007) == [1, 1_000_000_007]  # a prime, in milliseconds
    assert divisors(3 << 60)[:4] == [1, 2, 3, 4]
    assert from_the_middle([1]) == [1]
    assert from_the_middle([1, 2, 3, 4, 6]) == [3, 2, 4, 1, 6]
    assert sorted(from_the_middle(divisors(1024))) == divisors(1024)


def test_the_best_number_is_that_of_the_shortest_step() -> None:
    clock = Clock()
    heard: list[int] = []
    found = best_number(
        divisors(BATCH),
        lower,
        Settings(cluster="cpu:1x2"),
        clock,
        on_attempt=lambda attempt: heard.append(attempt.num_micro_batches),
    )
    assert sorted(heard) == [1, 2, 4, 8]
    assert [attempt.num_micro_batches for attempt in found.attempts] == heard
    planned = {a.num_micro_batches: a.seconds for a in found.attempts if a.seconds is not None}
    taken = found.planned.plan
    assert planned[taken.num_micro_batches] == min(planned.values())
    assert taken.predicted_step_seconds == min(planned.values())
    for attempt in found.attempts:
        assert attempt.bound is None or attempt.bound >= taken.predicted_step_seconds
    assert {"lower", "layer-cluster", "ilp-shard-annotate"} <= clock.seconds.keys()


def test_what_cannot_win_is_not_planned() -> None:
    def padded(number: int) -> ir.Module:
        """With 4 micro-batches each takes as long as the whole batch."""
        return parse(program(BATCH * 64 if number == 4 else BATCH // number))

    clock = Clock()
    found = best_number([1, 2, 4], padded, Settings(cluster="cpu:1x1"), clock)
    bounds = {a.num_micro_batches: a.bound for a in found.attempts}
    best = found.planned.plan.predicted_step_seconds
    assert bounds[4] is not None
    assert bounds[4] >= best


def test_a_number_that_fails_does_not_end_the_search() -> None:
    def some(number: int) -> ir.Module:
        if number != 4:
            raise problem(f"not {number}")
        return lower(number)

    found = best_number([1, 2, 4], some, Settings(cluster="cpu:1x1"), Clock())
    assert found.planned.plan.num_micro_batches == 4
    assert sorted(str(a.problem) for a in found.attempts if a.problem) == [
        "-: error: not 1",
        "-: error: not 2",
    ]


def test_where_all_fail_the_smallest_micro_batches_say_why() -> None:
    def none(number: int) -> ir.Module:
        raise problem(f"needs {10 // number} GiB")

    with pytest.raises(PlanningError) as error:
        best_number([1, 2, 4], none, Settings(cluster="cpu:1x1"), Clock())
    assert str(error.value) == (
        "-: error: no number of micro-batches can be planned (tried 1, 2, 4); with 4, the smallest "
        "micro-batches: needs 2 GiB"
    )


def test_planning_leaves_the_program_unchanged() -> None:
    module = lower(1)
    before = str(module)
    plan(module, Settings(cluster="cpu:1x1"), Clock())
    assert str(module) == before
