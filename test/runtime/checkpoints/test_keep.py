"""Which checkpoints `keep` deletes, and which steps a checkpoint may have."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.runtime import CheckpointError


def new() -> dict[str, Any]:
    return {"a": jnp.arange(4.0)}


def names(folder: Path) -> list[str]:
    return sorted(it.name for it in folder.iterdir())


@pytest.mark.parametrize("wait", [True, False])
def test_the_latest_are_kept(wait: bool, tmp_path: Path) -> None:
    for step in (1, 2, 10, 11):
        alpa.save(tmp_path, step, new(), keep=2, wait=wait)
    alpa.wait_for_saves()
    assert names(tmp_path) == ["10", "11"]


@pytest.mark.parametrize(("keep", "left"), [(1, [15]), (2, [15, 30]), (3, [15, 20, 30])])
def test_the_new_one_is_kept_though_later_ones_exist(
    keep: int, left: list[int], tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        alpa.save(tmp_path, step, new())
    alpa.save(tmp_path, 15, new(), keep=keep)
    assert names(tmp_path) == [str(step) for step in left]


def test_only_checkpoints_are_counted_and_deleted(tmp_path: Path) -> None:
    for name in ("2024", "0", "007", "old", "1.bak"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "theirs").write_text("kept")
    (tmp_path / "5").write_text("a file")
    for step in (1, 2, 3):
        alpa.save(tmp_path, step, new(), keep=2)
    assert names(tmp_path) == ["0", "007", "1.bak", "2", "2024", "3", "5", "old"]


@pytest.mark.parametrize(
    "step", [np.int64(7), np.uint8(7), np.array(7), jnp.asarray(7), jnp.uint32(7)]
)
def test_whole_numbers_of_numpy_and_jax(step: Any, tmp_path: Path) -> None:
    assert alpa.save(tmp_path, step, new()) == tmp_path / "7"
    assert alpa.latest_step(tmp_path) == 7
    np.testing.assert_array_equal(alpa.restore(tmp_path, new, step=step)["a"], new()["a"])


@pytest.mark.parametrize(
    "step",
    [
        *[True, np.True_, jnp.asarray(True), 7.0, np.float32(7), jnp.float32(7), "7", None, [7]],
        *[np.array([7]), jnp.arange(2), -1, jnp.int32(-1)],
    ],
)
def test_other_steps_are_refused(step: Any, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^step is .*; expected a whole number of at least 0"):
        alpa.save(tmp_path, step, new())
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    ("directory", "scheme"),
    [
        ("gs://bucket/run", "gs"),
        ("s3://bucket", "s3"),
        (Path("gs://bucket/run"), "gs"),
        ("file:///tmp/run", "file"),
        ("abfs+x://a@b/c", r"abfs\+x"),
    ],
)
def test_urls_are_refused(
    directory: Any, scheme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    match = f"has the scheme {scheme}, and checkpoints are written to folders only; mount the buck"
    for call in (
        lambda: alpa.save(directory, 1, new()),
        lambda: alpa.save(directory, 1, new(), wait=False),
        lambda: alpa.latest_step(directory),
        lambda: alpa.restore(directory, new),
    ):
        with pytest.raises(CheckpointError, match=match):
            call()
    assert names(tmp_path) == []


def test_a_folder_with_a_colon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert alpa.save("run:1", 1, new()) == tmp_path / "run:1" / "1"
    assert alpa.save("./gs:/run", 1, new()) == tmp_path / "gs:" / "run" / "1"
