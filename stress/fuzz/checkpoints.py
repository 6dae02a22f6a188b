"""Cases of checkpoints: damaged or malicious folders, given to `alpa.restore`.

A restored state must be the saved one, and nothing on disk may change.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa
from alpa.runtime import CheckpointError
from stress.fuzz.corpus import Corpus, batch, init, training_step
from stress.fuzz.mutations import mutate
from stress.fuzz.process import Harm

Damage = Callable[[Path, random.Random], None]
"""Damages the checkpoints in a folder."""

_STEP = 2
_MARK = "harmed"
"""a file that smuggled code would write"""


@dataclass(frozen=True, kw_only=True)
class CheckpointCase:
    """One to three damages of a checkpoint, which a plan's meshes or this process then read."""

    number: str
    whole: Path
    """the folder of `corpus.make`"""
    by_plan: bool
    seed: str = "checkpoints"
    damages: Sequence[Damage] | None = None
    """the damages to draw from; all by default"""

    @property
    def label(self) -> str:
        step = ", train_step, batch" if self.by_plan else ""
        return f'restore("checkpoints", init{step}, step={_STEP})'

    def run(self, folder: Path) -> int:
        """Runs in the folder, which is empty and the current one."""
        for name in ("checkpoints", "another"):
            shutil.copytree(self.whole / name, folder / name)
        (folder / "outside").write_text("not part of any checkpoint")
        generator = random.Random(self.number)
        for _ in range(generator.randint(1, 3)):
            damage = generator.choice(_DAMAGES if self.damages is None else self.damages)
            print("#", damage.__name__, file=sys.stderr)
            damage(folder, generator)
        before = _snapshot(folder)
        make = partial(init, _STEP)
        arguments: tuple[Any, ...] = (_planned_step(), batch()) if self.by_plan else ()
        state, refused = None, None
        try:
            alpa.latest_step("checkpoints")
            state = alpa.restore("checkpoints", make, *arguments, step=_STEP)
        except CheckpointError as error:
            refused = error
            print(error, file=sys.stderr)
        if _snapshot(folder) != before:
            raise Harm("changed the folder")
        if refused is not None:
            return 1
        for found, wanted in zip(_numbers(state), _numbers(make()), strict=True):
            if found.dtype != wanted.dtype or not np.array_equal(found, wanted):
                raise Harm("restored another state")
        return 0


@cache
def _planned_step() -> Any:
    """The step, planned and compiled once per process."""
    return training_step()


def _numbers(state: Any) -> list[np.ndarray]:
    state = {**state, "key": jax.random.key_data(state["key"])}
    return [np.asarray(jnp.asarray(leaf)) for leaf in jax.tree.leaves(state)]


def _snapshot(folder: Path) -> dict[str, Any]:
    """Everything under a folder: names, kinds, sizes, times and contents."""
    found: dict[str, Any] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else None
        found[str(path)] = status.st_mode, status.st_size, status.st_mtime_ns, content
    return found


def draw(number: str, corpus: Corpus) -> CheckpointCase:
    by_plan = random.Random(f"{number} by").random() < 0.3
    return CheckpointCase(number=number, whole=corpus.checkpoints, by_plan=by_plan)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() or path.is_symlink())


def _any_file(folder: Path, generator: random.Random) -> Path:
    """A file of the checkpoint; more often one that is read."""
    files = _files(folder / "checkpoints" / str(_STEP)) or [folder / "outside"]
    read = [path for path in files if path.name == "alpa.json" or path.parent.name.isdigit()]
    return generator.choice(read if read and generator.random() < 0.4 else files)


def _other_file(folder: Path, generator: random.Random) -> Path:
    """A file of any of the checkpoints; more often one of the same kind."""
    return generator.choice(_files(folder))


def _flip(folder: Path, generator: random.Random) -> None:
    path = _any_file(folder, generator)
    data = bytearray(_content(path))
    for _ in range(generator.randint(1, 4)):
        if data:
            data[generator.randrange(len(data))] ^= 1 << generator.randrange(8)
    _put(path, bytes(data))


def _truncate(folder: Path, generator: random.Random) -> None:
    path = _any_file(folder, generator)
    data = _content(path)
    _put(path, data[: generator.randrange(len(data) + 1)])


def _extend(folder: Path, generator: random.Random) -> None:
    path = _any_file(folder, generator)
    _put(path, _content(path) + generator.randbytes(generator.choice((1, 4, 100))))


def _remove(folder: Path, generator: random.Random) -> None:
    _any_file(folder, generator).unlink(missing_ok=True)


def _remove_folder(folder: Path, generator: random.Random) -> None:
    folders = [path for path in (folder / "checkpoints").rglob("*") if path.is_dir()]
    if folders:
        shutil.rmtree(generator.choice(sorted(folders)), ignore_errors=True)


def _swap(folder: Path, generator: random.Random) -> None:
    """Swaps two chunks of one size, or any two files, also with another checkpoint."""
    one = _any_file(folder, generator)
    size = len(_content(one))
    alike = [path for path in _files(folder) if len(_content(path)) == size and path != one]
    other = generator.choice(alike or _files(folder))
    a, b = _content(one), _content(other)
    _put(one, b)
    if generator.random() < 0.5:
        _put(other, a)


def _swap_folders(folder: Path, generator: random.Random) -> None:
    """Swaps the folder of an array, or of a checkpoint, with another one."""
    top = generator.choice(("checkpoints/1", "checkpoints/2", "another/2", "checkpoints"))
    inside = sorted(path for path in (folder / top).glob("*") if path.is_dir())
    mine = sorted(path for path in (folder / "checkpoints/2").glob("*") if path.is_dir())
    if not inside or not mine:
        return
    source, target = generator.choice(inside), generator.choice([*mine, mine[0].parent])
    if source == target or source in target.parents or target in source.parents:
        return
    shutil.rmtree(target)
    shutil.copytree(source, target, symlinks=True)


def _pickle(folder: Path, generator: random.Random) -> None:
    _put(_any_file(folder, generator), pickle.dumps(_Smuggled()))


class _Smuggled:
    def __reduce__(self) -> Any:
        return os.mkdir, (_MARK,)


def _description(folder: Path, generator: random.Random) -> None:
    """Breaks a JSON file like any text."""
    path = generator.choice(_descriptions(folder) or [_any_file(folder, generator)])
    text = _content(path).decode(errors="replace")
    _put(path, mutate(text, [text], generator).encode(errors="replace"))


def _descriptions(folder: Path) -> list[Path]:
    files = _files(folder / "checkpoints" / str(_STEP))
    return [path for path in files if path.name.endswith("json") or path.name.startswith("_")]


def _signed(folder: Path, generator: random.Random) -> None:
    """Changes the manifest and corrects its checksum."""
    path = folder / "checkpoints" / str(_STEP) / "alpa.json"
    try:
        content = json.loads(_content(path))
    except (ValueError, RecursionError):
        return
    if not isinstance(content, dict):
        return
    content.pop("checksum", None)
    _HARMS[generator.randrange(len(_HARMS))](content, generator)
    checksum = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
    _put(path, json.dumps(content | {"checksum": checksum}).encode())


def _harm_number(content: dict[str, Any], generator: random.Random) -> None:
    numbers = (0, -1, 1, 1 << 31, 1 << 62, 1 << 80, 1.5, None, True, "4", [4], float("nan"))
    arrays = content.get("arrays")
    if not isinstance(arrays, dict) or not arrays or generator.random() < 0.1:
        content[generator.choice(("format", "step", "arrays"))] = generator.choice(numbers)
        return
    entry = arrays[generator.choice(sorted(arrays))]
    if not isinstance(entry, dict):
        return
    field = generator.choice(("shape", "chunk", "checksums", "dtype", "type"))
    value = entry.get(field)
    if isinstance(value, list) and value and generator.random() < 0.8:
        value[generator.randrange(len(value))] = generator.choice(numbers)
    else:
        entry[field] = generator.choice((*numbers, "float64", "object", "V8", "int4", []))


def _harm_name(content: dict[str, Any], generator: random.Random) -> None:
    arrays = content.get("arrays")
    if isinstance(arrays, dict) and arrays:
        names = ("../../outside", "/etc/hostname", "..", "", "\0", "\ud800", "a" * 5000, "state.x")
        arrays[generator.choice(names)] = arrays.pop(generator.choice(sorted(arrays)))


def _harm_key(content: dict[str, Any], generator: random.Random) -> None:
    """Removes a key, of the manifest or of an array's entry."""
    arrays = content.get("arrays")
    inside = (
        [it for it in arrays.values() if isinstance(it, dict)] if isinstance(arrays, dict) else []
    )
    where = generator.choice([content, *inside])
    if where:
        del where[generator.choice(sorted(where))]


def _harm_depth(content: dict[str, Any], generator: random.Random) -> None:
    deep: Any = 0
    for _ in range(generator.choice((50, 800))):
        deep = [deep]
    content[generator.choice(("arrays", "step", "more"))] = deep


_HARMS = (_harm_number, _harm_number, _harm_name, _harm_key, _harm_depth)


def _huge(folder: Path, generator: random.Random) -> None:
    """Makes sizes in the manifest and in an array's description equal, and too large for memory."""
    size = generator.choice((1 << 20, 1 << 40, 1 << 62))
    root = folder / "checkpoints" / str(_STEP)
    for path in (root / "alpa.json", root / "state.count" / "zarr.json", *root.glob("*/zarr.json")):
        if path.is_file():
            text = re.sub(r"\b4\b", str(size), path.read_text(errors="replace"))
            path.write_text(text)
    _signed(folder, generator)


def _link(folder: Path, generator: random.Random) -> None:
    """Makes a link out of the folder, to itself, to another file, to an endless file; or a pipe."""
    path = _any_file(folder, generator)
    if generator.random() < 0.2 and path.parent != folder / "checkpoints":
        path = path.parent
    targets = (
        "/dev/zero",
        "/dev/full",
        ".",
        path.name,
        "/etc/passwd",
        "nowhere",
        "../../1/alpa.json",
    )
    other = str(_other_file(folder, generator).absolute())
    _gone(path)
    if generator.random() < 0.2:
        os.mkfifo(path)
    else:
        path.symlink_to(generator.choice((*targets, other)))


def _nest(folder: Path, generator: random.Random) -> None:
    depth = generator.choice((500, 5000, 200_000))
    path = generator.choice(_descriptions(folder) or [_any_file(folder, generator)])
    _put(path, generator.choice((b"[", b'{"a":')) * depth)


def _strange_name(folder: Path, generator: random.Random) -> None:
    """Puts something else than a checkpoint beside the checkpoints."""
    name = generator.choice(
        ("7", "007", "-1", "9" * 200, "2.5", "2.orbax-checkpoint-tmp-1", "\udc80")
    )
    path = folder / "checkpoints" / name
    if path.exists() or not path.parent.is_dir():
        return
    if generator.random() < 0.5:
        path.mkdir()
    else:
        path.write_text("{}")


def _rename(folder: Path, generator: random.Random) -> None:
    path = _any_file(folder, generator)
    target = path.with_name(generator.choice(("0", "1", "9", "x")))
    if not target.exists() and path.is_file():
        path.rename(target)


def _content(path: Path) -> bytes:
    """The content of a regular file; other files may not end."""
    return path.read_bytes() if path.is_file() else b""


def _gone(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _put(path: Path, data: bytes) -> None:
    """Replaces a file, without following a link."""
    if path.is_symlink() or path.exists():
        _gone(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


_DAMAGES: tuple[Damage, ...] = (
    _flip,
    _flip,
    _truncate,
    _extend,
    _remove,
    _remove_folder,
    _swap,
    _swap,
    _swap_folders,
    _pickle,
    _description,
    _description,
    _signed,
    _signed,
    _signed,
    _huge,
    _link,
    _link,
    _nest,
    _strange_name,
    _rename,
)
