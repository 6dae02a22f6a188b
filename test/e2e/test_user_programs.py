"""Programs that users write: each equals plain JAX, or is rejected with a remedy that works."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import alpa
from alpa.runtime.planning import PlanningError

R = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return R.normal(size=shape).astype(np.float32)


X, Y = normal(8, 6), R.integers(0, 3, 8).astype(np.int32)
W = normal(6, 3) / 2


def assert_equal(found: Any, expected: Any) -> None:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        ours, theirs = np.asarray(ours), np.asarray(theirs)
        assert ours.shape == theirs.shape
        bound = 1e-4 * max(float(np.max(np.abs(theirs))), 1e-3)
        assert float(np.max(np.abs(ours.astype(np.float64) - theirs))) <= bound


def parallelize(step: Callable[..., Any], number: int, **options: Any) -> Any:
    return alpa.parallelize(step, cluster="cpu:1x2", num_micro_batches=number, **options)


def sgd(params: Any, grads: Any) -> Any:
    return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)


def squares(w: Any, x: Any) -> Any:
    return jnp.mean(jnp.tanh(x @ w) ** 2)


def numbers_of_the_batch_size(state: Any, x: Any) -> Any:
    loss, g = alpa.value_and_grad(squares)(state["w"], x)
    n = x.shape[0]
    new = {"w": state["w"] - 0.1 * n / 8 * g, "seen": state["seen"] + n}
    return new, {"loss": loss, "n": n, "sum": loss * n, "index": jnp.arange(n)}


def running_metrics(state: Any, x: Any) -> Any:
    loss, g = jax.value_and_grad(squares)(state["w"], x)
    return {
        "w": state["w"] - 0.1 * g,
        "total": state["total"] + loss,
        "count": state["count"] + 1,
        "average": 0.9 * state["average"] + 0.1 * loss,
        "best": jnp.minimum(state["best"], loss),
    }, loss


def old_parameters_as_a_target(w: Any, target: Any, x: Any) -> Any:
    loss, g = alpa.value_and_grad(lambda w: jnp.mean((jnp.tanh(x @ w) - x @ target) ** 2))(w)
    return w - 0.1 * g, w, loss


def pair_of_words(state: Any, x: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        return squares(w, x) / (1 + state["count"][0].astype(jnp.float32))

    loss, g = alpa.value_and_grad(loss_fn)(state["w"])
    count = state["count"] + jnp.array([8, 0], jnp.uint32)
    return {"w": state["w"] - 0.1 * g, "count": count}, loss


def class_weights(w: Any, x: Any, y: Any, weights: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        return jnp.mean(jnp.sum((x @ w) ** 2, -1) * weights[y])

    loss, g = alpa.value_and_grad(loss_fn)(w)
    return w - 0.01 * g, loss


def residuals(w: Any, batch: Any) -> Any:
    def rest(w: Any) -> Any:
        return batch["y"] - jnp.tanh(batch["x"] @ w)

    return w - 0.1 * jax.grad(lambda w: jnp.mean(rest(w) ** 2))(w), rest(w)


def power_iteration(w: Any, u: Any, x: Any) -> Any:
    def once(_: int, u: Any) -> Any:
        v = w.T @ (w @ u)
        return v / jnp.linalg.norm(v)

    u = jax.lax.fori_loop(0, 3, once, u)
    norm = jnp.linalg.norm(w @ u)
    loss, g = alpa.value_and_grad(lambda w: squares(w / norm, x))(w)
    return w - 0.1 * g, u, loss


def masked_mean(w: Any, x: Any, y: Any) -> Any:
    """The first micro-batch has different counts from the others."""
    mask = (y > 0) | (jnp.abs(x[:, 0]) < 0.3)

    def loss_fn(w: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x @ w), y)
        return jnp.sum(losses * mask) / jnp.sum(mask)

    loss, g = jax.value_and_grad(loss_fn)(w)
    return w - 0.1 * g, {"loss": loss, "perplexity": jnp.exp(loss), "count": jnp.sum(mask)}


def residual(w: Any, x: Any) -> Any:
    """The samples come back element by element, as a state does."""
    return x - 0.1 * jnp.tanh(x @ w) @ w.T


def rows_that_are_looked_up(state: Any, x: Any, y: Any) -> Any:
    """Only the rows that samples use are differentiated, by JAX's own function."""

    def loss_fn(rows: Any, w: Any) -> Any:
        return jnp.mean(jnp.tanh((x * rows) @ w) ** 2)

    both = jax.value_and_grad(loss_fn, (0, 1))
    loss, (rows, w) = both(state["table"][y], state["w"])
    new = {"table": state["table"].at[y].add(-0.1 * rows), "w": state["w"] - 0.1 * w}
    return new, loss, 2 * rows


def sums_of_ones(w: Any, x: Any) -> Any:
    """They grow with the batch, and no sample changes them."""

    def loss_fn(w: Any) -> Any:
        ones = jnp.ones_like(x)
        return jnp.sum(jnp.tanh(x @ w) ** 2) / ones.sum(), (ones.sum(), (ones > 0).sum())

    (loss, counts), g = jax.value_and_grad(loss_fn, has_aux=True)(w)
    rows = jnp.broadcast_to(w[0], (x.shape[0], 3))
    return w - 0.1 * g, loss, counts, rows.sum(0), rows.mean(0)


def root_of_the_mean(w: Any, x: Any) -> Any:
    loss, g = jax.value_and_grad(lambda w: jnp.sqrt(squares(w, x)))(w)
    return w - 0.1 * g, loss


def picked(w: Any, x: Any, y: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        return -jnp.mean(jax.nn.log_softmax(x @ w)[jnp.arange(x.shape[0]), y])

    loss, g = jax.value_and_grad(loss_fn)(w)
    hits = jnp.argmax(x @ w, -1) == y
    return w - 0.1 * g, loss, hits, jnp.zeros((3, 3), jnp.int32).at[y, jnp.argmax(x @ w, -1)].add(1)


def layers_in_a_loop(w: Any, x: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda h, a: (jnp.tanh(h @ a), None), x, w)[0] ** 2)

    loss, g = jax.value_and_grad(loss_fn)(w)
    return w - 0.1 * g, loss


def two_masked_means(state: Any, x: Any, y: Any) -> Any:
    """The losses come back divided by a count; their inputs are computed for each gradient."""

    def loss_fn(w: Any, other: Any) -> Any:
        losses = optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x @ w) @ other, y)
        return jnp.sum(losses * (y > 0)) / jnp.maximum(jnp.sum(y > 0), 1)

    loss, a = jax.value_and_grad(loss_fn)(state["a"], state["b"])
    b = jax.grad(lambda b: loss_fn(state["a"], jnp.sin(b)))(state["b"])
    return sgd(state, {"a": a, "b": b}), loss, jnp.tanh(x @ state["a"]) @ state["b"]


def added_to_samples(w: Any, x: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        return squares(w, x.at[:, np.array([0, 3])].add(x[:, :2] * w[0, :2]))

    loss, g = jax.value_and_grad(loss_fn)(w)
    return w - 0.1 * g, loss


def evaluation_that_counts(state: Any, x: Any) -> Any:
    """The step learns nothing from the samples."""
    new = {"w": 0.9 * state["w"], "steps": state["steps"] + 1}
    return new, jnp.tanh(x @ state["w"]), jnp.tanh(x @ new["w"]).mean(), new["w"].sum()


def wrapped(optimizer: Any) -> Callable[..., Any]:
    def step(w: Any, state: Any, x: Any) -> Any:
        loss, g = jax.value_and_grad(squares)(w, x)
        updates, state = optimizer.update(g, state, w)
        return optax.apply_updates(w, updates), state, loss

    return step


EXACT: dict[str, tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]] = {
    "numbers of the batch size": (
        numbers_of_the_batch_size,
        ({"w": W, "seen": np.int32(0)}, X),
        {},
    ),
    "running metrics": (
        running_metrics,
        (
            {"w": W, "total": np.float32(0), "count": np.int32(0)}
            | {"average": np.float32(1), "best": np.float32(9)},
            X,
        ),
        {},
    ),
    "old parameters": (old_parameters_as_a_target, (W, W / 3, X), {}),
    "a pair of words": (pair_of_words, ({"w": W, "count": np.array([7, 0], np.uint32)}, X), {}),
    "class weights": (class_weights, (W, X, Y, np.linspace(0.5, 2, 8, dtype=np.float32)), {}),
    "residuals": (residuals, (W[:, 0], {"x": X, "y": normal(8)}), {}),
    "power iteration": (
        power_iteration,
        (W, np.ones(3, np.float32), X),
        {"state_argnums": (0, 1), "batch_argnums": 2},
    ),
    "masked mean": (masked_mean, (W, X, Y), {}),
    "two masked means": (two_masked_means, ({"a": W, "b": normal(3, 3)}, X, Y), {}),
    "added to samples": (added_to_samples, (W, X), {}),
    "evaluation that counts": (
        evaluation_that_counts,
        ({"w": W, "steps": np.int32(3)}, X),
        {"state_argnums": 0},
    ),
    "residual": (residual, (W, X), {}),
    "rows that are looked up": (
        rows_that_are_looked_up,
        ({"table": normal(5, 6), "w": W}, X, Y),
        {},
    ),
    "sums of ones": (sums_of_ones, (W, X), {}),
    "root of the mean": (root_of_the_mean, (W, X), {}),
    "picked": (picked, (W, X, Y), {}),
    "layers in a loop": (layers_in_a_loop, (normal(3, 6, 6) / 2, X), {}),
    **{
        name: (wrapped(optimizer), (W, optimizer.init(W), X), {"batch_argnums": 2})
        for name, optimizer in (
            ("finite updates", optax.apply_if_finite(optax.sgd(0.1), 2)),
            ("every second step", optax.MultiSteps(optax.adam(0.1), 2).gradient_transformation()),
            (
                "linear in the gradients",
                optax.MultiSteps(optax.sgd(0.1), 2).gradient_transformation(),
            ),
            ("clipped", optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1, eps=1e-3))),
        )
    },
}


@pytest.mark.parametrize("name", EXACT)
def test_two_micro_batches_give_what_the_whole_batch_gives(name: str) -> None:
    step, arguments, options = EXACT[name]
    assert_equal(parallelize(step, 2, **options)(*arguments), jax.jit(step)(*arguments))


def test_a_count_of_integers_is_added_up_and_not_averaged() -> None:
    """With one sample in a micro-batch the count leads to the gradients and to no loss."""
    step, arguments, options = EXACT["masked mean"]
    assert_equal(parallelize(step, 8, **options)(*arguments), jax.jit(step)(*arguments))


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 4, 8])
@pytest.mark.parametrize("name", EXACT)
def test_other_numbers_of_micro_batches_too(name: str, number: int) -> None:
    step, arguments, options = EXACT[name]
    assert_equal(parallelize(step, number, **options)(*arguments), jax.jit(step)(*arguments))


def normalised(w: Any, x: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        h = x @ w
        return jnp.mean(jnp.tanh((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-3)) ** 2)

    loss, g = alpa.value_and_grad(loss_fn)(w)
    return w - 0.1 * g, loss


def contrastive(w: Any, x: Any) -> Any:
    def loss_fn(w: Any) -> Any:
        h = jnp.tanh(x @ w)
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(h @ h.T)))

    loss, g = alpa.value_and_grad(loss_fn)(w)
    return w - 0.1 * g, loss


def largest_loss(w: Any, x: Any) -> Any:
    loss, g = alpa.value_and_grad(lambda w: jnp.max(jnp.sum((x @ w) ** 2, -1)))(w)
    return w - 0.1 * g, loss


def own_accumulation(w: Any, x: Any) -> Any:
    def one(g: Any, part: Any) -> Any:
        return g + alpa.grad(squares)(w, part), squares(w, part)

    g, losses = jax.lax.scan(one, jnp.zeros_like(w), x.reshape(2, -1, 6))
    return w - 0.05 * g, losses.mean()


def normalised_residual(w: Any, x: Any) -> Any:
    return x + jnp.tanh((x - x.mean(0)) @ w) @ w.T


def test_samples_that_come_back_like_a_state_are_asked_for_where_they_are_mixed() -> None:
    """The features of the samples are no batch that could be cut instead."""
    with pytest.raises(ValueError, match=r"ambiguous.* or x, 8 along dimension 0; name"):
        parallelize(normalised_residual, 2, micro_batches="independent")(W, X)
    step = parallelize(normalised_residual, 2, micro_batches="independent", batch_argnums="x")
    parts = [normalised_residual(W, part) for part in np.split(X, 2)]
    assert_equal(step(W, X), jnp.concatenate(parts))


def in_a_loop_over_micro_batches(step: Callable[..., Any], w: Any, x: Any, number: int) -> Any:
    """The mean of SGD's steps is the step by the mean gradient."""
    parts = [step(w, part) for part in np.split(x, number)]
    return jax.tree.map(lambda *each: sum(each) / number, *parts)


@pytest.mark.parametrize("step", [normalised, contrastive, largest_loss])
def test_what_mixes_samples_is_refused_and_both_remedies_work(step: Callable[..., Any]) -> None:
    with pytest.raises(PlanningError) as refused:
        parallelize(step, 2)(W, X)
    first = str(refused.value)
    assert f"{__file__}:" in first
    assert "2 micro-batches would not give what the whole batch gives" in first
    assert "plan with 1 micro-batch" in first
    assert 'micro_batches="independent"' in first
    assert_equal(parallelize(step, 1)(W, X), jax.jit(step)(W, X))
    found = parallelize(step, 2, micro_batches="independent")(W, X)
    assert_equal(found, in_a_loop_over_micro_batches(step, W, X, 2))


def test_an_update_in_a_branch_with_independent_micro_batches() -> None:
    """All new states are results of one op that reads all gradients."""
    optimizer = optax.apply_if_finite(optax.sgd(0.1), 2)

    def loss_fn(w: Any, x: Any) -> Any:
        h = jnp.tanh(x @ w["a"])
        return -jnp.mean(jnp.diagonal(jax.nn.log_softmax(h @ w["b"] @ h.T)))

    def step(w: Any, state: Any, x: Any) -> Any:
        loss, g = jax.value_and_grad(loss_fn)(w, x)
        updates, state = optimizer.update(g, state, w)
        return optax.apply_updates(w, updates), state, loss

    w = {"a": W, "b": normal(3, 3)}
    state = optimizer.init(jax.tree.map(jnp.asarray, w))
    options = {"micro_batches": "independent", "batch_argnums": 2}
    found = parallelize(step, 2, **options)(w, state, X)
    losses, g = zip(*(jax.value_and_grad(loss_fn)(w, part) for part in np.split(X, 2)), strict=True)
    updates, state = optimizer.update(jax.tree.map(lambda a, b: (a + b) / 2, *g), state, w)
    assert_equal(found, (optax.apply_updates(w, updates), state, sum(losses) / 2))


def test_accumulation_of_ones_own_is_refused_and_runs_with_one_micro_batch() -> None:
    with pytest.raises(PlanningError, match=r"reshape regroups the samples of 4x6 as 2x2x6"):
        parallelize(own_accumulation, 2)(W, X)
    found, expected = parallelize(own_accumulation, 1)(W, X), jax.jit(own_accumulation)(W, X)
    assert_equal(found, expected)


def test_state_in_a_loop_with_samples_is_refused_and_runs_with_one_micro_batch() -> None:
    """Each micro-batch would apply the decay once more."""

    def step(state: Any, x: Any) -> Any:
        def layer(carried: Any, _: Any) -> tuple[Any, None]:
            h, rate = carried
            return (jnp.tanh(h @ state["w"] @ state["w"].T), 0.9 * rate), None

        (h, rate), _ = jax.lax.scan(layer, (x, state["rate"]), length=2)
        return {"w": state["w"], "rate": rate}, h.mean()

    state = {"w": W, "rate": np.float32(1)}
    options = {"state_argnums": 0, "batch_argnums": 1}
    with pytest.raises(PlanningError, match=r"a new state that no sample changes, made in a loop"):
        parallelize(step, 2, **options)(state, X)
    assert_equal(parallelize(step, 1, **options)(state, X), jax.jit(step)(state, X))


def test_noise_of_a_generator_is_drawn_for_each_micro_batch() -> None:
    """The generator's loss reads a key and no batch."""

    def step(state: Any, x: Any, key: Any) -> Any:
        z = jax.random.normal(key, (x.shape[0], 4))

        def of_critic(critic: Any) -> Any:
            real, made = x @ critic, jnp.tanh(z @ state["g"]) @ critic
            return jnp.mean(jax.nn.softplus(-real)) + jnp.mean(jax.nn.softplus(made))

        def of_generator(g: Any) -> Any:
            return jnp.mean(jax.nn.softplus(-jnp.tanh(z @ g) @ state["d"]))

        first, d = alpa.value_and_grad(of_critic)(state["d"])
        second, g = alpa.value_and_grad(of_generator)(state["g"])
        return sgd(state, {"g": g, "d": d}), (first, second)

    state, key = {"g": normal(4, 6), "d": normal(6, 1)}, jax.random.key(1)
    planned = parallelize(step, 2)
    parts = [step(state, X[4 * m : 4 * m + 4], jax.random.fold_in(key, m)) for m in (0, 1)]
    expected = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    assert_equal(planned(state, X, key), expected)
    said = planned.prepare(state, X, key).plan
    assert said.micro_batches == "exact, random numbers per micro-batch"
    assert f"micro-batches: {said.micro_batches} (proven)\n" in str(said)


def test_a_key_that_is_used_comes_back_as_plain_jax_makes_it() -> None:
    def step(w: Any, key: Any, x: Any) -> Any:
        key = jax.random.fold_in(key, 1)
        kept = jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0)
        loss, g = alpa.value_and_grad(lambda w: squares(w, kept))(w)
        return w - 0.1 * g, key, loss

    for key in (jax.random.PRNGKey(0), jax.random.key(0)):
        planned = parallelize(step, 2)
        _, returned, _ = planned(W, key, X)
        assert (jax.random.key_data(returned) == jax.random.key_data(step(W, key, X)[1])).all()
        assert not alpa.compare_with_jax(planned, W, key, X).is_fault


@pytest.mark.parametrize("mode", ["exact", "independent"])
def test_state_that_no_sample_changes_is_written_once_per_step(mode: Any) -> None:
    step, arguments, options = EXACT["evaluation that counts"]
    planned = parallelize(step, 4, micro_batches=mode, **options)
    assert_equal(planned(*arguments), jax.jit(step)(*arguments))


def test_samples_in_another_dimension() -> None:
    """Inferred, and as the user states it."""

    def step(w: Any, x: Any, y: Any) -> Any:
        def loss_fn(w: Any) -> Any:
            first = jnp.zeros((x.shape[1], 6))
            last, _ = jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row), None), first, x)
            return jnp.mean((last[:, 0] - y) ** 2)

        loss, g = alpa.value_and_grad(loss_fn)(w)
        return w - 0.1 * g, loss

    arguments = normal(6, 6) / 2, normal(5, 8, 6), normal(8)
    expected = jax.jit(step)(*arguments)
    assert_equal(parallelize(step, 2)(*arguments), expected)
    said = parallelize(step, 2, batch_argnums={"x": 1, "y": 0})
    assert_equal(said(*arguments), expected)


def test_roles_are_explained(capsys: pytest.CaptureFixture[str]) -> None:
    planned = parallelize(class_weights, 2, explain_roles=True)
    table = str(planned.prepare(*EXACT["class weights"][1]).plan)
    printed = capsys.readouterr().out
    assert "  state: w: a result is computed from it element by element\n" in printed
    assert "  batch, cut in dimension 0: x" in printed
    assert "  constant: weights: no dimension of it holds samples\n" in printed
    assert printed in f"{table}\n"
