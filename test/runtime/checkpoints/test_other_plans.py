"""A checkpoint of the tiny GPT, taken on two meshes of four, continues under other plans."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax
import pytest

import alpa
from alpa.runtime import CheckpointError, WorkerOptions
from alpa.runtime.checkpoints.manifest import Manifest
from alpa.tools import zoo

pytestmark = pytest.mark.usefixtures("ray_cluster")

PROGRAM = zoo.get("gpt-tiny", optimizer="sgd")
WORKERS = WorkerOptions(cache_directory=None, timeout_seconds=120)
STEPS = 2  # before the checkpoint, and after it


def parallelize(executor: str, cluster: str, mesh_shape: str) -> Any:
    return alpa.parallelize(
        PROGRAM.train_step,
        cluster=cluster,
        mesh_shape=mesh_shape,
        inter="equal-layers",
        schedule="gpipe",
        num_micro_batches=2,
        executor=executor,
        workers=WORKERS if executor == "ray" else None,
    )


def losses(step: Any, state: Any) -> tuple[Any, list[float]]:
    found: list[float] = []
    for _ in range(STEPS):
        state, loss = step(state, PROGRAM.random_batch(1, 8))
        found.append(float(loss))
    return state, found


def assert_continues(directory: Path, plans: list[tuple[str, str, str]]) -> None:
    batch = PROGRAM.random_batch(1, 8)
    step = parallelize("ray", "cpu:2x4", "2x2")
    meshes = step.prepare(PROGRAM.init_state(0), batch).plan.meshes
    assert [len(mesh.devices) for mesh in meshes] == [4, 4]
    state, before = losses(step, PROGRAM.init_state(0))
    alpa.save(directory, STEPS, state)
    _, expected = losses(step, state)
    assert expected[-1] < before[0]
    check_damage_is_survived(step, state, directory)
    step.executable(state, batch).close()
    for executor, cluster, mesh_shape in plans:
        other = parallelize(executor, cluster, mesh_shape)
        state = alpa.restore(directory, lambda: PROGRAM.init_state(0), other, batch)
        _, found = losses(other, state)
        bound = 1e-5 * max(expected)
        assert max(abs(a - b) for a, b in zip(found, expected, strict=True)) <= bound, cluster
        if executor == "ray":
            other.executable(state, batch).close()


def check_damage_is_survived(step: Any, state: Any, directory: Path) -> None:
    """A worker rejects a flipped bit, and continues with its state."""
    copy = directory / str(STEPS + 1)
    shutil.copytree(directory / str(STEPS), copy)
    manifest = Manifest.read(copy)
    Manifest(step=STEPS + 1, arrays=manifest.arrays).write(copy)
    chunk = max((path for path in copy.rglob("c/**/*") if path.is_file()), key=size)
    content = bytearray(chunk.read_bytes())
    content[len(content) // 2] ^= 1
    chunk.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"mesh_[01] on host [01]: cannot read .*Digest"):
        alpa.restore(directory, lambda: PROGRAM.init_state(0), step, PROGRAM.random_batch(1, 8))
    losses(step, state)
    shutil.rmtree(copy)


def size(path: Path) -> int:
    return path.stat().st_size


@pytest.mark.parametrize(
    "plan",
    [
        ("cpu:2x2", "1x2"),
        pytest.param(("cpu:4x2", "1x2"), marks=pytest.mark.slow),
        pytest.param(("cpu:1x8", "2x4"), marks=pytest.mark.slow),
    ],
)
def test_other_meshes_and_the_local_executor(tmp_path: Path, plan: tuple[str, str]) -> None:
    assert jax.device_count() == 8
    assert_continues(tmp_path, [("local", *plan)])


@pytest.mark.slow
def test_other_meshes_in_workers(tmp_path: Path) -> None:
    plans = [("cpu:1x8", "2x4"), ("cpu:4x2", "1x2"), ("cpu:2x4", "1x4")]
    assert_continues(tmp_path, [("ray", *plan) for plan in plans] + [("local", *plans[2])])
