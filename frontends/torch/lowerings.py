"""The function of JAX that computes an op of PyTorch, from torchax's registry."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import torch
from torch._ops import OpOverload

from alpa.torch.corrections import CORRECTIONS
from alpa.torch.embeddings import EMBEDDINGS
from alpa.torch.linear_algebra import LINEAR_ALGEBRA
from alpa.torch.order import ORDER
from alpa.torch.pools import POOLS
from alpa.torch.random import RANDOM
from alpa.torch.registry import REGISTRY
from alpa.torch.subgradients import SUBGRADIENTS


@torch.library.custom_op("alpa::stop_gradient", mutates_args=())
def stop_gradient(x: torch.Tensor) -> torch.Tensor:
    """Stands for `detach` and `no_grad`, which decompositions take for the identity."""
    return x.clone()


@stop_gradient.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


STOP_GRADIENT = torch.ops.alpa.stop_gradient.default

_OWN: dict[Any, Callable[..., Any]] = {
    **CORRECTIONS,
    **EMBEDDINGS,
    **LINEAR_ALGEBRA,
    **ORDER,
    **POOLS,
    **SUBGRADIENTS,
    STOP_GRADIENT: jax.lax.stop_gradient,
    # A number of a tensor, which JAX does not know while it traces, stays an array. PyTorch's has
    # no gradient.
    torch.ops.aten._local_scalar_dense.default: jax.lax.stop_gradient,
    # JAX checks no values.
    torch.ops.aten._assert_scalar.default: lambda *_: None,
    torch.ops.aten._assert_async.default: lambda *_: None,
    torch.ops.aten._assert_async.msg: lambda *_: None,
    torch.ops.aten._linalg_check_errors.default: lambda *_, **__: None,
    torch.ops.aten.sym_constrain_range_for_size.default: lambda *_, **__: None,
}
"""Functions instead of torchax's, for an overload or for all overloads of an op."""


@dataclass(frozen=True, kw_only=True)
class Lowering:
    """A function of JAX, and whether it draws random numbers: it then has the argument `env`."""

    function: Callable[..., Any]
    draws: bool


class Keys:
    """The random keys of one call: each op that draws numbers gets one of its own.

    torchax's functions ask for it as they ask their environment.
    """

    def __init__(self, key: Any) -> None:
        self._key = key
        self._drawn = 0

    def get_and_rotate_prng_key(self, generator: None = None) -> Any:
        self._drawn += 1
        return jax.random.fold_in(self._key, self._drawn - 1)


def lowering(op: OpOverload) -> Lowering | None:
    """The function for an op, or None.

    None also stands for functions that are wrong here: those that change tensors in place, and
    those that draw the same numbers in each call.
    """
    if (own := _OWN.get(op, _OWN.get(op.overloadpacket))) is not None:
        return Lowering(function=own, draws=False)
    if (own := RANDOM.get(op.overloadpacket)) is not None:
        return Lowering(function=own, draws=True)
    found = REGISTRY.get(op) or REGISTRY.get(op.overloadpacket)
    draws = torch.Tag.nondeterministic_seeded in op.tags
    if found is None or not found.is_jax_function or found.needs_env != draws:
        return None
    return Lowering(function=found.func, draws=draws)
