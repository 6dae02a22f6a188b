"""Finds what `torch.export` drops from a `forward` without an error, by running it.

It drops `no_grad` inside autocast. This matters where a tensor that was computed there, from one
with a gradient, is used where gradients are recorded. It also drops assignments to `.data`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from alpa.torch.places import Place, place_here


class DroppedError(Exception):
    """What forward does, what to do instead, and the place."""


class NothingDropped(TorchFunctionMode):
    """Within this context, raises DroppedError at what torch.export drops."""

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
            raise DroppedError(
                "sets the .data of a tensor",
                "use copy_, for a buffer under torch.no_grad",
                place_here(),
            )
        if func is cast(Any, torch)._C._set_grad_enabled:
            is_inside = torch.is_grad_enabled() and _autocasts() > self._outside
            self._no_grad_is_dropped = not args[0] and (self._no_grad_is_dropped or is_inside)
        result = func(*args, **kwargs)
        if func not in _WITHOUT_GRADIENT:
            given = tensors_in((args, kwargs))
            changed = given[:1] if func is torch.Tensor.__setitem__ else tensors_in(result)
            results = [one for one in changed if one.is_floating_point() or one.is_complex()]
            if torch.is_grad_enabled() and results:
                self.check(given)
            elif self._no_grad_is_dropped:
                self._remember(given, results)
        return result

    def check(self, used: Iterable[torch.Tensor]) -> None:
        """Checks tensors from which a tensor with a gradient is computed.

        Raises:
            DroppedError: one was computed where they are not, and would have one.
        """
        for one in used:
            if (found := self._found(one)) is not None:
                raise DroppedError(
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


def tensors_in(tree: Any) -> list[torch.Tensor]:
    return [one for one in pytree.tree_leaves(tree) if isinstance(one, torch.Tensor)]


def _autocasts() -> int:
    """The number of autocast contexts around the caller, also of those that are disabled."""
    cast(Any, torch).autocast_increment_nesting()
    return cast(Any, torch).autocast_decrement_nesting()
