"""Programs that call Python are rejected with the place in the user's program."""

from __future__ import annotations

import inspect
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback

import alpa
from alpa.runtime.planning import PlanningError

W, X = np.ones((6, 3), np.float32), np.ones((8, 6), np.float32)


def print_in_loss(w: Any, x: Any) -> Any:
    def loss(w: Any) -> Any:
        h = x @ w
        jax.debug.print("h {}", h.mean())  # here
        return jnp.mean(h**2)

    return w - 0.1 * alpa.grad(loss)(w)


def print_in_order(w: Any, x: Any) -> Any:
    jax.debug.print("w {}", w, ordered=True)  # here
    return w - 0.1 * jnp.sum(x @ w)


def pure(w: Any, x: Any) -> Any:
    double = jax.pure_callback(lambda a: 2 * a, jax.ShapeDtypeStruct(w.shape, w.dtype), w)  # here
    return x @ double


def effect_in_order(w: Any, x: Any) -> Any:
    io_callback(lambda a: None, None, w, ordered=True)  # here
    return x @ w


def print_in_scan(w: Any, x: Any) -> Any:
    def body(total: Any, row: Any) -> Any:
        jax.debug.print("row {}", row)  # here
        return total + row, None

    return x @ w + jnp.sum(jax.lax.scan(body, jnp.zeros(6), x)[0])


def line_of_call(function: Callable[..., Any]) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(n for n, line in enumerate(lines) if "# here" in line)


PROGRAMS = [print_in_loss, print_in_order, pure, effect_in_order, print_in_scan]


@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("function", PROGRAMS)
def test_a_program_that_calls_python(function: Callable[..., Any], batches: int) -> None:
    step = alpa.parallelize(function, cluster="cpu:1x2", num_micro_batches=batches, batch_argnums=1)
    with pytest.raises(PlanningError) as raised:
        step(W, X)
    (line,) = str(raised.value).splitlines()
    assert line.startswith(f"{__file__}:{line_of_call(function)}:")
    assert "error: @xla_ffi_python_cpu_callback is a callback into Python" in line


def files_of(error: BaseException) -> list[str]:
    """The files of the frames that Python would print, including causes and contexts."""
    shown = traceback.TracebackException.from_exception(error)
    assert shown.__cause__ is None
    assert shown.__suppress_context__ or shown.__context__ is None
    return [Path(frame.filename).name for frame in shown.stack]


@pytest.mark.parametrize("method", ["__call__", "plan", "lower", "executable"])
def test_no_frame_is_shown_but_the_callers(method: str) -> None:
    step = alpa.parallelize(print_in_loss, cluster="cpu:1x2")
    with pytest.raises(PlanningError) as raised:
        getattr(step, method)(W, X)
    assert files_of(raised.value) == [Path(__file__).name]


def test_all_frames_are_shown_where_jax_shows_its_own() -> None:
    step = alpa.parallelize(print_in_loss, cluster="cpu:1x2")
    jax.config.update("jax_traceback_filtering", "off")
    try:
        with pytest.raises(PlanningError) as raised:
            step(W, X)
    finally:
        jax.config.update("jax_traceback_filtering", "auto")
    assert "parallelized.py" in files_of(raised.value)


def test_a_state_that_is_made_with_a_print() -> None:
    def init() -> Any:
        jax.debug.print("a new state")  # here
        return jnp.ones((6, 3))

    step = alpa.parallelize(lambda w, x: w - jnp.sum(x @ w), cluster="cpu:1x2", state_argnums=0)
    with pytest.raises(PlanningError, match=rf"_calls.py:{line_of_call(init)}:.* a callback"):
        alpa.create_state(init, step, X)
