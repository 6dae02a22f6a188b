"""Steps of PyTorch's optimizers equal PyTorch's.

Under adaptive optimizers, the distance to a run in float64 is at most 4 times that of PyTorch or of
plain JAX in float32. PyTorch computes Adam's corrections of the bias in float64, and JAX cannot.
"""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import jax
import numpy as np
import optax
import pytest

import alpa
from alpa.runtime.comparison import compare, distance

torch = pytest.importorskip("torch", reason="needs the extra torch")
alpa_torch = pytest.importorskip("alpa.torch", reason="needs the extra torch")
models = pytest.importorskip("test.frontends.torch.models", reason="needs the extra torch")
nn, optim = torch.nn, torch.optim


def problem() -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    return module, torch.randn(16, 6), torch.randn(16, 3)


def loss_of(module: Any, x: Any, y: Any) -> Any:
    return ((module(x) - y) ** 2).mean()


def ours(module: Any, update: Any, state: Any, x: Any, y: Any, steps: int = 3) -> dict[str, Any]:
    fn, params, buffers = alpa_torch.from_module(module, (x,))
    given, target = x.numpy(), y.numpy()

    @jax.jit
    def step(params: Any, state: Any) -> Any:
        grads = jax.grad(lambda p: ((fn(p, buffers, None, given)[0] - target) ** 2).mean())(params)
        return update(params, state, grads)

    for _ in range(steps):
        params, state = step(params, state)
    return params


def plain_jax(optimizer: Any, module: Any) -> tuple[Any, Any]:
    """The same for an optimizer of Optax."""

    def update(params: Any, state: Any, grads: Any) -> Any:
        changes, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, changes), state

    return update, optimizer.init({n: p.detach().numpy() for n, p in module.named_parameters()})


@pytest.mark.parametrize(
    ("make", "twin"),
    [
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1), None),
        (lambda p: optim.AdamW(p, lr=1e-2), optax.adamw(1e-2, weight_decay=1e-2)),
        (lambda p: optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1), None),
    ],
    ids=["SGD", "AdamW", "Adagrad"],
)
def test_three_steps_equal_pytorch(make: Any, twin: Any) -> None:
    module, x, y = problem()
    exact = copy.deepcopy(module).double()
    update, state = alpa_torch.from_optimizer(make(module.parameters()), module)
    found = ours(module, update, state, x, y)
    plain = found if twin is None else ours(module, *plain_jax(twin, module), x, y)
    models.trained(module, make(module.parameters()), [lambda: loss_of(module, x, y)] * 3)
    wide = [lambda: loss_of(exact, x.double(), y.double())] * 3
    models.trained(exact, make(exact.parameters()), wide)
    truth, theirs = models.arrays(exact), models.arrays(module)
    for name, array in truth.items():
        noise = distance(theirs[name], array)
        if twin is not None:
            noise = max(noise, distance(plain[name], array))
        assert distance(found[name], array) <= max(4 * noise, 1e-7), name


def test_groups_keep_their_hyperparameters_and_rates_change() -> None:
    module, x, _ = problem()
    groups = [{"params": module[0].parameters(), "weight_decay": 0.5}, {"params": module[2].weight}]
    optimizer = optim.SGD(groups, lr=0.1)
    update, state = alpa_torch.from_optimizer(optimizer, module)
    _, params, _ = alpa_torch.from_module(module, (x,))
    state = {**state, "lr": [2 * rate for rate in state["lr"]]}
    grads = {name: np.ones(array.shape, np.float32) for name, array in params.items()}
    new, same = update(params, state, grads)
    assert same["lr"] == state["lr"]
    np.testing.assert_allclose(
        new["0.bias"], params["0.bias"] - 0.2 * (1 + 0.5 * params["0.bias"]), rtol=1e-6
    )
    np.testing.assert_allclose(new["2.weight"], params["2.weight"] - 0.2, rtol=1e-6)
    assert new["2.bias"] is params["2.bias"]


def test_parameters_that_are_not_trained_are_left_out() -> None:
    """They are among the buffers, and PyTorch leaves them out as well: they have no gradients."""
    module, x, y = problem()
    module[0].requires_grad_(False)
    optimizer = optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.5)
    update, state = alpa_torch.from_optimizer(optimizer, module)
    assert [*state["params"]] == ["2.weight", "2.bias"]
    found = ours(module, update, state, x, y)
    models.trained(module, optimizer, [lambda: loss_of(module, x, y)] * 3)
    for name, array in found.items():
        [difference] = compare([array], [module.get_parameter(name).detach().numpy()])
        assert difference.ok, (name, difference)


@pytest.mark.parametrize(
    "way",
    [
        "fused",
        pytest.param("foreach", marks=pytest.mark.slow),
        pytest.param("capturable", marks=pytest.mark.slow),
    ],
)
def test_how_pytorch_runs_a_step_does_not_matter(way: str) -> None:
    module, _, _ = problem()
    grads = {n: np.ones(tuple(p.shape), np.float32) for n, p in module.named_parameters()}
    params = {n: p.detach().numpy() for n, p in module.named_parameters()}
    new = [
        update(params, state, grads)[0]
        for options in ({}, {way: True})
        for update, state in [
            alpa_torch.from_optimizer(optim.AdamW(module.parameters(), **options), module)
        ]
    ]
    jax.tree.map(np.testing.assert_array_equal, *new)


def test_the_order_of_names_does_not_matter() -> None:
    """JAX sorts dictionaries, and PyTorch does not."""
    module, x, _ = problem()
    _, params, _ = alpa_torch.from_module(module, (x,))
    update, state = alpa_torch.from_optimizer(optim.AdamW(module.parameters()), module)
    assert [*state["params"]] != sorted(state["params"])
    grads = {
        name: n + np.ones(array.shape, np.float32) for n, (name, array) in enumerate(params.items())
    }
    close = partial(np.testing.assert_allclose, rtol=1e-5)
    for _ in range(2):
        expected, state_after = update(params, state, grads)
        found, sorted_state = jax.jit(update)(params, state, grads)
        for ours, theirs in ((found, expected), (sorted_state["params"], state_after["params"])):
            for name, one in theirs.items():
                jax.tree.map(close, ours[name], one)
        params, state = found, sorted_state


def test_a_state_is_taken_over() -> None:
    module, x, y = problem()
    optimizer = optim.AdamW(module.parameters(), lr=1e-2)
    models.trained(module, optimizer, [lambda: loss_of(module, x, y)] * 2)
    found = ours(module, *alpa_torch.from_optimizer(optimizer, module), x, y, steps=1)
    models.trained(module, optimizer, [lambda: loss_of(module, x, y)])
    for name, array in models.arrays(module).items():
        assert all(one.ok for one in compare([found[name]], [array])), name


def test_a_planned_step_updates_the_state() -> None:
    module, x, y = problem()
    fn, params, buffers = alpa_torch.from_module(module, (x,))
    update, state = alpa_torch.from_optimizer(optim.AdamW(module.parameters(), lr=1e-2), module)

    @alpa.parallelize(cluster="cpu:1x2", num_micro_batches=2, num_stages=2, num_layers=2)
    def step(params: Any, state: Any, x: Any, y: Any) -> Any:
        def loss_fn(params: Any) -> Any:
            return ((fn(params, buffers, None, x)[0] - y) ** 2).mean()

        loss, grads = alpa.value_and_grad(loss_fn)(params)
        return *update(params, state, grads), loss

    report = alpa.compare_with_jax(step, params, state, x.numpy(), y.numpy())
    assert not report.is_fault, report.summary()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda p: optim.LBFGS(p), r"LBFGS evaluates the loss within a step"),
        (
            lambda p: optim.SGD(p, momentum=0.9, dampening=0.5),
            r"SGD's first step .* state of zeros",
        ),
        (lambda p: optim.NAdam(p), r"NAdam's first step .* state of zeros"),
        (lambda p: optim.RAdam(p), r"cannot export RAdam: the formula of a step .*optax.radam"),
    ],
    ids=["LBFGS", "SGD with dampening", "NAdam", "RAdam"],
)
def test_others_are_refused(make: Any, message: str) -> None:
    module, _, _ = problem()
    with pytest.raises(alpa_torch.ExportError, match=message):
        alpa_torch.from_optimizer(make(module.parameters()), module)


def test_an_optimizer_of_another_module_is_refused() -> None:
    module, _, _ = problem()
    optimizer = optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match=r"SGD has a parameter that Sequential does not have"):
        alpa_torch.from_optimizer(optimizer, module)
