"""Modules whose gradients JAX would compute differently are refused."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")
alpa_torch = pytest.importorskip("alpa.torch", reason="needs the extra torch")
checkpoint = pytest.importorskip(
    "torch.utils.checkpoint", reason="needs the extra torch"
).checkpoint
nn = torch.nn


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient


class Quantised(nn.Module):
    def __init__(self, *, by_detach: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([0.3, 1.7]))
        self.by_detach = by_detach

    def forward(self, x: Any) -> Any:
        y = x * self.scale
        return (y + (y.round() - y).detach() if self.by_detach else Rounded.apply(y)).sum()


def test_a_backward_of_its_own_is_refused_and_the_remedy_works() -> None:
    x = torch.tensor([1.0, 2.0])
    line = Rounded.forward.__code__.co_firstlineno
    message = rf"test_gradients.py:{line}: Rounded has a backward of its own.*detach"
    with pytest.raises(alpa_torch.ExportError, match=message):
        alpa_torch.from_module(Quantised(by_detach=False), (x,))
    module = Quantised(by_detach=True)
    fn, params, buffers = alpa_torch.from_module(module, (x,))
    value, grads = jax.value_and_grad(lambda p: fn(p, buffers, None, x.numpy())[0])(params)
    expected = module(x)
    expected.backward()
    assert float(value) == expected.item() == 3
    np.testing.assert_array_equal(grads["scale"], module.scale.grad.numpy())


class Checkpointed(nn.Module):
    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.reentrant = reentrant

    def forward(self, x: Any) -> Any:
        x = self.layer(x)
        return checkpoint(lambda x: self.layer(x).sin(), x, use_reentrant=self.reentrant).sum()


def test_reentrant_checkpoints_are_refused_and_others_work() -> None:
    torch.manual_seed(0)
    x = torch.ones(2, 4)
    with pytest.raises(alpa_torch.ExportError, match=r"pass use_reentrant=False"):
        alpa_torch.from_module(Checkpointed(reentrant=True), (x,))
    module = Checkpointed(reentrant=False)
    fn, params, buffers = alpa_torch.from_module(module, (x,))
    grads = jax.grad(lambda p: fn(p, buffers, None, x.numpy())[0])(params)
    module(x).backward()
    expected = module.layer.weight.grad.numpy()
    np.testing.assert_allclose(grads["layer.weight"], expected, rtol=1e-5)


def test_hooks_of_gradients_are_refused() -> None:
    module = nn.Linear(4, 4)
    module.weight.register_hook(lambda gradient: 2 * gradient)
    with pytest.raises(alpa_torch.ExportError, match=r"the parameter weight has a hook"):
        alpa_torch.from_module(module, (torch.ones(2, 4),))
    module = nn.Sequential(nn.Linear(4, 4))
    module[0].register_full_backward_hook(lambda module, grads, outs: None)
    with pytest.raises(alpa_torch.ExportError, match=r"the module 0 has a hook of its gradients"):
        alpa_torch.from_module(module, (torch.ones(2, 4),))


class Mixed(nn.Module):
    """Teacher and student under autocast; `teach` says how the teacher's gradient stops."""

    def __init__(self, teach: str) -> None:
        super().__init__()
        self.teacher, self.student = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("scale", torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.teach = teach

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                scale = self.scale * 2
                given = self.teacher(x) if self.teach == "within" else None
            if self.teach == "detach":
                given = self.teacher(x).detach()
        if self.teach == "around":
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
                given = self.teacher(x)
        return ((self.student(x) - given.float()) ** 2 * scale).mean()


class Scaled(nn.Module):
    """Scales by what `scale_of` computes of the weights in autocast, under no_grad."""

    def __init__(self, scale_of: Any, device: str, **autocast: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0]))
        self.scale_of = scale_of
        self.device, self.autocast = device, autocast

    def forward(self, x: Any) -> Any:
        with torch.autocast(self.device, **self.autocast), torch.no_grad():
            scale = self.scale_of(self.weight)
        return (x * self.weight * torch.cat(scale)).sum()


def topk(weight: Any) -> Any:
    return torch.topk(weight, 4)[:1]


def chunk(weight: Any) -> Any:
    return weight.chunk(2)


def double(weight: Any) -> Any:
    return (weight * 2,)


def written(weight: Any) -> Any:
    scale = torch.zeros(4)
    scale[:] = weight
    return (scale,)


@pytest.mark.filterwarnings("ignore:.*CUDA is not available")
@pytest.mark.parametrize(
    "module",
    [
        Scaled(topk, "cpu"),
        Scaled(chunk, "cpu"),
        Scaled(written, "cpu"),
        Scaled(double, "cpu", enabled=False),
        Scaled(double, "cuda", dtype=torch.bfloat16),
    ],
    ids=lambda it: f"{it.scale_of.__name__}-{it.device}",
)
def test_no_grad_within_any_autocast_is_refused(module: Any) -> None:
    message = r"test_gradients.py:\d+: forward computes with a gradient under no_grad inside autoc"
    with pytest.raises(alpa_torch.ExportError, match=message):
        alpa_torch.from_module(module, (torch.ones(4),))


def labels(y: Any) -> Any:
    return y.softmax(1).argmax(1)


def largest(y: Any) -> Any:
    return y.topk(2)[1]


def positive(y: Any) -> Any:
    return y > 0


class Labelled(nn.Module):
    """Counts, under autocast and no_grad, what a float with a gradient is compared with."""

    def __init__(self, count: Any) -> None:
        super().__init__()
        self.linear, self.count = nn.Linear(4, 4), count
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            y = self.linear(x)
            with torch.no_grad():
                self.average.mul_(0.9).add_(y.mean(0), alpha=0.1)
                scale = self.count(y)
                ones = torch.ones_like(y)
            y = y.float() * scale.float().mean() * ones[:, : y.detach().shape[1]]
        return y.sum()


@pytest.mark.parametrize("count", [labels, largest, positive], ids=lambda it: it.__name__)
def test_integers_and_unused_floats_under_no_grad_within_autocast(count: Any) -> None:
    torch.manual_seed(0)
    module, x = Labelled(count), torch.randn(3, 4)
    fn, params, buffers = alpa_torch.from_module(module, (x,))
    grads, new = jax.grad(lambda p: fn(p, buffers, None, x.numpy()), has_aux=True)(params)
    module(x).backward()
    for found, right in [
        (grads["linear.weight"], module.linear.weight.grad),
        (new["average"], module.average),
    ]:
        np.testing.assert_allclose(found, right.numpy(), rtol=1e-2)


class Returned(nn.Module):
    def __init__(self, *, by_buffer: bool) -> None:
        super().__init__()
        self.linear, self.by_buffer = nn.Linear(4, 4), by_buffer
        self.register_buffer("average", torch.zeros(4))

    def forward(self, x: Any) -> Any:
        with torch.autocast("cpu", torch.bfloat16):
            with torch.no_grad():
                y = self.linear(x).float()
                self.average.add_(y.mean(0))
            if self.by_buffer:
                return self.linear(x) * self.average
        return y, self.linear(x)


@pytest.mark.parametrize("by_buffer", [True, False])
def test_a_later_use_of_what_no_grad_within_autocast_computes_is_refused(by_buffer: bool) -> None:
    message = r"test_gradients.py:\d+: forward computes with a gradient under no_grad inside autoc"
    with pytest.raises(alpa_torch.ExportError, match=message):
        alpa_torch.from_module(Returned(by_buffer=by_buffer), (torch.ones(2, 4),))


def test_autocast_around_the_export_does_not_count() -> None:
    module, x = Mixed("around"), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        fn, params, buffers = alpa_torch.from_module(module, (x,))
    grads = jax.grad(lambda p: fn(p, buffers, None, x.numpy())[0])(params)
    assert not grads["teacher.weight"].any()
    assert grads["student.weight"].any()


def test_no_grad_within_autocast_is_refused_and_the_remedies_work() -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 4)
    message = r"test_gradients.py:\d+: forward computes with a gradient under no_grad inside autoc"
    with pytest.raises(alpa_torch.ExportError, match=message):
        alpa_torch.from_module(Mixed("within"), (x,))
    for way in ("detach", "around"):
        module = Mixed(way)
        fn, params, buffers = alpa_torch.from_module(module, (x,))
        grads = jax.grad(lambda p: fn(p, buffers, None, x.numpy())[0])(params)  # noqa: B023
        module(x).backward()
        assert not grads["teacher.weight"].any()
        expected = module.student.weight.grad.numpy()
        np.testing.assert_allclose(
            grads["student.weight"], expected, atol=2e-2 * abs(expected).max()
        )
