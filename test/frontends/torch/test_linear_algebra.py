"""Functions of `torch.linalg` have PyTorch's results and gradients, also in a plan."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest

import alpa

torch = pytest.importorskip("torch", reason="needs the extra torch")
alpa_torch = pytest.importorskip("alpa.torch", reason="needs the extra torch")
models = pytest.importorskip("test.frontends.torch.models", reason="needs the extra torch")
nn, linalg = torch.nn, torch.linalg

RANDOM = torch.Generator().manual_seed(0)
MATRICES = torch.randn(2, 4, 4, generator=RANDOM)
POSITIVE = MATRICES @ MATRICES.mT + 4 * torch.eye(4)
OTHERS = torch.randn(2, 4, 4, generator=RANDOM)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "inverse": linalg.inv,
    "inverse with a check": lambda x: linalg.inv_ex(x, check_errors=True)[0],
    "negative power": lambda x: linalg.matrix_power(x, -2),
    "determinant": linalg.det,
    "logarithm of the determinant": torch.logdet,
    "square right sides": lambda x: linalg.solve(x, OTHERS),
    "vectors": lambda x: linalg.solve(x, OTHERS[:, 0]),
    "one vector": lambda x: linalg.solve(x, OTHERS[0, 0]),
    "one matrix": lambda x: linalg.solve(x, OTHERS[0]),
    "from the right": lambda x: linalg.solve(x, OTHERS[:, :3], left=False),
    "right sides": lambda x: linalg.solve(POSITIVE, x),
    "cholesky": linalg.cholesky,
    "upper cholesky": lambda x: linalg.cholesky(x, upper=True),
    "cholesky of a triangle": lambda x: linalg.cholesky(x.tril()),
    "cholesky with a check": lambda x: linalg.cholesky_ex(x, check_errors=True)[0],
    "solve by cholesky": lambda x: torch.cholesky_solve(OTHERS[0], linalg.cholesky(x)),
    "solve by upper cholesky": lambda x: torch.cholesky_solve(
        OTHERS, linalg.cholesky(x, upper=True), upper=True
    ),
    "inverse by cholesky": lambda x: torch.cholesky_inverse(x.tril()),
    "inverse by upper cholesky": lambda x: torch.cholesky_inverse(x.triu(), upper=True),
}


@pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS.keys())
def test_results_and_gradients(function: Callable[[Any], Any]) -> None:
    models.assert_like_pytorch(function, POSITIVE)


def test_a_singular_matrix_has_no_finite_inverse() -> None:
    """PyTorch raises an error, and JAX checks no values."""
    fn, params, buffers = alpa_torch.from_module(models.Function(linalg.inv, torch.ones(2, 2)), ())
    assert not np.isfinite(fn(params, buffers, None)[0]).all()


def test_a_planned_step() -> None:
    class Whitened(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Any) -> Any:
            weight = self.linear.weight
            lower = linalg.cholesky(weight @ weight.mT + torch.eye(4))
            return linalg.solve(lower, self.linear(x).mT).mT

    torch.manual_seed(0)
    x = torch.randn(8, 4)
    fn, params, buffers = alpa_torch.from_module(Whitened(), (x,))

    @alpa.parallelize(cluster="cpu:1x2", num_micro_batches=2)
    def step(params: Any, x: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return (fn(params, buffers, None, x)[0] ** 2).mean()

        loss, grads = alpa.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    report = alpa.compare_with_jax(step, params, x.numpy())
    assert not report.is_fault, report.summary()
