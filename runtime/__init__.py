"""Runs planned programs: `load` returns a callable with the arguments of the original `@main`."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Not by name, when it is used: the function would be hidden by its module.
from alpa.runtime.prefetch import prefetch

if TYPE_CHECKING:
    from alpa.runtime.checkpoints.errors import CheckpointError
    from alpa.runtime.executable import Executable
    from alpa.runtime.loading import LoadError, load
    from alpa.runtime.workers.errors import ClusterSizeError, WorkerError
    from alpa.runtime.workers.options import TlsFiles, WorkerOptions

__all__ = [
    "CheckpointError",
    "ClusterSizeError",
    "Executable",
    "LoadError",
    "TlsFiles",
    "WorkerError",
    "WorkerOptions",
    "load",
    "prefetch",
]

_MODULES = {
    "CheckpointError": "alpa.runtime.checkpoints.errors",
    "ClusterSizeError": "alpa.runtime.workers.errors",
    "Executable": "alpa.runtime.executable",
    "LoadError": "alpa.runtime.loading",
    "TlsFiles": "alpa.runtime.workers.options",
    "WorkerError": "alpa.runtime.workers.errors",
    "WorkerOptions": "alpa.runtime.workers.options",
    "load": "alpa.runtime.loading",
}


# Planning a file needs no jax, which takes a second to import: only what runs plans imports it.
def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)
