"""Ops that torchax computes differently have PyTorch's results and gradients, also under jit."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.runtime.comparison import compare

torch = pytest.importorskip("torch", reason="needs the extra torch")
alpa_torch = pytest.importorskip("alpa.torch", reason="needs the extra torch")
models = pytest.importorskip("test.frontends.torch.models", reason="needs the extra torch")
nn = torch.nn


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_transposed_convolutions_with_groups(dim: int, groups: int) -> None:
    torch.manual_seed(0)
    kind = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][dim - 1]
    module = kind(4, 8, 3, stride=2, padding=1, output_padding=1, dilation=2, groups=groups)
    models.assert_module_like_pytorch(module, torch.randn(2, 4, *[5, 4, 3][:dim]))


class Resized(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.conv, self.options = nn.Conv2d(2, 2, 1), options

    def forward(self, x: Any) -> Any:
        return nn.functional.interpolate(self.conv(x), antialias=True, **self.options)


SIZES = [
    {"size": (4, 5)},
    {"size": (14, 2)},
    {"size": (7, 3)},
    {"scale_factor": (0.6, 1.7)},
    {"scale_factor": 0.6, "recompute_scale_factor": True},
]


@pytest.mark.parametrize("options", SIZES, ids=str)
@pytest.mark.parametrize("align", [True, False])
@pytest.mark.parametrize("mode", ["bilinear", "bicubic"])
def test_resizes_by_wide_filters(mode: str, align: bool, options: Any) -> None:
    torch.manual_seed(0)
    module = Resized(mode=mode, align_corners=align, **options)
    models.assert_module_like_pytorch(module, torch.randn(2, 2, 7, 8))


def test_resizes_by_the_filter_of_lanczos() -> None:
    torch.manual_seed(0)
    models.assert_module_like_pytorch(
        Resized(mode="lanczos", size=(4, 11)), torch.randn(2, 2, 7, 8)
    )


def test_resizes_of_images() -> None:
    class Smaller(nn.Module):
        def forward(self, x: Any) -> Any:
            return nn.functional.interpolate(x, size=(3, 5), mode="bicubic", antialias=True)

    x = torch.from_numpy(np.random.default_rng(0).choice([0, 255], (2, 3, 7, 8)).astype(np.uint8))
    fn, params, buffers = alpa_torch.from_module(Smaller(), (x,))
    result, _ = fn(params, buffers, None, x.numpy())
    assert result.dtype == np.uint8
    difference = np.asarray(result, np.int32) - Smaller()(x).numpy()
    assert abs(difference).max() <= 1  # PyTorch's weights of bytes have 16 bits.


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_group_norms(dtype: Any) -> None:
    torch.manual_seed(0)
    module = nn.GroupNorm(2, 4).to(dtype)
    nn.init.normal_(module.weight)
    x = (torch.randn(2, 4, 3, 5) * 300).to(dtype)  # Squares of 16 bits overflow.
    fn, params, buffers = alpa_torch.from_module(module, (x,))
    given = jnp.asarray(x.float().numpy()).astype(params["weight"].dtype)
    result, _ = fn(params, buffers, None, given)
    assert "while" not in jax.jit(fn).lower(params, buffers, None, given).as_text()
    expected = module(x).detach().float().numpy()
    bits = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}[dtype]
    np.testing.assert_allclose(result.astype(np.float32), expected, rtol=bits, atol=bits)


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
def test_multilabel_margins(reduction: str) -> None:
    class Margins(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scores = nn.Linear(3, 4)

        def forward(self, x: Any, target: Any) -> Any:
            loss = nn.functional.multilabel_margin_loss
            return loss(self.scores(x), target, reduction=reduction)

    torch.manual_seed(0)
    target = torch.tensor([[0, 2, -1, 1], [3, -1, -1, -1], [-1, 0, 1, 2], [0, 1, 2, 3]])
    models.assert_module_like_pytorch(Margins(), torch.randn(4, 3), target)


def test_rows_are_repeated_to_a_known_size() -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))

        def forward(self, repeats: Any) -> Any:
            return self.weight.repeat_interleave(repeats, 0, output_size=5)

    models.assert_module_like_pytorch(Repeated(), torch.tensor([1, 0, 4]))


class Routed(nn.Module):
    """The two best scores of each sample at their places, and zeros elsewhere."""

    def __init__(self, dim: int = -1) -> None:
        super().__init__()
        self.linear, self.dim = nn.Linear(6, 4), dim

    def forward(self, x: Any) -> Any:
        scores = self.linear(x)
        best, places = scores.topk(2, self.dim)
        return scores.square().scatter(self.dim, places, best)


@pytest.mark.parametrize("dim", [0, -1])
def test_scatters(dim: int) -> None:
    torch.manual_seed(0)
    models.assert_module_like_pytorch(Routed(dim), torch.randn(5, 6))


@pytest.mark.parametrize("shape", [(), (1,)])
def test_scatters_of_one_number(shape: tuple[int, ...]) -> None:
    class Number(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.number = nn.Parameter(torch.tensor(3.0))

        def forward(self, index: Any) -> Any:
            return self.number.scatter(0, index, 2 * self.number.expand(shape))

    models.assert_module_like_pytorch(Number(), torch.zeros(shape, dtype=torch.int64))


def test_samples_are_scattered_in_micro_batches() -> None:
    torch.manual_seed(0)
    module, x = Routed(), torch.randn(8, 6)
    fn, params, buffers = alpa_torch.from_module(module, (x,))

    @alpa.parallelize(cluster="cpu:1x2", num_micro_batches=2)
    def step(params: Any, x: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return (fn(params, buffers, None, x)[0] ** 2).mean()

        return jax.tree.map(lambda w, g: w - g, params, jax.grad(loss_of)(params))

    (module(x) ** 2).mean().backward()
    expected = (module.linear.weight - module.linear.weight.grad).detach().numpy()
    [difference] = compare([step(params, x.numpy())["linear.weight"]], [expected])
    assert difference.ok, difference


class Products(nn.Module):
    """Products of inputs, or of what parameters make of them."""

    def __init__(self, *, of_inputs: bool) -> None:
        super().__init__()
        self.linear, self.of_inputs = nn.Linear(4, 4), of_inputs

    def forward(self, x: Any, places: Any) -> Any:
        hidden = self.linear(x)
        source = x if self.of_inputs else hidden
        return hidden.scatter_reduce(1, places, source, "sum") + torch.ones(x.shape).scatter_reduce(
            1, places, source, "prod", include_self=False
        )


@pytest.mark.parametrize("of_inputs", [True, False])
def test_products_at_places_have_no_gradient(of_inputs: bool) -> None:
    torch.manual_seed(0)
    module = Products(of_inputs=of_inputs)
    x, places = torch.randn(3, 4), torch.tensor([[0, 0, 2, 3], [1, 1, 1, 1], [3, 2, 1, 0]])
    function, params, buffers = alpa_torch.from_module(module, (x, places))

    @jax.jit
    def loss(params: Any) -> Any:
        return function(params, buffers, jax.random.key(0), x.numpy(), places.numpy())[0].sum()

    expected = module(x, places).sum()
    np.testing.assert_allclose(loss(params), expected.detach().numpy(), rtol=1e-5)
    if of_inputs:
        expected.backward()
        found = jax.grad(loss)(params)["linear.weight"]
        np.testing.assert_allclose(found, module.linear.weight.grad.numpy(), rtol=1e-5)
        return
    said = r"test_corrections\.py:\d+:\d+: JAX has no gradient of scatter_reduce with 'prod'"
    with pytest.raises(NotImplementedError, match=rf"{said}; pass tensors .* with 'sum'"):
        jax.grad(loss)(params)
