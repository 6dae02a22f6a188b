"""Exports a module for some shapes to a graph of functional ops that JAX can run.

`torch.export` traces the module. Decompositions then reduce its ops to those for which torchax has
functions of JAX. What has no equivalent in JAX is refused, with the line and the reason.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind, OutputKind
from torchax.decompositions import DECOMPOSITIONS

from alpa.torch.lowerings import STOP_GRADIENT, lowering
from alpa.torch.places import place_in, place_of

_STATIC = "a planned program has one control flow: compute both branches, and choose by torch.where"
_REMEDIES = {"data-dependent": _STATIC, "Could not guard": _STATIC, "jax devices": _STATIC}
"""What to do, by a word of PyTorch's reason."""

_INPUTS = {
    InputKind.PARAMETER,
    InputKind.BUFFER,
    InputKind.CONSTANT_TENSOR,
    InputKind.USER_INPUT,
}
_CHANGED = {
    OutputKind.USER_INPUT_MUTATION: "changes its argument {} in place; clone it first",
    OutputKind.PARAMETER_MUTATION: "changes its parameter {} in place; make it a buffer",
}


class ExportError(ValueError):
    """A module that cannot be exported, with the line and the reason."""


def export(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> ExportedProgram:
    """Exports a module for arguments, whose tensors may be fake, to ops that have a lowering.

    Raises:
        ExportError: PyTorch cannot export it, or JAX cannot run it.
    """
    # In one pass: two, one for each table, give the same operations in twice the time.
    table = {**DECOMPOSITIONS, **default_decompositions()}
    try:
        with warnings.catch_warnings():
            # PyTorch's own use of what it deprecates.
            warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
            exported = torch.export.export(module, args, dict(kwargs), strict=False)
            _prepare(exported.graph_module)
            exported = exported.run_decompositions(table)
    except RuntimeError as error:  # PyTorch's refusals; the module's own errors pass.
        raise _refused(module, error) from error
    problems = list(dict.fromkeys(_problems(exported)))
    if problems:
        more = f" (and {len(problems) - 1} more of its operations)" if len(problems) > 1 else ""
        raise ExportError(f"{problems[0]}{more}")
    return exported


def _prepare(graph_module: fx.GraphModule) -> None:
    """Writes into a graph what its decompositions would lose, in place."""
    changed = _changed(graph_module.graph)
    for node in list(graph_module.graph.nodes):
        if node.target is torch.ops.aten.detach.default and node not in changed:
            _stop_gradient(node, 0)
        elif node.target is torch.ops.higher_order.wrap_with_set_grad_enabled and not node.args[0]:
            # The body of `no_grad`. What it changes are buffers, of values without gradients.
            body = getattr(graph_module, node.args[1].target).graph
            for n, given in enumerate(body.find_nodes(op="placeholder"), 2):
                if given not in _changed(body):
                    _stop_gradient(node, n)
        elif node.target is torch.ops.aten.view.default and node not in changed:
            # Decompositions, such as that of attention, change the order of elements in memory, so
            # that a view fails. Arrays of JAX have no such order.
            node.target = torch.ops.aten.reshape.default
    for child in graph_module.children():
        if isinstance(child, fx.GraphModule):
            _prepare(child)
    graph_module.recompile()


def _stop_gradient(node: fx.Node, n: int) -> None:
    """Stops the gradient of an input: decompositions drop `detach` and `no_grad`."""
    if isinstance(given := node.args[n], fx.Node) and _is_tensor(given):
        with node.graph.inserting_before(node):
            stopped = node.graph.call_function(STOP_GRADIENT, (given,))
        stopped.meta = {**node.meta, "val": given.meta["val"]}
        node.update_arg(n, stopped)


def _changed(graph: fx.Graph) -> set[fx.Node]:
    """The tensors that some op changes in place, and those that share their memory."""
    found: set[fx.Node] = set()
    for node in graph.nodes:
        if _schema_of(node, "is_mutable"):
            shared = node.args[0]
            while isinstance(shared, fx.Node):
                found.add(shared)
                returns = _schema_of(shared, "returns")
                shared = shared.args[0] if returns and returns[0].alias_info else None
    return found


def _schema_of(node: fx.Node, what: str) -> Any:
    op = node.target
    return getattr(cast(Any, op)._schema, what) if isinstance(op, OpOverload) else None


def _is_tensor(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), torch.Tensor)


def _refused(module: nn.Module, error: RuntimeError) -> ExportError:
    place = place_in(error.__traceback__)
    where = "" if place is None else f"{place}: "
    reason = str(error).strip().partition("\n")[0].rstrip(".")
    remedy = next((f"; {remedy}" for word, remedy in _REMEDIES.items() if word in reason), "")
    return ExportError(
        f"{where}torch.export cannot export {type(module).__name__}: {reason}{remedy}"
    )


def _problems(exported: ExportedProgram) -> Iterator[str]:
    """Says what JAX cannot run, or what a pure function cannot do."""
    for node in exported.graph.nodes:
        if node.op == "call_function" and (problem := _problem(node)):
            place = place_of(node)
            yield f"{place}: {problem}" if place else problem
    signature = exported.graph_signature
    for spec in signature.output_specs:
        if spec.kind in _CHANGED:
            yield f"the module {_CHANGED[spec.kind].format(spec.target)}"
    for spec in signature.input_specs:
        if spec.kind not in _INPUTS:
            yield f"the module holds {spec.target}, which is no tensor: keep it out of forward"


def _problem(node: fx.Node) -> str:
    op = node.target
    if isinstance(op, HigherOrderOperator):
        return (
            f"JAX cannot run {op.name()}; use plain operations: both branches and torch.where "
            "instead of torch.cond, and loops of Python instead of those of PyTorch"
        )
    if not isinstance(op, OpOverload):
        return ""
    if lowering(op) is None:
        lacks = "has no function for it"
        if torch.Tag.nondeterministic_seeded in op.tags:
            lacks = "has no function for it that takes a random key"
        return (
            f"JAX cannot run {op.name()}: torchax {lacks}; use other operations, or register one "
            f"by torchax.ops.ops_registry.register_torch_dispatch_op(torch.ops.{op}, function)"
        )
    value = node.meta.get("val")
    if isinstance(value, torch.Tensor) and any(isinstance(n, torch.SymInt) for n in value.shape):
        return (
            f"the shape of {op.name()}'s result depends on values, and shapes are static; use a "
            "mask and torch.where"
        )
    return ""
