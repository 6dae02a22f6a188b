"""The folder of a checkpoint until it is complete: it has a temporary name, Orbax's."""

from __future__ import annotations

import shutil
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

from orbax.checkpoint.path import atomicity_types

from alpa.runtime.checkpoints.errors import CheckpointError

_SUFFIX = atomicity_types.TMP_DIR_SUFFIX


class Unfinished:
    """A checkpoint that is being written, and gets the name of its folder at the end."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._there = _temporary(folder)
        self._new = [it for it in folder.parents if not it.exists()]
        """folders above it that this save creates, the innermost first"""

    @contextmanager
    def kept_if_successful(self) -> Generator[Path]:
        """Yields its temporary folder, and deletes what is there if the block fails.

        Raises:
            CheckpointError: a file cannot be written, or the block's own.
        """
        try:
            yield self._there
        except BaseException as error:
            self._delete(error)
            if isinstance(error, OSError):
                raise CheckpointError(f"cannot write {self._folder}: {error}") from error
            raise

    def complete(self) -> None:
        """Gives it its name."""
        self._there.rename(self._folder)

    def _delete(self, reason: BaseException) -> None:
        """Deletes what was written, also by Orbax under another temporary name."""
        try:
            for there in _unfinished(self._folder.parent, self._folder.name):
                shutil.rmtree(there)
            for folder in self._new:
                if folder.is_dir() and not any(folder.iterdir()):
                    folder.rmdir()
        except OSError as error:
            reason.add_note(f"Its temporary folder {self._there} cannot be deleted: {error}")


def delete_unfinished(root: Path) -> None:
    """Deletes what interrupted saves and deletions have left."""
    for there in _unfinished(root):
        shutil.rmtree(there)


def delete(folder: Path) -> None:
    """Deletes a checkpoint. If interrupted, it leaves nothing that looks like one."""
    shutil.rmtree(folder.rename(_temporary(folder)))


def _temporary(folder: Path) -> Path:
    return folder.with_name(folder.name + _SUFFIX)


def _unfinished(root: Path, name: str = "*") -> list[Path]:
    return [*root.glob(f"{name}{_SUFFIX}*")]
