"""Caches compiled executables on disk, one per program, devices and versions.

An executable is machine code that XLA loads and runs unchecked. A flipped bit can crash the process
or change results, and anyone who can write to the folder can run code as its reader. So each file
begins with a hash of its key and its bytes. A file with a wrong hash is not loaded: a warning names
it, and it is compiled again and replaced. The hash is not a signature. Protection comes from the
folder's permissions, which are checked.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
import stat
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jaxlib import version

_log = logging.getLogger(__name__)

_MAGIC = b"alpa executable 1\n"
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


class UnsafeCacheError(ValueError):
    """Other users could write to the folder of the cache, or to a file in it."""


@dataclass(frozen=True, kw_only=True)
class CompileCache:
    """A folder of executables, each under a key of everything that determines XLA's result.

    Several processes may share it: files are written under another name and renamed.
    """

    directory: Path

    def key(
        self,
        module: bytes,
        devices: Sequence[Any],
        options: Mapping[str, Any],
        versions: Mapping[str, str],
    ) -> str:
        """The name of an executable: a hash of module, devices, options and relevant versions.

        `options` are all of XLA's, with those of the platform; `versions` are those of the
        platform's software.
        """
        first = devices[0]
        made_for = {
            "jaxlib": version.__version__,
            "versions": sorted(versions.items()),
            "platform": first.platform,
            "device": first.device_kind,
            "machine": _machine() if first.platform == "cpu" else "",
            "numbers": [device.id for device in devices],
            "processes": [device.process_index for device in devices],
            "options": sorted((name, str(value)) for name, value in options.items()),
            "flags": os.environ.get("XLA_FLAGS", ""),
        }
        return hashlib.sha256(json.dumps(made_for).encode() + module).hexdigest()

    def read(self, key: str) -> bytes | None:
        """Returns a serialised executable, or None if there is none or its hash is wrong.

        Raises:
            UnsafeCacheError: other users can write there.
        """
        path = self._path(key)
        try:
            self._check_owner(self.directory, os.stat(self.directory))
            # Opening a pipe without a writer would block.
            file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            return self._refused(path, f"it cannot be read ({error.strerror})")
        with open(file, "rb") as stream:
            status = os.fstat(file)
            if not stat.S_ISREG(status.st_mode):
                return self._refused(path, "it is not a regular file")
            self._check_owner(path, status)
            head = stream.read(len(_MAGIC) + hashlib.sha256().digest_size)
            executable = stream.read()
        if not head.startswith(_MAGIC):
            return self._refused(path, "it is not an executable that this version of Alpa wrote")
        if head != _head(key, executable):
            return self._refused(path, "it is damaged, or another program's")
        return executable

    def write(self, key: str, executable: bytes) -> None:
        """Writes an executable; logs a warning if that fails."""
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.directory, delete=False) as file:
                try:
                    file.write(_head(key, executable) + executable)
                    file.flush()
                    os.replace(file.name, self._path(key))
                except OSError:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            _log.warning("%s cannot be written to the cache: %s", self._path(key), error.strerror)

    @staticmethod
    def _refused(path: Path, reason: str) -> None:
        _log.warning("%s of the cache is not used: %s; it is compiled again", path, reason)

    @staticmethod
    def _check_owner(path: Path, status: os.stat_result) -> None:
        if status.st_uid in (os.geteuid(), 0) and not status.st_mode & _OTHERS_WRITE:
            return
        raise UnsafeCacheError(
            f"{path} (mode {stat.filemode(status.st_mode)}, user {status.st_uid}) holds machine "
            "code, and other users can write to it; remove that permission (chmod go-w), or pass "
            "another folder or None as cache_directory"
        )

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.xla"


def _head(key: str, executable: bytes) -> bytes:
    """The beginning of a file. The hash includes the key, so that files cannot be swapped."""
    return _MAGIC + hashlib.sha256(key.encode() + b"\0" + executable).digest()


@cache
def _machine() -> str:
    """The processor that XLA compiles for on CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {features}"
