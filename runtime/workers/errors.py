"""What can be wrong with the workers of a plan; known without importing Ray."""

from __future__ import annotations


class ClusterSizeError(ValueError):
    """Ray has not what the plan needs."""


class WorkerError(RuntimeError):
    """A worker has failed or hangs; all workers of its plan are stopped."""
