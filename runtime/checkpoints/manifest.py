"""The manifest of a checkpoint: its format, step, program, and arrays.

`alpa.json` lies beside the arrays, with a checksum of its own, and is the only file that describes
them. The paths and shapes of arrays follow from the requested state; the chunks and their checksums
come from the manifest. The checksums detect damage and mix-ups, but do not stop someone who can
write to the folder and compute them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from math import prod
from pathlib import Path
from typing import Any, cast
from urllib.parse import quote

import jax
import jax.numpy as jnp

from alpa.runtime.calls import LeafType
from alpa.runtime.checkpoints.errors import CheckpointError
from alpa.runtime.checkpoints.stored_array import Shape, StoredArray, open_regular

FORMAT = 2
_FILE = "alpa.json"
_SHOWN = 200
"""letters of a name and a type that an error quotes"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An array of a state: its type in the program, and how it is stored.

    `checksums` are those of its chunks in row-major order.
    """

    type: str
    shape: Shape
    dtype: str
    chunk: Shape
    checksums: tuple[int, ...]

    @classmethod
    def read(cls, content: Any) -> Entry:
        """Reads a description of an array. Raises ValueError if it is invalid."""
        match content:
            case {
                "type": str(type_),
                "shape": list(shape),
                "dtype": str(dtype),
                "chunk": list(chunk),
                "checksums": list(checksums),
            } if _are_cut(shape, chunk, checksums):
                return cls(
                    type=type_,
                    shape=tuple(shape),
                    dtype=dtype,
                    chunk=tuple(chunk),
                    checksums=tuple(checksums),
                )
            case _:
                raise ValueError("it describes an impossible array")

    def at(self, folder: Path, name: str) -> StoredArray:
        """The stored array in a folder."""
        return StoredArray(
            path=str(folder / name),
            shape=self.shape,
            dtype=self.dtype,
            chunk=self.chunk,
            checksums=self.checksums,
        )


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """The manifest of a checkpoint; `arrays` are sorted by name."""

    step: int
    arrays: Mapping[str, Entry]

    @property
    def program(self) -> str:
        """A hash of the names, shapes and dtypes of the state."""
        return fingerprint({name: entry.type for name, entry in self.arrays.items()})

    def write(self, folder: Path) -> None:
        """Writes the manifest, with its checksum, to its file in a folder."""
        content = self._content()
        (folder / _FILE).write_text(
            json.dumps(content | {"checksum": _checksum(content)}, indent=1)
        )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads and checks a manifest. Raises CheckpointError if it is missing or invalid."""
        path = folder / _FILE
        try:
            with open_regular(path) as file, open(file, "rb", closefd=False) as stream:
                content = _checked(json.loads(stream.read()))
            if content.get("format") == FORMAT:
                return cls._of(content)
        except FileNotFoundError:
            raise CheckpointError(f"{folder} holds no checkpoint of Alpa's: no {_FILE}") from None
        except (ValueError, OSError, RecursionError) as error:
            raise CheckpointError(f"{path} is damaged: {error}; take another step") from error
        raise CheckpointError(
            f"{path} has the format {content.get('format')}, and this version of Alpa reads "
            f"{FORMAT}; install the version that wrote it"
        )

    @classmethod
    def _of(cls, content: dict[str, Any]) -> Manifest:
        """Parses a manifest. Raises ValueError if it is invalid despite a correct checksum."""
        match content:
            case {"step": int(step), "arrays": dict(arrays)}:
                entries = {name: Entry.read(it) for name, it in arrays.items()}
                return cls(step=step, arrays=entries)
            case _:
                raise ValueError("it has no step and arrays")

    def check(self, types: Mapping[str, LeafType], folder: Path) -> None:
        """Raises CheckpointError unless it holds arrays of these names and types."""
        there = {name: entry.type for name, entry in self.arrays.items()}
        wanted = {name: type_text(type_) for name, type_ in types.items()}
        if there == wanted:
            for name, type_ in types.items():
                entry = self.arrays[name]
                if (entry.shape, entry.dtype) != stored_type(type_):
                    raise CheckpointError(
                        f"{folder / _FILE} is damaged: {name} of type {entry.type} cannot be "
                        f"stored as {entry.dtype} of shape {entry.shape}; take another step"
                    )
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
                    "checksums": list(entry.checksums),
                }
                for name, entry in sorted(self.arrays.items())
            },
        }


def is_checkpoint(folder: Path) -> bool:
    """Whether a folder has a manifest, which says that Alpa has written it."""
    return (folder / _FILE).is_file()


def fingerprint(types: Mapping[str, str]) -> str:
    """A hash of the names and types of a state's arrays."""
    return hashlib.sha256(json.dumps(sorted(types.items())).encode()).hexdigest()


def names_of(paths: Iterable[Any]) -> list[str]:
    """Returns a name for each path in a tree of JAX, usable as the name of a folder.

    Raises:
        CheckpointError: two of them would have the same name.
    """
    keys = (jax.tree_util.keystr(path, simple=True, separator=".") for path in paths)
    # The first word separates them from other files in the folder.
    names = [quote(f"state.{key}" if key else "state", safe="") for key in keys]
    twice = next((name for n, name in enumerate(names) if name in names[:n]), None)
    if twice is not None:
        raise CheckpointError(
            f"two arrays of the state are called {twice}, such as a['b.c'] and a['b']['c']; "
            "give one of them another name"
        )
    return names


def stored_type(type_: LeafType) -> tuple[Shape, str]:
    """The stored shape and dtype of an array; for random keys, of their words."""
    struct = type_.struct()
    if type_.is_typed_key:
        struct = jax.eval_shape(jax.random.key_data, struct)
    return tuple(struct.shape), jnp.dtype(struct.dtype).name


def type_text(type_: LeafType) -> str:
    """A type as text for comparisons; a Python number counts as an array."""
    return str(type_.strong)


def _checked(content: Any) -> dict[str, Any]:
    """Removes a correct checksum. Raises ValueError if it is wrong or missing."""
    if not isinstance(content, dict):
        raise ValueError("it is not a JSON object")
    content = cast(dict[str, Any], content)
    if content.pop("checksum", None) != _checksum(content):
        raise ValueError("its checksum is wrong")
    return content


def _are_cut(shape: list[Any], chunk: list[Any], checksums: list[Any]) -> bool:
    """Whether an array of a shape has as many chunks as there are checksums."""
    numbers = [*shape, *chunk, *checksums]
    if len(shape) != len(chunk) or not all(type(it) is int and it >= 0 for it in numbers):
        return False
    if not all(each and size % each == 0 for size, each in zip(shape, chunk, strict=True)):
        return False
    counts = [size // each for size, each in zip(shape, chunk, strict=True)]
    return prod(counts) == len(checksums)


def _checksum(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _shown(item: tuple[str, str] | None) -> str:
    """Describes an array for an error, printable and short even if the manifest is forged."""
    if item is None:
        return "nothing more"
    text = ": ".join(item).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
