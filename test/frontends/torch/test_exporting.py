"""What cannot be exported is refused, with the line and the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs the extra torch")
alpa_torch = pytest.importorskip("alpa.torch", reason="needs the extra torch")
nn = torch.nn


def module_of(function: Callable[..., Any], **parts: Any) -> nn.Module:
    class Module(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for name, part in parts.items():
                setattr(self, name, part)

        def forward(self, x: Any) -> Any:
            return function(self, x)

    return Module()


def branch(self: Any, x: Any) -> Any:
    return x + 1 if x.sum() > 0 else x - 1


def selected(self: Any, x: Any) -> Any:
    return x[x > 0].sum()


def conditional(self: Any, x: Any) -> Any:
    return torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,))


def in_place(self: Any, x: Any) -> Any:
    return x.add_(1)


def counted(self: Any, x: Any) -> Any:
    with torch.no_grad():
        self.weight.add_(1)
    return x * self.weight


def drawn(self: Any, x: Any) -> Any:
    return x + torch.poisson(x)


def read_data(self: Any, x: Any) -> Any:
    return (x * 2).data * self.weight


def added_to_data(self: Any, x: Any) -> Any:
    self.average.data.mul_(0.9).add_(x)
    return x * self.average


def set_data(self: Any, x: Any) -> Any:
    self.average.data = 0.9 * self.average + x
    return x * self.average


def differentiated(self: Any, x: Any) -> Any:
    x = x.clone().requires_grad_()
    [force] = torch.autograd.grad(torch.tanh(x * self.weight).sum(), x, create_graph=True)
    return force


@torch.library.custom_op("alpa_test::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


@twice.register_fake
def _(x: Any) -> Any:
    return torch.empty_like(x)


def custom(self: Any, x: Any) -> Any:
    return torch.ops.alpa_test.twice(x)


def ctc(self: Any, x: Any) -> Any:
    scores = x.reshape(2, 1, 2).log_softmax(-1)
    return nn.functional.ctc_loss(scores, torch.ones(1, 1).long(), (2,), (1,))


def least_squares(self: Any, x: Any) -> Any:
    return torch.linalg.lstsq(x.reshape(2, 2), x.reshape(2, 2))[0]


def distributed(self: Any, x: Any) -> Any:
    return torch.distributions.Normal(x, 1.0).log_prob(x)


LIBRARY = torch.library.Library("alpa_test", "FRAGMENT")
LIBRARY.define("shapeless(Tensor x) -> Tensor")
LIBRARY.impl("shapeless", lambda x: 2 * x, "CPU")


def without_shapes(self: Any, x: Any) -> Any:
    return torch.ops.alpa_test.shapeless(x)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (branch, r"branch.*torch.where"),
        (selected, r"shape of aten::.* depends on values"),
        (lambda _, x: x.unique(), r"shape of aten::_unique2's result depends on values"),
        (ctc, r"aten._ctc_loss.default depends on values; .* optax.ctc_loss"),
        (least_squares, r"linalg_lstsq.default depends on values; use torch.linalg.pinv"),
        (distributed, r"a distribution checks .* pass validate_args=False"),
        (without_shapes, r"no shapes for .* alpa_test.shapeless.default; .* outside of the module"),
        (conditional, r"compute both branches"),
        (in_place, r"changes its argument x in place; clone it first"),
        (drawn, r"JAX cannot run aten::poisson.*random key"),
        (
            custom,
            r"JAX cannot run alpa_test::twice: .*register_torch_dispatch_op\(torch.ops.alpa_test",
        ),
    ],
    ids=lambda it: getattr(it, "__name__", None),
)
def test_what_jax_cannot_run_is_refused(function: Any, message: str) -> None:
    with pytest.raises(alpa_torch.ExportError, match=message) as error:
        alpa_torch.from_module(module_of(function), (torch.ones(4),))
    assert function is in_place or "test_exporting.py:" in str(error.value)


def test_a_mask_needs_a_word_whether_it_is_causal_and_the_remedy_works() -> None:
    class Masked(nn.Module):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
            self.encoder = nn.TransformerEncoder(layer, 1)
            self.options = options

        def forward(self, x: Any) -> Any:
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1])
            return self.encoder(x, mask, **self.options)

    x = torch.randn(2, 4, 8)
    message = r"test_exporting.py:\d+: .*: PyTorch compares the mask .* pass is_causal=True"
    with pytest.raises(alpa_torch.ExportError, match=message):
        alpa_torch.from_module(Masked(), (x,))
    module = Masked(is_causal=True).eval()
    fn, params, buffers = alpa_torch.from_module(module, (x,))
    result, _ = fn(params, buffers, None, x.numpy())
    np.testing.assert_allclose(result, module(x).detach().numpy(), atol=1e-5)


def test_a_batch_norm_that_counts_batches_is_refused() -> None:
    x = torch.ones(4, 3)
    message = r"^torch.export cannot export BatchNorm1d: with momentum=None, .* momentum=0.1$"
    with pytest.raises(alpa_torch.ExportError, match=message):
        alpa_torch.from_module(nn.BatchNorm1d(3, momentum=None), (x,))
    alpa_torch.from_module(nn.BatchNorm1d(3, momentum=None).eval(), (x,))
    with pytest.raises(alpa_torch.ExportError, match=r"BatchNorm1d: (?!with momentum)"):
        alpa_torch.from_module(nn.BatchNorm1d(4, momentum=None).eval(), (x,))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (read_data, r"does not see how a tensor here is computed; use detach\(\) instead of .data"),
        (added_to_data, r"does not see how a tensor here is computed"),
        (differentiated, r"does not see .* jax.grad of the function instead of torch.autograd"),
        (set_data, r"forward sets the .data of a tensor, which torch.export drops; use copy_"),
    ],
    ids=lambda it: getattr(it, "__name__", None),
)
def test_what_pytorch_does_not_see_is_refused(function: Any, message: str) -> None:
    module = module_of(function, weight=nn.Parameter(torch.ones(4)))
    module.register_buffer("average", torch.zeros(4))
    with pytest.raises(alpa_torch.ExportError, match=message) as error:
        alpa_torch.from_module(module, (torch.ones(4),))
    assert function is differentiated or "test_exporting.py:" in str(error.value)


def test_packed_sequences_are_refused() -> None:
    def packed(self: Any, x: Any) -> Any:
        given = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self.lstm(given)[0])[0]

    module = module_of(packed, lstm=nn.LSTM(4, 4, batch_first=True))
    message = r"test_exporting.py:\d+: torch.export cannot .* use a mask and torch.where"
    with pytest.raises(alpa_torch.ExportError, match=message):
        alpa_torch.from_module(module, (torch.ones(2, 3, 4),))


def test_a_parameter_that_changes_is_refused() -> None:
    module = module_of(counted, weight=nn.Parameter(torch.ones(4)))
    with pytest.raises(alpa_torch.ExportError, match=r"changes its parameter weight in place"):
        alpa_torch.from_module(module, (torch.ones(4),))


def test_a_module_without_shapes_is_refused() -> None:
    with pytest.raises(alpa_torch.ExportError, match=r"LazyLinear's weight has no shape yet"):
        alpa_torch.from_module(nn.LazyLinear(4), (torch.ones(2, 4),))


def test_wrong_arguments_are_refused() -> None:
    module, x = nn.Linear(4, 4), torch.ones(2, 4)
    with pytest.raises(TypeError, match=r"example_args is a Tensor; pass a tuple .* \(x,\)"):
        alpa_torch.from_module(module, x)
    with pytest.raises(TypeError, match=r"of type function; pass an nn.Module"):
        alpa_torch.from_module(lambda x: x, (x,))
    with pytest.raises(alpa_torch.ExportError, match=r"pass the module itself.*module._orig_mod"):
        alpa_torch.from_module(torch.compile(module), (x,))


def test_an_error_of_the_module_is_its_own() -> None:
    def wrong(self: Any, x: Any) -> Any:
        return x.no_such_attribute

    with pytest.raises(AttributeError, match=r"no_such_attribute"):
        alpa_torch.from_module(module_of(wrong), (torch.ones(4),))


def test_64_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"weight is torch.float64, and JAX has float32"):
        alpa_torch.from_module(nn.Linear(4, 4).double(), (torch.ones(2, 4).double(),))


def test_a_batch_of_another_shape_is_exported_again() -> None:
    """Shapes are static in each program, so code that depends on them is right."""

    def by_size(self: Any, x: Any) -> Any:
        return x * x.shape[0] if x.shape[0] % 2 == 0 else -x

    fn, _, _ = alpa_torch.from_module(module_of(by_size), (torch.ones(4),))
    np.testing.assert_array_equal(fn({}, {}, None, np.ones(2, np.float32))[0], [2, 2])
    np.testing.assert_array_equal(fn({}, {}, None, np.ones(3, np.float32))[0], [-1, -1, -1])
