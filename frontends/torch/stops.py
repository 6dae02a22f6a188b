"""Writes into an exported graph where gradients stop, because decompositions drop it.

`detach` and `no_grad` stop gradients. In JAX, a tensor whose gradient stops is another value than
the tensor with its gradient. PyTorch lets them share memory: a change of one in place is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, cast

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from alpa.torch.lowerings import STOP_GRADIENT
from alpa.torch.places import place_of

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


def write_stops(exported: ExportedProgram) -> list[str]:
    """Writes into a graph, in place, where gradients stop, and returns what is refused."""
    constants = {
        spec.arg.name
        for spec in cast(Any, exported.graph_signature.input_specs)
        if spec.kind in (InputKind.BUFFER, InputKind.CONSTANT_TENSOR)
    }
    inputs = exported.graph.find_nodes(op="placeholder")
    return [*_write(exported.graph_module, {one for one in inputs if one.name in constants})]


def changes(graph: fx.Graph) -> dict[fx.Node, fx.Node]:
    """The op that changes a tensor in place, by tensor and by those that share its memory."""
    nodes = list(graph.nodes)
    return {one: node for node in nodes for given in _written(node) for one in _memory_of(given)}


def _write(module: fx.GraphModule, constants: Collection[fx.Node]) -> Iterator[str]:
    """Writes stops into a graph and the graphs inside it, and yields what is refused.

    Args:
        module: holds the graph.
        constants: inputs without gradients.
    """
    carriers = _carriers(module.graph, constants)
    changed = changes(module.graph)
    for node in list(module.graph.nodes):
        if node.target is _DETACH:
            if node.args[0] in carriers:
                yield from _stop(node, 0, changed.get(node))
        elif (body := _body(module, node)) is not None:
            inner = body.graph.find_nodes(op="placeholder")
            first = len(node.args) - len(inner)
            within = {one for n, one in enumerate(inner, first) if node.args[n] not in carriers}
            if _is_no_grad(node):
                changed_within = changes(body.graph)
                for n, one in enumerate(inner, first):
                    if one not in within:
                        yield from _stop(node, n, changed_within.get(one))
                within = {*inner}
            yield from _write(body, within)
    module.recompile()


def _carriers(graph: fx.Graph, constants: Collection[fx.Node]) -> set[fx.Node]:
    """The tensors that may have a gradient."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            carries = node not in constants
        else:
            carries = (
                node.target is not _DETACH
                and getattr(node.target, "overloadpacket", None) not in _NEW
                and not _is_no_grad(node)
                and any(one in found for one in node.all_input_nodes)
            )
        if carries and _may_have_gradient(node):
            found.add(node)
            for written in _written(node):
                found.update(_memory_of(written))
    return found


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


def _memory_of(node: fx.Node) -> Iterator[fx.Node]:
    """A tensor, and those that it is a view of."""
    shared: Any = node
    while isinstance(shared, fx.Node):
        yield shared
        schema = _schema(shared)
        returns = () if schema is None else schema.returns
        shared = shared.args[0] if returns and returns[0].alias_info is not None else None


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


def _stop(node: fx.Node, n: int, change: fx.Node | None) -> Iterator[str]:
    """Stops the gradient of an op's argument, or yields why it cannot.

    Args:
        node: the op.
        n: the argument's position.
        change: the op that changes it in place, if there is one.
    """
    given = cast(fx.Node, node.args[n])
    if change is None:
        with node.graph.inserting_before(node):
            stopped = node.graph.call_function(STOP_GRADIENT, (given,))
        stopped.meta = {**node.meta, "val": given.meta["val"]}
        node.update_arg(n, stopped)
    elif given.op != "placeholder":  # A change of the module's inputs is refused for itself.
        place = place_of(change)
        where = "" if place is None else f"{place}: "
        yield (
            f"{where}changes a tensor in place that is detached or under no_grad here, and has a "
            "gradient elsewhere; change a clone"
        )
