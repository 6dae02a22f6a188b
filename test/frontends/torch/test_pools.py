"""Pools have PyTorch's results, indices and gradients."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")
alpa_torch = pytest.importorskip("alpa.torch", reason="needs the extra torch")
models = pytest.importorskip("test.frontends.torch.models", reason="needs the extra torch")
nn = torch.nn


@pytest.mark.parametrize("include", [True, False])
@pytest.mark.parametrize("ceil", [True, False])
@pytest.mark.parametrize("padding", [0, 1])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_average_pools(dim: int, padding: int, ceil: bool, include: bool) -> None:
    torch.manual_seed(0)
    kind = [nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d][dim - 1]
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dim - 1](2, 2, 1)
    pool = kind(3, 2, padding, ceil_mode=ceil, count_include_pad=include)
    models.assert_module_like_pytorch(
        nn.Sequential(conv, pool), torch.randn(2, 2, *[6, 8, 6][:dim])
    )


def test_average_pools_of_one_image_and_with_a_divisor() -> None:
    torch.manual_seed(0)
    pool = nn.AvgPool2d((2, 3), ceil_mode=True, divisor_override=4)
    models.assert_module_like_pytorch(nn.Sequential(nn.Conv2d(2, 2, 1), pool), torch.randn(2, 5, 7))
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
    models.assert_module_like_pytorch(nn.Sequential(conv, pool), x)


@pytest.mark.parametrize("size", [1, 3, 4, (None, 3), (11, 5)])
@pytest.mark.parametrize("dim", [1, 2, 3])
def test_adaptive_max_pools(dim: int, size: Any) -> None:
    if isinstance(size, tuple) and dim != 2:
        return
    torch.manual_seed(0)
    kind = [nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d][dim - 1]
    conv = [nn.Conv1d, nn.Conv2d, nn.Conv3d][dim - 1](2, 2, 1)
    x = torch.randint(0, 3, (2, 2, *[8, 8, 7][:dim])).float()  # equal elements
    models.assert_module_like_pytorch(nn.Sequential(conv, kind(size)), x)


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
