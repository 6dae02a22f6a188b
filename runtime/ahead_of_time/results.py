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


class Truths:
    """What XLA says of stages, as JSON."""

    suffix = ".json"

    def encode(self, result: Truth) -> bytes:
        return json.dumps(asdict(result)).encode()

    def decode(self, data: bytes) -> Truth:
        fields: dict[str, Any] = json.loads(data)
        found: list[dict[str, Any]] = fields.pop("collectives")
        for it in found:
            it["axes"] = tuple(it["axes"])
        return Truth(collectives=tuple(Collective(**it) for it in found), **fields)


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


@dataclass(frozen=True)
class Results(Generic[T]):
    """The results of one kind by key; without a folder there are none."""

    folder: Path | None
    format: Format[T]

    def read(self, key: str) -> T | None:
        """None if there is no result, or if its file cannot be read."""
        if self.folder is None:
            return None
        path = self._path(self.folder, key)
        try:
            return self.format.decode(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            _log.warning("%s is not used: %s; the stage is compiled again", path, error)
            return None

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
