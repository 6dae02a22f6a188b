"""Schedules against orders written down and an independent event simulation."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa.dialects.attributes import Part
from alpa.dialects.plan import Plan, Schedule
from alpa.passes.plan.data import DeviceMesh, Fragment, Program, Transfer, Value
from alpa.passes.plan.instructions import Run, write_script
from alpa.passes.plan.step_time import simulate, step_seconds
from alpa.passes.schedules.measure import Costs, measure
from alpa.passes.schedules.one_stage import stage_list
from alpa.passes.schedules.planned import in_flight, lists_of

SCHEDULES: list[Schedule] = ["gpipe", "1f1b"]
Direction = Literal["forward", "backward"]


@dataclass(frozen=True, kw_only=True)
class Pipeline:
    """Seconds of every stage, first to last. A transfer belongs to the boundary i | i + 1."""

    forward: tuple[float, ...]
    backward: tuple[float, ...] | None = None
    update: tuple[float, ...]
    forward_transfer: tuple[float, ...]
    backward_transfer: tuple[float, ...]
    num_micro_batches: int
    schedule: Schedule
    overlap: float = 0.0
    """the share of transfers that computation hides"""

    @property
    def p(self) -> list[float]:
        """Seconds of a forward and the transfer into it."""
        return [own + c for own, c in zip(self.forward, (0.0, *self.forward_transfer), strict=True)]

    @property
    def q(self) -> list[float]:
        """Seconds of a backward and the transfer into it; zeros without backwards."""
        backward = self.backward or (0.0,) * len(self.forward)
        return [own + c for own, c in zip(backward, (*self.backward_transfer, 0.0), strict=True)]

    def objective(self) -> float:
        """T: what the stage DP minimises."""
        a = [p + q for p, q in zip(self.p, self.q, strict=True)]
        return sum(a) + (self.num_micro_batches - 1) * max(a) + max(self.update)

    def bound(self) -> float:
        """T+: no schedule takes longer."""
        p, q = self.p, self.q
        return sum(p) + sum(q) + (self.num_micro_batches - 1) * (max(p) + max(q)) + max(self.update)

    def program(self) -> Program:
        """Each stage makes one value for the next, and its last part one for its update."""
        count, values = len(self.forward), list[Value]()
        steps: list[Fragment | Transfer] = []

        def run(stage: int, part: Part, reads: list[int], seconds: float) -> int:
            values.append(Value(mesh=f"mesh_{stage}", shape=(2,), dtype="f32"))
            made = len(values) - 1
            steps.append(
                Fragment(
                    name=f"{stage}.{part}",
                    mesh=f"mesh_{stage}",
                    part=part,
                    inputs=tuple(reads),
                    outputs=(made,),
                    seconds=seconds,
                )
            )
            return made

        def move(value: int, stage: int, seconds: float) -> list[int]:
            values.append(Value(mesh=f"mesh_{stage}", shape=(2,), dtype="f32"))
            steps.append(
                Transfer(
                    source=value, target=len(values) - 1, seconds=seconds, overlap=self.overlap
                )
            )
            return [len(values) - 1]

        reads, last = list[int](), list[int]()
        for s, seconds in enumerate(self.forward):
            if s:
                reads = move(last[-1], s, self.forward_transfer[s - 1])
            last.append(run(s, "forward", reads, seconds))
        if self.backward is not None:
            made, reads = list(last), [last[-1]]
            for s in reversed(range(count)):
                if s < count - 1:
                    reads = [*move(last[s + 1], s, self.backward_transfer[s]), made[s]]
                last[s] = run(s, "backward", reads, self.backward[s])
        for s, seconds in enumerate(self.update):
            run(s, "update", [last[s]], seconds)
        return Program(
            values=tuple(values),
            arguments=(),
            results=(),
            steps=tuple(steps),
            meshes=tuple(
                DeviceMesh(name=f"mesh_{s}", hosts=(0,), devices=(s,), axes=())
                for s in range(count)
            ),
            plan=Plan(num_micro_batches=self.num_micro_batches, schedule=self.schedule),
        )

    def seconds(self) -> float:
        """Of the simulated step. Each stage's update waits for its own last backward."""
        return step_seconds(self.program())

    def ends(self) -> dict[tuple[str, int], list[float]]:
        """When each stage ends its forwards and its backwards."""
        found = defaultdict[tuple[str, int], list[float]](list)
        for event in simulate(write_script(self.program())):
            if isinstance(event.instruction, Run) and event.instruction.fragment.part != "update":
                stage = int(event.mesh.removeprefix("mesh_"))
                found[event.instruction.fragment.part, stage].append(event.end)
        return dict(found)

    def idle(self) -> list[float]:
        """The share of the step in which each stage neither computes nor receives."""
        ends = zip(self.p, self.q, self.update, strict=True)
        busy = [self.num_micro_batches * (p + q) + update for p, q, update in ends]
        return [1 - each / self.seconds() for each in busy]


def written_order(
    schedule: Schedule, batches: int, stages_to_last: int
) -> list[tuple[Direction, int]]:
    """The order by its definition, phase by phase."""
    warm_up = batches if schedule == "gpipe" else min(batches, stages_to_last)
    works: list[tuple[Direction, int]] = [("forward", m) for m in range(warm_up)]
    for m in range(warm_up, batches):
        works += [("backward", m - warm_up), ("forward", m)]
    return works + [("backward", m) for m in range(batches - warm_up, batches)]


def event_simulation(pipeline: Pipeline) -> tuple[float, dict[tuple[int, Direction, int], float]]:
    """The step's seconds and the end of each piece, by messages in the order of their arrival."""
    count, batches = len(pipeline.forward), pipeline.num_micro_batches
    backward = pipeline.backward
    todo = [written_order(pipeline.schedule, batches, count - s)[::-1] for s in range(count)]
    if backward is None:
        todo = [[("forward", m) for m in reversed(range(batches))] for _ in range(count)]
    arrived = {(0, "forward", m): 0.0 for m in range(batches)}
    events = [(0.0, 0, "forward", m) for m in range(batches)]  # (time, stage, kind, micro-batch)
    free = [0.0] * count
    ends: dict[tuple[int, Direction, int], float] = {}
    while events:
        now, stage, kind, m = heapq.heappop(events)
        arrived[stage, kind, m] = now
        while todo[stage] and (stage, *todo[stage][-1]) in arrived:
            kind, m = todo[stage].pop()
            begin = max(free[stage], arrived[stage, kind, m])
            if kind == "forward":
                receive = pipeline.forward_transfer[stage - 1] if stage else 0.0
                free[stage] = begin + receive + pipeline.forward[stage]
                last = stage == count - 1
                target = (stage, "backward") if last else (stage + 1, "forward")
                if not (last and backward is None):
                    heapq.heappush(events, (free[stage], *target, m))
            else:
                assert backward is not None
                receive = pipeline.backward_transfer[stage] if stage < count - 1 else 0.0
                free[stage] = begin + receive + backward[stage]
                if stage:
                    heapq.heappush(events, (free[stage], stage - 1, "backward", m))
            ends[stage, kind, m] = free[stage]
    assert not any(todo)
    return max(f + u for f, u in zip(free, pipeline.update, strict=True)), ends


@st.composite
def pipelines(draw: st.DrawFn, backward: bool | None = None) -> Pipeline:
    count = draw(st.integers(1, 6))
    # Whole numbers make ties; others make none. Both add up without rounding.
    number = draw(st.sampled_from([st.integers(0, 4), st.integers(0, 1 << 20)])).map(float)

    def seconds(length: int) -> tuple[float, ...]:
        return tuple(draw(st.lists(number, min_size=length, max_size=length)))

    both = draw(st.booleans()) if backward is None else backward
    return Pipeline(
        forward=seconds(count),
        backward=seconds(count) if both else None,
        update=seconds(count),
        forward_transfer=seconds(count - 1),
        backward_transfer=seconds(count - 1) if both else (0.0,) * (count - 1),
        num_micro_batches=draw(st.integers(1, 9)),
        schedule=draw(st.sampled_from(SCHEDULES)),
    )


@given(pipelines())
def test_simulated_as_by_events(pipeline: Pipeline) -> None:
    seconds, ends = event_simulation(pipeline)
    assert pipeline.seconds() == seconds
    found = pipeline.ends()
    assert {
        (s, kind, m): t for (kind, s), them in found.items() for m, t in enumerate(them)
    } == ends


@given(st.sampled_from(SCHEDULES), st.integers(1, 9), st.integers(1, 9))
def test_order_and_what_is_in_flight(schedule: Schedule, batches: int, to_last: int) -> None:
    works = stage_list(schedule, batches, to_last)
    assert [(w.kind, w.micro_batch) for w in works] == written_order(schedule, batches, to_last)
    kept, peak = set[int](), 0
    for work in works:
        (kept.add if work.kind == "forward" else kept.remove)(work.micro_batch)
        peak = max(peak, len(kept))
    assert peak == in_flight(schedule, batches, to_last)
    assert not kept


@given(pipelines())
def test_bounds(pipeline: Pipeline) -> None:
    p, q = pipeline.p, pipeline.q
    a = [x + y for x, y in zip(p, q, strict=True)]
    batches, T, bound = pipeline.num_micro_batches, pipeline.objective(), pipeline.bound()
    with_updates = pipeline.seconds()
    assert bound >= T
    assert with_updates <= bound
    # Without updates: what the pipeline itself takes.
    bare = replace(pipeline, update=(0.0,) * len(p))
    seconds, T, bound = bare.seconds(), bare.objective(), bare.bound()
    if pipeline.backward is not None and pipeline.update[0] == max(pipeline.update):
        assert with_updates == seconds + pipeline.update[0]
    assert seconds >= sum(a) + (batches - 1) * a[-1]
    if pipeline.schedule == "gpipe" or pipeline.backward is None:
        assert seconds == bound
    if max(p) + max(q) == max(a):
        assert seconds <= T
        if max(a) == a[-1]:
            assert seconds == T


@given(pipelines(backward=True))
def test_1f1b_is_never_slower_than_gpipe(pipeline: Pipeline) -> None:
    bare = replace(pipeline, update=(0.0,) * len(pipeline.forward))
    one, other = (replace(bare, schedule=s).seconds() for s in ("1f1b", "gpipe"))
    assert one <= other


@given(
    st.sampled_from(SCHEDULES),
    st.integers(1, 6),
    st.integers(1, 9),
    st.lists(st.floats(0, 10), min_size=5, max_size=5),
)
def test_equal_stages_take_t(
    schedule: Schedule, count: int, batches: int, seconds: list[float]
) -> None:
    forward, backward, update, there, back = seconds
    # The first stage receives no forward, the last no backward: theirs are longer by as much.
    pipeline = Pipeline(
        forward=(forward + there, *(forward,) * (count - 1)),
        backward=(*(backward,) * (count - 1), backward + back),
        update=(update,) * count,
        forward_transfer=(there,) * (count - 1),
        backward_transfer=(back,) * (count - 1),
        num_micro_batches=batches,
        schedule=schedule,
    )
    each = forward + there + backward + back
    taken = pipeline.seconds()
    assert taken == pytest.approx((count - 1 + batches) * each + update, rel=1e-12)
    assert taken == pytest.approx(pipeline.objective(), rel=1e-12)
    bare = replace(pipeline, update=(0.0,) * count)
    if each:
        assert bare.idle() == pytest.approx([(count - 1) / (count - 1 + batches)] * count)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_one_stage_adds_up(schedule: Schedule) -> None:
    pipeline = Pipeline(
        forward=(2.0,),
        backward=(3.0,),
        update=(4.0,),
        forward_transfer=(),
        backward_transfer=(),
        num_micro_batches=5,
        schedule=schedule,
    )
    assert pipeline.seconds() == 5 * (2 + 3) + 4


def test_t_is_neither_bound_of_1f1b() -> None:
    """The docstring's two cases: a warm-up that pairs two stages, and work that is hidden."""
    none = (0.0, 0.0)
    longer = Pipeline(
        forward=(1.0, 0.0, 0.0),
        backward=(0.0, 1.0, 0.0),
        update=(0.0, 0.0, 0.0),
        forward_transfer=none,
        backward_transfer=none,
        num_micro_batches=8,
        schedule="1f1b",
    )
    assert longer.seconds() == longer.objective() + 1
    hidden = replace(
        longer,
        forward=(4.0, 1.0),
        backward=(4.0, 1.0),
        update=none,
        forward_transfer=(0.0,),
        backward_transfer=(0.0,),
    )
    assert hidden.seconds() == hidden.objective() - 2 == 8 * 8


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "eager-1f1b"])
@given(st.data())
def test_executed_as_listed(schedule: Schedule, data: st.DataObject) -> None:
    overlap = data.draw(st.sampled_from([0.0, 0.25, 1.0]))
    its = replace(data.draw(pipelines(backward=True)), schedule=schedule, overlap=overlap)
    assert its.backward is not None
    count, nothing = len(its.forward), (0.0,) * len(its.forward)
    costs = Costs(
        forward=its.forward,
        backward_input=its.backward,
        backward_weight=nothing,
        forward_transfer=(0.0, *its.forward_transfer),
        backward_transfer=(*its.backward_transfer, 0.0),
        update=its.update,
        held=nothing,
        kept=nothing,
        hidden=(overlap,) * count,
    )
    assert its.seconds() == measure(lists_of(schedule, count, its.num_micro_batches), costs).seconds


def test_eager_1f1b_hides_transfers() -> None:
    pipeline = Pipeline(
        forward=(2.0,) * 4,
        backward=(2.0,) * 4,
        update=(0.0,) * 4,
        forward_transfer=(1.0,) * 3,
        backward_transfer=(1.0,) * 3,
        num_micro_batches=16,
        schedule="1f1b",
    )
    eager = replace(pipeline, schedule="eager-1f1b")
    assert pipeline.seconds() == 111
    # More micro-batches in flight fill a few gaps, even if all transfers are waited for.
    assert eager.seconds() == 107
    pipeline, eager = (replace(it, overlap=1.0) for it in (pipeline, eager))
    assert pipeline.seconds() == 104
    # Each of the 6 transfers of the first micro-batch is waited for, the others are not.
    assert eager.seconds() == 3 * 6 + 16 * 4


def test_forwards_only() -> None:
    pipeline = Pipeline(
        forward=(1.0, 3.0),
        update=(0.0, 0.0),
        forward_transfer=(0.5,),
        backward_transfer=(0.0,),
        num_micro_batches=3,
        schedule="1f1b",
    )
    assert pipeline.seconds() == 1 + 3 * 3.5 == pipeline.objective()
    assert pipeline.ends() == {
        ("forward", 0): [m + 1.0 for m in range(3)],
        ("forward", 1): [1 + (m + 1) * 3.5 for m in range(3)],
    }


def long_pipeline(count: int, batches: int, schedule: Schedule) -> Pipeline:
    return Pipeline(
        forward=(1.0,) * count,
        backward=(2.0,) * count,
        update=(0.0,) * count,
        forward_transfer=(0.0,) * (count - 1),
        backward_transfer=(0.0,) * (count - 1),
        num_micro_batches=batches,
        schedule=schedule,
    )


def test_time_of_a_long_pipeline() -> None:
    """16 stages and 256 micro-batches: 8192 forwards and backwards."""
    pipeline = long_pipeline(16, 256, "1f1b")
    assert pipeline.seconds() == 3 * (16 - 1 + 256)
    assert sum(map(len, pipeline.ends().values())) == 8192


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_simulation_is_linear_in_its_pieces(
    schedule: Schedule, num_calls: Callable[[Callable[[], object]], int]
) -> None:
    small, long, deep = (
        num_calls(lambda size=size: long_pipeline(*size, schedule).seconds())
        for size in ((8, 32), (8, 64), (16, 32))
    )
    # The share of warm-up and drain depends on the length of the pipeline.
    assert long <= 2.2 * small
    assert deep <= 2.2 * small
