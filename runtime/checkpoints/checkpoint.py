"""`alpa.save`, `alpa.restore`, `alpa.resume`: a training state on disk.

    step, state = alpa.resume("checkpoints", init, train_step, batch)
    while step < 1000:
        state, loss = train_step(state, batches[step])
        step += 1
        if step % 100 == 0:
            alpa.save("checkpoints", step, state, keep=3, wait=False)
    alpa.wait_for_saves()

A checkpoint is a folder named by the number of its step. Each array is stored as one array, even if
it was split between meshes, so that any plan can read it, for the same or another cluster and for
either executor. The devices that hold a part of the state write it, and the devices that need a
part read it; nothing is gathered. All hosts must reach the folder under the same name.

Only one process at a time may save to a folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from alpa.passes.base import check_kind
from alpa.runtime.calls import Leaf
from alpa.runtime.checkpoints.background import background
from alpa.runtime.checkpoints.errors import CheckpointError
from alpa.runtime.checkpoints.manifest import Manifest, is_checkpoint, names_of
from alpa.runtime.checkpoints.unfinished import delete, delete_unfinished
from alpa.runtime.checkpoints.writing import StateLeaf, copy, write
from alpa.runtime.create_state import NewState, create_state
from alpa.runtime.elastic import on_living_hosts
from alpa.runtime.jit import Parallelized
from alpa.runtime.option_checks import check_count
from alpa.runtime.tracebacks import ends_at_caller

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/")
"""begins a URL; `pathlib` makes one slash of its two"""


def save(
    directory: str | Path, step: int, state: Any, *, keep: int | None = None, wait: bool = True
) -> Path:
    """Writes a state as the checkpoint of a step.

    A state is any tree of arrays. Until everything is written, the folder has a temporary name. A
    failed save deletes what it has written. An interrupted save leaves earlier checkpoints
    unchanged, and the new one either complete or absent.

    One save at a time is in flight in a process. If there is one, this waits for it first.

    Args:
        directory: the folder of the checkpoints; created if it does not exist.
        step: the number of steps that the state has seen.
        state: as a parallelised function returns it, or plain arrays; functions in it are not
            saved.
        keep: how many checkpoints to keep; by default all. These are the new one and those of the
            latest other steps. Nothing but checkpoints of Alpa's is deleted.
        wait: whether to wait until the checkpoint is written. With False this returns as soon as
            the hosts have a copy of the state in their memory, which is then written while training
            goes on. The state may be donated or changed at once. If the save fails, the next call
            that waits for it raises the error: `wait_for_saves`, `save`, `restore` or `resume`. If
            there is none, the process prints the error when it exits, with status 1.

    Returns:
        The checkpoint's folder. With `wait=False` it does not exist until the save has ended.

    Raises:
        CheckpointError: there is a checkpoint of this step already, or it cannot be written; the
            state is unchanged. Or the earlier save in the background has failed, and this one was
            not begun.
        RuntimeError: an array was deleted or donated.
        WorkerError: a worker has failed.
    """
    root = _root(directory)
    step = _number("step", step)
    if keep is not None:
        check_count("keep", keep, 1)
    check_kind("wait", wait, bool)
    leaves = _leaves(state)
    with background().turn:
        background().wait()
        folder = root / str(step)
        if folder.exists():
            raise CheckpointError(
                f"{folder} exists, and is not overwritten; delete it or save another"
            )
        delete_unfinished(root)
        if wait:
            write(folder, step, leaves)
            _delete_others(folder, keep)
            return folder
        write_copy = copy(folder, step, leaves)

        def finish() -> None:
            write_copy()
            _delete_others(folder, keep)

        background().start(folder, finish)
    return folder


def wait_for_saves() -> None:
    """Waits until the save in the background is written, if there is one.

    Raises:
        CheckpointError: it cannot be written.
        WorkerError: a worker has failed.
    """
    background().wait()


def latest_step(directory: str | Path) -> int | None:
    """Returns the step of the latest checkpoint, or None if there is none.

    A save in the background is completed first. If it fails, a later call raises its error.
    """
    root = _root(directory)
    background().settle()
    return max(_all_steps(root), default=None)


@ends_at_caller
def restore(
    directory: str | Path,
    init_fn: Callable[[], Any],
    train_step: Parallelized[..., Any] | None = None,
    *others: Any,
    step: int | None = None,
    argnums: int | Sequence[int] = 0,
) -> Any:
    """Restores the state of a checkpoint in the shardings of a step's plan.

        state = alpa.restore("checkpoints", init, train_step, batch)

    Each device reads its share. The checksum of each chunk that is read is checked. A save in the
    background is completed first. If it has failed because of a lost worker, an earlier checkpoint
    is restored, and the error is only logged.

    Args:
        directory: the folder of the checkpoints.
        init_fn: a function without arguments that makes such a state. It is traced, not run, and
            provides the parts of the state that are not arrays.
        train_step, others, argnums: as in `create_state`; without `train_step` the arrays are
            NumPy arrays.
        step: the step to restore; by default the latest.

    Raises:
        CheckpointError: there is no such checkpoint, it is another program's, or damaged. Or the
            save in the background has failed.
        ValueError: as in `create_state`.
    """
    root = _root(directory)
    if step is not None:
        step = _number("step", step)
    background().recover()
    step = latest_step(root) if step is None else step
    if step is None:
        raise CheckpointError(f"{root} holds no checkpoint; save one with alpa.save")
    folder = root / str(step)
    if not folder.is_dir():
        there = ", ".join(map(str, _all_steps(root))) or "none"
        raise CheckpointError(f"{root} holds no checkpoint of step {step}; there are {there}")
    manifest = Manifest.read(folder)
    if manifest.step != step:
        raise CheckpointError(f"{folder} holds step {manifest.step}; rename it, or take another")
    wanted = NewState(init_fn, argnums)
    names = names_of(leaf.path[1:] for leaf in wanted.leaves)
    types = [leaf.type for leaf in wanted.leaves]
    manifest.check(dict(zip(names, types, strict=True)), folder)
    stored = [manifest.arrays[name].at(folder, name) for name in names]
    if train_step is None:
        return wanted.result([array.read_whole() for array in stored])
    prepared, numbers = wanted.place(train_step, others)
    return wanted.result(prepared.executable.restore(numbers, stored))


@ends_at_caller
def resume(
    directory: str | Path,
    init_fn: Callable[[], Any],
    train_step: Parallelized[..., Any],
    *others: Any,
    argnums: int | Sequence[int] = 0,
) -> tuple[int, Any]:
    """Restores the latest checkpoint with its step, or returns step 0 and a new state.

    Call it at the start of a program that may be restarted, and after a worker was lost: failed
    workers are replaced by new ones. An elastic `train_step` is planned for the hosts that live
    (`runtime/elastic.py`).

    Args, Raises: as in `restore`.
    """
    background().recover()
    step = latest_step(directory)

    def state() -> Any:
        if step is None:
            return create_state(init_fn, train_step, *others, argnums=argnums)
        return restore(directory, init_fn, train_step, *others, step=step, argnums=argnums)

    found = on_living_hosts(train_step, state)
    # Workers that were stopped may have written until their processes had ended. What cannot be
    # deleted now, the next save reports.
    with suppress(OSError):
        delete_unfinished(_root(directory))
    return step or 0, found


def _root(directory: str | Path) -> Path:
    check_kind("directory", directory, str, os.PathLike)
    path = Path(directory).expanduser()
    url = _URL.match(str(directory))
    if url is not None:
        raise CheckpointError(
            f"{directory} has the scheme {url[1]}, and checkpoints are written to folders only; "
            "mount the bucket or file system on all hosts, and give the path of the folder there"
        )
    # Without `..`, which tensorstore refuses. Links stay, because other hosts may have others.
    return Path(os.path.abspath(path))


def _number(name: str, value: Any) -> int:
    """A whole number of Python's, also from a scalar of JAX or NumPy."""
    if isinstance(value, np.ndarray | jax.Array) and value.ndim == 0:
        value = int(value) if jnp.issubdtype(value.dtype, np.integer) else value
    check_count(name, value, 0)
    return int(value)


def _leaves(state: Any) -> dict[str, StateLeaf]:
    """The arrays of a state by their names.

    Raises:
        CheckpointError: there is none, two have the same name, or an integer does not fit.
        RuntimeError: a random key was deleted.
    """
    found, _ = jax.tree_util.tree_flatten_with_path(state)
    remedy = "keep it out of the state, and write it to a file of its own"
    leaves = [
        Leaf(argument="state", path=("state", *path), value=leaf, remedy=remedy)
        for path, leaf in found
    ]
    arrays = [leaf for leaf in leaves if leaf.type is not None]
    if not arrays:
        raise CheckpointError("the state has no arrays; there is nothing to save")
    names = names_of(leaf.path[1:] for leaf in arrays)
    return {name: StateLeaf.of(leaf) for name, leaf in zip(names, arrays, strict=True)}


def _all_steps(root: Path) -> list[int]:
    """The steps of the complete checkpoints, in order."""
    folders = [it for it in root.iterdir() if it.is_dir()] if root.is_dir() else []
    return sorted(int(it.name) for it in folders if re.fullmatch(r"0|[1-9][0-9]*", it.name))


def _delete_others(saved: Path, keep: int | None) -> None:
    """Deletes all checkpoints but the one just saved and those of the latest other steps.

    Raises:
        CheckpointError: one cannot be deleted.
    """
    if keep is None:
        return
    folders = [saved.parent / str(step) for step in _all_steps(saved.parent)]
    others = [folder for folder in folders if folder != saved and is_checkpoint(folder)]
    for folder in others[: max(0, len(others) - keep + 1)]:
        try:
            delete(folder)
        except OSError as error:
            raise CheckpointError(
                f"{saved} is written, but {folder} cannot be deleted for keep={keep}: {error}"
            ) from error
