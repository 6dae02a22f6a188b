"""Workers write a state in the background: they are closed, lost, or the caller exits."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

import alpa
from alpa.runtime import CheckpointError, WorkerError
from alpa.runtime.checkpoints import checkpoint, writing
from alpa.runtime.checkpoints.background import background

pytestmark = pytest.mark.usefixtures("ray_cluster")


def assert_restored(training: Any, directory: Path, step: int, expected: Any) -> None:
    restored = alpa.restore(directory, training.init, step=step)
    for name in ("params", "velocity"):
        for layer, other in zip(restored[name], expected[name], strict=True):
            np.testing.assert_array_equal(layer["w"], other["w"])


def fetched(state: Any) -> Any:
    return {
        name: [{"w": np.asarray(layer["w"])} for layer in state[name]]
        for name in ("params", "velocity")
    }


def test_closing_completes_the_save(training: Any, tmp_path: Path) -> None:
    step = training.parallelize("ray")
    state = alpa.create_state(training.init, step, training.batch(0))
    expected = fetched(state)
    executable = step.executable(state, training.batch(0))
    alpa.save(tmp_path, 1, state, wait=False)
    executable.close()
    assert (tmp_path / "1").is_dir()
    alpa.wait_for_saves()
    assert_restored(training, tmp_path, 1, expected)


@pytest.mark.slow
@pytest.mark.parametrize("noticed_by", ["the save", "a step"])
def test_a_worker_is_killed_before_it_has_written_its_copy(
    noticed_by: str, training: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    step, batch = training.parallelize("ray"), training.batch(0)
    state = alpa.create_state(training.init, step, batch)
    expected = fetched(state)
    alpa.save(tmp_path, 1, state)
    # What `save` does with `wait=False`, with the loss at the worst moment.
    finish = writing.copy(tmp_path / "2", 2, checkpoint._leaves(state))
    group: Any = state["count"]._group
    ray.kill(group._actors[0])
    if noticed_by == "a step":
        with pytest.raises(WorkerError):
            float(step(state, batch)[1])
    background().start(tmp_path / "2", finish)
    if noticed_by == "the save":
        with pytest.raises(WorkerError, match=r"mesh_. on host . has died .*alpa\.resume") as error:
            alpa.wait_for_saves()
        assert error.value.__notes__ == [
            f"This happened in the background, while {tmp_path / '2'} was saved."
        ]
        # As a worker may still write until its process has ended.
        (tmp_path / "2.orbax-checkpoint-tmp" / "late").mkdir(parents=True, exist_ok=True)
    with caplog.at_level(logging.ERROR):
        number, resumed = alpa.resume(tmp_path, training.init, step, batch)
    assert number == 1
    assert [it.name for it in tmp_path.iterdir()] == ["1"]
    assert (f"while {tmp_path / '2'} was saved" in caplog.text) is (noticed_by == "a step")
    assert_restored(training, tmp_path, 1, fetched(resumed))
    assert_restored(training, tmp_path, 1, expected)
    alpa.save(tmp_path, 2, resumed, wait=False)
    assert alpa.latest_step(tmp_path) == 2


ENDS = """
    import sys
    import ray
    ray.init(address=sys.argv[3])
    sys.path.insert(0, sys.argv[1])
    from conftest import Training
    import alpa
    def main():
        training = Training()
        step = training.parallelize("ray")
        state = alpa.create_state(training.init, step, training.batch(0))
        alpa.save(sys.argv[2], 1, state, wait=False)
        state, loss = step(state, training.batch(0))
        print(float(loss).hex())
    main()
"""


@pytest.mark.slow
def test_the_caller_exits(training: Any, tmp_path: Path) -> None:
    """Nothing but the save refers to the workers. The interpreter waits for it before Ray ends."""
    code, address = textwrap.dedent(ENDS), ray.get_runtime_context().gcs_address
    done = subprocess.run(
        [sys.executable, "-c", code, Path(__file__).parent, tmp_path, address],
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert [it.name for it in tmp_path.iterdir()] == ["1"]
    local = training.parallelize()
    state = alpa.create_state(training.init, local, training.batch(0))
    assert_restored(training, tmp_path, 1, state)
    _, loss = local(state, training.batch(0))
    assert float(loss).hex() == done.stdout.split()[-1]


@pytest.mark.slow
def test_workers_free_their_copies(training: Any, tmp_path: Path) -> None:
    step, batch = training.parallelize("ray"), training.batch(0)
    state = alpa.create_state(training.init, step, batch)
    folder = tmp_path / "2.orbax-checkpoint-tmp"
    finish = writing.copy(tmp_path / "2", 2, checkpoint._leaves(state))
    (folder / "state.count" / "zarr.json").mkdir(parents=True)
    with pytest.raises(CheckpointError, match=r"cannot write .*state\.count"):
        finish()
    assert list(tmp_path.iterdir()) == []
    state, _ = step(state, batch)  # The workers live.
    array = state["params"][0]["w"]
    copies = array.keeper.copy([array])
    copies.drop()
    with pytest.raises(WorkerError, match="KeyError"):
        copies.write([None])
