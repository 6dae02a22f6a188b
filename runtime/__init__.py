"""Runs planned programs: `load` returns a callable with the arguments of the original `@main`."""

from __future__ import annotations

from alpa.runtime.checkpoints.errors import CheckpointError
from alpa.runtime.executable import Executable
from alpa.runtime.loading import LoadError, load
from alpa.runtime.prefetch import prefetch
from alpa.runtime.workers.errors import ClusterSizeError, WorkerError
from alpa.runtime.workers.options import WorkerOptions

__all__ = [
    "CheckpointError",
    "ClusterSizeError",
    "Executable",
    "LoadError",
    "WorkerError",
    "WorkerOptions",
    "load",
    "prefetch",
]
