"""With `check_finite` a call names its results that are not finite."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.runtime import WorkerOptions

WORKERS = WorkerOptions(cache_directory=None, timeout_seconds=300)


def descend(state: Any, x: Any) -> Any:
    return {"w": state["w"] * x, "n": state["n"] + 1}, jnp.log(x)


def check_it_says_what_is_wrong(executor: Any) -> None:
    step = alpa.parallelize(
        descend, cluster="cpu:1x1", executor=executor, workers=WORKERS, check_finite=True
    )
    state = {"w": np.ones(3, np.float32), "n": np.int32(0)}
    state, _ = step(state, np.ones(3, np.float32))
    wrong = r"call 2 of descend: 1 of its 3 results hold NaN or infinity: result\[1\]; restore an"
    with pytest.raises(FloatingPointError, match=wrong):
        step(state, np.array([1, -1, 2], np.float32))
    both = r"call 3 of descend: 2 of its 3 .*: result\[0\]\['w'\], result\[1\];"
    with pytest.raises(FloatingPointError, match=both):
        step(state, np.array([1, np.inf, 2], np.float32))
    unchecked = alpa.parallelize(descend, cluster="cpu:1x1")
    assert np.isnan(np.asarray(unchecked(state, -np.ones(3, np.float32))[1])).all()


def test_it_says_what_is_wrong() -> None:
    check_it_says_what_is_wrong("local")


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_workers_say_what_is_wrong() -> None:
    check_it_says_what_is_wrong("ray")
