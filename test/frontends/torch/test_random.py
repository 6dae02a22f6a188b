"""Random numbers of JAX have the distributions of PyTorch's, and differ between keys."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")
alpa_torch = pytest.importorskip("alpa.torch", reason="needs the extra torch")
models = pytest.importorskip("test.frontends.torch.models", reason="needs the extra torch")
F = torch.nn.functional

SIZE = 1 << 16


def drawing(function: Callable[[Any], Any], x: Any) -> Callable[[int], np.ndarray]:
    fn, params, buffers = alpa_torch.from_module(models.Function(function, x), ())
    return lambda seed: np.asarray(fn(params, buffers, jax.random.key(seed))[0])


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.empty_like(x).exponential_(2),
        lambda x: torch.empty_like(x).normal_(2, 3),
        lambda x: torch.empty_like(x).cauchy_(2, 3),
        lambda x: F.rrelu(-torch.ones_like(x), 0.1, 0.6, training=True),
    ],
    ids=["exponential", "normal", "cauchy", "rrelu"],
)
def test_distributions(function: Callable[[Any], Any]) -> None:
    """The quantiles are PyTorch's."""
    torch.manual_seed(0)
    x = torch.zeros(SIZE)
    run = drawing(function, x)
    assert (run(0) == run(0)).all()
    assert (run(0) != run(1)).mean() > 0.99
    at = np.linspace(0.1, 0.9, 9)
    found, right = np.quantile(run(0), at), np.quantile(function(x).numpy(), at)
    spread = right[-1] - right[0]
    np.testing.assert_allclose(found, right, atol=0.03 * spread)


def test_exponential_numbers_are_positive() -> None:
    """The logarithm of the smallest is finite, in a sample with numbers that JAX draws as 0."""
    size = 1 << 24
    assert jax.random.exponential(jax.random.key(0), (size,)).min() == 0
    for dtype in (torch.float32, torch.float16):
        run = drawing(
            lambda x: torch.empty_like(x).exponential_().log(), torch.zeros(size).to(dtype)
        )
        assert np.isfinite(run(0)).all()


def test_gumbel_softmax() -> None:
    """Classes are drawn with their probabilities, with the gradient of the soft sample."""
    logits = torch.tensor([1.0, 0.0, -1.0]).repeat(SIZE, 1)
    module = models.Function(lambda x: F.gumbel_softmax(x, hard=True), logits)
    fn, params, buffers = alpa_torch.from_module(module, ())

    @jax.jit
    def run(params: Any, key: Any) -> Any:
        sample, _ = fn(params, buffers, key)
        return (sample * jnp.arange(3)).sum(), sample

    (_, sample), grads = jax.value_and_grad(run, has_aux=True)(params, jax.random.key(0))
    np.testing.assert_allclose(sample.max(1), 1, rtol=1e-6)
    np.testing.assert_allclose(sample.mean(0), logits[0].softmax(0).numpy(), atol=0.01)
    assert np.isfinite(grads["x"]).all()
    assert abs(grads["x"]).max() > 0


def test_slopes_of_rrelu() -> None:
    x = torch.linspace(-1, 1, 5)
    module = models.Function(lambda x: F.rrelu(x, 0.2, 0.3, training=True), x)
    fn, params, buffers = alpa_torch.from_module(module, ())

    def run(params: Any) -> Any:
        result, _ = fn(params, buffers, jax.random.key(0))
        return result.sum(), result

    (_, result), grads = jax.value_and_grad(run, has_aux=True)(params)
    slopes = grads["x"]
    assert ((slopes[:3] > 0.2) & (slopes[:3] < 0.3)).all()
    assert (slopes[3:] == 1).all()
    np.testing.assert_allclose(result, slopes * x.numpy(), rtol=1e-6)
