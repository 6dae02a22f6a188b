"""Errors of the workers of a plan, without importing Ray."""

from __future__ import annotations


class ClusterSizeError(ValueError):
    """Ray has fewer nodes or devices than the plan needs."""


class WorkerError(RuntimeError):
    """A worker has failed or hangs; all workers of its plan are stopped."""
