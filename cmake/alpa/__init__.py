"""Alpa: automatic inter- and intra-operator parallelism for StableHLO programs.

`parallelize` is `jax.jit` for a cluster. `alpa.passes` is the compiler as a library,
`alpa.runtime` runs plans, `alpa.torch` takes modules of PyTorch, and `alpa.dialects` is the
vocabulary of the IR.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from alpa.runtime.checkpoints.checkpoint import (
        latest_step,
        restore,
        resume,
        save,
        wait_for_saves,
    )
    from alpa.runtime.compare_with_jax import compare_with_jax
    from alpa.runtime.create_state import create_state
    from alpa.runtime.jit import parallelize
    from alpa.runtime.markers import grad, mark_layer_boundary, value_and_grad

    __version__: str
    """the installed version"""

__all__ = [
    "compare_with_jax",
    "create_state",
    "grad",
    "latest_step",
    "mark_layer_boundary",
    "parallelize",
    "restore",
    "resume",
    "save",
    "value_and_grad",
    "wait_for_saves",
]

_MODULES = {
    "compare_with_jax": "alpa.runtime.compare_with_jax",
    "create_state": "alpa.runtime.create_state",
    "grad": "alpa.runtime.markers",
    "latest_step": "alpa.runtime.checkpoints.checkpoint",
    "mark_layer_boundary": "alpa.runtime.markers",
    "parallelize": "alpa.runtime.jit",
    "restore": "alpa.runtime.checkpoints.checkpoint",
    "resume": "alpa.runtime.checkpoints.checkpoint",
    "save": "alpa.runtime.checkpoints.checkpoint",
    "value_and_grad": "alpa.runtime.markers",
    "wait_for_saves": "alpa.runtime.checkpoints.checkpoint",
}


# The compiler does not import jax. The package imports it only when a name that needs it is used.
def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("alpa-mlir")
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "__version__"})
