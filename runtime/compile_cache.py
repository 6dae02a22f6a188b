"""Folders of compiled executables: a cache on this machine, and those that were exported elsewhere.

An executable is machine code that XLA loads and runs unchecked. A flipped bit can crash the process
or change results, and anyone who can write to the folder can run code as its reader. So each file
begins with a hash of its key and its bytes. A file with a wrong hash is not loaded: a warning names
it, and the module is compiled. The hash is not a signature. Protection comes from the folder's
permissions, which are checked.

A file has two lines, then XLA's bytes. `head -n 2` shows them:

    alpa executable 2 HASH
    {"modules": [NAMES], "local": {...}, the parts of the key}
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import platform
import re
import stat
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import IO, Any

from jaxlib import version

_log = logging.getLogger(__name__)

_MAGIC = b"alpa executable 2 "
_LONGEST_LINE = 1 << 20
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_GPU_PLUGINS = ("jax-cuda12-pjrt", "jax-cuda13-pjrt", "jax-rocm7-pjrt")
_MODEL = ("vendor_id", "cpu family", "model", "stepping", "CPU implementer", "CPU part")
"""Fields of /proc/cpuinfo that name the processor, on x86 and on Arm."""


class UnsafeCacheError(ValueError):
    """Other users could write to a folder of executables, or to a file in it."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """Everything that determines XLA's result, in parts that JSON can express."""

    parts: Mapping[str, Any]
    local: Mapping[str, Any]
    """parts that are known only where the devices are; empty for executables that travel"""

    @property
    def travelling(self) -> Key:
        """The key without local parts."""
        return Key(parts=self.parts, local={})

    @property
    def file_name(self) -> str:
        """The name of the executable's file."""
        return f"{hashlib.sha256(_json([self.parts, self.local])).hexdigest()}.xla"

    def differences(self, other: Mapping[str, Any]) -> list[str]:
        """How other parts differ, in words."""
        return [
            f"{part} {_text(other.get(part))} (here {_text(value)})"
            for part, value in self.parts.items()
            if other.get(part) != value
        ]


@dataclass(frozen=True, kw_only=True)
class Found:
    """A serialised executable, and its file."""

    path: Path
    executable: bytes


@dataclass(frozen=True, kw_only=True)
class CompileCache:
    """A folder of executables, each under a key of everything that determines XLA's result.

    Several processes may share it: files are written under another name and renamed. `exported` are
    further folders of the same format, which are read first and never written. If an executable is
    in none of the folders, a warning says what the exported ones have instead. Without `directory`,
    nothing is written.
    """

    directory: Path | None = None
    exported: tuple[Path, ...] = ()

    def key(
        self,
        module: str,
        devices: Sequence[Any],
        options: Mapping[str, Any],
        versions: Mapping[str, str],
    ) -> Key:
        """The key of an executable: module, devices, options and relevant versions.

        `module` is a text without locations and names. `options` are all of XLA's, with those of
        the platform. `versions` are those of the platform's software where the devices are; the
        key of an executable that travels has none of them. Numbers of devices do not matter: XLA
        loads an executable for other devices of the same kind, if they are as many, and split
        between processes in the same way.
        """
        first = devices[0]
        made_for = {
            "jaxlib": version.__version__,
            "plug-in": _plug_in(first),
            "platform": first.platform,
            "device": first.device_kind,
            "devices": len(devices),
            "processes": _processes(devices),
            "machine": machine() if first.platform == "cpu" else platform.machine(),
            "options": sorted((name, str(value)) for name, value in options.items()),
            "flags": xla_flags(),
        }
        digest = hashlib.sha256(module.encode()).hexdigest()
        # As JSON reads it: pairs are lists.
        parts = json.loads(_json({"module": digest, **made_for}))
        return Key(parts=parts, local=dict(versions))

    def read(self, key: Key, module: str) -> Found | None:
        """Finds the executable of a module; None if there is none, or if its hash is wrong.

        Raises:
            UnsafeCacheError: other users can write there.
        """
        refused = False
        places = [(folder, key.travelling) for folder in self.exported]
        if self.directory is not None:
            places.append((self.directory, key))
        for folder, its_key in places:
            path = folder / its_key.file_name
            try:
                return Found(path=path, executable=_read(path))
            except (FileNotFoundError, NotADirectoryError):
                continue
            except _RefusedError as error:
                refused = True
                warn_refused(path, str(error))
        if self.exported and not refused:
            _log.warning("@%s is compiled: %s", module, self._reason(key, module))
        return None

    def write(self, key: Key, executable: bytes, modules: Sequence[str]) -> None:
        """Writes the executable of these modules, unless `directory` is None.

        Logs a warning if that fails.
        """
        if self.directory is None:
            return
        path = self.directory / key.file_name
        head = _json({"modules": [*modules], **key.parts, "local": key.local})
        try:
            self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            with tempfile.NamedTemporaryFile(dir=self.directory, delete=False) as file:
                try:
                    digest = _digest(path.name, head, executable).encode()
                    file.write(_MAGIC + digest + b"\n" + head + b"\n" + executable)
                    file.flush()
                    os.replace(file.name, path)
                except OSError:
                    os.unlink(file.name)
                    raise
        except OSError as error:
            _log.warning("%s cannot be written to the cache: %s", path, error.strerror)

    def _reason(self, key: Key, module: str) -> str:
        """Why no exported folder has the executable of a module."""
        folders = ", ".join(map(str, self.exported))
        heads = [head for folder in self.exported for head in _heads(folder)]
        same = [head for head in heads if head.get("module") == key.parts["module"]]
        if same:
            differences = min(map(key.differences, same), key=len)
            return f"{folders} has it for {', '.join(differences)}"
        if any(module in _names(head) for head in heads):
            return f"{folders} has a module of this name, but with another program; export it again"
        return f"{folders} has {'no such module' if heads else 'no executables'}"


def is_intact(path: Path) -> bool:
    """Whether a file is an executable that could be read; if it is another file, a warning says so.

    Raises:
        UnsafeCacheError: other users can write there.
    """
    try:
        _read(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except _RefusedError as error:
        warn_refused(path, str(error))
        return False
    return True


def warn_refused(path: Path, reason: str) -> None:
    """Says that a file is not used."""
    _log.warning("%s is not used: %s; it is compiled again", path, reason)


def package_version(name: str) -> str | None:
    """The version of an installed package; None if it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def xla_flags() -> str:
    """XLA's flags of this process, without the number of virtual devices."""
    flags = os.environ.get("XLA_FLAGS", "")
    return re.sub(r"--xla_force_host_platform_device_count=\d+", "", flags).strip()


class _RefusedError(Exception):
    """A file is not the executable that its name promises. The message is the reason."""


def _read(path: Path) -> bytes:
    """The executable in a file.

    Raises:
        FileNotFoundError, NotADirectoryError: there is no such file.
        UnsafeCacheError: other users can write to it.
        _RefusedError: it is something else, or damaged.
    """
    try:
        check_owner(path.parent, os.stat(path.parent))
        # Opening a pipe without a writer would block.
        file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except (FileNotFoundError, NotADirectoryError):
        raise
    except OSError as error:
        raise _RefusedError(f"it cannot be read ({error.strerror})") from error
    with open(file, "rb") as stream:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise _RefusedError("it is not a regular file")
        check_owner(path, status)
        digest, head = _first_lines(stream)
        executable = stream.read()
    if digest is None:
        raise _RefusedError("it is not an executable that this version of Alpa wrote")
    if digest != _digest(path.name, head, executable):
        raise _RefusedError("it is damaged, or another program's")
    return executable


def _first_lines(stream: IO[bytes]) -> tuple[str | None, bytes]:
    """The hash in a file's first line, None if it is another kind of file, and the second line."""
    first = stream.readline(_LONGEST_LINE).removesuffix(b"\n")
    if not first.startswith(_MAGIC):
        return None, b""
    digest = first.removeprefix(_MAGIC).decode(errors="replace")
    return digest, stream.readline(_LONGEST_LINE).removesuffix(b"\n")


def _heads(folder: Path) -> Iterator[Mapping[str, Any]]:
    """The second lines of the executables that travel, which say what these were compiled for."""
    for path in sorted(folder.glob("*.xla")):
        try:
            if not path.is_file():
                continue
            with path.open("rb") as stream:
                digest, head = _first_lines(stream)
            parts = json.loads(head) if digest is not None else None
        except (OSError, ValueError, RecursionError):
            continue
        if isinstance(parts, dict) and not parts.get("local"):
            yield parts


def _digest(name: str, head: bytes, executable: bytes) -> str:
    """The hash of a file. It includes the name, the key's hash, so that files cannot be swapped."""
    return hashlib.sha256(b"\n".join([name.encode(), head, executable])).hexdigest()


def _names(head: Mapping[str, Any]) -> list[str]:
    names = head.get("modules")
    return [str(name) for name in names] if isinstance(names, list) else []


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


def _text(value: Any) -> str:
    return value if isinstance(value, str) and value else json.dumps(value)


def check_owner(path: Path, status: os.stat_result) -> None:
    """Raises UnsafeCacheError if others than this user and root can write to a file or folder."""
    if status.st_uid in (os.geteuid(), 0) and not status.st_mode & _OTHERS_WRITE:
        return
    raise UnsafeCacheError(
        f"{path} (mode {stat.filemode(status.st_mode)}, user {status.st_uid}) holds machine "
        "code, and other users can write to it; remove that permission (chmod go-w), or use "
        "another folder"
    )


def _processes(devices: Sequence[Any]) -> list[int]:
    """The process of each device, numbered in the order in which they appear."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(it.process_index, len(numbers)) for it in devices]


def _plug_in(first: Any) -> str:
    """The package of XLA for a GPU, with its version; empty for platforms that jaxlib has."""
    if first.platform != "gpu":
        return ""
    versions = {name: package_version(name) for name in _GPU_PLUGINS}
    return ", ".join(f"{name} {it}" for name, it in versions.items() if it is not None)


def machine() -> str:
    """The processor that XLA compiles for on CPU.

    XLA uses instructions that `flags` does not list, so the model counts, too. It splits large ops
    into as many parts as the process may use cores.
    """
    name, digest = _processor()
    cores = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count()
    return f"{platform.machine()}, {name}, {cores} cores, features {digest}"


@cache
def _processor() -> tuple[str, str]:
    """The model of this machine's processor, and the beginning of a hash of its features."""
    info = Path("/proc/cpuinfo")
    first = info.read_text().split("\n\n")[0] if info.exists() else ""
    pairs = [line.partition(":")[::2] for line in first.splitlines()]
    found = {name.strip(): value.strip() for name, value in pairs}
    words = [name for name in _MODEL if name in found]
    model = " ".join(f"{name} {found[name]}" for name in words) or platform.processor()
    features = found.get("flags") or found.get("Features") or ""
    return model, hashlib.sha256(features.encode()).hexdigest()[:8]
