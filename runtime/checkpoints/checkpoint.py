"""`alpa.save`, `alpa.restore`, `alpa.resume`: a training state on disk.

    step, state = alpa.resume("checkpoints", init, train_step, batch)
    while step < 1000:
        state, loss = train_step(state, batches[step])
        step += 1
        if step % 100 == 0:
            alpa.save("checkpoints", step, state, keep=3)

A checkpoint is a folder named by the number of its step. Each array is stored as one array, even if
it was split between meshes, so that any plan can read it, for the same or another cluster and for
either executor. The devices that hold a part of the state write it, and the devices that need a
part read it; nothing is gathered. All hosts must reach the folder under the same name.

Only one process at a time may save to a folder.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint.path import atomicity_types
from orbax.checkpoint.path import step as steps

from alpa.passes.base import check_kind
from alpa.runtime.calls import Leaf
from alpa.runtime.checkpoints.errors import CheckpointError
from alpa.runtime.checkpoints.manifest import Manifest, names_of
from alpa.runtime.checkpoints.writing import StateLeaf, write
from alpa.runtime.create_state import NewState, create_state
from alpa.runtime.elastic import on_living_hosts
from alpa.runtime.jit import Parallelized
from alpa.runtime.option_checks import check_count
from alpa.runtime.tracebacks import ends_at_caller

_NAMES = steps.standard_name_format()


def save(directory: str | Path, step: int, state: Any, *, keep: int | None = None) -> Path:
    """Writes a state as the checkpoint of a step, and waits until it is written.

    A state is any tree of arrays. Until everything is written, the folder has a temporary name. An
    interrupted save therefore leaves earlier checkpoints unchanged, and the new one either complete
    or absent.

    Args:
        directory: the folder of the checkpoints; created if it does not exist.
        step: the number of steps that the state has seen.
        state: as a parallelised function returns it, or plain arrays; functions in it are not
            saved.
        keep: how many of the latest checkpoints to keep; by default all.

    Returns:
        The checkpoint's folder.

    Raises:
        CheckpointError: there is a checkpoint of this step already, or it cannot be written; the
            state is unchanged.
        WorkerError: a worker has failed.
    """
    root = _root(directory)
    check_count("step", step, 0)
    if keep is not None:
        check_count("keep", keep, 1)
    folder = root / _NAMES.build_name(step)
    if folder.exists():
        raise CheckpointError(f"{folder} exists, and is not overwritten; delete it or save another")
    found, _ = jax.tree_util.tree_flatten_with_path(state)
    leaves = [Leaf(argument="state", path=("state", *path), value=leaf) for path, leaf in found]
    arrays = [leaf for leaf in leaves if leaf.type is not None]
    if not arrays:
        raise CheckpointError("the state has no arrays; there is nothing to save")
    names = names_of(leaf.path[1:] for leaf in arrays)
    for unfinished in root.glob(f"*{atomicity_types.TMP_DIR_SUFFIX}*"):
        shutil.rmtree(unfinished)
    write(
        folder,
        step,
        {n: StateLeaf.of(leaf.type, leaf.value) for n, leaf in zip(names, arrays, strict=True)},
    )
    if keep is not None:
        for old in _all_steps(root)[:-keep]:
            _delete(root / _NAMES.build_name(old))
    return folder


def latest_step(directory: str | Path) -> int | None:
    """Returns the step of the latest checkpoint, or None if there is none."""
    return next(reversed(_all_steps(_root(directory))), None)


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

    Each device reads its share. The checksum of each chunk that is read is checked.

    Args:
        directory: the folder of the checkpoints.
        init_fn: a function without arguments that makes such a state. It is traced, not run, and
            provides the parts of the state that are not arrays.
        train_step, others, argnums: as in `create_state`; without `train_step` the arrays are
            NumPy arrays.
        step: the step to restore; by default the latest.

    Raises:
        CheckpointError: there is no such checkpoint, it is another program's, or damaged.
        ValueError: as in `create_state`.
    """
    root = _root(directory)
    if step is not None:
        check_count("step", step, 0)
    step = latest_step(root) if step is None else step
    if step is None:
        raise CheckpointError(f"{root} holds no checkpoint; save one with alpa.save")
    folder = root / _NAMES.build_name(step)
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
    step = latest_step(directory)

    def state() -> Any:
        if step is None:
            return create_state(init_fn, train_step, *others, argnums=argnums)
        return restore(directory, init_fn, train_step, *others, step=step, argnums=argnums)

    return step or 0, on_living_hosts(train_step, state)


def _root(directory: str | Path) -> Path:
    check_kind("directory", directory, str, os.PathLike)
    # Without `..`, which tensorstore refuses. Links stay, because other hosts may have others.
    return Path(os.path.abspath(Path(directory).expanduser()))


def _all_steps(root: Path) -> list[int]:
    """The steps of the complete checkpoints, in order."""
    return sorted(found.step for found in _NAMES.find_all(root)) if root.is_dir() else []


def _delete(folder: Path) -> None:
    """Deletes a checkpoint. If interrupted, it leaves nothing that looks like one."""
    doomed = folder.with_name(folder.name + atomicity_types.TMP_DIR_SUFFIX)
    shutil.rmtree(folder.rename(doomed))
