"""The folders of compiled executables on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from alpa.runtime.compile_cache import UnsafeCacheError, check_owner


@dataclass(frozen=True, kw_only=True)
class Cache:
    """A folder that Alpa keeps results in, without the folders inside it."""

    folder: str
    use: str
    files: int
    bytes: int
    exists: bool
    problem: str = ""
    """why Alpa does not read it; empty if it does"""

    @classmethod
    def of(cls, folder: Path, use: str) -> Cache:
        """Looks at a folder, which may not exist."""
        sizes: list[int] = []
        problem = ""
        try:
            check_owner(folder, folder.stat())
            for path, status in _files(folder):
                sizes.append(status.st_size)
                check_owner(path, status)
        except FileNotFoundError:
            pass
        except (OSError, UnsafeCacheError) as error:
            problem = str(error)
        return cls(
            folder=str(folder),
            use=use,
            files=len(sizes),
            bytes=sum(sizes),
            exists=folder.exists(),
            problem=problem,
        )


def _files(folder: Path) -> Iterator[tuple[Path, os.stat_result]]:
    for entry in os.scandir(folder):
        if entry.is_file(follow_symlinks=False):
            yield Path(entry.path), entry.stat(follow_symlinks=False)
