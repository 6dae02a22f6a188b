"""A PyTorch module as a pure function of JAX, and arrays of JAX back in a module."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.nn.parameter import is_lazy

from alpa.torch.arrays import to_array, to_tensor
from alpa.torch.blocks import find_blocks
from alpa.torch.exporting import ExportError, export
from alpa.torch.gradients import check_functions, check_hooks
from alpa.torch.program import Program, fake_arguments, flattened

Arrays = dict[str, jax.Array]


class ModuleFunction:
    """What a module computes, as a pure function: `fn(params, buffers, key, *args, **kwargs)`.

    Attributes:
        blocks: the names of the modules between which layers end.
    """

    def __init__(self, module: nn.Module, blocks: Sequence[str] | None) -> None:
        self.blocks = tuple(find_blocks(module) if blocks is None else blocks)
        if missing := {*self.blocks} - {name for name, _ in module.named_modules()}:
            raise ValueError(f"{_kind(module)} has no module {min(missing)!r}, which blocks= names")
        self._names = _first_names(module)
        self._mode = FakeTensorMode(
            allow_non_fake_inputs=True, shape_env=ShapeEnv(), static_shapes=True
        )
        self._module = _without_data(module, self._mode)
        self._programs: dict[Any, Program] = {}

    def __call__(
        self,
        params: Mapping[str, Any],
        buffers: Mapping[str, Any],
        key: Any,
        /,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Any, dict[str, Any]]:
        """Returns the module's result, and the buffers with their new values.

        Args:
            params: the parameters that are trained, by name.
            buffers: the buffers, and the parameters that are not trained, by name.
            key: a random key; None if the module draws no random numbers.
            *args: as of the module's `forward`: trees of arrays. Numbers, strings and None are part
                of the program. For other shapes, the module is exported again.
            **kwargs: as `args`.

        Raises:
            ExportError: the module cannot be exported for these arguments.
            KeyError: a parameter or buffer is missing.
            TypeError: an argument is of another type, or a key is missing.
        """
        leaves, program = self.program(args, kwargs)
        result, changed = program({**buffers, **params}, leaves, key)
        return result, {**buffers, **changed}

    def __repr__(self) -> str:
        return f"<{_kind(self._module)} as fn(params, buffers, key, *args, **kwargs)>"

    def program(self, args: Any, kwargs: Any) -> tuple[list[Any], Program]:
        """Returns the leaves of arguments, and the program for their shapes.

        Raises:
            ExportError: the module cannot be exported for these arguments.
            TypeError: an argument is of another type.
        """
        leaves, spec = flattened(args, kwargs)
        called = (spec, *map(_signature, leaves))
        if called not in self._programs:
            fake_args, fake_kwargs = fake_arguments(leaves, spec, self._mode)
            exported = export(self._module, fake_args, fake_kwargs)
            with self._mode:
                check_functions(self._module, fake_args, fake_kwargs)
            self._programs[called] = Program(exported, self._names, self.blocks)
        return leaves, self._programs[called]


def from_module(
    module: nn.Module,
    example_args: tuple[Any, ...],
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    blocks: Sequence[str] | None = None,
) -> tuple[ModuleFunction, Arrays, Arrays]:
    """Turns a module into a pure function of JAX, and copies its parameters and buffers.

    The function is `fn(params, buffers, key, *args, **kwargs) -> (result, buffers)`. It computes
    what the module computes in its present mode, `train()` or `eval()`, and keeps neither the
    module nor its data. Gradients stop where PyTorch's stop.

    Args:
        module: its `forward` is exported by `torch.export`.
        example_args: tensors or arrays of the shapes to export for first.
        example_kwargs: the same for keyword arguments.
        blocks: names of modules between which layers end. By default, the equal elements of the
            module's lists: of `nn.ModuleList` and `nn.Sequential`.

    Returns:
        The function; the parameters that are trained; and the buffers, with the parameters that
        have `requires_grad=False`. Arrays have the names of `named_parameters()` and
        `named_buffers()`, and tied weights are one array.

    Raises:
        ExportError: the module cannot be exported, or JAX cannot run it. The error has the line and
            the reason.
        TypeError: an argument or a tensor has a type that JAX lacks, `module` is no module, or
            `example_args` is no tuple.
        ValueError: a tensor needs 64 bits, or `blocks` names no module.
    """
    _check_arguments(module, example_args)
    lazy = [name for name, one in _tensors(module) if is_lazy(one)]
    if lazy:
        raise ExportError(
            f"{_kind(module)}'s {lazy[0]} has no shape yet: call the module once with its arguments"
        )
    check_hooks(module)
    params: Arrays = {}
    buffers: Arrays = {}
    for name, tensor in _tensors(module):
        is_trained = isinstance(tensor, nn.Parameter) and tensor.requires_grad
        (params if is_trained else buffers)[name] = to_array(tensor, name)
    function = ModuleFunction(module, blocks)
    function.program(example_args, dict(example_kwargs or {}))
    return function, params, buffers


def to_module(params: Mapping[str, Any], buffers: Mapping[str, Any], module: nn.Module) -> None:
    """Copies parameters and buffers of `from_module` into a module, in place.

    Args:
        params: arrays by name, on any devices, as a step returns them.
        buffers: the same for buffers.
        module: the module, or another one of its structure.

    Raises:
        ValueError: an array is missing, or has another shape.
    """
    given = {**buffers, **params}
    with torch.no_grad():
        for name, tensor in _tensors(module):
            if name not in given:
                raise ValueError(f"{_kind(module)} has {name}, and neither params nor buffers has")
            array = given[name]
            if array.shape != tensor.shape:
                raise ValueError(
                    f"{name} has shape {tuple(array.shape)}, and in the module "
                    f"{tuple(tensor.shape)}; pass a module of the same structure"
                )
            tensor.copy_(to_tensor(array))


def _tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """The parameters and buffers of a module, by their first names."""
    return [*module.named_parameters(), *module.named_buffers()]


def _first_names(module: nn.Module) -> dict[str, str]:
    """The first name of each parameter and buffer, by all its names: tied weights have several."""
    first = {id(tensor): name for name, tensor in _tensors(module)}
    every = [
        *module.named_parameters(remove_duplicate=False),
        *module.named_buffers(remove_duplicate=False),
    ]
    return {name: first[id(tensor)] for name, tensor in every}


def _check_arguments(module: Any, example_args: Any) -> None:
    """Checks the kinds of `from_module`'s arguments.

    Raises:
        ExportError: the module is that of `torch.compile`.
        TypeError: another kind.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module is {module!r}, of type {_kind(module)}; pass an nn.Module")
    # Only torch.compile imports the class, which takes most of a second.
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is not None and isinstance(module, dynamo.OptimizedModule):
        raise ExportError(
            "torch.compile has wrapped the module, to run it in PyTorch; pass the module itself, "
            "which is module._orig_mod"
        )
    if not isinstance(example_args, tuple):
        raise TypeError(
            f"example_args is a {_kind(example_args)}; pass a tuple of the arguments of forward, "
            "such as (x,) for one"
        )


def _without_data(module: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A copy of a module whose parameters and buffers have shapes only.

    So have tensors that it has computed of them, such as a weight under `nn.utils.weight_norm`.
    """
    tensors = [one for _, one in _tensors(module)]
    kept = [one for part in module.modules() for one in vars(part).values()]
    computed = [one for one in kept if isinstance(one, torch.Tensor) and one.grad_fn is not None]
    shapes = {id(one): mode.from_tensor(one) for one in tensors}
    shapes |= {id(one): mode.from_tensor(one.detach()) for one in computed}
    return copy.deepcopy(module, shapes)


def _kind(module: object) -> str:
    return type(module).__name__


def _signature(leaf: Any) -> Any:
    """What a program depends on."""
    return (leaf.shape, leaf.dtype) if isinstance(leaf, jax.Array) else (type(leaf), leaf)
