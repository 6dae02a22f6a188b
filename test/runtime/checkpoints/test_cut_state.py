"""A state that the plan cuts between meshes is one array on disk, in chunks of its parts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa import passes, runtime
from alpa.runtime import WorkerOptions
from alpa.runtime.checkpoints.manifest import Manifest
from alpa.runtime.cut_array import CutArray

WORKERS = WorkerOptions(cache_directory=None, timeout_seconds=300)


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of gradient descent; the layers are rows of `w`."""

    def loss_fn(w: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, w)
        return jnp.sum(y * y)

    loss, gradient = jax.value_and_grad(loss_fn)(w)
    return w - 0.1 * gradient, loss


def check_parts_go_and_come_back(executor: Any, directory: Path) -> None:
    draw = np.random.default_rng(0).normal
    weights = draw(scale=0.3, size=(4, 16, 16)).astype(np.float32)
    batch = draw(size=(8, 16)).astype(np.float32)
    lowered = jax.jit(step, donate_argnums=0).lower(weights, batch)
    options = "cluster=cpu:1x4 num-layers=4 num-stages=2"
    planned = passes.run(lowered.as_text(), f"alpa{{{options}}}")
    executable = runtime.load(planned, executor=executor, workers=WORKERS)
    state, _ = executable(weights, batch)
    assert isinstance(state, CutArray)
    expected = np.asarray(state)
    folder = alpa.save(directory, 1, {"w": state})
    entry = Manifest.read(folder).arrays["state.w"]
    assert entry.shape == (4, 16, 16)
    assert len(state.parts) > 1
    assert entry.chunk[0] < 4  # both meshes write no chunk in common
    (restored,) = executable.restore([0], [entry.at(folder, "state.w")])
    assert isinstance(restored, CutArray)
    assert list(restored.parts) == list(state.parts)
    np.testing.assert_array_equal(restored, expected)
    _, after = executable(restored, batch)
    _, loss = step(expected, batch)
    assert float(after) == pytest.approx(float(loss), rel=1e-4)


def test_parts_go_and_come_back(tmp_path: Path) -> None:
    check_parts_go_and_come_back("local", tmp_path)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_parts_go_and_come_back_in_workers(tmp_path: Path) -> None:
    check_parts_go_and_come_back("ray", tmp_path)
