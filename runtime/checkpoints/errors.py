"""Errors of checkpoints, without importing Orbax and tensorstore."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or another program's, or cannot be written.

    The state on the meshes and the checkpoints on disk are unchanged.
    """
