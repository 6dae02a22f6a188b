"""Runs the graph of an exported module on arrays of JAX, op by op.

Each op has the line of PyTorch that it comes from as its place, and the module's name as its scope.
Between two blocks, the end of a layer is marked.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from pathlib import Path
from types import FunctionType
from typing import Any

import jax
import torch
import torchax
from jax.extend import source_info_util
from torch import fx
from torch._ops import OpOverload

from alpa.runtime.markers import mark_layer_boundary
from alpa.torch.lowerings import Keys, lowering
from alpa.torch.places import Place, place_of

# The places of ops are in the user's files: those of a module, and of the call otherwise.
for _place in (*torch.__path__, *torchax.__path__, Path(__file__).parent):
    source_info_util.register_exclusion(f"{_place}{os.sep}")


class Interpreter(fx.Interpreter):
    """One run of a graph.

    Args:
        graph: only ops for which `lowering` has a function.
        blocks: names of the modules between which layers end.
        key: the random key; not used if no op draws numbers.
    """

    def __init__(self, graph: fx.GraphModule, blocks: Collection[str], key: Any) -> None:
        super().__init__(graph)
        self._blocks = blocks
        self._keys = Keys(key)
        self._block = ""

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function":
            return super().run_node(n)
        block = block_call(n, self._blocks)
        if block and self._block and block != self._block:
            mark_layer_boundary()
        self._block = block or self._block
        run = super().run_node
        with jax.named_scope(module_name(n) or type(n).__name__):
            return at(place_of(n), lambda: run(n))

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if not isinstance(target, OpOverload):
            return target(*args, **kwargs)
        found = lowering(target)
        assert found is not None, target  # The program was checked.
        return found.function(*args, **kwargs, **({"env": self._keys} if found.draws else {}))


def block_call(node: fx.Node, blocks: Collection[str]) -> str:
    """The call of a block that an op belongs to, or an empty string.

    A block that is called twice has two calls.
    """
    for call, (name, _) in node.meta.get("nn_module_stack", {}).items():
        if name in blocks:
            return call
    return ""


def module_name(node: fx.Node) -> str:
    """The name of the module that an op belongs to."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    return stack[-1][0].replace(".", "/") if stack else ""


def at(place: Place | None, call: Callable[[], Any]) -> Any:
    """Calls a function, for whose ops JAX records a place."""
    if place is None:
        return call()
    # JAX takes places from the frames of calls, so the call has a frame with this place.
    code = _frame.__code__.replace(
        co_filename=place.file, co_firstlineno=place.line - 1, co_name=place.function
    )
    return FunctionType(code, {})(call)


def _frame(call: Callable[[], Any]) -> Any:
    return call()
