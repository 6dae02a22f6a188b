"""The types of the API. pyright checks this file; nothing runs it.

A line with `pyright: ignore` has to be an error: pyright reports an unneeded ignore.
"""

# pyright: reportUnnecessaryTypeIgnoreComment=true

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, assert_type

import jax

import alpa
from alpa.passes.plan.report import StageReport
from alpa.runtime.executable import Executable
from alpa.runtime.parallelized import Parallelized
from alpa.runtime.step_plan import StepPlan


def step(state: dict[str, jax.Array], batch: jax.Array, *, rate: float = 0.1) -> tuple[int, float]:
    raise NotImplementedError


def evaluate(state: dict[str, jax.Array]) -> float:
    raise NotImplementedError


@alpa.parallelize(cluster="cpu:2x4", num_micro_batches="auto")
def decorated(state: dict[str, jax.Array], batch: jax.Array) -> tuple[int, float]:
    raise NotImplementedError


def forms(state: dict[str, jax.Array], batch: jax.Array) -> None:
    called = alpa.parallelize(step, cluster="cpu:2x4", batch_argnums={"batch": 0})
    assert_type(called(state, batch, rate=0.2), tuple[int, float])
    assert_type(decorated(state, batch=batch), tuple[int, float])
    also: Parallelized[[dict[str, jax.Array]], float] = alpa.parallelize(evaluate, like=called)
    assert_type(also(state), float)


class Model:
    @alpa.parallelize(cluster="cpu:2x4", static_argnums=0)
    def step(self, batch: jax.Array) -> float:
        raise NotImplementedError


def methods(state: dict[str, jax.Array], batch: jax.Array) -> None:
    assert_type(Model().step(batch), float)
    assert_type(Model.step(Model(), batch), float)
    assert_type(Model.step.plan(Model(), batch), StepPlan)
    assert_type(alpa.parallelize(evaluate, like=Model().step)(state), float)
    assert_type(alpa.parallelize(evaluate, like=Model.step)(state), float)


def refused(state: dict[str, jax.Array], batch: jax.Array) -> None:
    decorated(state)  # pyright: ignore[reportCallIssue]
    decorated(state, 1)  # pyright: ignore[reportArgumentType]
    alpa.parallelize(evaluate, cluter="cpu:2x4")  # pyright: ignore[reportCallIssue]
    alpa.parallelize(evaluate, schedule=3)  # pyright: ignore
    alpa.parallelize(evaluate, like=step)  # pyright: ignore
    alpa.parallelize(evaluate, like=Path().exists)  # pyright: ignore
    _ = decorated.plan(state, batch).step_seconds  # pyright: ignore


def results(state: dict[str, jax.Array], shape: jax.ShapeDtypeStruct) -> None:
    plan = decorated.plan(state, shape)
    assert_type(plan, StepPlan)
    assert_type(plan.predicted_step_seconds, float)
    assert_type(plan.stages, tuple[StageReport, ...])
    assert_type(plan.schedule, str)
    assert_type(plan.to_json(), str)
    assert_type(decorated.executable(state, shape), Executable)


def others(loss: Callable[..., jax.Array]) -> None:
    assert_type(alpa.value_and_grad(loss), Callable[..., Any])
    assert_type(alpa.latest_step("checkpoints"), int | None)
    assert_type(alpa.save("checkpoints", 1, {}, keep=2, wait=False), Path)
    assert_type(alpa.wait_for_saves(), None)
