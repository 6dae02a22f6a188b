"""`alpa.parallelize` on Ray actors computes what plain JAX does."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ray.util.placement_group import placement_group_table

import alpa
from alpa.runtime import WorkerOptions
from alpa.runtime.planning import PlanningError
from alpa.runtime.reference import compare
from alpa.runtime.workers.remote_array import RemoteArray

pytestmark = pytest.mark.usefixtures("ray_cluster")

WORKERS = WorkerOptions(cache_directory=None, timeout_seconds=300)
adam = optax.adam(0.01)
# Two meshes of two devices each.
two_stages = partial(
    alpa.parallelize,
    cluster="cpu:2x2",
    inter="equal-layers",
    mesh_shape="1x2",
    executor="ray",
    workers=WORKERS,
)


def init() -> dict[str, Any]:
    orthogonal = jax.nn.initializers.orthogonal()
    params = [{"w": orthogonal(jax.random.key(n), (16, 16)), "b": jnp.zeros(16)} for n in range(4)]
    return {"params": params, "opt_state": adam.init(params), "key": jax.random.key(7)}


def loss_fn(params: Any, batch: Any, key: Any = None) -> Any:
    x = batch["x"]
    for number, layer in enumerate(params):
        if number == 2:
            alpa.mark_layer_boundary()
        x = jnp.tanh(x @ layer["w"] + layer["b"])
        if key is not None:
            keep = jax.random.bernoulli(jax.random.fold_in(key, number), 0.9, (1, 16))
            x = jnp.where(keep, x / 0.9, 0)
    return jnp.mean((x - batch["y"]) ** 2)


def train_step(state: Any, batch: Any) -> Any:
    key, dropout = jax.random.split(state["key"])
    loss, grads = alpa.value_and_grad(loss_fn)(state["params"], batch, dropout)
    updates, opt_state = adam.update(grads, state["opt_state"], state["params"])
    params = optax.apply_updates(state["params"], updates)
    return {"params": params, "opt_state": opt_state, "key": key}, loss


def random_batch(samples: int = 16) -> dict[str, np.ndarray]:
    draw = partial(np.random.default_rng(1).normal, size=(samples, 16))
    return {"x": draw().astype(np.float32), "y": draw().astype(np.float32)}


def assert_close(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    rows = compare([*map(numbers, jax.tree.leaves(a))], [*map(numbers, jax.tree.leaves(b))])
    assert [row for row in rows if not row.ok] == []


def numbers(leaf: Any) -> np.ndarray:
    typed = jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    return np.asarray(jax.random.key_data(leaf) if typed else leaf)


fetch = RemoteArray.fetch


def fetch_of_keys(array: RemoteArray) -> np.ndarray:
    """The only parts of its state that a step may fetch: the words of random keys."""
    assert array.dtype == np.uint32
    return fetch(array)


def groups_of_workers() -> set[str]:
    """The placement groups that Ray holds."""
    groups = placement_group_table()
    return {key for key, group in groups.items() if group["state"] != "REMOVED"}


def test_training_and_evaluation_share_state_and_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = groups_of_workers()
    step = two_stages(train_step, donate_argnums=0)
    evaluate = alpa.parallelize(
        lambda state, batch: loss_fn(state["params"], batch), like=step, batch_argnums=1
    )
    batch, small = random_batch(), random_batch(8)
    ours, theirs = alpa.create_state(init, step, batch), jax.jit(init)()
    assert_close(ours, theirs)
    for given in (batch, batch, small):  # the last one is planned anew
        old = ours
        with monkeypatch.context() as patch:
            patch.setattr(RemoteArray, "fetch", fetch_of_keys)
            ours, loss = step(ours, given)
        theirs, expected = jax.jit(train_step)(theirs, given)
        assert old["params"][0]["w"].is_deleted()
        assert isinstance(loss, RemoteArray)
        assert float(loss) == pytest.approx(float(expected), rel=1e-4)
    assert_close(evaluate(ours, batch), loss_fn(theirs["params"], batch))
    assert len(groups_of_workers() - before) == 1
    weight = ours["params"][3]["w"]
    assert isinstance(weight, RemoteArray)
    assert "mesh_1" in repr(weight)
    assert jax.tree.map(jnp.shape, ours) == jax.tree.map(jnp.shape, theirs)
    fetched = jax.device_get(ours["params"])
    assert all(type(leaf) is np.ndarray for leaf in jax.tree.leaves(fetched))
    assert_close(fetched, theirs["params"])
    norm = optax.tree.norm(ours["params"])  # of arrays on both meshes
    assert float(norm) == pytest.approx(float(optax.tree.norm(theirs["params"])), rel=1e-4)
    w = fetched[3]["w"]
    np.testing.assert_allclose(np.sum(weight) + 2 * weight, np.sum(w) + 2 * w, atol=1e-5)
    held = step.executable(ours, batch).held_bytes()
    # Each mesh holds its own of four layers and two moments, at most once on each device.
    assert sum(held.values()) <= 2 * 4 * 3 * 4 * (16 * 16 + 16) + 64


def test_the_first_program_on_two_hosts(caplog: pytest.LogCaptureFixture) -> None:
    """A plan without any other option is one that the workers can run."""

    def train_step(weights: Any, x: Any) -> Any:
        def loss_fn(weights: Any) -> Any:
            return jnp.mean(jnp.tanh(jnp.tanh(x @ weights[0]) @ weights[1]) ** 2)

        loss, grads = alpa.value_and_grad(loss_fn)(weights)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads), loss

    step = alpa.parallelize(train_step, cluster="cpu:2x4", executor="ray", workers=WORKERS)
    state = [0.1 * jnp.eye(16), jnp.full((16, 16), 0.1)]
    batch = random_batch()["x"]
    with step, caplog.at_level("WARNING", "alpa"):
        found, loss = step(state, batch)
        expected, expected_loss = jax.jit(train_step)(state, batch)
        assert_close(found, expected)
        assert_close(loss, expected_loss)
        meshes = step.executable(state, batch).program.meshes
    if jax.__version_info__ < (0, 12):
        assert [mesh.hosts for mesh in meshes] == [(0,), (1,)]
        reason = f"need jax 0.12 for a mesh over several hosts, this is {jax.__version__}"
        assert "train_step is planned without meshes over several hosts" in caplog.text
        assert reason in caplog.text
        (dropped,) = step.prepare(state, batch).plan.dropped
        assert dropped.what == "every mesh over several hosts"


def test_nothing_is_said_of_meshes_over_hosts_if_none_could_be(
    caplog: pytest.LogCaptureFixture,
) -> None:
    two = alpa.parallelize(
        train_step, cluster="cpu:2x4", num_stages=2, executor="ray", workers=WORKERS
    )
    with caplog.at_level("WARNING", "alpa"):
        assert two.prepare(jax.eval_shape(init), random_batch()).plan.dropped == ()
    assert caplog.text == ""


@pytest.mark.skipif(jax.__version_info__ >= (0, 12), reason="meshes may span CPU hosts")
def test_one_mesh_over_two_hosts_is_refused_before_workers_start() -> None:
    before = groups_of_workers()
    one = alpa.parallelize(
        train_step, cluster="cpu:2x4", inter="none", executor="ray", workers=WORKERS
    )
    with pytest.raises(PlanningError) as refused:
        one.plan(jax.eval_shape(init), random_batch())
    assert "2 hosts need at least 2 stages, and num-stages is 1" in str(refused.value)
    assert "note: CPU devices need jax 0.12 for a mesh over several hosts" in str(refused.value)
    assert groups_of_workers() == before


def test_arrays_of_other_meshes_are_sent() -> None:
    """The evaluation is on one mesh of two devices: it has workers of its own."""
    params, x = init()["params"], random_batch()["x"]
    double = alpa.parallelize(
        lambda params: jax.tree.map(lambda a: 2 * a, params),
        cluster="cpu:1x1",
        executor="ray",
        workers=WORKERS,
    )
    forward = alpa.parallelize(
        lambda params, x: jnp.tanh(x @ params[0]["w"]),
        cluster="cpu:1x2",
        executor="ray",
        workers=WORKERS,
    )
    before = groups_of_workers()
    doubled = double(params)
    assert_close(forward(doubled, x), jnp.tanh(x @ (2 * params[0]["w"])))
    assert len(groups_of_workers() - before) == 2
    del double, forward, doubled
    assert groups_of_workers() == before
