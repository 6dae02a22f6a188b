"""Writes into an exported graph where gradients stop, because decompositions drop it.

`detach` and `no_grad` stop gradients. In JAX, a tensor whose gradient stops is another value than
the tensor with its gradient. PyTorch lets them share memory: a change of one in place is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
from torch import fx
from torch._decomp import get_decompositions
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from alpa.torch.lowerings import STOP_GRADIENT
from alpa.torch.places import located, place_of

_DETACH = torch.ops.aten.detach.default
_NO_GRAD = cast(Any, torch.ops.higher_order).wrap_with_set_grad_enabled

_NEW = {
    getattr(torch.ops.aten, name)
    for name in (
        *(f"{kind}_like" for kind in ("empty", "full", "ones", "rand", "randn", "zeros")),
        *(f"new_{kind}" for kind in ("empty", "full", "ones", "zeros")),
    )
}
"""Ops that read the shape of a tensor only."""

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default
_batch_norm_with_gradients = get_decompositions([_BATCH_NORM])[_BATCH_NORM]


def _batch_norm(*args: Any) -> tuple[Any, ...]:
    """PyTorch's decomposition, but the running statistics have no gradient."""
    *results, mean, variance = _batch_norm_with_gradients(*args)
    return *results, STOP_GRADIENT(mean), STOP_GRADIENT(variance)


STOPPING_DECOMPOSITIONS = {_BATCH_NORM: _batch_norm}
"""Decompositions of ops some of whose results have no gradient."""


def write_stops(exported: ExportedProgram) -> list[str]:
    """Writes into a graph, in place, where gradients stop, and returns what is refused."""
    constant = {
        spec.arg.name
        for spec in cast(Any, exported.graph_signature.input_specs)
        if spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    }
    inputs = exported.graph.find_nodes(op="placeholder")
    constants = {one for one in inputs if one.name in constant}
    memory = Memory(exported.graph_module)
    carriers = _Carriers(memory)
    carriers.add_graph(exported.graph_module, constants)
    stops = [
        (node, n, memory.change(copied))
        for node, n, copied in _copies(exported.graph_module)
        if node.args[n] in carriers.found
    ]
    # A change of the module's arguments and parameters is refused for itself.
    given = {one for node in inputs if node not in constants for one in memory.of(node)}
    refused: list[str] = []
    for node, n, change in stops:
        if change is None:
            _stop(node, n)
        elif memory.of(cast(fx.Node, node.args[n])).isdisjoint(given):
            message = (
                "changes a tensor in place that is detached or under no_grad, and has a gradient "
                "elsewhere; change a clone"
            )
            refused.append(located(place_of(change), message))
    for module in exported.graph_module.modules():
        if isinstance(module, fx.GraphModule):
            module.recompile()
    return refused


class Memory:
    """Which tensors of a graph, and of the graphs inside it, share memory, and what changes it."""

    def __init__(self, module: fx.GraphModule) -> None:
        self._of: dict[fx.Node, set[int]] = {}
        self._time: dict[fx.Node, int] = {}
        self._changes: list[tuple[fx.Node, set[int]]] = []
        self._passed: dict[fx.Node, list[fx.Node]] = {}
        self._read(module)

    def of(self, node: fx.Node) -> set[int]:
        """The memory of an op's results: equal numbers for tensors that share it."""
        return self._of[node]

    def change(self, node: fx.Node) -> fx.Node | None:
        """The first op that would make a copy of a tensor differ from it.

        It changes the memory after the tensor is there, and the tensor or a view of it is used
        then or afterwards.
        """
        own, begin = self._of[node], self._time[node]
        later = [op for op, of in self._changes if self._time[op] > begin and own & of]
        if not later:
            return None
        found, last = [node], begin
        seen = {node}
        for one in found:
            for user in (*one.users, *self._passed.get(one, ())):
                last = max(last, self._time[user])
                if user not in seen and own & self._of[user]:
                    seen.add(user)
                    found.append(user)
        return next((op for op in later if self._time[op] <= last), None)

    def _read(self, module: fx.GraphModule) -> None:
        for node in module.graph.nodes:
            self._time[node] = len(self._time)
            # The fake tensors of views share memory as the tensors do.
            self._of[node] = {
                cast(Any, one.untyped_storage())._cdata
                for one in pytree.tree_leaves(node.meta.get("val"))
                if isinstance(one, torch.Tensor)
            }
            if (body := _body(module, node)) is not None:
                pairs = _inputs(node, body)
                pairs += [(node, one) for one in _results(body)]
                for one, given in pairs:
                    if isinstance(given, fx.Node):
                        self._passed.setdefault(given, []).append(one)
                self._read(body)
            for one in _written(node):
                self._changes.append((node, self._of[one]))


class _Carriers:
    """Finds the tensors that may have a gradient.

    Attributes:
        found: these tensors.
    """

    def __init__(self, memory: Memory) -> None:
        self.found: set[fx.Node] = set()
        self._memory = memory
        self._seen: dict[int, list[fx.Node]] = {}

    def add_graph(self, module: fx.GraphModule, constants: Collection[fx.Node]) -> None:
        """Adds the tensors of a graph, and of the graphs inside it.

        Args:
            module: holds the graph.
            constants: inputs without gradients.
        """
        for node in module.graph.nodes:
            for one in self._memory.of(node):
                self._seen.setdefault(one, []).append(node)
            given: Collection[fx.Node] = node.all_input_nodes
            if (body := _body(module, node)) is not None:
                within = _inputs(node, body)
                stopped = _is_no_grad(node)
                self.add_graph(
                    body, {one for one, outer in within if stopped or outer not in self.found}
                )
                given = _results(body)
            if node.op == "placeholder":
                carries = node not in constants
            else:
                carries = (
                    node.target is not _DETACH
                    and getattr(node.target, "overloadpacket", None) not in _NEW
                    and not _is_no_grad(node)
                    and any(one in self.found for one in given)
                )
            if carries and _may_have_gradient(node):
                self.found.add(node)
                for written in _written(node):
                    for one in self._memory.of(written):
                        self.found.update(self._seen[one])


def _copies(module: fx.GraphModule) -> Iterator[tuple[fx.Node, int, fx.Node]]:
    """Where gradients stop: the op, the argument's position, and the tensor without a gradient."""
    for node in module.graph.nodes:
        if node.target is _DETACH:
            yield node, 0, node
        elif (body := _body(module, node)) is not None:
            if _is_no_grad(node):
                inner = [one for one, _ in _inputs(node, body)]
                yield from (
                    (node, n, one) for n, one in enumerate(inner, len(node.args) - len(inner))
                )
            yield from _copies(body)


def _may_have_gradient(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor):
        return value.dtype.is_floating_point or value.dtype.is_complex
    return True


def _written(node: fx.Node) -> Iterator[fx.Node]:
    """The arguments that an op changes in place."""
    schema = _schema(node)
    for n, argument in enumerate(() if schema is None else schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            value: Any = node.args[n] if n < len(node.args) else node.kwargs.get(argument.name)
            values = value if isinstance(value, list | tuple) else (value,)
            yield from (one for one in values if isinstance(one, fx.Node))


def _schema(node: fx.Node) -> Any:
    return cast(Any, node.target)._schema if isinstance(node.target, OpOverload) else None


def _is_no_grad(node: fx.Node) -> bool:
    return node.target is _NO_GRAD and not node.args[0]


def _body(module: fx.GraphModule, node: fx.Node) -> fx.GraphModule | None:
    """The graph inside an op, whose inputs are the op's last arguments."""
    if not isinstance(node.target, HigherOrderOperator):
        return None
    named = [one for one in node.args if isinstance(one, fx.Node) and one.op == "get_attr"]
    parts = [getattr(module, cast(str, one.target)) for one in named]
    bodies = [one for one in parts if isinstance(one, fx.GraphModule)]
    return bodies[0] if len(bodies) == 1 else None


def _inputs(node: fx.Node, body: fx.GraphModule) -> list[tuple[fx.Node, Any]]:
    """The inputs of the graph inside an op, with the op's arguments."""
    inner = body.graph.find_nodes(op="placeholder")
    return [*zip(inner, node.args[len(node.args) - len(inner) :], strict=True)]


def _results(body: fx.GraphModule) -> list[fx.Node]:
    """The results of the graph inside an op."""
    [output] = body.graph.find_nodes(op="output")
    return output.all_input_nodes


def _stop(node: fx.Node, n: int) -> None:
    """Stops the gradient of an op's argument."""
    given = cast(fx.Node, node.args[n])
    with node.graph.inserting_before(node):
        stopped = node.graph.call_function(STOP_GRADIENT, (given,))
    stopped.meta = {**node.meta, "val": given.meta["val"]}
    node.update_arg(n, stopped)
