"""A restored checkpoint equals the saved state, or an error explains why it cannot be restored."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

import alpa
from alpa.dialects.attributes import Slice
from alpa.runtime import CheckpointError
from alpa.runtime.checkpoints import manifest
from alpa.runtime.cut_array import CutArray


def fetched(tree: Any) -> list[np.ndarray]:
    """The arrays of a tree; for random keys, their words."""
    return [
        np.asarray(jax.random.key_data(leaf) if is_key(leaf) else leaf)
        for leaf in jax.tree.leaves(tree)
    ]


def is_key(leaf: Any) -> bool:
    return hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def assert_equal(tree: Any, expected: list[np.ndarray]) -> None:
    for one, it in zip(fetched(tree), expected, strict=True):
        assert one.dtype == it.dtype
        np.testing.assert_array_equal(one, it)


def test_training_goes_on_as_if_it_had_not_stopped(training: Any, tmp_path: Path) -> None:
    step = training.parallelize()
    number, state = alpa.resume(tmp_path, training.init, step, training.batch(0))
    assert number == 0
    state, losses = training.run(step, state, range(3))
    folder = alpa.save(tmp_path, 3, state)
    assert folder == tmp_path / "3"
    saved = fetched(state)
    _, expected = training.run(step, state, range(3, 6))

    number, resumed = alpa.resume(tmp_path, training.init, step, training.batch(0))
    assert number == 3
    assert_equal(resumed, saved)
    assert training.run(step, resumed, range(3, 6))[1] == expected
    assert losses[0] != expected[0]

    # Restored under another plan, on one mesh; without a plan; by orbax without Alpa.
    other = training.parallelize(cluster="cpu:1x4", mesh_shape="2x2")
    resumed = alpa.restore(tmp_path, training.init, other, training.batch(0))
    np.testing.assert_allclose(training.run(other, resumed, range(3, 6))[1], expected, rtol=1e-6)
    on_host = alpa.restore(tmp_path, training.init)
    assert_equal(on_host, saved)
    plain = ocp.PyTreeCheckpointer().restore(folder)
    np.testing.assert_array_equal(plain["state.params.0.w"], on_host["params"][0]["w"])


def every_kind() -> dict[str, Any]:
    devices = jax.devices()
    mesh = jax.make_mesh((2, 2), ("a", "b"), devices=devices[:4])
    sharding = jax.NamedSharding(mesh, jax.P("b"))
    rows = np.arange(48.0, dtype=np.float32).reshape(2, 6, 4)
    return {
        "sharded": jax.device_put(np.arange(12, dtype=np.int32).reshape(6, 2), sharding),
        "cut": CutArray(
            {
                Slice(1, 2, 6): jax.device_put(rows[:, 2:], devices[1]),
                Slice(1, 0, 2): jax.device_put(rows[:, :2], devices[0]),
            }
        ),
        "bf16": jnp.full((3,), 1.5, jnp.bfloat16),
        "int4": jnp.ones(4, jnp.int4),
        "bool": jnp.array([True, False]),
        "complex": jnp.array([1 + 2j]),
        "f64": np.array([1e300]),
        "empty": jnp.zeros((0, 3)),
        "zeros": jnp.zeros((2, 2)),
        "a/b": {"..": 1, "c": 2.5},
        "keys": jax.random.split(jax.random.key(1)),
        "raw": jax.random.PRNGKey(2),
    }


def test_arrays_of_every_kind(tmp_path: Path) -> None:
    with jax.enable_x64(True):
        state = {"state": every_kind(), "function": jnp.tanh}
        alpa.save(tmp_path, 0, state)
        restored = alpa.restore(tmp_path, lambda: jax.tree.map(as_jax, state))
    assert restored["function"] is jnp.tanh
    assert_equal(restored["state"], fetched(state["state"]))


def as_jax(leaf: Any) -> Any:
    """What `init` might return for a leaf."""
    if isinstance(leaf, jax.Array) or not hasattr(leaf, "dtype"):
        return leaf
    return jnp.asarray(np.asarray(leaf))


def new(shape: int = 4) -> dict[str, Any]:
    return {"a": jnp.arange(float(shape)), "b": jnp.zeros((2, 3))}


def sign(folder: Path, **changes: Any) -> None:
    """Writes `changes` into a manifest, with the right checksum; None removes an entry."""
    path = folder / "alpa.json"
    content = json.loads(path.read_text()) | changes
    content = {key: it for key, it in content.items() if it is not None and key != "checksum"}
    path.write_text(json.dumps(content | {"checksum": manifest._checksum(content)}))


def entry(folder: Path, **changes: Any) -> dict[str, Any]:
    """The entries of a manifest, with other values for `b`."""
    arrays = json.loads((folder / "alpa.json").read_text())["arrays"]
    arrays["state.b"] |= changes
    return arrays


def damaged(folder: Path, how: str) -> None:
    """Damages a checkpoint of `new()`."""
    chunk, manifest = folder / "state.b" / "c" / "0" / "0", folder / "alpa.json"
    description = folder / "state.b" / "zarr.json"
    if how == "a flipped bit":
        content = bytearray(chunk.read_bytes())
        content[5] ^= 4
        chunk.write_bytes(content)
    elif how == "a truncated chunk":
        chunk.write_bytes(chunk.read_bytes()[:-8])
    elif how == "a lost chunk":
        chunk.unlink()
    elif how == "a lost array":
        shutil.rmtree(folder / "state.b")
    elif how == "a description that says something else":
        text = description.read_text().replace('"chunk_shape":[2,3]', '"chunk_shape":[1,3]')
        description.write_text(text)
    elif how == "another array's chunk":
        shutil.copy(folder / "state.c" / "c" / "0" / "0", chunk)
    elif how == "the same chunk of another step":
        shutil.copy(folder.parent / "1" / "state.b" / "c" / "0" / "0", chunk)
    elif how == "a longer chunk":
        chunk.write_bytes(chunk.read_bytes() + b"more")
    elif how == "a pipe for a chunk":
        chunk.unlink()
        os.mkfifo(chunk)
    elif how == "a pipe for a description":
        description.unlink()
        os.mkfifo(description)
    elif how == "a deep description":
        description.write_text("[" * 200_000)
    elif how == "a device for a manifest":
        manifest.unlink()
        manifest.symlink_to("/dev/zero")
    elif how == "a deep manifest":
        manifest.write_text("[" * 200_000)
    elif how == "a manifest without arrays":
        sign(folder, arrays=None)
    elif how == "a manifest with a name out of the folder":
        arrays = entry(folder)
        sign(folder, arrays=arrays | {"../../1/state.b": arrays.pop("state.b")})
    elif how == "a manifest with a name that cannot be printed":
        arrays = entry(folder)
        sign(folder, arrays=arrays | {"state.b\udc80" + "x" * 5000: arrays.pop("state.b")})
    elif how == "a manifest with a huge array":
        sign(folder, arrays=entry(folder, shape=[1 << 62, 3], chunk=[1 << 62, 3]))
    elif how == "a manifest with chunks of nothing":
        sign(folder, arrays=entry(folder, chunk=[0, 3]))
    elif how == "a manifest with a text for a size":
        sign(folder, arrays=entry(folder, shape=["2", 3]))
    elif how == "a manifest with another type":
        sign(folder, arrays=entry(folder, dtype="object"))
    elif how == "a changed manifest":
        manifest.write_text(manifest.read_text().replace("float32", "float64"))
    elif how == "a truncated manifest":
        manifest.write_bytes(manifest.read_bytes()[:100])
    elif how == "a pickle":
        manifest.write_bytes(b"\x80\x04\x8c\x08builtins\x8c\x04exit\x93)R.")
    elif how == "a lost manifest":
        manifest.unlink()


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("a flipped bit", r"cannot read .*state\.b: .*Digest mismatch"),
        ("a truncated chunk", r"cannot read .*state\.b: "),
        ("a lost chunk", r"cannot read .*state\.b: .*missing"),
        ("a lost array", r"cannot read .*state\.b: "),
        ("a description that says something else", r"cannot read .*state\.b: .*chunk"),
        ("a changed manifest", r"alpa\.json is damaged: its checksum is wrong; take another step"),
        ("a truncated manifest", r"alpa\.json is damaged"),
        ("a pickle", r"alpa\.json is damaged"),
        ("a lost manifest", r"holds no checkpoint of Alpa's: no alpa\.json"),
        ("another array's chunk", r"state\.b: chunk \(0, 0\) is not the one that was saved"),
        ("the same chunk of another step", r"state\.b: chunk \(0, 0\) is not the one that was "),
        ("a longer chunk", r"state\.b: chunk \(0, 0\) has 32 bytes instead of 28"),
        ("a pipe for a chunk", r"cannot read .*state\.b: 0 is not a regular file"),
        ("a pipe for a description", r"cannot read .*state\.b: zarr\.json is not a regular file"),
        ("a deep description", r"cannot read .*state\.b: "),
        ("a device for a manifest", r"alpa\.json is damaged: alpa\.json is not a regular file"),
        ("a deep manifest", r"alpa\.json is damaged: maximum recursion depth"),
        ("a manifest without arrays", r"alpa\.json is damaged: it has no step and arrays"),
        ("a manifest with a name out of the folder", r"is of another program .* has \.\./\.\./1"),
        (
            "a manifest with a name that cannot be printed",
            r"is of another program .* it has state\.b\\udc80x{150,200}\.\.\. where",
        ),
        ("a manifest with a huge array", r"state\.b of type float32\[2,3\] cannot be stored as"),
        ("a manifest with chunks of nothing", r"damaged: it describes an impossible array"),
        ("a manifest with a text for a size", r"damaged: it describes an impossible array"),
        ("a manifest with another type", r"float32\[2,3\] cannot be stored as object"),
    ],
)
def test_what_is_damaged_is_refused(how: str, message: str, tmp_path: Path) -> None:
    def saved() -> dict[str, Any]:
        return new() | {"c": jnp.ones((2, 3))}

    alpa.save(tmp_path, 1, saved())
    alpa.save(tmp_path, 2, saved() | {"b": jnp.full((2, 3), 2.0)})
    damaged(tmp_path / "2", how)
    with pytest.raises(CheckpointError, match=message) as caught:
        alpa.restore(tmp_path, saved)
    assert not re.search(r"tensorstore_spec|source locations", str(caught.value))
    assert_equal(alpa.restore(tmp_path, saved, step=1), fetched(saved()))


def test_another_programs_checkpoint_is_refused(tmp_path: Path) -> None:
    alpa.save(tmp_path, 1, new())
    another = r"1 is of another program \(\w{12}\) than this state \(\w{12}\): it has "
    with pytest.raises(CheckpointError, match=another + r"state\.a: float32\[4\] where .*\[5\]"):
        alpa.restore(tmp_path, partial(new, 5))
    with pytest.raises(CheckpointError, match=another + r"nothing more where this has state\.c"):
        alpa.restore(tmp_path, lambda: new() | {"c": jnp.zeros(1)})
    with pytest.raises(CheckpointError, match=r"state\.b: float32\[2,3\] where .*\[3,2\]"):
        alpa.restore(tmp_path, lambda: new() | {"b": jnp.zeros((3, 2))})


def test_a_newer_format_is_refused(tmp_path: Path) -> None:
    sign(alpa.save(tmp_path, 1, new()), format=3)
    with pytest.raises(CheckpointError, match="has the format 3, and this version of Alpa reads 2"):
        alpa.restore(tmp_path, new)


def test_a_file_whose_name_is_a_number_is_no_checkpoint(tmp_path: Path) -> None:
    alpa.save(tmp_path, 2, new())
    (tmp_path / "9").write_text("mine")
    assert alpa.latest_step(tmp_path) == 2
    alpa.restore(tmp_path, new)


def test_what_is_no_array_is_not_saved(tmp_path: Path) -> None:
    message = r"state\['a'\] is 's', a str, not an array; keep it out of the state"
    with pytest.raises(TypeError, match=message):
        alpa.save(tmp_path, 1, {"a": "s"})


def test_steps_are_kept_and_never_overwritten(tmp_path: Path) -> None:
    root = tmp_path / "new" / ".." / "a folder"
    assert alpa.latest_step(root) is None
    with pytest.raises(CheckpointError, match=r"holds no checkpoint; save one with alpa\.save"):
        alpa.restore(root, new)
    for step in (2, 10, 9):
        alpa.save(root, step, new())
    assert alpa.latest_step(root) == 10
    with pytest.raises(CheckpointError, match="10 exists, and is not overwritten"):
        alpa.save(root, 10, new())
    with pytest.raises(CheckpointError, match="no checkpoint of step 3; there are 2, 9, 10"):
        alpa.restore(root, new, step=3)
    alpa.save(root, 11, new(), keep=2)
    assert sorted(path.name for path in (tmp_path / "a folder").iterdir()) == ["10", "11"]
    folder = tmp_path / "a folder"
    (folder / "11").rename(folder / "12")
    with pytest.raises(CheckpointError, match="12 holds step 11; rename it"):
        alpa.restore(root, new)
    with pytest.raises(ValueError, match="step is -1"):
        alpa.save(root, -1, new())
    with pytest.raises(CheckpointError, match="no arrays"):
        alpa.save(root, 20, {"f": jnp.tanh})
    with pytest.raises(CheckpointError, match=r"two arrays of the state are called state\.a\.b"):
        alpa.save(root, 20, {"a.b": jnp.zeros(1), "a": {"b": jnp.zeros(1)}})
