"""Among equal elements, gradients go to those of the indices, and most indices are PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from alpa.runtime.comparison import compare

torch = pytest.importorskip("torch", reason="needs the extra torch")
alpa_torch = pytest.importorskip("alpa.torch", reason="needs the extra torch")
models = pytest.importorskip("test.frontends.torch.models", reason="needs the extra torch")

VALUES = torch.tensor(
    [[1.0, 1, 2, 2, 0, 1], [3, 3, 3, 3, 3, 3], [0, 0, 1, 1, 2, 2], [2, 1, 2, 1, 2, 0]]
)

OF_PYTORCH: dict[str, Callable[[Any], Any]] = {
    "sort": lambda x: x.sort(1),
    "sort, descending": lambda x: x.sort(0, descending=True),
    "sort, stable": lambda x: torch.sort(x, dim=-1, descending=True, stable=True),
    "mode": lambda x: x.mode(1),
    "mode, kept": lambda x: x.mode(0, keepdim=True),
    "cummax": lambda x: x.cummax(1),
    "cummin": lambda x: x.cummin(-1),
    "max": lambda x: x.max(1),
    "min": lambda x: x.min(0, keepdim=True),
    "median of all": lambda x: (x.median(),),
    "nanmedian of all": lambda x: (x.nanmedian(),),
    "largest of all": lambda x: (x.max(),),
}
OF_ANY: dict[str, Callable[[Any, int], Any]] = {
    "topk": lambda x, dim: x.topk(3, dim),
    "topk, smallest": lambda x, dim: x.topk(3, dim, largest=False),
    "kthvalue": lambda x, dim: x.kthvalue(3, dim, keepdim=True),
    "median": lambda x, dim: x.median(dim, keepdim=True),
    "nanmedian": lambda x, dim: x.nanmedian(dim, keepdim=True),
}


def run(function: Callable[[Any], Any], x: Any) -> tuple[Any, Any, Any]:
    """Results and the gradient of the first, and their weights in it."""
    fn, params, buffers = alpa_torch.from_module(models.Function(function, x), ())
    weights = torch.linspace(0.5, 2, function(x)[0].numel()).reshape(function(x)[0].shape)

    def weighted(params: Any) -> Any:
        results, _ = fn(params, buffers, None)
        return (results[0] * weights.numpy()).sum(), results

    grads, results = jax.jit(jax.grad(weighted, has_aux=True))(params)
    return results, grads["x"], weights


@pytest.mark.parametrize("function", OF_PYTORCH.values(), ids=OF_PYTORCH.keys())
def test_equal_elements_are_those_of_pytorch(function: Callable[[Any], Any]) -> None:
    results, gradient, weights = run(function, VALUES)
    x = VALUES.clone().requires_grad_()
    expected = function(x)
    (expected[0] * weights).sum().backward()
    for found, right in zip([*results, gradient], [*expected, x.grad], strict=True):
        [difference] = compare([found], [right.detach().numpy()])
        assert difference.ok, difference


@pytest.mark.parametrize("dim", [0, 1])
@pytest.mark.parametrize("function", OF_ANY.values(), ids=OF_ANY.keys())
def test_gradients_are_those_of_the_indices(function: Callable[..., Any], dim: int) -> None:
    (values, indices), gradient, weights = run(lambda x: function(x, dim), VALUES)
    np.testing.assert_array_equal(values, function(VALUES, dim)[0].numpy())
    at = torch.from_numpy(np.array(indices)).long()
    np.testing.assert_array_equal(VALUES.gather(dim, at), values)
    expected = torch.zeros_like(VALUES).scatter_add(dim, at, weights)
    np.testing.assert_allclose(gradient, expected.numpy(), rtol=1e-6)


@pytest.mark.parametrize("size", [5, 6])
@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.sort(),
        lambda x: x.sort(descending=True),
        lambda x: x.topk(3),
        lambda x: x.topk(3, largest=False),
        lambda x: x.kthvalue(4),
        lambda x: x.median(0),
        lambda x: x.nanmedian(0),
        lambda x: x.cummax(0),
        lambda x: x.cummin(0),
        lambda x: x.max(0),
        lambda x: (x.median(), x.nanmedian()),
    ],
)
def test_values_that_are_no_numbers(function: Callable[[Any], Any], size: int) -> None:
    x = torch.tensor([3.0, float("nan"), 1, -float("inf"), 2, 4])[:size]
    results, _, _ = run(function, x)
    for found, right in zip(results, function(x), strict=True):
        np.testing.assert_array_equal(found, right.numpy())


@pytest.mark.parametrize("dtype", [torch.int32, torch.uint8])
def test_integers(dtype: Any) -> None:
    class Integers(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            values = x.sort(descending=True)[0], x.topk(2, largest=False)[0], x.cummax(0)[0]
            return *values, x.median(), x.mode()[0]

    x = torch.tensor([1, 0, 3, 0, 1, 0]).to(dtype)
    fn, _, _ = alpa_torch.from_module(Integers(), (x,))
    for found, right in zip(fn({}, {}, None, x.numpy())[0], Integers()(x), strict=True):
        np.testing.assert_array_equal(found, right.numpy())
