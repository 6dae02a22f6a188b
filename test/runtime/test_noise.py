"""`alpa.runtime.noise`: perturbed arguments, and noise compared with differences."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa.dialects import parse
from alpa.passes.pipelines.clock import Clock
from alpa.runtime.noise import Output, Reference, compare_with_noise, perturbed
from alpa.runtime.reference import unplanned


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, jnp.bfloat16, np.complex64])
def test_floats_move_by_one_unit_in_the_last_place(dtype: Any) -> None:
    array = np.array([1.5, -3.0, 1e-3, 0.0, np.inf] * 20).astype(dtype)
    (moved,) = perturbed([array], 0)
    assert moved.dtype == array.dtype
    wide = [np.real(a).astype(np.float64).reshape(20, 5) for a in (array, moved)]
    steps = wide[1][:, :3] - wide[0][:, :3]
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(np.abs(steps[:, 0]), eps)
    np.testing.assert_allclose(np.abs(steps[:, 1]), 2 * eps)
    assert {*np.sign(steps).ravel().tolist()} == {-1.0, 1.0}
    np.testing.assert_array_equal(wide[1][:, 3:], wide[0][:, 3:])


def test_other_types_and_shapes_stay() -> None:
    given = [np.arange(3), np.array(True), np.float32(2.0), np.zeros((0, 2), np.float32)]
    moved = perturbed(given, 1)
    assert [a.shape for a in moved] == [(3,), (), (), (0, 2)]
    np.testing.assert_array_equal(moved[0], given[0])
    assert moved[2] != given[2]


def reference_of(function: Any, arguments: list[np.ndarray]) -> Reference:
    module = parse(jax.jit(function).lower(*arguments).as_text())
    return Reference(description="plain JAX", run=unplanned(module), module=module)


def test_cancellation_is_noise_but_a_wrong_result_beside_it_is_not() -> None:
    def function(x: Any) -> Any:
        return (x - x.mean()) / jnp.sqrt(x.var()), x * 2

    x = (1 + 1e-6 * np.random.default_rng(0).normal(size=64)).astype(np.float32)
    reference = reference_of(function, [x])
    centred = np.flip(x) - np.flip(x).mean()
    noisy = np.flip(centred / np.sqrt((centred**2).mean()))
    noisy = noisy + np.float32(1e-2)
    outputs = [Output(label=name, type="float32[64]") for name in ("normal", "double")]
    right = compare_with_noise([noisy, x * 2], [x], reference, outputs, Clock())
    assert [tensor.verdict for tensor in right.tensors] == ["noise", "equal"]
    wrong = compare_with_noise([noisy, x * 2.001], [x], reference, outputs, Clock())
    assert [tensor.verdict for tensor in wrong.tensors] == ["noise", "differs"]


def test_other_results_are_refused() -> None:
    x = np.ones(4, np.float32)
    reference = reference_of(lambda x: (x, x), [x])
    with pytest.raises(ValueError, match="the plan has 1 results, its reference 2"):
        compare_with_noise([x], [x], reference, [], Clock())
