"""An exported module as a pure function of arrays."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree

from alpa.torch.arrays import array_dtype, tensor_dtype, to_array
from alpa.torch.interpreter import Interpreter
from alpa.torch.lowerings import lowering
from alpa.torch.places import located, place_of

_CONSTANTS = (bool, int, float, complex, str, type(None), torch.dtype, torch.device)


# Results of topk, max or sort, which are trees for PyTorch.
for _kind in torch.return_types.all_return_types:
    jax.tree_util.register_pytree_node(
        _kind, lambda result: (tuple(result), type(result)), lambda kind, children: kind(children)
    )


def flattened(args: Any, kwargs: Any) -> tuple[list[Any], pytree.TreeSpec]:
    """The leaves of arguments: arrays and constants; and their tree.

    Raises:
        TypeError: a leaf is neither.
    """
    leaves, spec = pytree.tree_flatten((args, kwargs))
    return [_leaf(leaf) for leaf in leaves], spec


def _leaf(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return to_array(leaf, "an argument")
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return jnp.asarray(leaf)
    if isinstance(leaf, _CONSTANTS):
        return leaf
    raise TypeError(
        f"an argument is a {type(leaf).__name__}; pass trees of arrays, numbers, strings and None"
    )


def fake_arguments(
    leaves: Iterable[Any], spec: pytree.TreeSpec, mode: FakeTensorMode | None = None
) -> tuple[Any, Any]:
    """Arguments and keyword arguments to export for: arrays become tensors without data.

    Integers have PyTorch's default of 64 bits, which PyTorch requires of labels.
    """
    integer = jax.dtypes.canonicalize_dtype(np.int64)

    def fake(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        dtype = torch.int64 if leaf.dtype == integer else tensor_dtype(leaf.dtype)
        return torch.empty(leaf.shape, dtype=dtype)

    with mode or FakeTensorMode():
        return pytree.tree_unflatten([fake(leaf) for leaf in leaves], spec)


class Program:
    """What a module computes for arguments of some shapes.

    Args:
        exported: by `exporting.export`.
        names: the first name of each parameter and buffer, by all its names.
        blocks: names of the modules between which layers end.
    """

    def __init__(
        self, exported: ExportedProgram, names: Mapping[str, str], blocks: Collection[str]
    ) -> None:
        self._graph = exported.graph_module
        self._signature = exported.graph_signature
        self._out_spec = cast(pytree.TreeSpec, exported.call_spec.out_spec)
        self._names = cast(Mapping[str | None, str], names)
        self._blocks = blocks
        constants = cast(Mapping[str | None, torch.Tensor], exported.constants)
        self._constants = {
            spec.target: to_array(constants[spec.target], f"the constant {spec.target}")
            for spec in self._signature.input_specs
            if spec.kind is InputKind.CONSTANT_TENSOR
        }
        [output] = exported.graph.find_nodes(op="output")
        self._types = [_dtype(node) for node in output.args[0]]
        self._draws = next((node for node in exported.graph.nodes if _draws(node)), None)

    def __call__(
        self, state: Mapping[str, Any], leaves: Iterable[Any], key: Any
    ) -> tuple[Any, dict[str, Any]]:
        """Computes the module's result, and the buffers that it changes, by name.

        Args:
            state: parameters and buffers by name.
            leaves: those of the arguments and keyword arguments.
            key: the random key.

        Raises:
            KeyError: a parameter or buffer is missing.
            TypeError: the module draws random numbers, and `key` is None.
        """
        if self._draws is not None and key is None:
            message = (
                "the module draws random numbers, and the key is None; pass another key in each "
                "step, for example jax.random.fold_in(key, step), or export the module in eval mode"
            )
            raise TypeError(located(place_of(self._draws), message))
        given = iter(leaves)
        arrays: list[Any] = []
        for spec in self._signature.input_specs:
            if spec.kind is InputKind.USER_INPUT:
                arrays.append(next(given))
            elif spec.kind is InputKind.CONSTANT_TENSOR:
                arrays.append(self._constants[spec.target])
            elif (name := self._names[spec.target]) in state:
                arrays.append(state[name])
            else:
                raise KeyError(f"neither params nor buffers has {name}; pass those of from_module")
        run = Interpreter(self._graph, self._blocks, key)
        with warnings.catch_warnings():
            # PyTorch's default integers have 64 bits, and JAX's have 32.
            warnings.filterwarnings("ignore", r"Explicitly requested dtype int64", UserWarning)
            found = run.run(*arrays, enable_io_processing=False)
        results: list[Any] = []
        changed: dict[str, Any] = {}
        for spec, value, dtype in zip(
            self._signature.output_specs, found, self._types, strict=True
        ):
            result = value if dtype is None else value.astype(dtype)
            if spec.kind is OutputKind.BUFFER_MUTATION:
                changed[self._names[spec.target]] = result
            else:
                results.append(result)
        return pytree.tree_unflatten(results, self._out_spec), changed


def _dtype(node: Any) -> Any:
    """The type of a result; None if it is no tensor."""
    value = node.meta["val"] if isinstance(node, torch.fx.Node) else node
    return array_dtype(value.dtype) if isinstance(value, torch.Tensor) else None


def _draws(node: torch.fx.Node) -> bool:
    found = lowering(node.target) if isinstance(node.target, OpOverload) else None
    return found is not None and found.draws
