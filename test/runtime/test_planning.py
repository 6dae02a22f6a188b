"""Planning goes on where a mesh has no room for its stage."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa import passes
from alpa.passes.stages.options import Option
from alpa.runtime.planning import Clock, Planned, PlanningError, Settings, plan_clustered

WIDTH, ROWS, LAYERS = 128, 64, 6


def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss(params: list[jax.Array]) -> jax.Array:
        h = x
        for w in params:
            h = jnp.tanh(h @ w)
        return jnp.mean(h**2)

    value, grads = jax.value_and_grad(loss)(params)
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value


def planned(cluster: Path) -> Planned:
    params = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32)
    text = jax.jit(step, donate_argnums=0).lower(params, x).as_text()
    text = text.replace("tensor<f32> {jax", 'tensor<f32> {alpa.result = "mean", jax')
    settings = Settings(cluster=str(cluster), num_micro_batches=6, schedule="gpipe", mesh_shape="1")
    layers = passes.run(text, f"simplify-trivial-ops,layer-cluster{{num-layers={LAYERS}}}")
    return plan_clustered(layers, settings, Clock())


@pytest.fixture
def hopeful(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stages are cut as if devices had more memory than they have."""
    exact = Option.max_in_flight

    def fitting(option: Option, memory: float) -> np.ndarray:
        return exact(option, 1.25 * memory)

    monkeypatch.setattr(Option, "max_in_flight", fitting)


@pytest.mark.usefixtures("hopeful")
def test_stages_that_do_not_fit_are_cut_again(small_cluster: Callable[..., Path]) -> None:
    found = planned(small_cluster("1400KiB", devices=2))
    assert max(found.plan.predicted_peak_bytes) <= 1400 * 1024
    said = [remark.message for remark in found.remarks]
    assert said
    reason = r"needs at least \S+ MiB per device on mesh_\d, small has 1.37 MiB"
    for message in said:
        again = r": stages are cut again with reserve=0\.\d+"
        assert re.fullmatch(reason + again, message)
    shares = [float(message.rpartition("=")[2]) for message in said]
    assert all(1.95 * a <= b for a, b in pairwise(shares))


@pytest.mark.usefixtures("hopeful")
def test_where_no_cut_fits_the_first_answer_is_given(small_cluster: Callable[..., Path]) -> None:
    with pytest.raises(PlanningError) as raised:
        planned(small_cluster("1000KiB", devices=2))
    message = raised.value.diagnostics[0].message
    assert "needs at least 1.09 MiB per device on mesh_0, small has 0.977 MiB" in message
    assert "with a larger reserve" in message


def test_what_fits_is_cut_once(small_cluster: Callable[..., Path]) -> None:
    assert not planned(small_cluster("1480KiB", devices=2)).remarks
