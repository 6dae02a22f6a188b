"""Compiled executables on disk, so that a program is compiled once for its devices and versions."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from jaxlib import version


@dataclass(frozen=True, kw_only=True)
class CompileCache:
    """A folder of executables, each under a key of all that decides what XLA makes.

    Several processes may share it: a file is written aside and renamed.
    """

    directory: Path

    def key(self, module: bytes, devices: Sequence[Any], options: Mapping[str, Any]) -> str:
        """The name of an executable: its module, devices, options and the versions that matter."""
        first = devices[0]
        made_for = {
            "jaxlib": version.__version__,
            "runtime": first.client.platform_version,
            "platform": first.platform,
            "device": first.device_kind,
            "machine": _machine() if first.platform == "cpu" else "",
            "numbers": [device.id for device in devices],
            "options": sorted((name, str(value)) for name, value in options.items()),
            "flags": os.environ.get("XLA_FLAGS", ""),
        }
        return hashlib.sha256(json.dumps(made_for).encode() + module).hexdigest()

    def read(self, key: str) -> bytes | None:
        """A serialised executable; None where there is none."""
        try:
            return self._path(key).read_bytes()
        except FileNotFoundError:
            return None

    def write(self, key: str, executable: bytes) -> None:
        self.directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=self.directory, delete=False) as file:
            file.write(executable)
        os.replace(file.name, self._path(key))

    def _path(self, key: str) -> Path:
        return self.directory / f"{key}.xla"


@cache
def _machine() -> str:
    """The processor, for which XLA compiles on CPU."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    features = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    return f"{platform.machine()} {platform.processor()} {features}"
