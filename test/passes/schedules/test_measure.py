"""Simulated schedules with random costs, and against all orders on small cases."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise, product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa.passes.schedules.measure import Costs, Event, measure, peak
from alpa.passes.schedules.named import NAMES, Name, schedule_of
from alpa.passes.schedules.simulate import DeadlockError, simulate
from alpa.passes.schedules.verify import verify
from alpa.passes.schedules.work import Work

number = st.integers(0, 1 << 20).map(float)


@st.composite
def costs(draw: st.DrawFn, stages: int) -> Costs:
    def each() -> tuple[float, ...]:
        return tuple(draw(st.lists(number, min_size=stages, max_size=stages)))

    held = each()
    return Costs(
        forward=each(),
        backward_input=each(),
        backward_weight=each(),
        forward_transfer=each(),
        backward_transfer=each(),
        update=each(),
        held=held,
        kept=tuple(it // 2 for it in held),
        hidden=tuple(draw(st.sampled_from([0.0, 0.25, 1.0])) for _ in held),
    )


@given(st.data(), st.sampled_from(NAMES), st.integers(1, 4), st.integers(1, 3))
def test_random_costs(data: st.DataObject, name: Name, meshes: int, groups: int) -> None:
    """Each item starts when all that it waits for has ended; meshes do one at a time."""
    schedule = schedule_of(name, meshes, 2 * groups * meshes)
    verify(schedule)
    its = data.draw(costs(schedule.num_stages))
    found = measure(schedule, its)
    ends = {event.work: span.end for event, span in found.spans.items() if event.what == "work"}
    starts = {event.work: span.start for event, span in found.spans.items() if event.what == "work"}
    assert len(ends) == sum(map(len, schedule.lists))
    for works in schedule.lists:
        for before, work in pairwise(works):
            assert starts[work] >= ends[before]
        for work in works:
            assert ends[work] == starts[work] + its.seconds(work)
            for needed in schedule.needs(work):
                there = schedule.mesh_of[needed.stage] != schedule.mesh_of[work.stage]
                kind = its.forward_transfer if work.kind == "forward" else its.backward_transfer
                assert starts[work] >= ends[needed] + there * kind[work.stage]
    updates = [span.end for event, span in found.spans.items() if event.what == "update"]
    assert found.seconds == max(updates)
    assert found.seconds >= max(found.busy)


@given(st.data(), st.integers(1, 4), st.integers(1, 6))
def test_hidden_transfers_are_never_slower(data: st.DataObject, meshes: int, batches: int) -> None:
    its = data.draw(costs(meshes))
    schedule = schedule_of("1f1b", meshes, batches)
    waiting, partly, wholly = (
        measure(schedule, replace(its, hidden=(share,) * meshes)).seconds
        for share in (0.0, 0.25, 1.0)
    )
    assert waiting >= max(partly, wholly)


def test_a_hidden_transfer_runs_beside_work() -> None:
    """Two stages; all items and transfers take a second, a whole backward two."""
    schedule = schedule_of("eager-1f1b", 2, 3)
    found = measure(schedule, Costs.uniform(2, transfer=1.0, hidden=1.0))
    spans = {
        str(event.work): span
        for event, span in found.spans.items()
        if event.what == "hidden" and isinstance(event.work, Work)
    }
    # As soon as the forwards of the first stage have ended.
    assert [spans[f"1F{m}"] for m in range(3)] == [(1, 2), (2, 3), (3, 4)]
    # 0F0, its transfer, all of the last stage, the transfer of the last gradient, 0B2.
    assert found.seconds == 1 + 1 + 3 * 3 + 1 + 2


def test_a_transfer_that_is_hidden_in_part() -> None:
    """A quarter of each transfer runs beside work, the rest occupies the receiving mesh."""
    schedule = schedule_of("eager-1f1b", 2, 1)
    found = measure(schedule, Costs.uniform(2, transfer=4.0, hidden=0.25))
    spans = {
        (event.what, str(event.work)): span
        for event, span in found.spans.items()
        if event.what in ("hidden", "receive")
    }
    assert spans["hidden", "1F0"] == (1, 2)
    assert spans["receive", "1F0"] == (2, 5)
    assert found.busy == (1 + 3 + 2, 3 + 1 + 2)


def test_memory_of_a_list() -> None:
    works = [Work(0, "forward", 0), Work(1, "forward", 0)]
    works += [Work(1, "backward-input", 0), Work(0, "forward", 1), Work(1, "backward-weight", 0)]
    works += [Work(0, "backward", 0), Work(1, "forward", 1)]
    assert peak(works, held=(10.0, 6.0), kept=(0.0, 2.0)) == 22
    assert peak(works[:3], held=(10.0, 6.0), kept=(0.0, 2.0)) == 16


def test_lists_that_wait_for_one_another() -> None:
    needs = {"a": "d", "c": "b"}
    with pytest.raises(DeadlockError, match="a waits for d; c waits for b") as raised:
        simulate({0: "ab", 1: "cd"}, lambda item: needs.get(item, ""), lambda _: 1.0)
    assert raised.value.waiting == ((0, "a", "d"), (1, "c", "b"))


Counts = tuple[tuple[int, int, int], ...]
"""Of each stage, how many forwards, backward-inputs and backward-weights have run."""


@cache
def shortest(meshes: int, batches: int, most: tuple[int, ...]) -> int:
    """The seconds of the shortest schedule of two stages per mesh in V shape whose meshes hold no
    more than `most`, by breadth-first search over all states; each item takes a second."""
    stages = 2 * meshes
    mesh_of = [min(s, stages - 1 - s) for s in range(stages)]

    def ready(state: Counts, s: int, kind: int) -> bool:
        forwards, inputs, weights = state[s]
        if kind == 0:
            held = sum(state[t][0] - state[t][2] for t in range(stages) if mesh_of[t] == mesh_of[s])
            there = not s or state[s - 1][0] > forwards
            return forwards < batches and there and held < most[mesh_of[s]]
        if kind == 1:
            return inputs < forwards and (s + 1 == stages or state[s + 1][1] > inputs)
        return weights < inputs

    def after(state: Counts, chosen: tuple[tuple[int, int] | None, ...]) -> Counts:
        counts = [list(them) for them in state]
        for it in chosen:
            if it is not None:
                counts[it[0]][it[1]] += 1
        return tuple((f, i, w) for f, i, w in counts)

    states: set[Counts] = {((0, 0, 0),) * stages}
    end = ((batches, batches, batches),) * stages
    seconds = 0
    while end not in states:
        found: set[Counts] = set()
        for state in states:
            options = defaultdict[int, list[tuple[int, int] | None]](list)
            for s, kind in product(range(stages), range(3)):
                if ready(state, s, kind):
                    options[mesh_of[s]].append((s, kind))
            # Idle meshes are only tried where they may help: nothing runs, or memory is short.
            choices = [[*options[mesh], None] for mesh in range(meshes)]
            found.update(after(state, chosen) for chosen in product(*choices))
        states = found
        seconds += 1
    return seconds


@pytest.mark.parametrize("batches", [1, 2, 3])
@pytest.mark.parametrize("name", ["zb-v", "v-half", "v-min"])
def test_v_schedules_against_all_orders(name: Name, batches: int) -> None:
    """No schedule that holds as much is shorter, on two meshes."""
    schedule = schedule_of(name, 2, batches)
    found = measure(schedule, Costs.uniform(4))
    most = tuple(int(it) for it in found.peak)
    assert found.seconds == shortest(2, batches, most)


def test_events_have_their_work() -> None:
    found = measure(schedule_of("1f1b", 1, 1), Costs.uniform(1))
    forward, backward = Work(0, "forward", 0), Work(0, "backward", 0)
    assert list(found.spans) == [
        Event("work", forward),
        Event("work", backward),
        Event("update", 0),
    ]
