"""A save that fails deletes what it has written, and leaves everything else."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.runtime import CheckpointError
from alpa.runtime.checkpoints import checkpoint, writing


def new() -> dict[str, Any]:
    return {"a": jnp.arange(4.0), "b": jnp.zeros((2, 3))}


def donated() -> dict[str, Any]:
    state = new()
    state["b"].delete()
    return state


def below(folder: Path) -> list[str]:
    return sorted(str(it.relative_to(folder)) for it in folder.rglob("*"))


@pytest.mark.parametrize("wait", [True, False])
def test_a_donated_array(wait: bool, tmp_path: Path) -> None:
    alpa.save(tmp_path, 1, new())
    before = below(tmp_path)
    with pytest.raises(RuntimeError, match="deleted"):
        alpa.save(tmp_path, 2, donated(), wait=wait)
    assert below(tmp_path) == before
    alpa.save(tmp_path, 2, new())
    assert alpa.latest_step(tmp_path) == 2


@pytest.mark.parametrize("wait", [True, False])
def test_folders_that_the_save_has_created(wait: bool, tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match="deleted"):
        alpa.save(tmp_path / "new" / "newer", 2, donated(), wait=wait)
    assert below(tmp_path) == []


@pytest.mark.parametrize("wait", [True, False])
def test_a_file_in_the_place_of_the_directory(wait: bool, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("not a folder")
    with pytest.raises(CheckpointError, match=r"cannot write .*file/1: .*Not a directory"):
        alpa.save(file, 1, new(), wait=wait)
    assert file.read_text() == "not a folder"


@pytest.mark.parametrize("how", [writing.write, lambda *given: writing.copy(*given)()])
def test_another_process_has_written_the_folder(how: Callable[..., Any], tmp_path: Path) -> None:
    """Everything is written, and the folder cannot get its name."""
    folder = tmp_path / "1"
    folder.mkdir()
    (folder / "theirs").write_text("kept")
    with pytest.raises(CheckpointError, match=r"cannot write .*1: .*not empty"):
        how(folder, 1, checkpoint._leaves(new()))
    assert below(tmp_path) == ["1", "1/theirs"]


def test_integers_that_do_not_fit(tmp_path: Path) -> None:
    """JAX's have 32 bits, and cut those of NumPy."""
    message = r"state\['n'\] has integers of int64 that do not fit into int32.*jax_enable_x64"
    with pytest.raises(CheckpointError, match=message):
        alpa.save(tmp_path, 1, {**new(), "n": np.array([1, 2**40])})
    assert below(tmp_path) == []
    alpa.save(tmp_path, 1, {"n": np.array([1, 2**30])})
    assert alpa.restore(tmp_path, lambda: {"n": np.zeros(2, int)})["n"].tolist() == [1, 2**30]


@pytest.mark.parametrize("wait", [True, False])
def test_threads_save_in_turn(wait: bool, tmp_path: Path) -> None:
    """A save deletes the temporary folders that it finds, but not another thread's."""
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(lambda step: alpa.save(tmp_path, step, new(), wait=wait), range(8)))
    alpa.wait_for_saves()
    assert sorted(it.name for it in tmp_path.iterdir()) == [str(step) for step in range(8)]


def test_an_interrupted_save_is_deleted_by_the_next(tmp_path: Path) -> None:
    remains = alpa.save(tmp_path, 1, new())
    remains.rename(tmp_path / "1.orbax-checkpoint-tmp")
    (tmp_path / "notes.txt").write_text("kept")
    assert alpa.latest_step(tmp_path) is None
    alpa.save(tmp_path, 2, new())
    assert sorted(it.name for it in tmp_path.iterdir()) == ["2", "notes.txt"]


FULL = """
    import resource, sys
    import jax.numpy as jnp
    import alpa
    state = {"a": jnp.arange(100_000)}
    alpa.save(sys.argv[1], 1, state)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))
    alpa.save(sys.argv[1], 2, state, wait=sys.argv[2] == "True")
    try:
        alpa.wait_for_saves()
    finally:
        print("waited")
"""


@pytest.mark.parametrize("wait", [True, False])
def test_a_full_disk(wait: bool, tmp_path: Path) -> None:
    """A limit on file sizes, set by the process itself, stands for a full disk."""
    command = [sys.executable, "-c", textwrap.dedent(FULL), tmp_path, str(wait)]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 1
    assert re.search(r"CheckpointError: cannot write .*state\.a.*File too large", done.stderr)
    assert done.stdout == ("" if wait else "waited\n")
    assert ("This happened in the background, while" in done.stderr) is not wait
    assert [it.name for it in tmp_path.iterdir()] == ["1"]
    assert alpa.latest_step(tmp_path) == 1
