"""`plan.report`: the page of a function's plan."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import alpa


@alpa.parallelize(cluster="cpu:1x2", num_micro_batches=2, donate_argnums=0)
def my_step(w: jax.Array, batch: jax.Array) -> tuple[jax.Array, jax.Array]:
    loss, grad = alpa.value_and_grad(lambda w: jnp.mean((batch @ w) ** 2))(w)
    return w - 0.1 * grad, loss


def test_the_page_of_a_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((16, 16), (8, 16))]
    plan = my_step.plan(*shapes)
    capsys.readouterr()  # the table
    plan.report(tmp_path / "plan.html")
    text = (tmp_path / "plan.html").read_text()
    assert "Plan of my_step for cpu:1x2" in text
    assert f'value="{plan.predicted_step_seconds!r}" data-entry="predicted_step_seconds"' in text
    assert "test_step_plan.py:16:" in text  # the line of the product
    with pytest.raises(FileNotFoundError):
        plan.report(tmp_path / "nowhere" / "plan.html")
