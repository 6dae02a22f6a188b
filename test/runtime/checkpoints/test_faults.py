"""Whatever process dies, the caller gets an error soon, and continues from the last checkpoint.

The moments are random. The number of the test is their seed.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import ray

import alpa
from alpa.runtime import WorkerError

SOON = 120.0  # seconds; a machine with much else to do takes more than 30
KINDS = ("starting", "in a step", "saving")


def descendants(root: int) -> dict[int, str]:
    """The processes below one, by their ids, and their names."""
    listed = subprocess.run(
        ["ps", "-ww", "-eo", "pid=,ppid=,stat=,args="], check=True, capture_output=True, text=True
    ).stdout
    rows = [line.split(None, 3) for line in listed.splitlines()]
    alive = {int(r[0]): (int(r[1]), r[3]) for r in rows if len(r) == 4 and r[2][0] != "Z"}
    found: dict[int, str] = {}
    below = [root]
    while below:
        parent = below.pop()
        for pid, (its_parent, name) in alive.items():
            if its_parent == parent and pid not in found:
                found[pid] = name
                below.append(pid)
    return found


def report(figure: str) -> None:
    """Prints a figure of docs/figures.md for those who run pytest with `-s`."""
    print(figure)  # noqa: T201  Nothing but the test knows the figure.


def workers() -> list[int]:
    """The processes of this process's workers."""
    return [pid for pid, name in descendants(os.getpid()).items() if name.startswith("ray::Worker")]


class Killer(threading.Thread):
    """Kills one of the new workers, some seconds after an event."""

    def __init__(
        self, when: Callable[[], bool], delay: float, draw: random.Random, before: set[int]
    ) -> None:
        super().__init__(daemon=True)
        self._when, self._delay, self._draw, self._before = when, delay, draw, before
        self.killed_at: float | None = None
        self._given_up = threading.Event()

    def run(self) -> None:
        while not self._when():
            if self._given_up.wait(0.002):
                return
        if self._given_up.wait(self._delay):
            return
        # Workers of earlier programs may still be ending.
        victims = sorted(set(workers()) - self._before)
        os.kill(self._draw.choice(victims), signal.SIGKILL)
        self.killed_at = time.monotonic()

    def give_up(self) -> None:
        self._given_up.set()
        self.join()


class Run:
    """A training that saves each step, and its losses by step."""

    def __init__(self, training: Any, directory: Path) -> None:
        self.directory = directory / "checkpoints"
        self.losses: dict[int, float] = {}
        self.doing, self.steps = "", 0
        self.state: Any = None
        training.workers = replace(training.workers, cache_directory=str(directory / "cache"))
        self._training = training
        self._step = training.parallelize("ray")

    def train(self, until: int) -> None:
        self.doing, self.steps, self.state = "starting", 0, None
        init, batch = self._training.init, self._training.batch
        number, state = alpa.resume(self.directory, init, self._step, batch(0))
        while number < until:
            self.doing = "in a step"
            state, loss = self._step(state, batch(number))
            self.state = state
            seen = self.losses.setdefault(number, float(loss))
            assert seen == float(loss)  # a repeated step gives the same loss
            number += 1
            self.doing = "saving"
            alpa.save(self.directory, number, state, keep=2)
            self.steps += 1

    def continued(self) -> Any:
        """The result of another step after the last one."""
        return self._step(self.state, self._training.batch(len(self.losses)))

    def train_until_killed(self, kind: str, draw: random.Random) -> float:
        """Seconds from the death of a worker to the error."""
        before, steps = set(workers()), draw.randrange(2)
        self.doing = "starting"  # no longer the result at the end of the last training
        when: dict[str, tuple[Callable[[], bool], float]] = {
            "starting": (lambda: bool(set(workers()) - before), 4.0),
            "in a step": (lambda: self.doing == kind and self.steps >= steps, 0.02),
            "saving": (lambda: self.doing == kind and self.steps >= steps, 0.04),
        }
        condition, longest = when[kind]
        killer = Killer(condition, draw.uniform(0, longest), draw, before)
        killer.start()
        try:
            with pytest.raises(WorkerError) as caught:
                self.train(until=len(self.losses) + 200)  # long before the loss is noticed
            heard = time.monotonic()
        finally:
            killer.give_up()
        assert killer.killed_at is not None
        message = str(caught.value)
        assert re.match(r"mesh_[01] on host [01] has died .*alpa\.resume.*Ray says: .", message)
        if self.state is not None:  # it is lost, and no workers are started for it
            with pytest.raises(WorkerError, match="stopped, load it again: mesh_"):
                self.continued()
        assert_gone(set(workers()) - before)
        return heard - killer.killed_at


def assert_gone(processes: set[int], within: float = SOON) -> None:
    """Waits, for some seconds at most, until processes have ended."""
    begin = time.monotonic()
    while left := [pid for pid in processes if alive(pid)]:
        assert time.monotonic() - begin < within, left
        time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] != "Z"


def assert_training_survives(
    training: Any, directory: Path, kinds: Sequence[str], seed: int
) -> list[float]:
    """Kills a worker for each kind; returns the seconds until that was noticed."""
    draw = random.Random(seed)
    run = Run(training, directory)
    seconds = [run.train_until_killed(kind, draw) for kind in kinds]
    run.train(until=len(run.losses) + 1)
    local = training.parallelize()
    state = alpa.create_state(training.init, local, training.batch(0))
    _, expected = training.run(local, state, range(len(run.losses)))
    assert [run.losses[n] for n in range(len(run.losses))] == expected
    return seconds


@pytest.mark.usefixtures("ray_cluster")
def test_a_worker_is_killed(training: Any, tmp_path: Path) -> None:
    assert_training_survives(training, tmp_path, ["in a step"], seed=0)


@pytest.mark.usefixtures("ray_cluster")
def test_workers_that_hang_are_ended(training: Any, tmp_path: Path) -> None:
    """The error names the expired timeout, and the workers are gone though they do not listen."""
    training.workers = replace(training.workers, checkpoint_timeout_seconds=1.0)
    before = set(workers())
    step = training.parallelize("ray")
    state = alpa.create_state(training.init, step, training.batch(0))
    state, loss = step(state, training.batch(0))
    assert np.isfinite(float(loss))
    mine = set(workers()) - before
    assert len(mine) == 2
    for pid in mine:
        os.kill(pid, signal.SIGSTOP)
    late = r"no answer while it wrote a checkpoint for 1 s; .* larger checkpoint_timeout_seconds"
    with pytest.raises(WorkerError, match=late):
        alpa.save(tmp_path, 1, state)
    assert alpa.latest_step(tmp_path) is None
    assert_gone(mine)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_worker_is_killed_at_20_moments(training: Any, tmp_path: Path) -> None:
    kinds = [KINDS[n % len(KINDS)] for n in range(20)]
    seconds = assert_training_survives(training, tmp_path, kinds, seed=1)
    report(f"20 deaths noticed within {max(seconds):.2f} s")


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_worker_hangs(training: Any, tmp_path: Path) -> None:
    """It is stopped, like a process that waits for a dead file system."""
    training.workers = replace(training.workers, timeout_seconds=15)
    before = set(workers())  # an earlier test may have left some to be collected
    run = Run(training, tmp_path)
    run.train(until=2)
    mine = set(workers()) - before
    os.kill(min(mine), signal.SIGSTOP)
    with pytest.raises(WorkerError, match=r"no answer in a step for 15 s; .* timeout_seconds"):
        float(run.continued()[1])
    assert_gone(mine)
    run.train(until=4)


SAVING = """
    import sys
    import jax.numpy as jnp
    import alpa
    for step in range(1, 1000):
        state = {name: jnp.full((64, 1024), float(step)) for name in "abcdefgh"}
        alpa.save(sys.argv[1], step, state, keep=2)
        print(step, flush=True)
"""


def assert_checkpoint_survives(directory: Path, draw: random.Random) -> int:
    """Kills a saving process; returns the step of the checkpoint that exists afterwards."""
    code = textwrap.dedent(SAVING)
    child = subprocess.Popen(
        [sys.executable, "-c", code, directory], stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    with child:
        assert child.stdout.readline() == "1\n"
        time.sleep(draw.uniform(0, 0.5))
        child.kill()
        last = max((int(line) for line in child.stdout.read().split()), default=1)
    latest = alpa.latest_step(directory)
    assert latest in (last, last + 1)  # it may have died before it could report that
    state = alpa.restore(directory, lambda: dict.fromkeys("abcdefgh", jnp.zeros((64, 1024))))
    for array in state.values():
        np.testing.assert_array_equal(array, np.full((64, 1024), float(latest), np.float32))
    return latest


def test_a_save_is_interrupted(tmp_path: Path) -> None:
    assert_checkpoint_survives(tmp_path, random.Random(2))


@pytest.mark.slow
def test_a_save_is_interrupted_at_20_moments(tmp_path: Path) -> None:
    draw = random.Random(3)
    steps = [assert_checkpoint_survives(tmp_path / str(n), draw) for n in range(20)]
    report(f"latest steps: {steps}")
    assert len(set(steps)) > 1


TRAINING = """
    import logging, sys
    from pathlib import Path
    import ray
    own = dict(num_cpus=4, num_gpus=0, include_dashboard=False, object_store_memory=200_000_000)
    ray.init(address=sys.argv[3], **own if sys.argv[3] == "local" else {})
    sys.path.insert(0, sys.argv[1])
    from conftest import Training
    import alpa
    training = Training()
    step = training.parallelize("ray")
    directory = Path(sys.argv[2])
    print("starting", flush=True)
    number, state = alpa.resume(directory, training.init, step, training.batch(0))
    print("training", flush=True)
    while True:
        state, loss = step(state, training.batch(number))
        number += 1
        alpa.save(directory, number, state, keep=2)
        print(number, float(loss).hex(), flush=True)
"""


class DriverRun:
    """A driver in a process of its own, which is killed and started again.

    It starts a Ray cluster itself, or joins the one at `address`, which this process has started.
    """

    def __init__(self, directory: Path, address: str = "local") -> None:
        self.directory, self.address = directory / "checkpoints", address
        self.said = directory / "said.txt"
        self.losses: dict[int, str] = {}
        self.started: set[int] = set()

    def kill(self, draw: random.Random, process: str = "", longest: float = SOON) -> float:
        """Starts the driver, and kills it, or a process of its cluster, at a random moment.

        Returns the seconds until the driver and all workers that it started have ended.
        """
        before = descendants(os.getpid())
        command = [sys.executable, "-c", textwrap.dedent(TRAINING), Path(__file__).parent]
        with self.said.open("w") as said:  # a full pipe would stop it
            child = subprocess.Popen(
                [*command, self.directory, self.address], stdout=said, stderr=subprocess.DEVNULL
            )
        with child:
            wait_for = draw.choice(["starting", "training", "training"])
            while wait_for not in self.said.read_text().split():
                assert child.poll() is None
                time.sleep(0.02)
            time.sleep(draw.uniform(0, 8 if wait_for == "starting" else 4))
            above = child.pid if self.address == "local" else os.getpid()
            started = {pid: name for pid, name in descendants(above).items() if pid not in before}
            programs = {Path(name.split()[0]).name: pid for pid, name in started.items()}
            os.kill(programs[process] if process else child.pid, signal.SIGKILL)
            killed_at = time.monotonic()
            child.wait(longest)
            assert_gone({pid for pid, name in started.items() if name.startswith("ray::Worker")})
            seconds = time.monotonic() - killed_at
        if self.address == "local":
            self.started |= set(started)
        for line in self.said.read_text().splitlines():
            if len(line.split()) == 2:
                number, loss = line.split()
                assert self.losses.setdefault(int(number), loss) == loss
        return seconds


@pytest.mark.slow
def test_the_driver_is_killed_at_20_moments(tmp_path: Path) -> None:
    draw = random.Random(4)
    run = DriverRun(tmp_path)
    seconds = [run.kill(draw) for _ in range(20)]
    report(f"all workers ended within {max(seconds):.1f} s; {len(run.losses)} steps")
    assert run.losses
    # Two of Ray's agents wait for a minute for their cluster to come back.
    assert_gone(run.started, within=90)


@pytest.mark.slow
@pytest.mark.parametrize(
    # Training continues until Ray gives up its cluster's server, which it does after a minute.
    ("process", "longest"),
    [("raylet", SOON), ("gcs_server", 60 + SOON)],
)
def test_a_process_of_the_cluster_is_killed_at_20_moments(
    process: str, longest: float, tmp_path: Path
) -> None:
    draw = random.Random(6)
    run = DriverRun(tmp_path)
    seconds = [run.kill(draw, process, longest) for _ in range(20)]
    report(f"all ended within {max(seconds):.1f} s; {len(run.losses)} steps")
    run.kill(draw)  # the resumed training gives the losses of before
    assert run.losses


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_driver_on_a_shared_cluster_is_killed(tmp_path: Path) -> None:
    draw = random.Random(5)
    run = DriverRun(tmp_path, ray.get_runtime_context().gcs_address)
    seconds = [run.kill(draw) for _ in range(5)]
    report(f"all workers ended within {max(seconds):.1f} s; {len(run.losses)} steps")
    assert run.losses
    assert ray.is_initialized()
    assert ray.cluster_resources()["CPU"] == 16
