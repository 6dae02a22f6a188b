"""Refuses modules whose gradients JAX would compute differently.

JAX differentiates the operations of `forward`. PyTorch lets a function bring a backward of its own,
and hooks change gradients; `torch.export` drops both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils.checkpoint import CheckpointFunction

from alpa.torch.exporting import ExportError
from alpa.torch.places import Place, located, place_here
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


class _DroppedError(Exception):
    """What forward does, what to do instead, and the place."""


class _NothingDropped(TorchFunctionMode):
    """Raises _DroppedError at what torch.export drops without an error.

    It drops `no_grad` inside autocast. This matters where a tensor that was computed there, from
    one with a gradient, is used where gradients are recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self._no_grad_is_dropped = False
        self._outside = _autocasts()
        self._results: dict[int, tuple[torch.Tensor, Place | None]] = {}
        self._written: dict[int, tuple[torch.Tensor, Place | None]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func == cast(Any, torch.Tensor).data.__set__:
            raise _DroppedError(
                "sets the .data of a tensor",
                "use copy_, for a buffer under torch.no_grad",
                place_here(),
            )
        if func is cast(Any, torch)._C._set_grad_enabled:
            is_inside = torch.is_grad_enabled() and _autocasts() > self._outside
            self._no_grad_is_dropped = not args[0] and (self._no_grad_is_dropped or is_inside)
        result = func(*args, **kwargs)
        if func not in _WITHOUT_GRADIENT:
            given = _tensors((args, kwargs))
            changed = given[:1] if func is torch.Tensor.__setitem__ else _tensors(result)
            results = [one for one in changed if one.is_floating_point() or one.is_complex()]
            if torch.is_grad_enabled() and results:
                self.check(given)
            elif self._no_grad_is_dropped:
                self._remember(given, results)
        return result

    def check(self, used: Iterable[torch.Tensor]) -> None:
        """Checks tensors from which a tensor with a gradient is computed.

        Raises:
            _DroppedError: one was computed where they are not, and would have one.
        """
        for one in used:
            if (found := self._found(one)) is not None:
                raise _DroppedError(
                    "computes with a gradient under no_grad inside autocast",
                    "use detach, or no_grad around autocast",
                    found[1],
                )

    def _found(self, one: torch.Tensor) -> tuple[torch.Tensor, Place | None] | None:
        return self._results.get(id(one)) or self._written.get(_storage(one))

    def _remember(self, given: Sequence[torch.Tensor], results: Sequence[torch.Tensor]) -> None:
        """Remembers what a function computes or writes under the `no_grad` that is dropped."""
        if not any(one.requires_grad or self._found(one) is not None for one in given):
            return
        place = place_here()
        for one in results:
            # It is kept, so that no other tensor gets its number.
            if any(one is other for other in given):
                self._written[_storage(one)] = one, place
            else:
                self._results[id(one)] = one, place


_WITHOUT_GRADIENT = {
    torch.Tensor.detach,
    *(
        getattr(torch, f"{kind}_like")
        for kind in ("empty", "full", "ones", "rand", "randn", "zeros")
    ),
    *(getattr(torch.Tensor, f"new_{kind}") for kind in ("empty", "full", "ones", "zeros")),
}
"""Functions whose results have no gradient."""


def _storage(tensor: torch.Tensor) -> int:
    return cast(Any, tensor.untyped_storage())._cdata


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]


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
        with torch.enable_grad(), _NothingDropped() as dropped, Unchecked():
            results = _tensors(module(*args, **kwargs))
        dropped.check(results)
    except _DroppedError as error:
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
