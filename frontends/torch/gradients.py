"""Refuses modules whose gradients JAX would compute differently.

JAX differentiates the operations of `forward`. PyTorch lets a function bring a backward of its own,
and hooks change gradients; `torch.export` drops both. `dropped.py` finds what else it drops.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.utils.checkpoint import CheckpointFunction

from alpa.torch.dropped import DroppedError, NothingDropped, tensors_in
from alpa.torch.exporting import ExportError
from alpa.torch.places import located
from alpa.torch.unchecked import Unchecked


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
        with torch.enable_grad(), NothingDropped() as dropped, Unchecked():
            results = tensors_in(module(*args, **kwargs))
        dropped.check(results)
    except DroppedError as error:
        what, remedy, place = error.args
        message = f"forward {what}, which torch.export drops; {remedy}"
        raise ExportError(located(place, message)) from None
    found: list[Any] = [one.grad_fn for one in results]
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
