"""Wrong arguments are rejected by name before anything runs, by both executors."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.errors import JaxRuntimeError

import alpa
import alpa.runtime
from alpa.runtime import WorkerError, interrupts
from alpa.runtime.argument_checks import ArgumentTypeError, check_usable
from alpa.runtime.mesh_array import MeshArray

Door = Literal["parallelize", "load"]
Step = Callable[..., Any]

DOORS = pytest.mark.parametrize("door", ["parallelize", "load"])
BATCHES = pytest.mark.parametrize("batches", [1, 4])

X = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)


def train(w: Any, ema: Any, x: Any) -> Any:
    grad = alpa.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
    new = w - 0.1 * grad
    return new, 0.9 * ema + 0.1 * new


def weights() -> tuple[jax.Array, jax.Array]:
    return jnp.full((6, 3), 0.5), jnp.full((6, 3), 0.25)


def opened(door: Door, batches: int = 1, **options: Any) -> tuple[Step, Callable[[int], str]]:
    """The training step, and the names of its arguments in errors."""
    given: dict[str, Any] = {"cluster": "cpu:1x4", "batch_argnums": 2, "donate_argnums": (0, 1)}
    step = alpa.parallelize(train, num_micro_batches=batches, **(given | options))
    if door == "parallelize":
        return step, ["w", "ema", "x"].__getitem__
    return alpa.runtime.load(step.prepare(*weights(), X).plan.module), "argument {}".format


def assert_close(found: Any, expected: Any) -> None:
    for one, other in zip(found, expected, strict=True):
        bound = 1e-4 * np.max(np.abs(other))
        assert np.max(np.abs(np.asarray(one) - np.asarray(other))) <= bound


@DOORS
@BATCHES
def test_a_donated_array_that_is_given_again(door: Door, batches: int) -> None:
    """The program `deleted_argument.py`: plain JAX aborts the process on several CPU devices."""
    step, name = opened(door, batches)
    old = step(*weights(), X)
    new = step(*old, X)
    assert [array.is_deleted() for array in old] == [True, True]
    match = rf"^Array has been deleted with shape=float32\[6,3\]: {name(0)} was donated to an ear"
    with pytest.raises(RuntimeError, match=match):
        step(*old, X)
    with pytest.raises(RuntimeError, match=rf"{name(1)} was donated"):
        step(new[0], old[1], X)
    expected = train(*train(*train(*weights(), X), X), X)
    assert_close(step(*new, X), expected)  # the rejected call has changed nothing


@DOORS
def test_a_deleted_batch(door: Door) -> None:
    step, name = opened(door)
    x = jnp.asarray(X)
    x.delete()
    with pytest.raises(RuntimeError, match=rf"shape=float32\[8,6\]: {name(2)} was"):
        step(*weights(), x)


@DOORS
@BATCHES
def test_an_array_that_is_donated_twice(door: Door, batches: int) -> None:
    """The program `donated_twice.py`."""
    step, name = opened(door, batches)
    w, ema = weights()
    match = rf"Attempt to donate the same buffer twice in Execute\(\): {name(0)} and {name(1)} are"
    with pytest.raises(JaxRuntimeError, match=match):
        step(w, w, X)
    w, ema = step(w, jnp.copy(w), X)
    with pytest.raises(JaxRuntimeError, match=match):
        step(ema, ema, X)
    assert not w.is_deleted()
    assert not ema.is_deleted()
    same = np.full((6, 3), 0.5, np.float32)
    assert_close(step(same, same, X), train(same, same, X))  # NumPy arrays are copied


@DOORS
def test_a_donated_array_that_is_given_as_another_argument_too(door: Door) -> None:
    step, name = opened(door, donate_argnums=0)
    w, ema = step(*weights(), X)
    match = (
        r"Attempt to use a buffer that was previously donated in the same call to Execute\(\): "
        rf"{name(0)} and {name(1)} are the same array, and {name(0)} is donated"
    )
    with pytest.raises(JaxRuntimeError, match=match):
        step(w, w, X)
    expected = train(np.asarray(w), np.asarray(ema), X)
    assert_close(step(w, ema, X), expected)


def test_it_is_refused_before_the_search() -> None:
    step = alpa.parallelize(train, cluster="cpu:1x4", donate_argnums=(0, 1))
    w, ema = weights()
    with pytest.raises(JaxRuntimeError, match="w and ema are the same array"):
        step(w, w, X)
    w.delete()
    with pytest.raises(RuntimeError, match="Array has been deleted"):
        step(w, ema, X)
    assert "_found" not in vars(step.prepare(w, ema, X))


@DOORS
def test_donation_is_alike_where_nothing_is_overwritten(door: Door) -> None:
    """In a program without gradients no fragment overwrites an argument."""

    def double(state: Any, x: Any) -> Any:
        return {"a": 2 * state["a"], "same": state["same"]}, x @ state["same"]

    step: Step = alpa.parallelize(double, cluster="cpu:1x2", donate_argnums=0)
    state = {"a": jnp.ones((6, 3)), "same": jnp.ones((6, 3))}
    if door == "load":
        loaded = step.executable(state, X)
        first = loaded(*state.values(), X)
        second = loaded(*first[:2], X)
        arrays = [first[0], second[1]]
    else:
        old, _ = step(state, X)
        new, _ = step(old, X)
        arrays = [old["a"], new["same"]]
    # An argument that is returned unchanged is its own new value.
    assert [array.is_deleted() for array in arrays] == [True, False]
    np.testing.assert_array_equal(arrays[1], np.ones((6, 3)))


def test_what_comes_back_unchanged_is_an_array_of_its_own() -> None:
    step = alpa.parallelize(lambda w, x: (w, x @ w), cluster="cpu:1x2")
    update: Step = alpa.parallelize(train, cluster="cpu:1x2", donate_argnums=(0, 1))
    w, ema = update(*weights(), X)
    same, _ = step(w, X)
    before = np.asarray(w)
    update(w, ema, X)
    assert w.is_deleted()
    np.testing.assert_array_equal(same, before)


@DOORS
def test_shapes_cannot_be_run(door: Door) -> None:
    step, name = opened(door)
    shape = jax.ShapeDtypeStruct((6, 3), jnp.float32)
    where = name(0).removeprefix("argument ")
    match = rf"Argument '{where}' of shape float32\[6,3\] of type .* is not a valid JAX type"
    with pytest.raises(TypeError, match=match):
        step(shape, weights()[1], X)


def loaded() -> alpa.runtime.Executable:
    """A program of a matrix, a scalar and a counter."""

    def scaled(w: Any, rate: Any, count: Any) -> Any:
        return w * rate, count + 1

    step = alpa.parallelize(scaled, cluster="cpu:1x1")
    return step.executable(jnp.ones((6, 3)), np.float32(1), np.int32(1))


W = np.ones((6, 3), np.float32)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ((W[:4], 1.0, 1), "argument 0 is float32[4, 3]; expected float32[6, 3]"),
        ((W.astype(np.float64), 1.0, 1), "argument 0 is float64[6, 3]; expected float32[6, 3]"),
        ((W, np.int32(1), 1), "argument 1 is int32[]; expected float32[]"),
        ((W, 1.0, 1.5), "argument 2 is 1.5, a Python float; expected int32[]"),
        ((W, 1.0, True), "argument 2 is True, a Python bool; expected int32[]"),
        ((W, 1j, 1), "argument 1 is 1j, a Python complex; expected float32[]"),
        ((W, 1.0, 2**40), "argument 2 is 1099511627776, which int32 cannot hold; expected int32[]"),
        ((1.0, 1.0, 1), "argument 0 is float32[]; expected float32[6, 3]"),
    ],
)
def test_types_that_a_loaded_program_was_not_compiled_for(given: Any, words: str) -> None:
    match = f"^Argument types differ from the types for which this computation.*{re.escape(words)}"
    with pytest.raises(ArgumentTypeError, match=re.compile(match, re.DOTALL)) as raised:
        loaded()(*given)
    assert isinstance(raised.value, TypeError)
    assert isinstance(raised.value, ValueError)


def test_an_error_lists_all_mismatches() -> None:
    with pytest.raises(TypeError) as raised:
        loaded()(W[:4], np.int32(1), np.float32(1))
    assert re.findall(r"argument (\d) is", str(raised.value)) == ["0", "1", "2"]


@pytest.mark.parametrize("number", [None, "1.0", [1.0], {"rate": 1.0}, (1.0,), object()])
def test_trees_of_other_structure(number: Any) -> None:
    kind = type(number).__name__
    match = rf"argument 1 is a {kind}, not an array; expected float32\[\]\. Pass each leaf"
    with pytest.raises(TypeError, match=match):
        loaded()(W, number, 1)
    with pytest.raises(TypeError, match=match):
        loaded().place(1, number)


def test_python_numbers_are_accepted_if_no_digits_are_lost() -> None:
    doubled, count = loaded()(W, 2, 1)
    np.testing.assert_array_equal(doubled, 2 * W)
    assert int(count) == 2
    assert float(loaded()(W, 0.5, 1)[0][0, 0]) == 0.5


def test_a_loaded_program_is_not_traced() -> None:
    step = loaded()
    with pytest.raises(TypeError, match=r"argument 0 is being traced: .* call it outside"):
        jax.jit(lambda w: step(w, 1.0, 1))(W)


def test_arguments_that_were_placed_elsewhere() -> None:
    step, other = loaded(), loaded()
    rate = step.place(1, 3.0)
    np.testing.assert_array_equal(step(W, rate, 1)[0], 3 * W)
    with pytest.raises(ValueError, match=r"argument 0 was placed as argument 1; place it with"):
        step(rate, 1.0, 1)
    with pytest.raises(ValueError, match=r"argument 1 was placed as argument 1 of another execut"):
        other(W, rate, 1)
    gone = jnp.asarray(W)
    gone.delete()
    with pytest.raises(RuntimeError, match=r"deleted .*: argument 0 was donated"):
        step.place(0, gone)


def test_an_argument_by_position_and_by_name() -> None:
    step = alpa.parallelize(train, cluster="cpu:1x2")
    w, ema = weights()
    with pytest.raises(TypeError, match="multiple values for argument 'w': by position and by"):
        step(w, ema, X, w=w)


def test_arrays_whose_workers_are_gone() -> None:
    class Lost(MeshArray):
        def is_deleted(self) -> bool:
            return True

        def check_workers(self) -> None:
            raise WorkerError("mesh_0 on host 0 has died in a step")

        def fetch(self) -> np.ndarray:
            raise NotImplementedError

        def where(self) -> str:
            return "elsewhere"

    lost = Lost((3,), np.dtype(np.float32))
    with pytest.raises(WorkerError, match=r"^state\['w'\] is lost with its workers: mesh_0 on"):
        check_usable([W, lost], ["x", "state['w']"].__getitem__, interrupts.Lost())
