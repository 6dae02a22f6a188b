"""Refuses modules whose gradients JAX would compute differently.

JAX differentiates the operations of `forward`. PyTorch lets a function bring a backward of its own,
and hooks change gradients; `torch.export` drops both.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from alpa.torch.exporting import ExportError
from alpa.torch.places import place_in


def check_hooks(module: nn.Module) -> None:
    """Checks that no hook changes gradients.

    Raises:
        ExportError: one does.
    """
    hooked = [
        f"the {kind} {name or type(module).__name__}"
        for kind, parts in (
            ("module", module.named_modules()),
            ("parameter", module.named_parameters()),
        )
        for name, part in parts
        if _has_hook(part)
    ]
    if hooked:
        raise ExportError(
            f"{hooked[0]} has a hook of its gradients, which JAX does not call; remove it, and "
            "change gradients after jax.grad"
        )


def _has_hook(part: Any) -> bool:
    return bool(part._backward_hooks or getattr(part, "_backward_pre_hooks", None))


class _DroppedError(Exception):
    """What forward does, and what to do instead."""


class _NothingDropped(TorchFunctionMode):
    """Raises _DroppedError at what torch.export drops without an error."""

    def __init__(self) -> None:
        super().__init__()
        self._no_grad_is_dropped = False
        self._outside = _autocasts()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == cast(Any, torch.Tensor).data.__set__:
            raise _DroppedError(
                "sets the .data of a tensor", "use copy_, for a buffer under torch.no_grad"
            )
        if func is cast(Any, torch)._C._set_grad_enabled:
            self._no_grad_is_dropped = not args[0] and _autocasts() > self._outside
        result = func(*args, **kwargs)
        changed = func is torch.Tensor.__setitem__
        results = pytree.tree_leaves(result)
        if self._no_grad_is_dropped and (changed or any(map(torch.is_tensor, results))):
            given = pytree.tree_leaves((args, kwargs))
            if any(isinstance(one, torch.Tensor) and one.requires_grad for one in given):
                raise _DroppedError(
                    "computes with a gradient under no_grad inside autocast",
                    "use detach, or no_grad around autocast",
                )
        return result


def _autocasts() -> int:
    """The number of autocast contexts around the caller, also of those that are disabled."""
    cast(Any, torch).autocast_increment_nesting()
    return cast(Any, torch).autocast_decrement_nesting()


def check_functions(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Checks that a module computes its result by operations that torch.export and JAX see.

    They do not see the backward of a `torch.autograd.Function`, nor what torch.export drops.

    Args:
        module: its parameters and buffers may be fake.
        args: of `forward`, as fake tensors.
        kwargs: of `forward`.

    Raises:
        ExportError: one does.
    """
    try:
        with torch.enable_grad(), _NothingDropped():
            results = pytree.tree_leaves(module(*args, **kwargs))
    except _DroppedError as error:
        place = place_in(error.__traceback__)
        where = "" if place is None else f"{place}: "
        what, remedy = error.args
        raise ExportError(f"{where}forward {what}, which torch.export drops; {remedy}") from None
    found: list[Any] = [one.grad_fn for one in results if isinstance(one, torch.Tensor)]
    seen: set[Any] = {None}
    while found:
        node = found.pop()
        if node in seen:
            continue
        seen.add(node)
        found += [before for before, _ in node.next_functions]
        if isinstance(node, BackwardCFunction):
            raise ExportError(_own_backward(cast(Any, node)._forward_cls))


def _own_backward(kind: type[torch.autograd.Function]) -> str:
    if kind is CheckpointFunction:
        return (
            "torch.utils.checkpoint has a backward of its own, and JAX would differentiate its "
            "forward; pass use_reentrant=False, or leave rematerialisation to Alpa"
        )
    code = kind.forward.__code__
    return (
        f"{code.co_filename}:{code.co_firstlineno}: {kind.__name__} has a backward of its own, and "
        "JAX would differentiate its forward; write the gradient with detach, for example "
        "x + (y - x).detach() for y with the gradient of x"
    )
