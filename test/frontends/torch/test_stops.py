"""Gradients stop where PyTorch's do, and the buffers that change there are returned."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

from alpa.runtime.comparison import compare

torch = pytest.importorskip("torch", reason="needs the extra torch")
alpa_torch = pytest.importorskip("alpa.torch", reason="needs the extra torch")
nn = torch.nn


def assert_like_pytorch(module: Any, x: Any) -> None:
    """The result, the gradients of its squares, and the new buffers are PyTorch's."""
    fn, params, buffers = alpa_torch.from_module(module, (x,))

    def loss_of(params: Any) -> Any:
        result, new = fn(params, buffers, None, x.numpy())
        return (result**2).sum(), (result, new)

    grads, (result, new) = jax.grad(loss_of, has_aux=True)(params)
    expected = module(x)
    (expected**2).sum().backward()
    pairs = {"result": (result, expected.detach().numpy())}
    for name, one in module.named_parameters():
        pairs[name] = grads[name], np.zeros(one.shape) if one.grad is None else one.grad.numpy()
    pairs |= {name: (new[name], one.numpy()) for name, one in module.named_buffers()}
    for name, (found, right) in pairs.items():
        [difference] = compare([found], [right])
        assert difference.ok, (name, difference)


class Frozen(nn.Module):
    """A backbone whose parameters are not trained, but whose batch norms count on."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Conv2d(3, 4, 1), norm)
        self.head = nn.Conv2d(4, 2, 1)

    def forward(self, x: Any) -> Any:
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


@pytest.mark.parametrize(
    "norm", [nn.BatchNorm2d(4), nn.InstanceNorm2d(4, track_running_stats=True)], ids=repr
)
def test_statistics_of_a_frozen_backbone_are_returned(norm: Any) -> None:
    torch.manual_seed(0)
    assert_like_pytorch(Frozen(norm), torch.randn(4, 3, 5, 5))


class Whitened(nn.Module):
    """Reads the running statistics after the norm has updated them."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.linear, self.norm = nn.Conv1d(4, 4, 1, bias=False), norm

    def forward(self, x: Any) -> Any:
        y = self.norm(self.linear(x)).exp()
        return y * self.norm.running_var[:, None] + self.norm.running_mean[:, None]


@pytest.mark.parametrize(
    "norm",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, affine=False).eval(),
        nn.SyncBatchNorm(4),
        nn.InstanceNorm1d(4, track_running_stats=True),
    ],
    ids=repr,
)
def test_running_statistics_have_no_gradient(norm: Any) -> None:
    torch.manual_seed(0)
    assert_like_pytorch(Whitened(norm), torch.randn(6, 4, 3))


def test_buffers_that_are_written_by_out_are_returned() -> None:
    """The power iteration of a spectral norm writes its vectors so."""
    torch.manual_seed(0)
    module = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 4))
    nn.init.normal_(module.parametrizations.weight.original)  # far from what has converged
    assert_like_pytorch(module, torch.randn(6, 8))


def test_tensors_without_gradients_may_change_under_no_grad() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("largest", torch.zeros(4))

        def forward(self, x: Any) -> Any:
            scale = torch.ones_like(x)
            with torch.no_grad():
                scale[:, 0] = self.linear(x)[:, 1]
                self.largest.view(2, 2).add_(1)
            return self.linear(x) * scale * self.largest.detach()

    torch.manual_seed(0)
    assert_like_pytorch(Masked(), torch.randn(6, 4))


def detached(y: Any) -> Any:
    y.detach().mul_(2)
    return y


def by_out(y: Any) -> Any:
    torch.mul(y.detach(), 2, out=y.detach())
    return y


def under_no_grad(y: Any) -> Any:
    with torch.no_grad():
        y[0] = 1
    return y


def after_detach(y: Any) -> Any:
    z = y.detach()
    y.mul_(2)
    return z + y


def after_detach_of_a_view(y: Any) -> Any:
    d = y.view(4, 2).detach()
    y.add_(1)
    return d.view(2, 4) * y


def by_a_view(y: Any) -> Any:
    v = y[:2]
    d = y.detach()
    v.mul_(2)
    return d + y


def within_autocast(y: Any) -> Any:
    d = y.detach()
    with torch.autocast("cpu", torch.bfloat16):
        y += 1
    return d * y


def detached_within_autocast(y: Any) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        d = y.detach()
    y += 1
    return d * y


def after_detach_under_no_grad(y: Any) -> Any:
    with torch.no_grad():
        d = y.detach()
    y.mul_(2)
    return d + y


def after_detach_of_parts(y: Any) -> Any:
    v, _ = y.detach().chunk(2)
    y.mul_(2)
    return y + v


def after_detach_without_aliases_in_its_schema(y: Any) -> Any:
    v = torch.atleast_3d(y)
    d = v.detach()
    y.mul_(2)
    return d[..., 0] + y


def of_a_constant_under_no_grad(y: Any) -> Any:
    base = torch.zeros_like(y)
    with torch.no_grad():
        d = base.detach()
        v = base * 2
    base.copy_(y)
    return d * v * y


def of_a_constant(y: Any) -> Any:
    base = torch.zeros_like(y)
    d = base.detach()
    base.copy_(y)
    return d * y


CHANGES = [
    detached,
    by_out,
    under_no_grad,
    after_detach,
    after_detach_of_a_view,
    by_a_view,
    within_autocast,
    detached_within_autocast,
    after_detach_under_no_grad,
    after_detach_of_parts,
    after_detach_without_aliases_in_its_schema,
    of_a_constant,
    of_a_constant_under_no_grad,
]


class Changed(nn.Module):
    """Changes a tensor with a gradient."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 4), change

    def forward(self, x: Any) -> Any:
        return self.change(self.linear(x) + 0)


@pytest.mark.parametrize("change", CHANGES, ids=lambda it: it.__name__)
def test_what_has_a_gradient_does_not_change_without_it(change: Callable[[Any], Any]) -> None:
    message = r"changes a tensor in place that is detached or under no_grad, .*change a clone"
    with pytest.raises(alpa_torch.ExportError, match=message):
        alpa_torch.from_module(Changed(change), (torch.ones(2, 4),))


def changed_before(y: Any) -> Any:
    y.relu_()
    with torch.no_grad():
        scale = y.view(4, 2).mean()
    return y * y.detach() * scale


def used_before(y: Any) -> Any:
    scale = y.detach().view(4, 2).mean()
    with torch.no_grad():
        shift = y.view(4, 2).mean()
    y.mul_(2)
    return y * scale + shift


def view_of_what_is_written(y: Any) -> Any:
    base = torch.zeros(8)
    v = base.view(2, 4)
    base.copy_(y.view(8))
    return v.detach() * y


def part_of_what_is_written(y: Any) -> Any:
    base = torch.zeros(4, 4)
    v, w = base[:2], base[2:]
    with torch.autocast("cpu", torch.bfloat16):
        base[1:].view(3, 4)[:2].copy_(y)
    return v.detach() * y + w


@pytest.mark.parametrize(
    "change",
    [changed_before, used_before, view_of_what_is_written, part_of_what_is_written],
    ids=lambda it: it.__name__,
)
def test_gradients_stop_beside_changes(change: Callable[[Any], Any]) -> None:
    torch.manual_seed(0)
    assert_like_pytorch(Changed(change), torch.randn(2, 4))
