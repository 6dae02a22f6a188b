"""What a checkpoint says of itself: its format, its step, whose state it holds, and which arrays.

`alpa.json` lies beside the arrays, with a checksum of its own. Nothing else in the folder is
believed: where the arrays are follows from the state that is wanted, and so does what shape they
have; how they are cut into chunks, and which those are, from here. The checksums tell what was
damaged or mixed up; they keep out nobody who may write to the folder and can work them out.
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
"""letters of a name and a type that an error repeats"""


@dataclass(frozen=True, kw_only=True)
class Entry:
    """An array of a state: its type, as the program has it, and how it is stored.

    `checksums` are those of its chunks in row-major order.
    """

    type: str
    shape: Shape
    dtype: str
    chunk: Shape
    checksums: tuple[int, ...]

    @classmethod
    def read(cls, content: Any) -> Entry:
        """Raises ValueError where it is no description of an array."""
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
                raise ValueError("it describes an array that cannot be")

    def at(self, folder: Path, name: str) -> StoredArray:
        """Where it is stored."""
        return StoredArray(
            path=str(folder / name),
            shape=self.shape,
            dtype=self.dtype,
            chunk=self.chunk,
            checksums=self.checksums,
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
        """Writes the manifest, with its checksum, to its file in a folder."""
        content = self._content()
        (folder / _FILE).write_text(
            json.dumps(content | {"checksum": _checksum(content)}, indent=1)
        )

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Raises CheckpointError where there is none, or none that can be believed."""
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
        """Raises ValueError where it is no manifest: the checksum keeps out what was not meant."""
        match content:
            case {"step": int(step), "arrays": dict(arrays)}:
                entries = {name: Entry.read(it) for name, it in arrays.items()}
                return cls(step=step, arrays=entries)
            case _:
                raise ValueError("it has no step and arrays")

    def check(self, types: Mapping[str, LeafType], folder: Path) -> None:
        """Raises CheckpointError unless it holds a state of these types by these names."""
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


def stored_type(type_: LeafType) -> tuple[Shape, str]:
    """Shape and dtype of what is stored of an array: of random keys, their words."""
    struct = type_.struct()
    if type_.is_typed_key:
        struct = jax.eval_shape(jax.random.key_data, struct)
    return tuple(struct.shape), jnp.dtype(struct.dtype).name


def type_text(type_: LeafType) -> str:
    """A type as a state's arrays are compared by: a number that Python made is an array, too."""
    return str(type_.strong)


def _checked(content: Any) -> dict[str, Any]:
    """Without the checksum, which is right; else raises ValueError."""
    if not isinstance(content, dict):
        raise ValueError("no object of JSON")
    content = cast(dict[str, Any], content)
    if content.pop("checksum", None) != _checksum(content):
        raise ValueError("its checksum is wrong")
    return content


def _are_cut(shape: list[Any], chunk: list[Any], checksums: list[Any]) -> bool:
    """Whether an array of a shape is made of as many chunks as there are checksums."""
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
    """Of a manifest that was forged, too: in letters that can be printed, and not too many."""
    if item is None:
        return "nothing more"
    text = ": ".join(item).encode("ascii", "backslashreplace").decode()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
