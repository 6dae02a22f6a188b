"""Earlier results of the compiler in a folder, one file each."""

from __future__ import annotations

import gzip
import json
import logging
import os
import zlib
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

from alpa.passes.plan.predicted_collectives import Collective
from alpa.runtime.compile_cache import is_intact
from alpa.runtime.truth import Truth

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Format(Protocol[T]):
    """How results of one kind are written."""

    @property
    def suffix(self) -> str: ...

    def encode(self, result: T) -> bytes: ...

    def decode(self, data: bytes) -> T:
        """Raises ValueError, TypeError, KeyError or AttributeError for what was not encoded."""
        ...

    def is_complete(self, result: T, folder: Path) -> bool:
        """Whether the folder has the other files of a result."""
        ...


@dataclass(frozen=True, kw_only=True)
class CompiledStage:
    """What XLA says of a stage, and where its executable is."""

    truth: Truth
    executable: str | None = None
    """the name of the executable's file, if one was written"""
    tuned_on_device: bool = False
    """whether it calls kernels that are chosen on the device, so that its executable is no use"""


@dataclass(frozen=True, kw_only=True)
class CompiledStages:
    """Compiled stages, as JSON."""

    executables: bool
    """whether a stage without its executable is incomplete"""

    suffix = ".json"

    def encode(self, result: CompiledStage) -> bytes:
        return json.dumps(asdict(result)).encode()

    def decode(self, data: bytes) -> CompiledStage:
        fields: dict[str, Any] = json.loads(data)
        truth: dict[str, Any] = fields.pop("truth")
        found: list[dict[str, Any]] = truth.pop("collectives")
        for it in found:
            it["axes"] = tuple(it["axes"])
        collectives = tuple(Collective(**it) for it in found)
        return CompiledStage(truth=Truth(collectives=collectives, **truth), **fields)

    def is_complete(self, result: CompiledStage, folder: Path) -> bool:
        """Raises UnsafeCacheError: other users can write to the folder, which has executables."""
        if not self.executables or result.tuned_on_device:
            return True
        return result.executable is not None and is_intact(folder / result.executable)


class Texts:
    """Programs, compressed."""

    suffix = ".hlo.gz"

    def encode(self, result: str) -> bytes:
        return gzip.compress(result.encode())

    def decode(self, data: bytes) -> str:
        if not data:  # gzip takes it for an empty text.
            raise ValueError("the file is empty")
        try:
            return gzip.decompress(data).decode()
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(str(error)) from error

    def is_complete(self, result: str, folder: Path) -> bool:
        del result, folder  # A program has no other files.
        return True


@dataclass(frozen=True)
class Results(Generic[T]):
    """The results of one kind by key; without a folder there are none."""

    folder: Path | None
    format: Format[T]

    def read(self, key: str) -> T | None:
        """None if there is no result, if its file cannot be read, or if it is incomplete."""
        if self.folder is None:
            return None
        path = self._path(self.folder, key)
        try:
            result = self.format.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("%s is not used: %s; the stage is compiled again", path, error)
            return None
        return result if self.format.is_complete(result, self.folder) else None

    def write(self, key: str, result: T) -> None:
        """Writes a result; logs a warning if that fails."""
        if self.folder is None:
            return
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            path = self._path(self.folder, key)
            unfinished = path.with_name(f"{path.name}.{os.getpid()}")
            unfinished.write_bytes(self.format.encode(result))
            unfinished.replace(path)
        except OSError as error:
            _log.warning("%s cannot be written: %s", self.folder, error.strerror)

    def _path(self, folder: Path, key: str) -> Path:
        return folder / f"{key}{self.format.suffix}"
