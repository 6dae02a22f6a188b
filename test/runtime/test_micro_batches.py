"""The search for the number of micro-batches, and the choice of the schedule."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from alpa.dialects import ir, main_function, parse
from alpa.dialects.attributes import Plan, Schedule
from alpa.passes.base import Remark
from alpa.passes.cost.cluster import Cluster
from alpa.passes.pipelines.diagnostics import Diagnostic, Place
from alpa.passes.stage_mesh_partition import StageMeshPartition
from alpa.runtime import micro_batches
from alpa.runtime.micro_batches import best_number, divisors, handful, lower_bound
from alpa.runtime.planning import Clock, PlanningError, Settings, clustered, plan

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


def test_a_handful_of_divisors() -> None:
    assert divisors(12) == [1, 2, 3, 4, 6, 12]
    assert handful([1]) == [1]
    assert sorted(handful([1, 2])) == [1, 2]
    powers = divisors(1024)
    few = handful(powers)
    assert few[0] == 32
    assert {1, 1024} < set(few)
    assert len(few) == 5


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
        assert attempt.bound is not None
        assert attempt.seconds is None or attempt.bound <= attempt.seconds
        assert attempt.seconds is not None or attempt.bound >= taken.predicted_step_seconds
    assert {"lower", "layer-cluster", "ilp-shard-annotate"} <= clock.seconds.keys()


def test_the_bound_is_the_compute_split_evenly() -> None:
    settings = Settings(cluster="cpu:1x2")
    module = clustered(lower(2), settings, Clock())
    one, two = (lower_bound(module, Cluster.parse("cpu:1x2"), n) for n in (1, 2))
    four = lower_bound(module, Cluster.parse("cpu:1x4"), 1)
    assert four == pytest.approx(one / 2)
    assert one < two < 2 * one  # the update runs once


def test_what_cannot_win_is_not_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    def bound(module: ir.Module, cluster: Cluster, number: int) -> float:
        return 0.0 if number == 2 else float("inf")

    monkeypatch.setattr(micro_batches, "lower_bound", bound)
    found = best_number([1, 2, 4], lower, Settings(cluster="cpu:1x1"), Clock())
    assert found.planned.plan.num_micro_batches == 2
    skipped = {a.num_micro_batches for a in found.attempts if a.is_skipped}
    assert skipped == {1, 4}


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
        "ones: needs 2 GiB"
    )


def phases(settings: Settings) -> tuple[Counter[str], str, int]:
    heard: Counter[str] = Counter()

    def hear(phase: str) -> None:
        heard[phase] += 1

    planned = plan(lower(4), settings, Clock(hear))
    return heard, planned.plan.schedule, len(planned.report(Clock()).stages)


def test_with_one_micro_batch_gpipe_is_not_planned() -> None:
    heard, schedule, _ = phases(Settings(cluster="cpu:1x2"))
    assert (heard["stage-mesh-partition"], schedule) == (1, "1f1b")


@pytest.fixture
def two_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    options = Settings.options

    def two(self: Settings, schedule: Schedule) -> dict[str, str]:
        return {**options(self, schedule), "num-layers": "2", "num-stages": "2"}

    monkeypatch.setattr(Settings, "options", two)


@pytest.mark.parametrize(("share", "taken"), [(0.5, "gpipe"), (1.5, "1f1b")])
@pytest.mark.usefixtures("two_stages")
def test_gpipe_is_planned_to_the_end_only_where_its_stages_are_faster(
    share: float, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = StageMeshPartition.run

    def faster_or_slower(self: StageMeshPartition, module: ir.Module, remark: Remark) -> None:
        run(self, module, remark)
        found = Plan.read(main_function(module))
        assert found is not None
        if self.schedule == "gpipe":
            seconds = share * found.predicted_step_seconds
            replace(found, predicted_step_seconds=seconds).write(main_function(module))

    monkeypatch.setattr(StageMeshPartition, "run", faster_or_slower)
    heard, schedule, stages = phases(Settings(cluster="cpu:1x2", num_micro_batches=4))
    assert (schedule, stages) == (taken, 2)
    assert heard["layer-cluster"] == 1
    assert heard["stage-mesh-partition"] == 2
    assert heard["ilp-shard-annotate"] == (2 if taken == "gpipe" else 1)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_a_schedule_that_is_asked_for_is_taken(schedule: Schedule) -> None:
    settings = Settings(cluster="cpu:1x2", num_micro_batches=4, schedule=schedule)
    heard, planned, _ = phases(settings)
    assert (heard["stage-mesh-partition"], planned) == (1, schedule)


def test_an_option_that_no_pass_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "options", lambda self, schedule: {"speed": "high"})
    with pytest.raises(PlanningError, match="no pass has an option speed"):
        plan(lower(1), Settings(cluster="cpu:1x1"), Clock())


def test_planning_leaves_the_program_as_it_is() -> None:
    module = lower(1)
    before = str(module)
    plan(module, Settings(cluster="cpu:1x1"), Clock())
    assert str(module) == before
