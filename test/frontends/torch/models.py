"""Tiny modules, and their training in PyTorch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
import torch
from torch import nn

import alpa.torch
from alpa.runtime.comparison import compare

F = nn.functional


class Function(nn.Module):
    """A function of a parameter."""

    def __init__(self, function: Callable[[Any], Any], x: torch.Tensor) -> None:
        super().__init__()
        self.x, self.function = nn.Parameter(x.clone()), function

    def forward(self) -> Any:
        return self.function(self.x)


def assert_like_pytorch(function: Callable[[Any], Any], x: torch.Tensor) -> None:
    """Checks that a function has PyTorch's result and gradient under jit."""
    module = Function(function, x)
    fn, params, buffers = alpa.torch.from_module(module, ())
    expected = module()
    weights = torch.linspace(0.5, 2, expected.numel()).reshape(expected.shape)
    (expected * weights).sum().backward()

    def run(params: Any) -> Any:
        result, _ = fn(params, buffers, None)
        return (result * weights.numpy()).sum(), result

    (_, result), grads = jax.jit(jax.value_and_grad(run, has_aux=True))(params)
    assert module.x.grad is not None
    pairs = zip([result, grads["x"]], [expected.detach(), module.x.grad], strict=True)
    for found, right in pairs:
        [difference] = compare([found], [right.numpy()])
        assert difference.ok, difference


def assert_module_like_pytorch(module: Any, *args: Any) -> None:
    """The result is PyTorch's, and so are the gradients of its squares."""
    fn, params, buffers = alpa.torch.from_module(module, args)
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


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        samples, length, width = x.shape
        split = self.qkv(x).view(samples, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*split.unbind(0), is_causal=True)
        return self.out(y.transpose(1, 2).reshape(samples, length, width))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    """A decoder with a tied embedding; returns the loss."""

    def __init__(self, *, layers: int = 4, width: int = 32, dropout: float = 0.0) -> None:
        super().__init__()
        self.tokens = nn.Embedding(64, width)
        self.positions = nn.Parameter(torch.randn(16, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, 2, dropout) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 64, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.tokens(x) + self.positions[: x.shape[1]]
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), y.flatten())


class Residual(nn.Module):
    def __init__(self, channels: int, out: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride=out // channels, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(out)
        self.conv2 = nn.Conv2d(out, out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(out)
        self.shortcut = nn.Identity()
        if channels != out:
            self.shortcut = nn.Conv2d(channels, out, 1, stride=out // channels, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(y)) + self.shortcut(x))


class ResNet(nn.Module):
    """Batch norm, and lists of blocks with other shapes; returns the scores of classes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8))
        self.layer1 = nn.Sequential(Residual(8, 8))
        self.layer2 = nn.Sequential(Residual(8, 16))
        self.head = nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer2(self.layer1(F.relu(self.stem(x))))
        return self.head(x.mean((2, 3)))


def trained(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    losses: Sequence[Callable[[], torch.Tensor]],
) -> list[float]:
    """Takes a step of PyTorch for each loss, in place, and returns the losses."""
    found: list[float] = []
    for loss_of in losses:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    return found


def arrays(module: nn.Module) -> dict[str, np.ndarray]:
    """The parameters and buffers of a module."""
    named: list[Any] = [*module.named_parameters(), *module.named_buffers()]
    return {name: one.detach().numpy().copy() for name, one in named}
