"""Where a function has a kink, its gradient is PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa.runtime.comparison import compare

torch = pytest.importorskip("torch", reason="needs the extra torch")
alpa_torch = pytest.importorskip("alpa.torch", reason="needs the extra torch")
nn = torch.nn
F = nn.functional

VALUES = torch.tensor([[0.0, 0, 0], [1, -1, 0], [2, 2, -3], [0.5, 3, 1]])
OTHERS = torch.tensor([[0.0, 1, 0], [1, -1, 2], [2, 2, -3], [0.5, 0, 1]])


def std(x: Any) -> Any:
    return x.std(1)


KINKS: dict[str, Callable[[Any], Any]] = {
    "abs": torch.abs,
    "l1 loss": lambda x: F.l1_loss(x, OTHERS),
    "log of sigmoid": F.logsigmoid,
    "clamp": lambda x: x.clamp(-1, 1),
    "clamp by a tensor": lambda x: x.clamp(max=OTHERS),
    "hardtanh": F.hardtanh,
    "relu6": lambda x: F.relu6(x * 3),
    "hardsigmoid": F.hardsigmoid,
    "hardswish": F.hardswish,
    "leaky relu": lambda x: F.leaky_relu(x, 0.2),
    "fmax": lambda x: torch.fmax(x, OTHERS),
    "fmin": lambda x: torch.fmin(x, OTHERS),
    "sinc": torch.sinc,
    "power of 0": lambda x: x**0 + x,
    "power of a tensor": lambda x: x.abs() ** OTHERS.relu(),
    "power of itself": lambda x: x.relu() ** x.relu(),
    "power of a number": lambda x: (x.abs() + 1) ** 2.3 + 2**x,
    "angle": lambda x: torch.atan2(x, OTHERS),
    "sign of another": lambda x: torch.copysign(x, OTHERS - 1),
    **{f"norm {p}": lambda x, p=p: x.norm(p=p, dim=1) for p in (0.5, 1, 2, 3, float("inf"))},
    "norm of all": lambda x: torch.linalg.norm(x * 0),
    "normalize": lambda x: F.normalize(x, dim=1, eps=0.1),
    "similarity": lambda x: F.cosine_similarity(x, OTHERS, dim=1, eps=0.1),
    "distances": lambda x: torch.cdist(x, x),
    "distances of order 1": lambda x: torch.cdist(x, OTHERS, p=1),
    "own distances": lambda x: F.pdist(torch.cat([x, x[:1]])),
    "distance": lambda x: torch.dist(x, x.detach()),
    "standard deviation": std,
    **{
        f"{function.__name__} of large numbers": lambda x, function=function: function(x * 100)
        for function in (F.softplus, F.mish, F.elu, F.celu, F.selu)
    },
    "elu": lambda x: F.elu(x, 0.5),
    "celu": lambda x: F.celu(x, 0.5),
    "softplus": lambda x: F.softplus(x, 2, 3),
    "cross entropy of 0 and 1": lambda x: F.binary_cross_entropy(
        (x * 100).sigmoid(), OTHERS.clamp(0, 1), weight=OTHERS
    ),
    "attention to nothing": lambda x: F.scaled_dot_product_attention(
        x[None], x[None], x[None], attn_mask=torch.ones(4, 4).tril(-1).bool()
    ),
    "of equal elements": lambda x: torch.std(x * 0 + 1, unbiased=False),
}


def flat(results: Any) -> Any:
    return results if isinstance(results, tuple) else (results,)


def weights_of(result: Any) -> np.ndarray:
    number = int(np.prod(result.shape))
    return np.linspace(0.5, 2, number, dtype=np.float32).reshape(result.shape)


class Kinks(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.x, self.function = nn.Parameter(VALUES.clone()), function

    def forward(self) -> Any:
        return self.function(self.x)


@pytest.mark.parametrize("function", KINKS.values(), ids=KINKS.keys())
def test_gradients_at_kinks(function: Callable[[Any], Any]) -> None:
    module = Kinks(function)
    fn, params, buffers = alpa_torch.from_module(module, ())

    def run(params: Any) -> Any:
        results = [*flat(fn(params, buffers, None)[0])]
        return (results[0] * weights_of(results[0])).sum(), results

    grads, results = jax.grad(run, has_aux=True)(params)
    expected = [*flat(module())]
    (expected[0] * torch.from_numpy(weights_of(expected[0]))).sum().backward()
    pairs = [*zip(results, expected, strict=True), (grads["x"], module.x.grad)]
    for found, right in pairs:
        [difference] = compare([found], [right.detach().numpy()])
        assert difference.ok, (found, right)


class Size(nn.Module):
    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Any) -> Any:
        return self.function(x)


@pytest.mark.parametrize("function", [torch.norm, torch.std], ids=lambda it: it.__name__)
def test_sums_of_16_bits_do_not_overflow(function: Callable[[Any], Any]) -> None:
    x = torch.tensor([-600.0, 800.0]).half()
    module = Size(function)
    fn, _, _ = alpa_torch.from_module(module, (x,))
    result, _ = fn({}, {}, None, jnp.asarray(x.numpy()))
    assert result.dtype == jnp.float16
    assert result == module(x).item() < 1024


@pytest.mark.parametrize(
    "function",
    [
        lambda x: torch.linalg.vector_norm(x, dim=1, dtype=torch.float32),
        lambda x: torch.linalg.norm(x, dim=1, dtype=torch.float32),
        lambda x: torch.norm(x, dim=1, dtype=torch.float32),
        lambda x: torch._safe_softmax(x, 1, torch.float32),
    ],
    ids=["vector norm", "linalg norm", "norm", "softmax"],
)
def test_results_of_another_type(function: Callable[[Any], Any]) -> None:
    x = VALUES.bfloat16()
    module = Size(function)
    fn, _, _ = alpa_torch.from_module(module, (x,))
    result, _ = fn({}, {}, None, jnp.asarray(VALUES.numpy(), jnp.bfloat16))
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, module(x).numpy(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "function",
    [F.elu, F.selu, F.celu, F.softplus, F.mish, F.hardsigmoid, F.hardswish, torch.sinc],
    ids=lambda it: it.__name__,
)
def test_16_bits_are_rounded_once(function: Callable[[Any], Any], dtype: Any) -> None:
    x = torch.tensor([*np.arange(-6, 6.25, 0.25), 11.5, 15, 19, 100], dtype=dtype)
    module = Kinks(function)
    module.x = nn.Parameter(x.clone())
    fn, params, buffers = alpa_torch.from_module(module, ())

    def run(params: Any) -> Any:
        result, _ = fn(params, buffers, None)
        return result.sum(dtype=jnp.float32), result

    grads, result = jax.grad(run, has_aux=True)(params)
    wide = x.float().requires_grad_()
    expected = function(wide)
    expected.sum().backward()
    for found, right in ((result, expected), (grads["x"], wide.grad)):
        assert found.dtype == params["x"].dtype
        np.testing.assert_allclose(
            np.asarray(found, np.float32),
            right.detach().numpy(),
            rtol=torch.finfo(dtype).eps,
            atol=1e-6,
        )


def test_gradients_of_elu_of_very_negative_numbers() -> None:
    module = Kinks(F.elu)
    module.x = nn.Parameter(torch.tensor([-30.0, -20, -12]))
    fn, params, buffers = alpa_torch.from_module(module, ())
    grads = jax.grad(lambda params: fn(params, buffers, None)[0].sum())(params)
    np.testing.assert_allclose(grads["x"], np.exp([-30.0, -20, -12]), rtol=1e-5)


def test_gradients_of_hardswish_at_infinity() -> None:
    module = Kinks(F.hardswish)
    module.x = nn.Parameter(torch.tensor([-np.inf, np.inf], dtype=torch.float32))
    fn, params, buffers = alpa_torch.from_module(module, ())
    grads = jax.grad(lambda params: fn(params, buffers, None)[0].sum())(params)
    module().sum().backward()
    np.testing.assert_array_equal(grads["x"], module.x.grad)
