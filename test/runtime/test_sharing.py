"""Functions that share a state are planned for the meshes and shardings that hold it."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa
from alpa.runtime.parallelized import Parallelized
from alpa.runtime.reference import compare

adam = optax.adam(0.01)
# Two meshes of two devices; the evaluation's own search would take one of all devices.
train_on = partial(
    alpa.parallelize,
    cluster="cpu:2x2",
    num_micro_batches=4,
    inter="equal-layers",
    mesh_shape="1x2",
)


def forward(params: Any, x: Any) -> Any:
    for number, layer in enumerate(params):
        if number:
            alpa.mark_layer_boundary()
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return x


def train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        return jnp.mean((forward(params, batch["x"]) - batch["y"]) ** 2)

    loss, grads = alpa.value_and_grad(loss_fn)(state["params"])
    updates, opt = adam.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=shape).astype(np.float32)


def new_state() -> Any:
    params = [{"w": jnp.asarray(normal(64, 64) / 8), "b": jnp.zeros(64)} for _ in range(4)]
    return {"params": params, "opt": adam.init(params)}


def random_batch(samples: int) -> Any:
    return {"x": normal(samples, 64), "y": normal(samples, 64)}


def places(step: Parallelized[..., Any], *arguments: Any) -> dict[str, set[Any]]:
    """By path, the meshes and shardings in which a step takes an argument."""
    prepared = step.prepare(*arguments)
    program = prepared.executable.program
    found: dict[str, set[Any]] = {}
    for argument in program.arguments:
        value = program.values[argument.value]
        path = jax.tree_util.keystr(prepared.step.call.arrays[argument.number].path[1:])
        found.setdefault(path, set()).add((value.mesh, value.dims))
    return found


def test_evaluation_reads_the_state_where_training_leaves_it() -> None:
    train = train_on(train_step)
    batch = random_batch(16)
    state, _ = train(new_state(), batch)
    by_state = places(train, state, batch)
    assert {mesh for held in by_state.values() for mesh, _ in held} == {"mesh_0", "mesh_1"}

    def of_state(state: Any, x: Any) -> Any:
        return forward(state["params"], x)

    def of_params(params: Any, x: Any) -> Any:
        return forward(params, x)

    whole = alpa.parallelize(of_state, like=train)
    part = alpa.parallelize(of_params, like=train, num_micro_batches=2, batch_argnums=1)
    expected = forward(jax.device_get(state["params"]), batch["x"])
    for found in (whole(state, batch["x"]), part(state["params"], batch["x"])):
        (row,) = compare([np.asarray(found)], [np.asarray(expected)])
        assert row.ok
    # State that the evaluation does not read stays in its place, too.
    taken = places(whole, state, batch["x"])
    assert {path: taken[path] for path in by_state if path in taken and path != "['x']"} == {
        path: held for path, held in by_state.items() if path not in ("['x']", "['y']")
    }
    params = places(part, state["params"], batch["x"])
    for path in ("[0]['w']", "[3]['w']", "[3]['b']"):
        assert params[path] == by_state[f"['params']{path}"]


def test_a_program_of_one_layer_leaves_the_other_mesh_idle() -> None:
    train = train_on(train_step)
    state = jax.eval_shape(new_state)
    plan = train.plan(state, random_batch(16))
    norm = alpa.parallelize(lambda state: optax.tree.norm(state["params"]), like=train)
    found = norm.plan(state)
    assert found.meshes == plan.meshes
    assert sorted(len(stage.layers) for stage in found.stages) == [0, 1]
    given = new_state()
    assert float(norm(given)) == pytest.approx(float(optax.tree.norm(given["params"])), rel=1e-4)


def test_new_shapes_keep_the_meshes_of_the_state() -> None:
    train = alpa.parallelize(train_step, cluster="cpu:1x2", num_micro_batches=2)
    state = jax.eval_shape(new_state)
    before = places(train, state, random_batch(64))
    after = places(train, state, random_batch(4))
    assert {path: held for path, held in after.items() if "['params']" in path} == {
        path: held for path, held in before.items() if "['params']" in path
    }


def test_meshes_are_not_given_before_training_is_planned() -> None:
    train = train_on(train_step)
    early = alpa.parallelize(lambda state, x: forward(state["params"], x), like=train)
    plan = early.plan(jax.eval_shape(new_state), random_batch(16)["x"])
    assert len(train.plan(jax.eval_shape(new_state), random_batch(16)).meshes) == 2
    assert len(plan.meshes) == 2  # those of its own settings; mesh_shape is taken
