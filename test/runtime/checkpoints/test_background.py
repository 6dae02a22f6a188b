"""A state is saved as it was when `save` returned, and no error of the writer is lost."""

from __future__ import annotations

import gc
import os
import re
import subprocess
import sys
import textwrap
import threading
import weakref
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.runtime import CheckpointError, WorkerError
from alpa.runtime.checkpoints.background import Background


def new(value: float = 1.0) -> dict[str, Any]:
    return {"a": jnp.full((64, 1024), value, jnp.float32), "b": np.full(1000, value, np.float32)}


def assert_is_new(state: dict[str, Any], value: float = 1.0) -> None:
    for name, array in new(value).items():
        np.testing.assert_array_equal(state[name], array)


def test_a_state_that_is_donated_and_changed_at_once(tmp_path: Path) -> None:
    """On CPU, NumPy sees the buffer of an array itself, and the donating step writes to it."""
    change = jax.jit(lambda it: it + 1, donate_argnums=0)
    state = new()
    before = state["a"].unsafe_buffer_pointer()
    alpa.save(tmp_path, 1, state, wait=False)
    changed = change(state["a"])
    assert changed.block_until_ready().unsafe_buffer_pointer() == before
    state["b"][:] = 7
    alpa.wait_for_saves()
    assert_is_new(alpa.restore(tmp_path, new))


@pytest.mark.parametrize("executor", ["local", "ray"])
def test_training_goes_on(
    executor: str, training: Any, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Each state in flight is donated to the next step; what is restored gives the same losses."""
    if executor == "ray":
        request.getfixturevalue("ray_cluster")
    step = training.parallelize(executor)
    number, state = alpa.resume(tmp_path, training.init, step, training.batch(0))
    losses = {}
    for number in range(6):
        alpa.save(tmp_path, number, state, wait=False, keep=3)
        state, losses[number] = step(state, training.batch(number))
    alpa.wait_for_saves()
    assert sorted(it.name for it in tmp_path.iterdir()) == ["3", "4", "5"]
    for number in (3, 4, 5):
        state = alpa.restore(tmp_path, training.init, step, training.batch(0), step=number)
        again = training.run(step, state, range(number, 6))[1]
        assert again == [float(losses[it]) for it in range(number, 6)]


def test_a_failed_save_keeps_nothing() -> None:
    """Its state is freed with its error, without the garbage collector."""

    def state() -> None:
        raise CheckpointError("full")

    freed = weakref.ref(state)
    background = Background()
    background.start(Path("1"), state)
    del state
    gc.disable()
    try:
        with suppress(CheckpointError):
            background.wait()
        assert freed() is None
    finally:
        gc.enable()


def test_calls_in_the_same_process_wait(tmp_path: Path) -> None:
    for step, call in enumerate(
        [
            partial(alpa.latest_step, tmp_path),
            partial(alpa.restore, tmp_path, new),
            partial(alpa.save, tmp_path, 10, new()),
            alpa.wait_for_saves,
        ]
    ):
        folder = alpa.save(tmp_path, step, new(step), wait=False)
        assert folder == tmp_path / str(step)
        call()
        assert folder.is_dir()
        assert_is_new(alpa.restore(tmp_path, new, step=step), step)


def test_a_step_in_flight_is_not_saved_twice(tmp_path: Path) -> None:
    alpa.save(tmp_path, 1, new(), wait=False)
    with pytest.raises(CheckpointError, match="1 exists, and is not overwritten"):
        alpa.save(tmp_path, 1, new(), wait=False)


def test_wait_is_a_bool(tmp_path: Path) -> None:
    wrong: Any = "no"
    with pytest.raises(TypeError, match="wait is 'no'"):
        alpa.save(tmp_path, 1, new(), wait=wrong)


def test_one_save_at_a_time() -> None:
    saves = Background()
    go_on, order = threading.Event(), list[str]()

    def first() -> None:
        go_on.wait()
        order.append("first")

    saves.start(Path("1"), first)
    threading.Timer(0.05, go_on.set).start()
    saves.start(Path("2"), lambda: order.append("second"))
    assert order[0] == "first"
    saves.wait()
    assert order == ["first", "second"]


def fail(error: BaseException) -> None:
    raise error


def test_an_error_is_raised_once() -> None:
    saves = Background()
    saves.start(Path("steps/1"), partial(fail, CheckpointError("the disk is full")))
    saves.settle()  # closing an executable does not raise it
    with pytest.raises(CheckpointError, match="the disk is full") as caught:
        saves.start(Path("steps/2"), partial(pytest.fail, "begun though the first has failed"))
    assert caught.value.__notes__ == ["This happened in the background, while steps/1 was saved."]
    saves.wait()
    saves.start(Path("steps/2"), lambda: None)
    saves.wait()


def test_lost_workers_do_not_keep_from_resuming(caplog: pytest.LogCaptureFixture) -> None:
    saves = Background()
    saves.start(Path("steps/1"), partial(fail, WorkerError("mesh_0 has died")))
    saves.recover()
    assert "mesh_0 has died\nThis happened in the background, while steps/1 was" in caplog.text
    saves.wait()
    saves.start(Path("steps/1"), partial(fail, CheckpointError("the disk is full")))
    with pytest.raises(CheckpointError, match="the disk is full"):
        saves.recover()


@pytest.mark.skipif(sys.platform != "linux", reason="the priority of a thread is Linux's")
def test_the_writers_have_a_low_priority(tmp_path: Path) -> None:
    """Also threads of tensorstore that an earlier save has started, and waited for."""
    alpa.save(tmp_path, 1, {str(n): jnp.zeros((1024, 1024)) for n in range(8)})
    assert set(priorities("ts_pool_worker")) <= {0, 19}
    alpa.save(tmp_path, 2, {str(n): jnp.zeros((1024, 1024)) for n in range(8)}, wait=False)
    alpa.wait_for_saves()
    assert set(priorities("ts_pool_worker")) <= {19}
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) < 19


def priorities(name: str) -> list[int]:
    """The priorities of this process's threads of a name."""
    found: list[int] = []
    for thread in Path("/proc/self/task").iterdir():
        with suppress(FileNotFoundError, ProcessLookupError):
            if (thread / "comm").read_text().strip() == name:
                found.append(os.getpriority(os.PRIO_PROCESS, int(thread.name)))
    return found


def test_the_thread_has_a_low_priority() -> None:
    found: list[int] = []
    saves = Background()
    saves.start(
        Path("1"),
        lambda: found.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id())),
    )
    saves.wait()
    assert found == [19 if sys.platform == "linux" else 0]


BESIDE_RAY = """
    import os, sys
    from pathlib import Path
    import jax.numpy as jnp
    import alpa
    os.nice(15)
    alpa.save(sys.argv[1], 1, {str(n): jnp.zeros((1024, 1024)) for n in range(8)}, wait=False)
    alpa.wait_for_saves()
    print(os.sched_getscheduler(0))
    for thread in Path("/proc/self/task").iterdir():
        if (thread / "comm").read_text().strip() == "ts_pool_worker":
            print(os.sched_getscheduler(int(thread.name)))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the policy of a thread is Linux's")
def test_the_writers_of_a_process_of_low_priority_are_idle_work(tmp_path: Path) -> None:
    command = [sys.executable, "-c", textwrap.dedent(BESIDE_RAY), tmp_path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    main, *writers = map(int, done.stdout.split())
    assert main == os.SCHED_OTHER
    assert writers
    assert set(writers) == {os.SCHED_IDLE}


ENDS = """
    import resource, sys
    import jax.numpy as jnp
    import alpa
    directory, how = sys.argv[1:]
    state = {str(n): jnp.full((1024, 1024), n) for n in range(8)}
    alpa.save(directory, 1, state)
    if how == "full disk":
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    alpa.save(directory, 2, state, keep=1, wait=False)
    print("end")
    if how == "own error":
        raise SystemExit(7)
"""


@pytest.mark.parametrize(
    ("how", "status", "left"), [("", 0, ["2"]), ("own error", 7, ["2"]), ("full disk", 1, ["1"])]
)
def test_the_process_exits(how: str, status: int, left: list[str], tmp_path: Path) -> None:
    """The interpreter waits for the save, and its failure is an error of the process."""
    command = [sys.executable, "-c", textwrap.dedent(ENDS), tmp_path, how]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == status
    assert done.stdout == "end\n"
    assert [it.name for it in tmp_path.iterdir()] == left
    failed = r"CheckpointError: cannot write .*File too large.*\n.*while .*/2 was saved\."
    assert bool(re.search(failed, done.stderr)) is (how == "full disk")
    state = alpa.restore(tmp_path, lambda: {str(n): jnp.zeros((1024, 1024), int) for n in range(8)})
    assert all((state[str(n)] == n).all() for n in range(8))
