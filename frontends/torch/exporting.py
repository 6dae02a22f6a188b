"""Exports a module for some shapes to a graph of functional ops that JAX can run.

`torch.export` traces the module. Decompositions then reduce its ops to those for which torchax has
functions of JAX. What has no equivalent in JAX is refused, with the line and the reason.
"""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Iterator, Mapping
from typing import Any, cast

import torch
import torch.export._remove_effect_tokens_pass as effect_tokens
from torch import fx, nn
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    UnsupportedOperatorException,
)
from torch.export import ExportedProgram, default_decompositions
from torch.export.graph_signature import InputKind, OutputKind
from torch.utils import _pytree as pytree
from torchax.decompositions import DECOMPOSITIONS

from alpa.torch.corrections import UNDECOMPOSED
from alpa.torch.lowerings import lowering
from alpa.torch.places import Place, located, place_in, place_of
from alpa.torch.stops import STOPPING_DECOMPOSITIONS, Memory, write_stops
from alpa.torch.subgradients import WHOLE
from alpa.torch.unchecked import Unchecked

_REMEDIES = {
    "_ctc_loss": (
        "return the scores from forward, and compute the loss of them by optax.ctc_loss, which "
        "has masks instead of lengths"
    ),
    "linalg_lstsq": "use torch.linalg.pinv(a) @ b",
    **dict.fromkeys(
        ("data-dependent", "Could not guard", "jax devices"),
        "a planned program has one control flow: compute both branches, and choose by torch.where",
    ),
    **dict.fromkeys(
        (FakeTensor.__name__, "depends on values"),
        "shapes and numbers cannot depend on values; use a mask and torch.where",
    ),
    "has no shapes": "compute it outside of the module, by a function of JAX",
}
"""What to do, by a word of PyTorch's reason; the first that occurs."""

_VALUES_READ_IN = {
    "_detect_is_causal_mask": (
        "PyTorch compares the mask with a causal one, unless the call says whether it is: pass "
        "is_causal=True if the mask is causal, and False if not (tgt_is_causal for a decoder)"
    ),
    "_BatchNorm.forward": (
        "with momentum=None, a batch norm divides by the number of batches, which is a value; pass "
        "a number, such as momentum=0.1"
    ),
    "Distribution.__init__": (
        "a distribution checks the values of its arguments; pass validate_args=False"
    ),
    "_single_tensor_radam": (
        "the formula of a step depends on the number of steps, which is a value; use optax.radam, "
        "or AdamW with a learning rate that grows in the first steps"
    ),
}
"""Why values are read and what to do, by the function of PyTorch that reads them."""

_BAGS = {torch.ops.aten._embedding_bag, torch.ops.aten._embedding_bag_forward_only}
_RANGE = torch.ops.aten.arange.start_step
_VIEW = torch.ops.aten.view.default

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


def export(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], name: str = ""
) -> ExportedProgram:
    """Exports a module for arguments, whose tensors may be fake, to ops that have a lowering.

    Args:
        module: its `forward` is exported.
        args: of `forward`.
        kwargs: of `forward`.
        name: what errors call the module: its class by default.

    Raises:
        ExportError: PyTorch cannot export it, or JAX cannot run it.
    """
    # In one pass: two, one for each table, give the same operations in twice the time.
    table = {**DECOMPOSITIONS, **default_decompositions(), **STOPPING_DECOMPOSITIONS}
    table = {op: function for op, function in table.items() if op not in {*WHOLE, *UNDECOMPOSED}}
    try:
        with warnings.catch_warnings():
            # PyTorch's own use of what it deprecates.
            warnings.filterwarnings("ignore", r".*LeafSpec.* is deprecated", FutureWarning)
            with Unchecked():
                exported = torch.export.export(module, args, dict(kwargs), strict=False)
            _check_constants(exported)
            problems = write_stops(exported)
            _reshape_views(exported.graph_module)
            exported = exported.run_decompositions(table)
            # Checks of linear algebra are effects, and have tokens for their order.
            exported = cast(Any, effect_tokens)._remove_effect_tokens(exported)
            _write_offsets(exported.graph)
    except (RuntimeError, TypeError) as error:  # The module's own errors pass.
        if isinstance(error, TypeError) and FakeTensor.__name__ not in str(error):
            raise
        raise _refused(name or type(module).__name__, error) from error
    problems = list(dict.fromkeys([*problems, *_problems(exported)]))
    if problems:
        more = f" (and {len(problems) - 1} more of its operations)" if len(problems) > 1 else ""
        raise ExportError(f"{problems[0]}{more}")
    return exported


def _check_constants(exported: ExportedProgram) -> None:
    """Checks that all tensors are computed by the graph.

    Raises:
        ExportError: one is that of an example, for which PyTorch has recorded no operation.
    """
    inputs = {node.name: node for node in exported.graph.find_nodes(op="placeholder")}
    for spec in cast(Any, exported.graph_signature.input_specs):
        if isinstance(exported.constants.get(spec.target), FakeTensor):
            message = (
                "torch.export does not see how a tensor here is computed; use detach() instead of "
                ".data, and jax.grad of the function instead of torch.autograd.grad, and compute "
                "what the module keeps of parameters in forward"
            )
            raise ExportError(located(_place_of_use(inputs[spec.arg.name]), message))


def _place_of_use(node: fx.Node) -> Place | None:
    """The first line that computes with a node."""
    using = {node}
    for one in node.graph.nodes:
        if not using.isdisjoint(one.all_input_nodes):
            if (place := place_of(one)) is not None:
                return place
            using.add(one)
    return None


def _reshape_views(graph_module: fx.GraphModule) -> None:
    """Makes views of tensors that do not change reshapes, in place.

    Decompositions, such as that of attention, change the order of elements in memory, so that a
    view fails. Arrays of JAX have no such order.
    """
    memory = Memory(graph_module)
    for module in graph_module.modules():
        if isinstance(module, fx.GraphModule):
            for node in module.graph.find_nodes(op="call_function", target=_VIEW):
                if memory.change(node) is None:
                    node.target = torch.ops.aten.reshape.default
            module.recompile()


def _write_offsets(graph: fx.Graph) -> None:
    """Writes the offsets of bags of one size, which their lowering then knows, as numbers."""
    for node in graph.nodes:
        if getattr(node.target, "overloadpacket", None) in _BAGS:
            offsets = node.args[2]
            if offsets.target is _RANGE and all(isinstance(one, int) for one in offsets.args):
                node.update_arg(2, [*range(*offsets.args)])


def _refused(name: str, error: Exception) -> ExportError:
    message = f"torch.export cannot export {name}: {_reason(error)}"
    return ExportError(located(place_in(error.__traceback__), message))


def _reason(error: Exception) -> str:
    """Why PyTorch cannot export, and what to do."""
    if isinstance(error, UnsupportedOperatorException):
        reason = f"it has no shapes for the results of {error.func}"
    elif isinstance(error, DataDependentOutputException | DynamicOutputShapeException):
        reason = f"the result of {error.func} depends on values"
    else:
        reason = str(error).strip().partition("\n")[0].partition(" (unhinted")[0].rstrip(".")
    if "data-dependent" in reason:
        for frame, _ in traceback.walk_tb(error.__traceback__):
            if (known := _VALUES_READ_IN.get(frame.f_code.co_qualname)) is not None:
                return known
    remedies = [remedy for word, remedy in _REMEDIES.items() if word in reason]
    return "; ".join([reason, *remedies[:1]])


def _problems(exported: ExportedProgram) -> Iterator[str]:
    """Says what JAX cannot run, or what a pure function cannot do."""
    for node in exported.graph.nodes:
        if node.op == "call_function" and (problem := _problem(node)):
            yield located(place_of(node), problem)
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
    values = pytree.tree_leaves(node.meta.get("val"))
    shapes = [one.shape for one in values if isinstance(one, torch.Tensor)]
    if any(isinstance(size, torch.SymInt) for shape in shapes for size in shape):
        return (
            f"the shape of {op.name()}'s result depends on values, and shapes are static; use a "
            "mask and torch.where"
        )
    return ""
