"""`alpa.parallelize(force=..., hints=...)`: what is forced is so, and steps equal plain JAX."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.dialects import main_function
from alpa.dialects.mpmd_types import MeshTensor
from alpa.runtime.planning import PlanningError

BATCH = {"x": np.arange(16 * 32, dtype=np.float32).reshape(16, 32) / 500}


def state() -> dict[str, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return {
        "v": jax.random.normal(keys[0], (64, 32)) / 8,
        "w": jax.random.normal(keys[1], (32, 64)) / 8,
    }


def train_step(state: dict[str, jax.Array], batch: Any) -> tuple[dict[str, jax.Array], jax.Array]:
    def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
        return jnp.mean((jnp.tanh(batch["x"] @ params["w"]) @ params["v"]) ** 2)

    loss, grads = alpa.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


FORCE = ("state['w'] = [axis1, -]", "layers 0-1 on 1x4 as 2x2")


@pytest.mark.parametrize("how", ["force", "hints"])
def test_what_is_forced_is_so(how: str, tmp_path: Path) -> None:
    hints = tmp_path / "hints"
    hints.write_text("\n".join(FORCE))
    options: dict[str, Any] = {"force": FORCE} if how == "force" else {"hints": hints}
    step = alpa.parallelize(train_step, cluster="cpu:1x4", num_layers=2, **options)
    new, loss = step(state(), BATCH)
    same, expected = jax.jit(train_step)(state(), BATCH)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)
    for name, value in same.items():
        np.testing.assert_allclose(new[name], value, rtol=1e-5, atol=1e-7)
    plan = step.prepare(state(), BATCH).plan
    types = [MeshTensor.from_type(it.type) for it in main_function(plan.module).arguments]
    assert [it.sharding and it.sharding.axis_names for it in types][1] == (("axis1",), ())
    assert [mesh.logical_shape for mesh in plan.meshes] == [(2, 2)]


def test_arguments_have_the_callers_names() -> None:
    step = alpa.parallelize(train_step, cluster="cpu:1x4", force="state['u'] = [-, -]")
    with pytest.raises(PlanningError, match=r"no argument is called state\['u'\]; there are state"):
        step.prepare(state(), BATCH).plan  # noqa: B018


def test_a_plan_is_explained(capsys: pytest.CaptureFixture[str]) -> None:
    step = alpa.parallelize(train_step, cluster="cpu:1x2")
    plan = step.prepare(state(), BATCH).plan
    (explanation,) = plan.explain("state['w']")
    assert capsys.readouterr().out == str(explanation)
    assert explanation.chosen.step_seconds == plan.predicted_step_seconds
    assert {it.choice for it in (*explanation.alternatives, explanation.chosen)} == {
        "[-, -]",
        "[axis0, -]",
        "[-, axis0]",
    }


def test_a_plan_from_a_file_is_not_explained(tmp_path: Path) -> None:
    path = tmp_path / "planned.mlir"
    first = alpa.parallelize(train_step, cluster="cpu:1x2")
    first.prepare(state(), BATCH).plan.save(path)
    again = alpa.parallelize(train_step, cluster="cpu:1x2", plan=path)
    with pytest.raises(ValueError, match=r"was read from .*, and only a search can be asked"):
        again.prepare(state(), BATCH).plan.explain("stage 0")


@pytest.mark.parametrize(
    ("options", "error", "problem"),
    [
        ({"force": "w"}, ValueError, "'w' is no choice"),
        ({"force": 3}, TypeError, "force is 3, of type int"),
        ({"force": [3]}, TypeError, "force is 3, of type int"),
        ({"hints": 3}, TypeError, "hints is 3, of type int"),
        ({"hints": "no/such/file"}, ValueError, "no/such/file: error: No such file"),
    ],
)
def test_options_of_other_types(
    options: dict[str, Any], error: type[Exception], problem: str
) -> None:
    with pytest.raises(error, match=problem):
        alpa.parallelize(train_step, cluster="cpu:1x4", **options)
