"""Ctrl-C leaves the state of a step as it was, or says that it is lost; the rest can be used."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
import alpa.runtime
from alpa.runtime import WorkerOptions
from alpa.runtime.interpreter import Interpreter
from alpa.runtime.interrupts import held_back
from test.processes import ended_on_failure

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
LOST = (
    r"was donated to a step that was interrupted, and is lost; restore it from a checkpoint "
    r"\(alpa\.resume\), or create it again"
)
WORKERS = WorkerOptions(cache_directory=None, timeout_seconds=300)


def train(w: Any, x: Any) -> Any:
    return w - 0.1 * alpa.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)


def weights() -> jax.Array:
    return jnp.full((6, 3), 0.5)


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(np.asarray(found), np.asarray(expected), rtol=1e-5)


def parallelized(**options: Any) -> Any:
    return alpa.parallelize(train, cluster="cpu:1x2", batch_argnums=1, donate_argnums=0, **options)


def test_a_state_that_a_step_has_not_used_yet_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    step = parallelized()
    w = step(weights(), X)

    def interrupted(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Interpreter, "run", interrupted)
        with pytest.raises(KeyboardInterrupt):
            step(w, X)
    assert_close(step(w, X), train(train(weights(), X), X))


@pytest.fixture
def after_its_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Steps in this process are interrupted once they have used their arguments."""
    run = Interpreter.run

    def interrupted(*args: Any, **options: Any) -> None:
        run(*args, **options)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Interpreter, "run", interrupted)
        yield patch


def test_a_state_that_a_step_has_used_is_lost(after_its_run: pytest.MonkeyPatch) -> None:
    step = parallelized()
    evaluate = alpa.parallelize(lambda w, x: jnp.sum(x @ w), like=step, batch_argnums=1)
    w = weights()
    with pytest.raises(KeyboardInterrupt) as interrupt:
        step(w, X)
    (note,) = interrupt.value.__notes__
    assert note.startswith("The state was donated to a step that was interrupted, and is lost")
    after_its_run.undo()
    for function in (step, evaluate):
        with pytest.raises(RuntimeError, match=rf"^Array has been deleted with .*: w {LOST}"):
            function(w, X)
    assert_close(step(weights(), X), train(weights(), X))


def test_a_state_of_a_loaded_program_is_lost(after_its_run: pytest.MonkeyPatch) -> None:
    step = alpa.runtime.load(parallelized().prepare(weights(), X).plan.module)
    w = weights()
    with pytest.raises(KeyboardInterrupt):
        step(w, X)
    after_its_run.undo()
    with pytest.raises(RuntimeError, match=rf"argument 0 {LOST}"):
        step(w, X)
    assert_close(step(weights(), X)[0], train(weights(), X))


def test_an_interrupt_is_held_back() -> None:
    reached: list[str] = []

    def section() -> None:
        with held_back():
            signal.raise_signal(signal.SIGINT)
            reached.append("the end")
        reached.append("after it")

    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        section()
    assert reached == ["the end"]
    assert signal.getsignal(signal.SIGINT) is before


def check_training(executor: str, rounds: int) -> None:
    """Interrupts a training several times, the first time while it plans or starts workers."""
    script = Path(__file__).with_name("interrupted_training.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("XLA_FLAGS", None)
    environment.pop("RAY_ADDRESS", None)
    with (
        subprocess.Popen(
            [sys.executable, script, executor, str(rounds)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
            start_new_session=True,
        ) as process,
        ended_on_failure(process),
    ):
        assert process.stdout is not None
        lost = 0
        for number in range(rounds):
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.5 + 0.013 * number)
            os.killpg(process.pid, signal.SIGINT)  # as a terminal does
            outcome = process.stdout.readline()
            if outcome != "usable\n":
                assert "interrupted" in outcome, outcome
                lost += 1
        out, err = process.communicate(timeout=120)
    assert out == "equal\n", err
    assert process.returncode == 0
    assert lost < rounds, "a state that no step has used is usable"


def test_training_is_interrupted() -> None:
    check_training("local", rounds=8)


@pytest.mark.usefixtures("ray_cluster")
class TestOnRay:
    def test_a_step_is_ordered_from_all_meshes_or_none(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        from alpa.runtime.workers.group import WorkerGroup  # noqa: PLC0415 - it imports Ray

        with parallelized(num_stages=2, executor="ray", workers=WORKERS) as step:
            w = step(weights(), X)
            call = WorkerGroup.call

            def interrupted(group: WorkerGroup, mesh: str, method: str, *arguments: Any) -> Any:
                if method == "step":
                    signal.raise_signal(signal.SIGINT)
                return call(group, mesh, method, *arguments)

            with monkeypatch.context() as patch:
                patch.setattr(WorkerGroup, "call", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    step(w, X)
            with pytest.raises(RuntimeError, match=rf"w {LOST}"):
                step(w, X)
            with pytest.raises(RuntimeError, match=rf"Array has been deleted .* It {LOST}"):
                np.asarray(w)
            w = step(weights(), X)  # in the same workers
            assert_close(step(w, X), train(train(weights(), X), X))

    def test_workers_that_start_are_stopped(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from ray.util.placement_group import placement_group_table  # noqa: PLC0415 - Ray is slow

        from alpa.runtime.workers.group import WorkerGroup  # noqa: PLC0415 - it imports Ray

        def interrupted(_: WorkerGroup) -> str:
            raise KeyboardInterrupt

        def groups() -> list[str]:
            table = placement_group_table()
            return sorted(key for key, group in table.items() if group["state"] != "REMOVED")

        before = groups()
        with parallelized(executor="ray", workers=WORKERS) as step:
            with monkeypatch.context() as patch:
                patch.setattr(WorkerGroup, "_connect", interrupted)
                with pytest.raises(KeyboardInterrupt) as interrupt:
                    step(weights(), X)
            assert groups() == before, interrupt  # which holds the frames
            assert_close(step(weights(), X), train(weights(), X))


@pytest.mark.slow
def test_training_on_ray_is_interrupted() -> None:
    check_training("ray", rounds=8)
