"""Functions of PyTorch that read values to check them, without the checks.

torch.export cannot trace what reads values.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode


class Unchecked(TorchFunctionMode):
    """Within this context, the functions of this file stand for PyTorch's."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return _UNCHECKED.get(func, func)(*args, **(kwargs or {}))


def gaussian_nll_loss(
    x: torch.Tensor,
    target: torch.Tensor,
    var: torch.Tensor | float,
    full: bool = False,
    eps: float = 1e-6,
    reduction: str = "mean",
) -> torch.Tensor:
    """Does not check that no variance is negative."""
    if isinstance(var, int | float):
        var = torch.full_like(x, var)
    elif var.shape == x.shape[:-1]:
        var = var.unsqueeze(-1)
    elif var.shape != x.shape:
        pairs = zip(x.shape, var.shape, strict=False)
        if var.ndim != x.ndim or sum(own for size, own in pairs if own != size) != 1:
            raise ValueError(f"var has shape {tuple(var.shape)}, and the input {tuple(x.shape)}")
    # As in PyTorch, the gradient passes the clamp.
    var = var + (var.clamp(min=eps) - var).detach()
    losses = 0.5 * (var.log() + (x - target) ** 2 / var)
    if full:
        losses = losses + 0.5 * math.log(2 * math.pi)
    return {"none": lambda: losses, "mean": losses.mean, "sum": losses.sum}[reduction]()


def cov(
    x: torch.Tensor,
    *,
    correction: int = 1,
    fweights: torch.Tensor | None = None,
    aweights: torch.Tensor | None = None,
) -> torch.Tensor:
    """Does not check that weights are positive, and does not warn of few observations."""
    x = x.reshape(1, -1) if x.ndim < 2 else x
    weights = torch.ones(x.shape[1], dtype=torch.int64, device=x.device)
    for one in (fweights, aweights):
        weights = weights if one is None else weights * one
    total = weights.sum()
    scale = 1 if aweights is None else (weights * aweights).sum() / total
    centered = x - (x * weights).sum(1, keepdim=True) / total
    products = centered @ (centered * weights).mT.conj()
    return (products / (total - correction * scale).clamp(min=0)).squeeze()


def corrcoef(x: torch.Tensor) -> torch.Tensor:
    c = cov(x)
    if c.ndim == 0:
        return c / c
    deviations = c.diagonal().sqrt()
    c = c / deviations[:, None] / deviations
    if c.is_complex():
        return torch.complex(c.real.clamp(-1, 1), c.imag.clamp(-1, 1))
    return c.clamp(-1, 1)


_UNCHECKED: dict[Any, Any] = {
    functional.gaussian_nll_loss: gaussian_nll_loss,
    torch.cov: cov,
    torch.Tensor.cov: cov,
    torch.corrcoef: corrcoef,
    torch.Tensor.corrcoef: corrcoef,
}
