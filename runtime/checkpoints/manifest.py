"""What a checkpoint says of itself: its format, its step, whose state it holds, and which arrays.

`alpa.json` lies beside the arrays, with a checksum of its own. Nothing else in the folder is
believed: where the arrays are follows from the state that is wanted, what shape they have and how
they are cut into chunks from here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import jax

from alpa.runtime.calls import LeafType
from alpa.runtime.checkpoints.errors import CheckpointError
from alpa.runtime.checkpoints.stored_array import Shape, StoredArray

FORMAT = 1
_FILE = "alpa.json"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An array of a state: its type, as the program has it, and how it is stored."""

    type: str
    shape: Shape
    dtype: str
    chunk: Shape

    def at(self, folder: Path, name: str) -> StoredArray:
        """Where it is stored."""
        return StoredArray(
            path=str(folder / name), shape=self.shape, dtype=self.dtype, chunk=self.chunk
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`arrays` are by their names, in the order of the names."""

    step: int
    arrays: Mapping[str, Entry]

    @property
    def program(self) -> str:
        """A hash of the names, shapes and dtypes of the state."""
        return fingerprint({name: entry.type for name, entry in self.arrays.items()})

    def write(self, folder: Path) -> None:
        content = self._content()
        (folder / _FILE).write_text(
            json.dumps(content | {"checksum": _checksum(content)}, indent=1)
        )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises CheckpointError where there is none, or none that can be believed."""
        path = folder / _FILE
        try:
            content = json.loads(path.read_bytes())
        except FileNotFoundError:
            raise CheckpointError(f"{folder} holds no checkpoint of Alpa's: no {_FILE}") from None
        except ValueError as error:
            raise CheckpointError(f"{path} is damaged: {error}; take another step") from error
        if not isinstance(content, dict):
            raise CheckpointError(f"{path} is damaged: no object of JSON; take another step")
        content = cast(dict[str, Any], content)
        # Checked first: what comes later trusts that each key is as it was written.
        checksum = content.pop("checksum", None)
        if checksum != _checksum(content):
            raise CheckpointError(f"{path} is damaged: its checksum is wrong; take another step")
        if content["format"] != FORMAT:
            raise CheckpointError(
                f"{path} has the format {content['format']}, and this version of Alpa reads "
                f"{FORMAT}; install the version that wrote it"
            )
        entries = {
            name: Entry(
                type=it["type"],
                shape=tuple(it["shape"]),
                dtype=it["dtype"],
                chunk=tuple(it["chunk"]),
            )
            for name, it in content["arrays"].items()
        }
        return cls(step=content["step"], arrays=entries)

    def check(self, wanted: Mapping[str, str], folder: Path) -> None:
        """Raises CheckpointError unless it holds a state of these types by these names."""
        there = {name: entry.type for name, entry in self.arrays.items()}
        if fingerprint(there) == fingerprint(wanted):
            return
        differences = [
            (theirs, ours)
            for theirs, ours in zip_longest(sorted(there.items()), sorted(wanted.items()))
            if theirs != ours
        ]
        theirs, ours = differences[0]
        raise CheckpointError(
            f"{folder} is of another program ({self.program[:12]}) than this state "
            f"({fingerprint(wanted)[:12]}): it has {_shown(theirs)} where this has {_shown(ours)}"
        )

    def _content(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "step": self.step,
            "program": self.program,
            "jax": jax.__version__,
            "arrays": {
                name: {
                    "type": entry.type,
                    "shape": list(entry.shape),
                    "dtype": entry.dtype,
                    "chunk": list(entry.chunk),
                }
                for name, entry in sorted(self.arrays.items())
            },
        }


def fingerprint(types: Mapping[str, str]) -> str:
    """A hash of the names and types of a state's arrays."""
    return hashlib.sha256(json.dumps(sorted(types.items())).encode()).hexdigest()


def names_of(paths: Iterable[Any]) -> list[str]:
    """A name for each path in a tree of jax's, by which a file system can call a folder.

    Raises:
        CheckpointError: two of them would have the same.
    """
    keys = (jax.tree_util.keystr(path, simple=True, separator=".") for path in paths)
    # The word at the beginning keeps them apart from what else is in the folder.
    names = [quote(f"state.{key}" if key else "state", safe="") for key in keys]
    twice = next((name for n, name in enumerate(names) if name in names[:n]), None)
    if twice is not None:
        raise CheckpointError(
            f"two arrays of the state are called {twice}, such as a['b.c'] and a['b']['c']; "
            "give one of them another name"
        )
    return names


def type_text(type_: LeafType) -> str:
    """A type as a state's arrays are compared by: a number that Python made is an array, too."""
    return str(type_.strong)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _shown(item: tuple[str, str] | None) -> str:
    return "nothing more" if item is None else f"{item[0]}: {item[1]}"
