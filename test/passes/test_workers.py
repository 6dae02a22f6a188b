from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, cast

import numpy as np
import pytest

from alpa.dialects import ir
from alpa.passes.base import OptionError, PassError
from alpa.passes.solve.errors import SolverFailedError, VerificationError
from alpa.passes.solve.sharding.ilp import solve
from alpa.passes.solve.sharding.problem import (
    Edge,
    InfeasibleError,
    OutOfMemoryError,
    Problem,
    Usage,
    verify,
)
from alpa.passes.workers import Workers, _Call, workers_of

TOO_LARGE = Problem(
    node_costs=(np.array([1.0, 2.0]),),
    edges=(),
    usages=(Usage(nodes=(0,), bytes=np.array([8.0, 4.0]), start=0, stop=1),),
    memory_limit=2.0,
)


def random_problem(seed: int) -> Problem:
    costs = np.random.default_rng(seed).random((3, 4))
    edges = (Edge(0, 1, np.outer(costs[0], costs[1])), Edge(1, 2, np.outer(costs[1], costs[2])))
    return Problem(node_costs=tuple(costs), edges=edges)


@pytest.mark.parametrize("count", [0, 2])
def test_solutions_come_in_the_order_asked_for(count):
    problems = [random_problem(seed) for seed in range(5)]
    with Workers(count) as workers:
        pending = [workers.submit(solve, problem) for problem in problems]
        found = [one.result().choice for one in pending]
    assert found == [solve(problem).choice for problem in problems]


def test_prepared_processes_take_calls():
    with Workers(1) as workers:
        workers.prepare("alpa.passes.solve.sharding.ilp", calls=4)
        found = workers.submit(solve, random_problem(0)).result()
    assert found.choice == solve(random_problem(0)).choice


def test_much_work_is_worth_a_process_and_all_work_where_there_is_one():
    with Workers(1) as workers:
        assert workers.worth(range(9_999), 1).count == 0
        assert workers.worth(range(2_499), 4).count == 0
        assert workers.worth(range(2_500), 4) is workers
        workers.submit(solve, random_problem(0)).result()
        assert workers.worth([], 1) is workers


@pytest.mark.parametrize("count", [0, 1])
def test_errors_arrive_whole(count):
    with Workers(count) as workers:
        pending = workers.submit(solve, TOO_LARGE)
        with pytest.raises(OutOfMemoryError) as caught:
            pending.result()
        assert (caught.value.needed, caught.value.limit, caught.value.nodes) == (4.0, 2.0, (0,))
        never = Problem(node_costs=(np.array([np.inf]),), edges=())
        with pytest.raises(InfeasibleError, match="node 0 has no strategy of finite cost"):
            workers.submit(solve, never).result()


@pytest.mark.parametrize("count", [0, 1])
def test_a_failed_check_is_not_taken_for_an_infeasible_problem(count):
    problem = Problem(node_costs=(np.array([1.0, 2.0]),), edges=())
    wrong = replace(solve(problem), objective=0.5)
    with Workers(count) as workers:
        pending = workers.submit(verify, problem, wrong)
        with pytest.raises(VerificationError, match=r"costs 1\.0 s, not 0\.5 s") as failed:
            pending.result()
    assert not isinstance(failed.value, ValueError)


@pytest.fixture
def busy() -> Iterator[Workers]:
    """One process, which is asleep."""
    with Workers(1) as workers:
        workers.submit(time.sleep, 60)
        yield workers


def test_who_waits_takes_shared_calls(busy):
    shared = [busy.share(os.getpid) for _ in range(3)]
    assert busy.places == 2
    assert {one.result() for one in shared} == {os.getpid()}


def test_who_waits_takes_no_other_calls(busy):
    other, shared = busy.submit(os.getpid), busy.share(os.getpid)
    assert shared.result() == os.getpid()
    assert not other.running()
    assert not other.done()


def test_a_shared_call_may_have_a_shorter_way_here(busy):
    assert busy.share(os.getpid, here=lambda: -1).result() == -1


def test_errors_of_shared_calls_arrive_here(busy):
    pending = busy.share(partial(solve, TOO_LARGE))
    assert isinstance(pending.exception(), OutOfMemoryError)
    with pytest.raises(OutOfMemoryError):
        pending.result()
    with pytest.raises(TypeError, match="takes no arguments"):  # a bug, not an answer
        busy.share(partial(os.getpid, 1)).result()


def test_a_call_runs_near_the_one_before():
    with Workers(2) as workers:
        there = workers.submit(os.getpid)
        for _ in range(5):
            assert workers.share(os.getpid, near=there).result() == there.result() != os.getpid()
        sleeping = [workers.submit(time.sleep, 60) for _ in range(2)]
        here = workers.share(os.getpid)
        assert here.result() == os.getpid()
        workers.drop()
        assert all(one.done() for one in sleeping)
        assert workers.share(os.getpid, near=here).result() == os.getpid()


@contextmanager
def asleep() -> Iterator[tuple[Workers, Future[None]]]:
    """One process, and the call that it is running."""
    with Workers(1) as workers:
        slow = workers.submit(time.sleep, 60)
        while not slow.running():
            time.sleep(0.001)
        yield workers, slow
        workers.drop()


def test_a_busy_process_keeps_one_call():
    with asleep() as (workers, slow):
        kept, taken = (workers.share(os.getpid, near=slow) for _ in range(2))
        assert taken.result() == os.getpid()
        here = workers.share(os.getpid)
        assert here.result() == os.getpid()
        assert not kept.running()
        assert not kept.done()


def test_who_waits_takes_the_awaited_call_before_others_that_are_near_to_none():
    with asleep() as (workers, slow):
        others = [workers.share(partial(time.sleep, 60)) for _ in range(3)]
        _, awaited = (workers.share(os.getpid, near=slow) for _ in range(2))
        assert awaited.result() == os.getpid()
        assert not any(other.running() for other in others)


def test_a_call_near_a_thread_that_waits_for_nothing():
    with Workers(1) as workers:
        slow, found = workers.submit(time.sleep, 60), list[Future[int]]()
        other = threading.Thread(target=lambda: found.append(workers.share(os.getpid)))
        other.start()
        other.join()
        waiting = threading.Thread(target=found[0].result)
        waiting.start()
        waiting.join()
        assert workers.share(os.getpid, near=found[0]).result() == os.getpid()
        assert not slow.done()
        workers.drop()


def test_who_has_its_result_takes_no_more_calls():
    with Workers(1) as workers:
        first = workers.share(partial(time.sleep, 0))
        later = workers.share(partial(time.sleep, 60), near=first)
        first.result()
        first.result()
        workers.drop()
        assert later.done()


def test_a_call_near_one_of_other_workers_runs_anywhere():
    with Workers(1) as earlier:
        known = earlier.submit(os.getpid)
        known.result()
    with Workers(1) as workers:
        assert workers.share(os.getpid, near=known).result() != known.result()


def test_shared_calls_that_nobody_waits_for_are_dropped(busy):
    pending = busy.share(os.getpid)
    busy.drop()
    assert pending.cancelled()
    assert busy.submit(os.getpid).result() != os.getpid()


def test_a_process_that_ends_is_an_error_of_the_solver():
    with (
        Workers(1) as workers,
        pytest.raises(SolverFailedError, match="a process ended with status 3"),
    ):
        workers.submit(os._exit, 3).result()


def test_work_that_is_not_waited_for_is_ended():
    with Workers(1) as workers:
        process = workers.submit(os.getpid).result()
        pending = workers.submit(time.sleep, 60)
        while not pending.running():
            time.sleep(0.001)
    with pytest.raises(SolverFailedError, match="a process ended with status -9"):
        pending.result()
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


def test_dropped_calls_end_and_idle_processes_stay():
    with Workers(2) as workers:
        idle = workers.submit(os.getpid).result()
        sleeping = [workers.submit(time.sleep, 60) for _ in range(5)]
        while sum(one.running() for one in sleeping) < 2:
            time.sleep(0.001)
        workers.drop()
        assert all(one.done() for one in sleeping)
        assert sum(one.cancelled() for one in sleeping) == 3
        with pytest.raises(SolverFailedError, match="a process ended with status -9"):
            sleeping[0].result()
        first = workers.submit(os.getpid)
        first.result()
        workers.drop()  # Nothing runs.
        assert workers.share(os.getpid, near=first).result() == first.result()
        assert idle != first.result()  # Both processes were asleep.


@pytest.mark.parametrize("count", [0, 1])
def test_a_pass_leaves_the_processes_of_its_driver(count):
    with Workers(count) as shared:
        for _ in range(2):
            with workers_of(shared, "auto") as workers:
                assert workers is shared
                workers.submit(time.sleep, 0.01)
            assert shared.submit(os.getpid).result()
    with workers_of(None, count) as own:
        assert own.submit(os.getpid).result()


def test_at_the_end_of_a_pass_its_processes_end_what_they_run():
    with Workers(1) as shared:
        with workers_of(shared, "auto") as workers:
            runs, waits = workers.submit(time.sleep, 0.01), workers.submit(os.getpid)
            while not runs.running():
                time.sleep(0.001)
        assert waits.cancelled() or waits.result()  # The process may have been fast.
        assert runs.result() is None
        process = shared.submit(os.getpid).result()
        with suppress(PassError), workers_of(shared, "auto"):
            raise PassError(ir.Location.unknown(ir.Context()), "refused")
        assert shared.submit(os.getpid).result() == process
        with suppress(KeyError), workers_of(shared, "auto") as workers:
            lost = workers.submit(time.sleep, 60)
            raise KeyError
        assert lost.done()


def test_a_call_that_an_interrupt_kept_from_running_is_not_waited_for():
    with Workers(1) as workers:
        workers.submit(time.sleep, 60)
        taken = workers.share(os.getpid)
        assert cast("_Call[Any]", taken).take()
        workers.drop()


def test_processes_have_their_environment_and_log(tmp_path):
    log = tmp_path / "log"
    with Workers(1, environment={"ALPA_TEST": "here"}, log=log) as workers:
        assert workers.submit(os.getenv, "ALPA_TEST").result() == "here"
        workers.submit(os.write, 2, b"said\n").result()
    assert "ALPA_TEST" not in os.environ
    assert log.read_text() == "said\n"


def test_text_that_a_library_prints_is_not_an_answer():
    with Workers(1) as workers:
        assert workers.submit(os.write, 1, b"a line of a solver's own\n").result() == 25
        assert workers.submit(os.getppid).result() == os.getpid()


def test_a_negative_number_of_processes_is_refused():
    with pytest.raises(OptionError, match="processes is -1; at least 0"):
        Workers(-1)
