"""`alpa.runtime.reassociation`: the same sums in another order."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa.dialects import parse
from alpa.runtime.reassociation import reassociate
from alpa.runtime.reference import run_unplanned

BATCH_NORMS = """
func.func @main(%x: tensor<6x4x5xf32>, %s: tensor<4xf32>, %b: tensor<4xf32>, %g: tensor<6x4x5xf32>)
    -> (tensor<6x4x5xf32>, tensor<4xf32>, tensor<4xf32>,
        tensor<6x4x5xf32>, tensor<4xf32>, tensor<4xf32>) {
  %0:3 = "stablehlo.batch_norm_training"(%x, %s, %b) {epsilon = 1.0e-5 : f32, feature_index = 1}
      : (tensor<6x4x5xf32>, tensor<4xf32>, tensor<4xf32>)
      -> (tensor<6x4x5xf32>, tensor<4xf32>, tensor<4xf32>)
  %1:3 = "stablehlo.batch_norm_grad"(%x, %s, %0#1, %0#2, %g)
      {epsilon = 1.0e-5 : f32, feature_index = 1}
      : (tensor<6x4x5xf32>, tensor<4xf32>, tensor<4xf32>, tensor<4xf32>, tensor<6x4x5xf32>)
      -> (tensor<6x4x5xf32>, tensor<4xf32>, tensor<4xf32>)
  return %0#0, %0#1, %0#2, %1#0, %1#1, %1#2
      : tensor<6x4x5xf32>, tensor<4xf32>, tensor<4xf32>, tensor<6x4x5xf32>, tensor<4xf32>,
        tensor<4xf32>
}
"""


def contraction(x: Any, w: Any) -> Any:
    return jnp.einsum("abc,cd->abd", x, w)


def total(x: Any, w: Any) -> Any:
    return x.sum((0, 2)), x.prod(1)


def convolution(x: Any, w: Any) -> Any:
    return jax.lax.conv_general_dilated(x, w.reshape(5, 3, 3), (1,), "SAME")


def grouped(x: Any, w: Any) -> Any:
    return jax.lax.conv_general_dilated(x, w.reshape(9, 1, 5), (2,), "SAME", feature_group_count=3)


def in_a_loop(x: Any, w: Any) -> Any:
    return jax.lax.fori_loop(0, 3, lambda i, s: s + x[i] @ w, jnp.zeros((3, 5)))


def nothing_to_reorder(x: Any, w: Any) -> Any:
    return x.max(0), jnp.tanh(w), x[:, :2].sum(1), w.astype(jnp.int32).sum()


def module_of(function: Any) -> tuple[Any, list[np.ndarray]]:
    r = np.random.default_rng(0)
    shapes = (5, 3, 9), (9, 5)
    arguments = [r.normal(size=shape).astype(np.float32) for shape in shapes]
    lowered = jax.jit(function, keep_unused=True).lower(*arguments)
    return parse(lowered.as_text()), arguments


def assert_reordered(module: Any, arguments: list[np.ndarray], count: int) -> None:
    """The results change by rounding only, and some do change."""
    before = run_unplanned(module, arguments)
    assert reassociate(module) == count
    module.operation.verify()
    errors = [
        np.max(np.abs(np.asarray(a) - b)) / np.max(np.abs(b))
        for a, b in zip(run_unplanned(module, arguments), map(np.asarray, before), strict=True)
    ]
    assert 0 < max(errors) < 1e-5


@pytest.mark.parametrize(
    ("function", "count"),
    [(contraction, 1), (total, 2), (convolution, 1), (grouped, 1), (in_a_loop, 1)],
)
def test_sums_round_differently(function: Any, count: int) -> None:
    module, arguments = module_of(function)
    assert_reordered(module, arguments, count)


def test_batch_norms_round_differently() -> None:
    r = np.random.default_rng(0)
    shapes = (6, 4, 5), (4,), (4,), (6, 4, 5)
    arguments = [r.normal(size=shape).astype(np.float32) for shape in shapes]
    assert_reordered(parse(BATCH_NORMS), arguments, 2)


def test_what_has_no_order_stays() -> None:
    module, _ = module_of(nothing_to_reorder)
    before = str(module)
    assert reassociate(module) == 0
    assert str(module) == before
