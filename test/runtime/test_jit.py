from __future__ import annotations

import gc
import inspect
import io
import json
import logging
import pickle
import weakref
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import alpa
from alpa.dialects import ir
from alpa.runtime import LoadError
from alpa.runtime.jit import Options
from alpa.runtime.planning import PlanningError
from alpa.runtime.prepared import PlanMismatchError
from alpa.runtime.reference import compare

# Two meshes of one device each unless a test says otherwise; markers say where the models part.
two_stages = partial(alpa.parallelize, cluster="cpu:2x1", inter="equal-layers", mesh_shape="1x1")


def assert_close(a: Any, b: Any) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    rows = compare([*map(plain, jax.tree.leaves(a))], [*map(plain, jax.tree.leaves(b))])
    assert [row for row in rows if not row.ok] == []


def plain(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return np.asarray(jax.random.key_data(leaf))
    return np.asarray(leaf)


def mlp_params(width: int = 16) -> list[dict[str, Any]]:
    generator = np.random.default_rng(0)
    return [
        {
            "w": jnp.asarray(generator.normal(size=(width, width)) * width**-0.5, jnp.float32),
            "b": jnp.zeros(width),
        }
        for _ in range(4)
    ]


def mlp(params: Any, x: Any, rate: Any = 0.0, key: Any = None) -> Any:
    for number, layer in enumerate(params):
        if number == 2:
            alpa.mark_layer_boundary()
        x = jnp.tanh(x @ layer["w"] + layer["b"])
        if key is not None:
            keep = jax.random.bernoulli(jax.random.fold_in(key, number), 1 - rate, x.shape)
            x = jnp.where(keep, x / (1 - rate), 0)
    return x


def mlp_loss(params: Any, batch: Any) -> Any:
    return jnp.mean((mlp(params, batch["x"]) - batch["y"]) ** 2)


def random_batch(samples: int = 16, width: int = 16, seed: int = 1) -> dict[str, Any]:
    generator = np.random.default_rng(seed)
    draw = partial(generator.normal, size=(samples, width))
    return {"x": draw().astype(np.float32), "y": draw().astype(np.float32)}


clipped = optax.chain(
    optax.clip_by_global_norm(0.1),
    optax.sgd(optax.cosine_decay_schedule(0.1, 100), momentum=0.9),
)


def train_step(state: Any, batch: Any) -> Any:
    params, opt_state = state
    loss, grads = alpa.value_and_grad(mlp_loss)(params, batch)
    updates, opt_state = clipped.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def new_state() -> Any:
    params = mlp_params()
    return params, clipped.init(params)


def test_steps_of_a_clipped_schedule_are_those_of_jax() -> None:
    step = two_stages(train_step, cluster="cpu:2x4", mesh_shape="2x2", num_micro_batches=4)
    batch, ours, theirs = random_batch(), new_state(), new_state()
    for _ in range(3):
        ours, loss = step(ours, batch)
        theirs, expected = jax.jit(train_step)(theirs, batch)
        assert_close(loss, expected)
    assert_close(ours, theirs)
    executable = step.executable(ours, batch)
    assert len(executable.program.meshes) == 2
    assert executable.plan.num_micro_batches == 4


def test_markers_change_nothing_under_plain_jax() -> None:
    def unmarked(params: Any, batch: Any) -> Any:
        h = batch["x"]
        for layer in params:
            h = jnp.tanh(h @ layer["w"] + layer["b"])
        return jnp.mean((h - batch["y"]) ** 2)

    params, batch = mlp_params(), random_batch()
    expected = jax.jit(jax.value_and_grad(unmarked))(params, batch)
    found = jax.jit(alpa.value_and_grad(mlp_loss))(params, batch)
    assert jax.tree.all(jax.tree.map(lambda a, b: np.array_equal(a, b), found, expected))
    grads, aux = alpa.grad(lambda p: (mlp_loss(p, batch), 7), has_aux=True)(params)
    assert_close(grads, expected[1])
    assert aux == 7
    hessian = jax.jit(jax.jacfwd(alpa.grad(lambda x: jnp.sum(jnp.sin(x)))))(jnp.ones(3))
    assert_close(hessian, -np.eye(3, dtype=np.float32) * np.sin(np.float32(1)))
    assert jax.vmap(alpa.grad(jnp.sin))(jnp.zeros(3)).tolist() == [1, 1, 1]


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        x = nn.BatchNorm(use_running_average=not train)(nn.Dense(16, use_bias=False)(x))
        return nn.Dropout(0.25, deterministic=not train)(nn.tanh(x))


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool = True) -> Any:
        x = Block()(x, train)
        alpa.mark_layer_boundary()
        return nn.Dense(4)(Block()(x, train))


class FlaxState(TrainState):
    key: Any
    batch_stats: Any


def flax_loss(params: Any, stats: Any, key: Any, batch: Any) -> Any:
    logits, new = Classifier().apply(
        {"params": params, "batch_stats": stats},
        batch["x"],
        rngs={"dropout": key},
        mutable=["batch_stats"],
    )
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean()
    right = jnp.sum(jnp.argmax(logits, -1) == batch["label"])
    return loss, (new["batch_stats"], logits, right)


def flax_state(key: Any) -> FlaxState:
    variables = Classifier().init(jax.random.key(0), jnp.zeros((2, 8)), train=False)
    return FlaxState.create(
        apply_fn=Classifier().apply,
        params=variables["params"],
        tx=optax.sgd(0.1),
        key=key,
        batch_stats=variables["batch_stats"],
    )


def flax_step(state: FlaxState, batch: Any) -> Any:
    key, dropout = jax.random.split(state.key)
    value_and_grad = alpa.value_and_grad(flax_loss, has_aux=True)
    (loss, aux), grads = value_and_grad(state.params, state.batch_stats, dropout, batch)
    stats, logits, right = aux
    state = state.apply_gradients(grads=grads, batch_stats=stats, key=key)
    return state, {"loss": loss, "logits": logits, "right": right}


def by_micro_batches(state: FlaxState, batch: Any, count: int) -> Any:
    """`flax_step` with several micro-batches: each has its own folded key."""
    losses, logits, rights, sums, stats = [], [], [], None, state.batch_stats
    for m in range(count):
        part = jax.tree.map(lambda a, m=m: jnp.split(a, count)[m], batch)
        _, dropout = jax.random.split(jax.random.fold_in(state.key, m))
        value_and_grad = jax.value_and_grad(flax_loss, has_aux=True)
        (loss, aux), grads = value_and_grad(state.params, stats, dropout, part)
        stats = aux[0]
        losses.append(loss)
        logits.append(aux[1])
        rights.append(aux[2])
        sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
    grads = jax.tree.map(lambda g: g / count, sums)
    key, _ = jax.random.split(state.key)
    state = state.apply_gradients(grads=grads, batch_stats=stats, key=key)
    results = {
        "loss": sum(losses) / count,
        "logits": jnp.concatenate(logits),
        "right": sum(rights),
    }
    return state, results


@pytest.mark.parametrize(
    "make_key", [jax.random.key, pytest.param(jax.random.PRNGKey, marks=pytest.mark.slow)]
)
def test_flax_with_dropout_and_batch_norm(make_key: Any) -> None:
    step = two_stages(flax_step, num_micro_batches=2, micro_batches="independent", donate_argnums=0)
    generator = np.random.default_rng(2)
    batch = {
        "x": generator.normal(size=(16, 8)).astype(np.float32),
        "label": generator.integers(4, size=16),
    }
    theirs = flax_state(make_key(3))
    ours = jax.tree.map(jnp.copy, theirs)
    reference = jax.jit(by_micro_batches, static_argnums=2)
    for _ in range(2):
        before = jax.tree.leaves(ours.params)
        ours, found = step(ours, batch)
        theirs, expected = reference(theirs, batch, 2)
        assert_close(found, expected)
    assert_close(ours, theirs)
    assert ours.key.dtype == theirs.key.dtype
    assert all(leaf.is_deleted() for leaf in before)


def test_one_micro_batch_keeps_keys_and_numbers_of_jax() -> None:
    def step(params: Any, key: Any, x: Any) -> Any:
        key, dropout = jax.random.split(key)
        return key, jnp.mean(mlp(params, x, 0.5, dropout), axis=1)

    arguments = mlp_params(), jax.random.key(1), random_batch()["x"]
    found = alpa.parallelize(step, cluster="cpu:1x1")(*arguments)
    assert_close(found, jax.jit(step)(*arguments))


def test_micro_batches_draw_from_folded_keys_and_the_update_from_the_given_one() -> None:
    def loss_fn(w: Any, key: Any, x: Any) -> Any:
        return jnp.mean((jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0) @ w) ** 2)

    def step(w: Any, key: Any, x: Any) -> Any:
        key, dropout, noise = jax.random.split(key, 3)
        loss, grad = alpa.value_and_grad(loss_fn)(w, dropout, x)
        return w - 0.1 * (grad + jax.random.normal(noise, grad.shape)), key, loss

    w, key, x = jnp.ones((4, 4)), jax.random.key(5), random_batch(8, 4)["x"]
    found = alpa.parallelize(step, cluster="cpu:1x1", num_micro_batches=2)(w, key, x)
    parts = [
        jax.value_and_grad(loss_fn)(w, jax.random.split(jax.random.fold_in(key, m), 3)[1], part)
        for m, part in enumerate(np.split(x, 2))
    ]
    loss, grad = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    new_key, _, noise = jax.random.split(key, 3)
    expected = w - 0.1 * (grad + jax.random.normal(noise, grad.shape)), new_key, loss
    assert_close(found, expected)


def test_nnx_state_and_evaluation_share_the_meshes() -> None:
    class Model(nnx.Module):
        def __init__(self, rngs: nnx.Rngs) -> None:
            self.first = nnx.Linear(8, 16, rngs=rngs)
            self.second = nnx.Linear(16, 8, rngs=rngs)

        def __call__(self, x: Any) -> Any:
            x = nnx.tanh(self.first(x))
            alpa.mark_layer_boundary()
            return self.second(x)

    graph, start = nnx.split(Model(nnx.Rngs(0)))
    x = random_batch(8, 8)["x"]

    def loss_fn(state: Any, x: Any) -> Any:
        return jnp.mean((nnx.merge(graph, state)(x) - x) ** 2)

    def step(state: Any, x: Any) -> Any:
        loss, grads = alpa.value_and_grad(loss_fn)(state, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss

    def evaluate(state: Any, x: Any) -> Any:
        return nnx.merge(graph, state)(x), loss_fn(state, x)

    train = two_stages(step, num_micro_batches=2)
    test = alpa.parallelize(evaluate, like=train, num_micro_batches=2)
    state, _ = train(start, x)
    assert_close(test(state, x), evaluate(jax.jit(step)(start, x)[0], x))
    assert test.target.settings == train.target.settings


def test_equinox_model_with_functions_among_its_leaves() -> None:
    eqx = pytest.importorskip("equinox")
    model = eqx.nn.MLP(8, 8, 16, depth=2, activation=jnp.tanh, key=jax.random.key(0))
    optimizer = optax.sgd(0.1, momentum=0.9)
    x = random_batch(8, 8)["x"]

    def step(model: Any, opt_state: Any, x: Any) -> Any:
        def loss_fn(model: Any) -> Any:
            return jnp.mean((jax.vmap(model)(x) - x) ** 2)

        loss, grads = eqx.filter_value_and_grad(loss_fn)(model)
        updates, opt_state = optimizer.update(grads, opt_state)
        return eqx.apply_updates(model, updates), opt_state, loss

    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    expected = eqx.filter_jit(step)(model, opt_state, x)
    found = alpa.parallelize(step, cluster="cpu:1x2", num_micro_batches=2)(model, opt_state, x)
    assert found[0].activation is model.activation
    assert_close(eqx.filter(found, eqx.is_array), eqx.filter(expected, eqx.is_array))


def test_create_state_makes_each_array_where_the_plan_wants_it() -> None:
    def init() -> Any:
        keys = jax.random.split(jax.random.key(0), 4)
        params = [{"w": jax.random.normal(key, (16, 16)), "b": jnp.zeros(16)} for key in keys]
        return params, clipped.init(params)

    step = two_stages(train_step, cluster="cpu:2x2", mesh_shape="1x2", num_micro_batches=2)
    with pytest.raises(ValueError, match="train_step has not been planned for such a state"):
        alpa.create_state(init, step)
    state = alpa.create_state(init, step, random_batch())
    assert_close(state, jax.jit(init)())
    arrays = jax.tree.leaves(state)
    meshes = {frozenset(d.id for d in array.devices()) for array in arrays}
    assert meshes == {frozenset({0, 1}), frozenset({2, 3})}
    step(state, random_batch())
    assert alpa.create_state(init, step)[0][0]["w"].devices() == arrays[0].devices()


def test_create_state_makes_constants_of_every_type() -> None:
    """optax.apply_if_finite begins with `jnp.array(True)`."""

    def init() -> Any:
        numbers = [jnp.array(1, jnp.int8), jnp.array(2.0, jnp.bfloat16), jnp.array(1j), 3, 0.5]
        return {"w": jnp.ones(4), "finite": jnp.array(True), "python": False, "numbers": numbers}

    @alpa.parallelize(cluster="cpu:1x2")
    def step(state: Any, x: Any) -> Any:
        return {**state, "w": state["w"] + x.sum(0)}

    found = alpa.create_state(init, step, np.ones((2, 4), np.float32))
    expected = jax.jit(init)()
    assert_close(found, expected)
    assert jax.tree.map(lambda a: a.dtype, found) == jax.tree.map(lambda a: a.dtype, expected)
    step(found, np.ones((2, 4), np.float32))


def test_decorator_static_arguments_and_keywords() -> None:
    @alpa.parallelize(
        cluster="cpu:1x2", static_argnames="power", batch_argnums="x", num_micro_batches=2
    )
    def step(w: Any, *, x: Any, power: int) -> Any:
        return jnp.sum(x * w, axis=1) ** power

    w, x = jnp.arange(4.0), np.ones((6, 4), np.float32)
    assert step(w, x=x, power=2).tolist() == [36] * 6
    assert step(w, x=x, power=1).tolist() == [6] * 6


def test_a_method_takes_its_object() -> None:
    class Model:
        rate = 0.5

        @alpa.parallelize(cluster="cpu:1x1", static_argnums=0)
        def step(self, w: Any, x: Any) -> Any:
            """Multiplies."""
            return self.rate * w * x

    model, x = Model(), np.ones(4, np.float32)
    assert model.step(2.0, x).tolist() == [1] * 4
    assert Model.step(model, 4.0, x=x).tolist() == [2] * 4
    assert model.step.__doc__ == "Multiplies."
    assert Model.step.plan(model, 2.0, x).num_micro_batches == 1
    for step in (model.step, Model.step):
        like = alpa.parallelize(lambda x: x + 1, like=step)
        assert like.target.family is Model.step.target.family
        assert like(x).tolist() == [2] * 4


def test_a_plan_prints_its_table_and_is_taken_again(
    tmp_path: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    step = alpa.parallelize(train_step, cluster="cpu:1x2", num_micro_batches="auto")
    shapes = jax.eval_shape(new_state)
    batch = random_batch(4)
    plan = step.plan(shapes, batch)
    assert capsys.readouterr().out == str(plan)
    assert str(plan).startswith("plan for cpu:1x2")
    assert "<table>" in plan._repr_html_()
    assert json.loads(plan.to_json())["num_micro_batches"] == plan.num_micro_batches
    plan.save(tmp_path / "planned.mlir")
    again = alpa.parallelize(train_step, cluster="cpu:1x2", plan=tmp_path / "planned.mlir")
    assert_close(again(new_state(), batch), train_step(new_state(), batch))
    other = alpa.parallelize(train_step, cluster="cpu:1x2", plan=tmp_path / "planned.mlir")
    with pytest.raises(PlanMismatchError, match="planned for another program"):
        other.plan(shapes, random_batch(8))


def test_a_plan_that_is_damaged_or_none_is_refused(tmp_path: Any) -> None:
    shapes, batch = jax.eval_shape(new_state), random_batch(4)
    options: dict[str, Any] = {"cluster": "cpu:1x2", "num_micro_batches": 2}
    plan = alpa.parallelize(train_step, **options).prepare(shapes, batch).plan
    path = tmp_path / "planned.mlir"
    plan.save(path)
    text = path.read_text()
    bytecode = io.BytesIO()
    plan.module.operation.write_bytecode(bytecode)

    def refused(data: bytes, error: type[Exception], message: str) -> None:
        path.write_bytes(data)
        step = alpa.parallelize(train_step, **options, plan=path)
        with pytest.raises(error, match=message):
            step.executable(shapes, batch)
        assert path.read_bytes() == data

    def changed(old: str, new: str) -> bytes:
        assert old in text
        return text.replace(old, new, 1).encode()

    refused(text[: len(text) // 2].encode(), ir.MLIRError, "Unable to parse")
    refused(pickle.dumps(text), ir.MLIRError, "Unable to parse")
    refused(bytecode.getvalue(), PlanMismatchError, "is bytecode, but a saved plan must be text")
    refused(b"module {}", LoadError, "no public function")
    refused(changed("alpa.program = ", "alpa.other = "), PlanMismatchError, r"program \(unknown\)")
    refused(
        changed('alpa.program = "', 'alpa.program = 0, alpa.was = "'), PlanMismatchError, "unkn"
    )
    number = "num_micro_batches = 2 : i64"
    refused(changed(number, "num_micro_batches = 3 : i64"), PlanMismatchError, "for 3 micro-batch")
    refused(changed(number, 'num_micro_batches = "2"'), LoadError, r'is "2"; expected an integer')
    refused(changed('status = "', 'status = 1 : i64, was = "'), LoadError, "status of alpa.solver")


def test_the_loss_may_be_a_sum() -> None:
    def step(w: Any, x: Any) -> Any:
        loss, grad = alpa.value_and_grad(lambda w: jnp.sum((x @ w) ** 2))(w)
        return w - 0.01 * grad, loss

    w, x = jnp.ones((4, 4)), random_batch(8, 4)["x"]
    summed = alpa.parallelize(step, cluster="cpu:1x1", num_micro_batches=4, loss_reduction="sum")
    assert_close(summed(w, x), step(w, x))


def test_gradients_that_come_back_are_no_state() -> None:
    gradients = alpa.value_and_grad(mlp_loss)
    step = alpa.parallelize(gradients, cluster="cpu:1x2", num_micro_batches=4, batch_argnums=1)
    params, batch = mlp_params(), random_batch()
    assert_close(step(params, batch), gradients(params, batch))


def test_new_shapes_are_planned_anew_with_a_notice(caplog: pytest.LogCaptureFixture) -> None:
    step = alpa.parallelize(lambda w, x: x * w, cluster="cpu:1x1")
    with caplog.at_level(logging.WARNING, "alpa"):
        step(2.0, np.ones(4, np.float32))
        step(3.0, np.ones(4, np.float32))
        count = alpa.parallelize(lambda count: count + 1, cluster="cpu:1x1", state_argnums=0)
        assert int(count(count(1))) == 3
        assert caplog.text == ""
        assert step(2.0, np.ones(6, np.float32)).tolist() == [2] * 6
    assert "x was float32[4], is float32[6]" in caplog.text


def test_other_settings_of_jax_are_planned_anew(caplog: pytest.LogCaptureFixture) -> None:
    step = alpa.parallelize(lambda x: (jnp.argmax(x), x), cluster="cpu:1x1")
    x = np.arange(4, dtype=np.float32)
    with jax.enable_x64(True):
        assert step(x)[0].dtype == np.int64
        assert caplog.text == ""
    assert step(x)[0].dtype == np.int32
    assert "jax_enable_x64 was True, is False" in caplog.text
    with jax.enable_x64(True):
        assert step(x)[0].dtype == np.int64
    with jax.default_matmul_precision("highest"):
        step(x)
    assert "jax_default_matmul_precision was None, is highest" in caplog.text


def failing(message: str, error: type[Exception] = ValueError) -> Any:
    return pytest.raises(error, match=message)


@pytest.mark.parametrize("number", [1, 2])
def test_a_batch_may_be_donated(number: int) -> None:
    """Results of its shape that are state, and scalars, do not make it state."""

    def step(w: Any, x: Any) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
        return w - 0.1 * grad, loss

    w, x = jnp.eye(4), jnp.arange(16.0).reshape(4, 4)
    expected = step(w, x)
    planned = alpa.parallelize(
        step, cluster="cpu:1x2", num_micro_batches=number, donate_argnums=1, batch_argnums="x"
    )
    assert_close(planned(w, jnp.copy(x)), expected)
    if number == 1:
        alone = alpa.parallelize(step, cluster="cpu:1x2", donate_argnums=(0, 1))
        assert_close(alone(jnp.copy(w), jnp.copy(x)), expected)


def test_wrong_uses_are_refused() -> None:
    parallelize = partial(alpa.parallelize, cluster="cpu:1x2")
    batch, state = random_batch(10), new_state()
    with failing(r"a batch of 10 samples cannot be cut into 4 .*, but into 1, 2 or 5"):
        parallelize(train_step, num_micro_batches=4)(state, batch)
    with failing(r"there is no batch to cut into micro-batches"):
        parallelize(lambda w: w * 2.0, num_micro_batches=2)(1.0)
    with failing(r"different numbers of samples: .*x'\] has 10.*; name only the arguments"):
        both = {"x": np.ones(10), "y": np.ones(4)}
        parallelize(lambda both: both["x"].sum(), num_micro_batches=2, batch_argnums=0)(both)
    with failing(r"both\['y'\] holds the samples in dimension 1, but it is float32\[4\]"):
        parallelize(lambda both: both["y"].sum(), num_micro_batches=2, batch_argnums={0: 1})(
            {"y": np.ones(4, np.float32)}
        )
    with failing(r"state\['name'\] is 'gpt', a str, not an array", TypeError):
        parallelize(lambda state: state)({"name": "gpt"})
    with failing(r"x is being traced: .* cannot be called inside jax.jit", TypeError):
        jax.jit(parallelize(lambda x: x))(1.0)
    with failing(r"state\[0\]\[0\]\['w'\] is float32\[16,16\] and comes back as bfloat16"):
        cast = partial(jax.tree.map, lambda a: a.astype(jnp.bfloat16))
        changed = lambda state, batch: cast(state)  # noqa: E731
        parallelize(changed, donate_argnums=0)(state, batch)
    with failing(r"x is donated .*: x is float32\[4\] and comes back as bfloat16\[4\]\. Return"):
        halved = lambda w, x: (w + 1, x.astype(jnp.bfloat16))  # noqa: E731
        parallelize(halved, donate_argnums=1)(np.ones(4, np.float32), np.ones(4, np.float32))
    with failing(r"the cluster cpu:4x4 has 16 devices, and JAX sees 8 of CPU; planning needs none"):
        alpa.parallelize(train_step, cluster="cpu:4x4")(state, batch)
    with failing(r"parallelize needs the cluster to plan for"):
        alpa.parallelize(train_step)
    with failing(r"batch_argnums holds 2, but the function has 2 positional parameters"):
        parallelize(train_step, batch_argnums=2)
    with failing(r"batch_argnums holds 'data', but the function has no .*; it has state, batch"):
        parallelize(train_step, batch_argnums="data")
    with failing(r"static_argnums holds 'rate', but the function has no parameter of that name"):
        parallelize(train_step, static_argnames="rate")
    for name in ("executor", "intra", "inter", "remat", "loss_reduction"):
        with failing(rf"{name} is 'other'; expected one of .*"):
            parallelize(train_step, **{name: "other"})
    with failing(
        '"other" is neither the name of a schedule, gpipe, .* or dualpipe-v, nor a file .*'
    ):
        parallelize(train_step, schedule="other")
    with failing(r"num_micro_batches is 'many'; expected a number of at least 1, or auto"):
        parallelize(train_step, num_micro_batches="many")
    with failing(r"like= must be a function that alpa.parallelize returned", TypeError):
        alpa.parallelize(train_step, like=train_step)
    with failing(r"like= takes the cluster, settings and workers of train_step; remove intra="):
        alpa.parallelize(train_step, like=parallelize(train_step), intra="megatron")
    with failing(r"there is no plan nowhere.mlir; save one by train_step.plan", FileNotFoundError):
        parallelize(train_step, plan="nowhere.mlir")(state, batch)
    with failing(r"<lambda> returns no array, so that there is nothing to compute", TypeError):
        parallelize(lambda x: None)(1.0)
    with failing(r"the static argument power is a list, which has no hash", TypeError):
        parallelize(lambda x, power: x, static_argnums=1)(1.0, [2])
    with failing(r"tells whether any sample is true, and result\[0\] depends on it", PlanningError):
        parallelize(lambda x: jnp.any(x > 0), num_micro_batches=2)(np.ones(4))
    with failing(r"result\['name'\] is a str, not an array", TypeError):
        parallelize(lambda x: {"name": "gpt"})(1.0)


def test_errors_of_tracing_name_the_users_function() -> None:
    def branches(x: Any) -> Any:
        return x if x > 0 else -x

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        alpa.parallelize(branches, cluster="cpu:1x1")(1.0)
    assert "tracing the function branches at" in str(error.value)
    assert "tracing.py" not in str(error.value)


def test_errors_of_tracing_name_the_field_whose_number_is_read() -> None:
    def step(model: Any, x: Any) -> Any:
        return x * model["rate"] if model["dropout"]["inference"] else x[: model["size"]]

    model = {"dropout": {"inference": False}, "rate": 0.5, "size": np.int32(2)}
    planned = alpa.parallelize(step, cluster="cpu:1x1")
    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        planned(model, np.ones(4, np.float32))
    assert "the value of the argument model['dropout']['inference']" in str(error.value)
    assert "keep it out of the tree: arrays, static = eqx.partition" in str(error.value)

    def over_rows(model: Any, x: Any) -> Any:
        return x[model["size"] :] if x else x

    with pytest.raises(jax.errors.TracerBoolConversionError) as error:
        alpa.parallelize(over_rows, cluster="cpu:1x1")(model, np.ones(1, np.float32))
    assert "the value of the argument x." in str(error.value)
    assert "eqx.partition" not in str(error.value)


def test_a_step_keeps_no_arrays_of_its_first_call() -> None:
    step = alpa.parallelize(lambda w, x: x * w, cluster="cpu:1x1")
    weight = jnp.ones(4)
    seen = weakref.ref(weight)
    step(weight, np.ones(4, np.float32))
    del weight
    gc.collect()
    assert seen() is None


@pytest.mark.parametrize(
    ("options", "is_planned"),
    [
        ({"cluster": "cpu:2x2", "num_micro_batches": 4}, True),
        ({"cluster": "cpu:2x2", "num_micro_batches": 4, "num_stages": 2}, True),
        ({"cluster": "cpu:2x1", "num_micro_batches": "auto"}, True),
        ({"cluster": "cpu:2x1,memory=512B", "num_micro_batches": 4}, False),
        ({"cluster": "cpu:2x1,memory=512B", "num_micro_batches": "auto"}, False),
    ],
)
def test_a_first_call_leaves_no_cycles(options: Any, is_planned: bool) -> None:
    """Cycles keep what the callers' frames hold until Python collects them: a first state, and
    workers."""

    def train_step(weights: Any, x: jax.Array) -> Any:
        def loss_fn(weights: Any) -> jax.Array:
            hidden = x
            for weight in weights:
                hidden = jnp.tanh(hidden @ weight)
            return jnp.mean(hidden**2)

        loss, grads = alpa.value_and_grad(loss_fn)(weights)
        return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss

    def call() -> list[weakref.ref[Any]]:
        step = alpa.parallelize(train_step, **options)
        weights = [jnp.full((8, 8), 0.1 * n) for n in range(4)]
        seen = [weakref.ref(it) for it in (step, *weights)]
        try:
            step(weights, jnp.ones((16, 8)))
        except PlanningError:
            assert not is_planned
        else:
            assert is_planned
        return seen

    gc.collect()
    gc.disable()
    try:
        assert [it() for it in call()] == [None] * 5
    finally:
        gc.enable()


def test_the_types_of_both_forms_know_all_options() -> None:
    assert ["fun", *Options.__annotations__] == list(inspect.signature(alpa.parallelize).parameters)


def test_plans_that_were_not_used_for_long_are_forgotten(
    caplog: pytest.LogCaptureFixture,
) -> None:
    step = alpa.parallelize(lambda x: 2 * x, cluster="cpu:1x1", max_plans=2)
    first, second = step.prepare(jnp.ones(1)), step.prepare(jnp.ones(2))
    assert step.prepare(jnp.ones(1)) is first
    with caplog.at_level("WARNING", logger="alpa"):
        third = step.prepare(jnp.ones(3))
    assert "called in more than 2 ways" in caplog.text
    assert step.prepare(jnp.ones(1)) is first
    assert step.prepare(jnp.ones(3)) is third
    assert step.prepare(jnp.ones(2)) is not second
    np.testing.assert_array_equal(step(jnp.ones(2)), 2 * np.ones(2))


def test_forgotten_plans_are_freed() -> None:
    step = alpa.parallelize(lambda x: 2 * x, cluster="cpu:1x1", max_plans=1)
    forgotten = [weakref.ref(step.prepare(jnp.ones(n)).executable) for n in range(1, 4)]
    gc.collect()
    assert [it() is None for it in forgotten] == [True, True, False]


def test_functions_that_custom_calls_compute_with_are_in_each_stage() -> None:
    """JAX leaves them public, before the step itself."""

    def step(w: jax.Array, x: jax.Array) -> tuple[Any, Any]:
        hidden = jax.lax.approx_max_k(x @ w, 4)
        alpa.mark_layer_boundary()
        return hidden, jax.lax.approx_max_k(-hidden[0], 2)

    draw = np.random.default_rng(0).normal
    w, x = (jnp.asarray(draw(size=(8, 8)), jnp.float32) for _ in range(2))
    run = two_stages(step)
    assert_close(run(w, x), jax.jit(step)(w, x))
    assert len(run.plan(w, x).meshes) == 2
    assert not alpa.compare_with_jax(run, w, x).is_fault
