"""A PyTorch optimizer's step as a pure function of JAX."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

from alpa.torch.arrays import array_dtype, to_array
from alpa.torch.exporting import ExportError, export
from alpa.torch.program import Program, fake_arguments, flattened

_WAYS = "foreach", "fused", "capturable"
"""options that say how PyTorch runs a step, not what it computes"""

State = dict[str, Any]
"""`{"lr": [one for each group of parameters], "params": {name: {what it keeps: array}}}`"""


class UpdateFunction:
    """What an optimizer's step computes, as a pure function: `update(params, state, grads)`."""

    def __init__(self, optimizer: torch.optim.Optimizer, names: Sequence[Sequence[str]]) -> None:
        self._step = _Step(optimizer, names)
        self._program: Program | None = None

    def __call__(
        self, params: Mapping[str, Any], state: State, grads: Mapping[str, Any]
    ) -> tuple[dict[str, Any], State]:
        """Returns the new parameters and the new state.

        Args:
            params: by name. Those that the optimizer does not have are returned as they are.
            state: of `from_optimizer` or of an earlier call. `state["lr"]` may be changed between
                steps, as PyTorch's schedulers change `param_groups[n]["lr"]`.
            grads: by the same names.
        """
        own = self._step.names
        # PyTorch keeps the order of dictionaries, and JAX sorts them.
        kept = {name: dict(sorted(state["params"][name].items())) for name in own}
        rates = [jnp.asarray(rate, jnp.float32) for rate in state["lr"]]
        given = (
            {name: params[name] for name in own},
            {"lr": rates, "params": kept},
            {name: grads[name] for name in own},
        )
        leaves, spec = flattened(given, {})
        if self._program is None:
            args, _ = fake_arguments(leaves, spec)
            self._program = Program(export(self._step, args, {}, self._step.kind), {}, ())
        (new, state), _ = self._program({}, leaves, None)
        return {**params, **new}, state

    def __repr__(self) -> str:
        return f"<{self._step.kind} as update(params, state, grads)>"


def from_optimizer(
    optimizer: torch.optim.Optimizer, module: nn.Module
) -> tuple[UpdateFunction, State]:
    """Turns an optimizer of PyTorch into a pure function of JAX, and copies its state.

    The function is `update(params, state, grads) -> (params, state)`, with the parameters of
    `from_module`. It computes what `optimizer.step()` computes with the hyperparameters that the
    optimizer has now. Only learning rates are in the state.

    Args:
        optimizer: of `torch.optim`, or another one whose step is a function of parameters,
            gradients and a state of tensors.
        module: the module whose parameters it has.

    Raises:
        ExportError: the step is no such function, or its state does not begin with zeros.
        ValueError: the optimizer has a parameter that the module has not.
    """
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ExportError(f"{kind} evaluates the loss within a step; use another optimizer")
    name_of = {id(parameter): name for name, parameter in module.named_parameters()}
    groups = optimizer.param_groups
    if any(id(parameter) not in name_of for group in groups for parameter in group["params"]):
        raise ValueError(f"{kind} has a parameter that {type(module).__name__} does not have")
    # Parameters that are not trained have no gradients, so that a step leaves them out.
    trained = [[one for one in group["params"] if one.requires_grad] for group in groups]
    kept: dict[str, dict[str, jax.Array]] = {}
    for group, parameters in zip(groups, trained, strict=True):
        for parameter in parameters:
            name = name_of[id(parameter)]
            kept[name] = {
                what: to_array(value, f"{name}'s {what}")
                for what, value in optimizer.state.get(parameter, {}).items()
                if isinstance(value, torch.Tensor)
            } or _first_state(optimizer, group, parameter)
    names = [[name_of[id(parameter)] for parameter in parameters] for parameters in trained]
    rates = [jnp.asarray(float(group["lr"]), jnp.float32) for group in groups]
    update, state = UpdateFunction(optimizer, names), State(lr=rates, params=kept)
    params = {
        name_of[id(one)]: jax.ShapeDtypeStruct(one.shape, array_dtype(one.dtype))
        for parameters in trained
        for one in parameters
    }
    jax.eval_shape(update, params, state, params)  # exports the step, or refuses it
    return update, state


class _Step(nn.Module):
    """An optimizer's step as a module, to export it."""

    def __init__(self, optimizer: torch.optim.Optimizer, groups: Sequence[Sequence[str]]) -> None:
        super().__init__()
        self.kind = type(optimizer).__name__
        self.names = [name for group in groups for name in group]
        self._groups = groups
        self._optimizer = _without_parameters(optimizer)

    @torch.no_grad()
    def forward(
        self, params: dict[str, torch.Tensor], state: State, grads: dict[str, torch.Tensor]
    ) -> Any:
        new = {name: value.clone() for name, value in params.items()}
        for name, value in new.items():
            value.grad = grads[name]
        groups = [
            {**group, "lr": lr, "params": [new[name] for name in names]}
            for group, lr, names in zip(
                self._optimizer.param_groups, state["lr"], self._groups, strict=True
            )
        ]
        kept = {
            new[name]: {what: value.clone() for what, value in state["params"][name].items()}
            for name in self.names
        }
        optimizer = _with(self._optimizer, groups, kept)
        optimizer.step()
        after = {name: _tensors(optimizer.state[new[name]]) for name in self.names}
        return new, {"lr": state["lr"], "params": after}


def _first_state(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: torch.Tensor
) -> dict[str, jax.Array]:
    """What an optimizer keeps of a parameter before its first step: zeros.

    Raises:
        ExportError: with zeros, the first step computes something else.
    """
    shape = (2,) * parameter.ndim
    sample = torch.linspace(0.5, 1.0, 2**parameter.ndim, dtype=parameter.dtype).reshape(shape)

    def stepped(kept: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        value = sample.clone()
        value.grad = sample.clone()
        one = _with(optimizer, [{**group, "params": [value]}], {value: kept} if kept else {})
        one.step()
        return value, _tensors(one.state[value])

    value, state = stepped({})
    zeros = {what: torch.zeros_like(one) for what, one in state.items()}
    again, state_again = stepped(zeros)
    is_same = torch.equal(value, again) and all(
        torch.equal(one, state_again[what]) for what, one in state.items()
    )
    if not is_same or any(one.shape not in ((), shape) for one in state.values()):
        raise ExportError(
            f"{type(optimizer).__name__}'s first step with these options is not that with a state "
            "of zeros; take its first step in PyTorch, or use an optimizer of Optax"
        )
    return {
        what: jnp.zeros(parameter.shape if one.shape else (), array_dtype(one.dtype))
        for what, one in state.items()
    }


def _with(
    optimizer: torch.optim.Optimizer, groups: list[Any], state: Mapping[Any, Any]
) -> torch.optim.Optimizer:
    """The optimizer for other parameters, with another state."""
    one = copy.copy(optimizer)
    one.param_groups = [{**group, **{k: False for k in _WAYS if k in group}} for group in groups]
    one.state = defaultdict(dict, {value: dict(kept) for value, kept in state.items()})
    return one


def _without_parameters(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return _with(optimizer, [{**group, "params": []} for group in optimizer.param_groups], {})


def _tensors(kept: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    return {what: value for what, value in kept.items() if isinstance(value, torch.Tensor)}
