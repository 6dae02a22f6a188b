"""Functions that check values are exported without the checks, and equal PyTorch's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")
alpa_torch = pytest.importorskip("alpa.torch", reason="needs the extra torch")
models = pytest.importorskip("test.frontends.torch.models", reason="needs the extra torch")
F = torch.nn.functional

RANDOM = torch.Generator().manual_seed(0)
X = torch.randn(4, 6, generator=RANDOM)
OTHERS = torch.randn(4, 6, generator=RANDOM)
COUNTS, SHARES = torch.arange(1, 7), torch.linspace(1, 2, 6)

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "loss": lambda x: F.gaussian_nll_loss(x, OTHERS, OTHERS.abs()),
    "loss of variances": lambda x: F.gaussian_nll_loss(
        OTHERS, -OTHERS, x.exp(), full=True, reduction="none"
    ),
    "loss of small variances": lambda x: F.gaussian_nll_loss(OTHERS, -OTHERS, x.relu(), eps=0.1),
    "loss of a variance per row": lambda x: F.gaussian_nll_loss(
        OTHERS, -OTHERS, x[:, 0].exp(), reduction="sum"
    ),
    "loss of a kept dimension": lambda x: F.gaussian_nll_loss(OTHERS, -OTHERS, x[:, :1].exp()),
    "loss of one variance": lambda x: F.gaussian_nll_loss(x, OTHERS, 0.5),
    "cov": torch.cov,
    "cov of a row": lambda x: torch.cov(x[0]),
    "cov, corrected": lambda x: x.cov(correction=0),
    "cov of counts": lambda x: torch.cov(x, fweights=COUNTS),
    "cov of shares": lambda x: torch.cov(x, aweights=SHARES, correction=2),
    "cov of both": lambda x: torch.cov(x, fweights=COUNTS, aweights=SHARES),
    "corrcoef": torch.corrcoef,
    "corrcoef of a method": lambda x: x[:2].corrcoef(),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_results_and_gradients(function: Callable[[Any], Any]) -> None:
    models.assert_like_pytorch(function, X)


def test_variances_of_another_shape_are_refused() -> None:
    module = models.Function(lambda x: F.gaussian_nll_loss(x, OTHERS, x[:2]), X)
    with pytest.raises(ValueError, match=r"var has shape \(2, 6\), and the input \(4, 6\)"):
        alpa_torch.from_module(module, ())
