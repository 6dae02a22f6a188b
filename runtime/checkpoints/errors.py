"""What can be wrong with a checkpoint; known without orbax and tensorstore."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint is missing, damaged or another program's, or cannot be written.

    Nothing has been changed: neither the state on the meshes nor the checkpoints on disk.
    """
