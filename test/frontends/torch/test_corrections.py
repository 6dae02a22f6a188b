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
nn = torch.nn


def assert_like_pytorch(module: Any, *args: Any) -> None:
    """The result is PyTorch's, and so are the gradients of its squares."""
    fn, params, buffers = alpa_torch.from_module(module, args)
    given = [one.numpy() for one in args]

    @jax.jit
    def run(params: Any, given: Any) -> Any:
        result, _ = fn(params, buffers, None, *given)
        return (result**2).sum(), result

    (_, result), grads = jax.value_and_grad(run, has_aux=True)(params, given)
    expected = module(*args)
    (expected**2).sum().backward()
    [difference] = compare([result], [expected.detach().numpy()])
    assert difference.ok, difference
    for name, one in module.named_parameters():
        [difference] = compare([grads[name]], [one.grad.numpy()])
        assert difference.ok, (name, difference)


@pytest.mark.parametrize("groups", [2, 4])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_transposed_convolutions_with_groups(dim: int, groups: int) -> None:
    torch.manual_seed(0)
    kind = [nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d][dim - 1]
    module = kind(4, 8, 3, stride=2, padding=1, output_padding=1, dilation=2, groups=groups)
    assert_like_pytorch(module, torch.randn(2, 4, *[5, 4, 3][:dim]))


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("ceil", [True, False])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_average_pools(dim: int, padding: int, ceil: bool, include: bool) -> None:
    torch.manual_seed(0)
    kind = [nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d][dim - 1]
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dim - 1](2, 2, 1)
    pool = kind(3, 2, padding, ceil_mode=ceil, count_include_pad=include)
    assert_like_pytorch(nn.Sequential(conv, pool), torch.randn(2, 2, *[6, 8, 6][:dim]))


def test_average_pools_of_one_image_and_with_a_divisor() -> None:
    torch.manual_seed(0)
    pool = nn.AvgPool2d((2, 3), ceil_mode=True, divisor_override=4)
    assert_like_pytorch(nn.Sequential(nn.Conv2d(2, 2, 1), pool), torch.randn(2, 5, 7))
    fn, _, _ = alpa_torch.from_module(nn.AvgPool2d(2), (torch.ones(1, 4, 4).bfloat16(),))
    assert fn({}, {}, None, jnp.ones((1, 4, 4), jnp.bfloat16))[0].dtype == jnp.bfloat16


@pytest.mark.parametrize("ceil", [True, False])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_dilated_max_pools(dim: int, padding: int, ceil: bool) -> None:
    torch.manual_seed(0)
    kind = [nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d][dim - 1]
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dim - 1](2, 2, 1)
    pool = kind(3, 2, padding, dilation=2, ceil_mode=ceil)
    x = torch.randint(0, 3, (2, 2, *[9, 8, 7][:dim])).float()  # equal elements
    assert_like_pytorch(nn.Sequential(conv, pool), x)


@pytest.mark.parametrize("size", [1, 3, 4, (None, 3), (11, 5)])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_adaptive_max_pools(dim: int, size: Any) -> None:
    if isinstance(size, tuple) and dim != 2:
        return
    torch.manual_seed(0)
    kind = [nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d][dim - 1]
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dim - 1](2, 2, 1)
    x = torch.randint(0, 3, (2, 2, *[8, 8, 7][:dim])).float()  # equal elements
    assert_like_pytorch(nn.Sequential(conv, kind(size)), x)


@pytest.mark.parametrize("other", [float("nan"), -float("inf")])
@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(3, 2, 1, return_indices=True),
        nn.MaxPool2d(3, 1, 1, 2, return_indices=True),
        nn.AdaptiveMaxPool2d(3, return_indices=True),
    ],
    ids=repr,
)
def test_indices_of_the_largest_elements(pool: Any, other: float) -> None:
    random = np.random.default_rng(0)
    x = random.integers(0, 2, (2, 3, 9, 8)).astype(np.float32)
    x[random.random(x.shape) < 0.3] = other
    x[0, 0, :5, :5] = other
    fn, params, buffers = alpa_torch.from_module(pool, (torch.from_numpy(x),))
    (values, indices), _ = fn(params, buffers, None, x)
    expected, at = pool(torch.from_numpy(x))
    np.testing.assert_array_equal(values, expected.numpy())
    np.testing.assert_array_equal(indices, at.numpy())


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
    assert_like_pytorch(module, torch.randn(2, 2, 7, 8))


def test_resizes_by_the_filter_of_lanczos() -> None:
    torch.manual_seed(0)
    assert_like_pytorch(Resized(mode="lanczos", size=(4, 11)), torch.randn(2, 2, 7, 8))


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
    assert_like_pytorch(Margins(), torch.randn(4, 3), target)


def test_rows_are_repeated_to_a_known_size() -> None:
    class Repeated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.arange(6.0).reshape(3, 2))

        def forward(self, repeats: Any) -> Any:
            return self.weight.repeat_interleave(repeats, 0, output_size=5)

    assert_like_pytorch(Repeated(), torch.tensor([1, 0, 4]))


def test_embeddings_by_frequency() -> None:
    torch.manual_seed(0)
    module = nn.Embedding(6, 3, padding_idx=1, scale_grad_by_freq=True)
    assert_like_pytorch(module, torch.tensor([[0, 2, 2], [1, 2, 0], [1, 1, 5]]))


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("padding", [None, 2])
def test_bags_of_embeddings(mode: str, padding: int | None) -> None:
    torch.manual_seed(0)
    words = torch.tensor([0, 2, 3, 1, 2, 2, 4, 5])
    offsets = torch.tensor([0, 3, 3, 4])  # the second bag is empty
    module = nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding)
    assert_like_pytorch(module, words, offsets)
    for rows in (words.view(4, 2), torch.tensor([[2, 2], [0, 3]])):  # the first bag is empty
        assert_like_pytorch(nn.EmbeddingBag(6, 3, mode=mode, padding_idx=padding), rows)
    assert_like_pytorch(
        nn.EmbeddingBag(6, 3, mode=mode, include_last_offset=True), words,
        torch.tensor([0, 3, 4, 8]),
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize("offsets", [[0, 2, 5], [0, 0, 5, 5], [0, 3, 7]])
def test_rows_after_the_last_offset_are_in_no_bag(mode: str, offsets: list[int]) -> None:
    """As PyTorch documents it. Given such rows, it drops them only in sums, not in gradients."""
    torch.manual_seed(0)
    words, ends = torch.tensor([0, 2, 3, 1, 2, 2, 4, 5]), torch.tensor(offsets)
    module = nn.EmbeddingBag(6, 3, mode=mode, include_last_offset=True)
    fn, params, buffers = alpa_torch.from_module(module, (words, ends))

    def run(params: Any) -> Any:
        result, _ = fn(params, buffers, None, words.numpy(), ends.numpy())
        return (result**2).sum(), result

    grads, result = jax.grad(run, has_aux=True)(params)
    expected = module(words[: offsets[-1]], ends)
    (expected**2).sum().backward()
    pairs = [(result, expected), (grads["weight"], module.weight.grad)]
    if mode == "sum":
        pairs.append((result, module(words, ends)))
    for found, right in pairs:
        [difference] = compare([found], [right.detach().numpy()])
        assert difference.ok, difference


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_of_one_size_in_micro_batches(mode: str) -> None:
    torch.manual_seed(0)
    module = nn.EmbeddingBag(6, 3, mode=mode, padding_idx=2)
    words = torch.randint(0, 6, (8, 4))
    fn, params, buffers = alpa_torch.from_module(module, (words,))

    @alpa.parallelize(cluster="cpu:1x1", num_micro_batches=2, batch_argnums="words")
    def step(params: Any, words: Any) -> Any:
        def loss_of(params: Any) -> Any:
            return (fn(params, buffers, None, words)[0] ** 2).mean()

        grads = jax.grad(loss_of)(params)
        return jax.tree.map(lambda w, g: w - g, params, grads)

    (module(words) ** 2).mean().backward()
    expected = (module.weight - module.weight.grad).detach().numpy()
    [difference] = compare([step(params, words.numpy())["weight"]], [expected])
    assert difference.ok, difference


def test_offsets_of_one_step_that_leave_a_longer_bag() -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(6, 3)

        def forward(self, words: Any) -> Any:
            return self.bag(words, torch.arange(0, 8, 4))

    torch.manual_seed(0)
    assert_like_pytorch(Bags(), torch.tensor([0, 2, 3, 1, 2, 2, 4, 5, 1, 1]))


def test_weights_of_a_bag() -> None:
    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag = nn.EmbeddingBag(6, 3, mode="sum")

        def forward(self, words: Any, offsets: Any, weights: Any) -> Any:
            return self.bag(words, offsets, weights)

    torch.manual_seed(0)
    words, offsets = torch.tensor([0, 2, 3, 1]), torch.tensor([0, 3])
    weights = torch.from_numpy(np.linspace(1, 2, 4, dtype=np.float32))
    assert_like_pytorch(Weighted(), words, offsets, weights)
