"""torchax's functions of JAX, by the ops of PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torchax.ops import jaten

# Its import fills the registry. torchax's environment does as well, but creates JAX's devices.
REGISTRY = jaten.ops_registry.all_aten_ops


def torchax_function(op: Any) -> Callable[..., Any]:
    return REGISTRY[op].func
