"""A module is compiled once for its devices and options."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from alpa.dialects import parse
from alpa.runtime.compile_cache import CompileCache, UnsafeCacheError
from alpa.runtime.pjrt import Compiled, compile_module

TEXT = """
func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = stablehlo.SUM %x, %x : tensor<4xf32>
  return %y : tensor<4xf32>
}
"""


def compiled(cache: CompileCache, device: int = 0, op: str = "add", level: int = 1) -> Compiled:
    where = jax.devices()[device]
    return compile_module(
        parse(TEXT.replace("SUM", op)),
        [where],
        [((4,), SingleDeviceSharding(where))],
        compiler_options={"xla_backend_optimization_level": level},
        cache=cache,
    )


def argument() -> jax.Array:
    return jax.device_put(np.arange(4, dtype=np.float32), jax.devices()[0])


def test_an_executable_is_read_back_where_all_is_equal(tmp_path: Path) -> None:
    cache = CompileCache(directory=tmp_path / "deep" / "cache")
    x = argument()
    compiled(cache)
    (path,) = cache.directory.iterdir()
    written = path.stat().st_mtime_ns
    again = compiled(cache)
    (result,) = again([x])
    np.testing.assert_array_equal(result, x + x)
    assert again.memory().argument_size_in_bytes == 16
    assert path.stat().st_mtime_ns == written
    for number, change in enumerate(({"op": "multiply"}, {"device": 1}, {"level": 0}), start=2):
        compiled(cache, **change)
        assert len(list(cache.directory.iterdir())) == number


def test_what_is_found_is_not_compiled(tmp_path: Path) -> None:
    cache = CompileCache(directory=tmp_path)
    compiled(cache, op="multiply")
    (other,) = tmp_path.iterdir()
    executable = cache.read(other.stem)
    assert executable is not None
    other.unlink()
    compiled(cache)
    (path,) = tmp_path.iterdir()
    cache.write(path.stem, executable)
    x = argument()
    np.testing.assert_array_equal(compiled(cache)([x])[0], x * x)


def gpu(number: int = 0, **changed: Any) -> Any:
    client = SimpleNamespace(platform_version="cuda 12090")
    plain = {"id": number, "platform": "gpu", "device_kind": "H100", "process_index": 0}
    return SimpleNamespace(client=client, **{**plain, **changed})


def test_a_key_has_everything_that_decides_the_result(tmp_path: Path) -> None:
    cache = CompileCache(directory=tmp_path)
    options, versions = {"xla_a": True}, {"cudnn": "90800", "nvidia-nccl-cu12": "2.27"}
    key = cache.key(b"module", [gpu(), gpu(1)], options, versions)
    assert key == cache.key(b"module", [gpu(), gpu(1)], dict(options), dict(versions))
    others = [
        cache.key(b"other", [gpu(), gpu(1)], options, versions),
        cache.key(b"module", [gpu(), gpu(2)], options, versions),
        cache.key(b"module", [gpu(device_kind="H200"), gpu(1)], options, versions),
        cache.key(b"module", [gpu(), gpu(1, process_index=1)], options, versions),
        cache.key(b"module", [gpu(), gpu(1)], {"xla_a": False}, versions),
        cache.key(b"module", [gpu(), gpu(1)], options, {**versions, "cudnn": "91000"}),
        cache.key(b"module", [gpu(), gpu(1)], options, {**versions, "driver": "570"}),
    ]
    assert len({key, *others}) == 1 + len(others)


def damaged(path: Path, how: str, foreign: bytes) -> None:
    """Damages a file of the cache."""
    content = bytearray(path.read_bytes())
    path.unlink()
    if how == "a flipped bit":
        content[len(content) // 2] ^= 4
        path.write_bytes(content)
    elif how == "a flipped bit of the hash":
        content[30] ^= 4
        path.write_bytes(content)
    elif how == "truncated":
        path.write_bytes(content[:-8])
    elif how == "longer":
        path.write_bytes(content + b"more")
    elif how == "empty":
        path.touch()
    elif how == "another program's":
        path.write_bytes(foreign)
    elif how == "a bare executable":
        path.write_bytes(content[50:])
    elif how == "a pickle":
        path.write_bytes(b"\x80\x04\x8c\x08builtins\x8c\x04exit\x93)R.")
    elif how == "a pipe":
        os.mkfifo(path)
    elif how == "a link to itself":
        path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("a flipped bit", "it is damaged, or another program's"),
        ("a flipped bit of the hash", "it is damaged, or another program's"),
        ("truncated", "it is damaged, or another program's"),
        ("longer", "it is damaged, or another program's"),
        ("empty", "it is not an executable"),
        ("another program's", "it is damaged, or another program's"),
        ("a bare executable", "it is not an executable"),
        ("a pickle", "it is not an executable"),
        ("a pipe", "it is not a regular file"),
        ("a link to itself", "it cannot be read"),
    ],
)
def test_what_is_damaged_is_compiled_anew(
    how: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    cache = CompileCache(directory=tmp_path)
    compiled(cache)
    (path,) = tmp_path.iterdir()
    whole = cache.read(path.stem)
    compiled(cache, op="multiply")
    (other,) = set(tmp_path.iterdir()) - {path}
    foreign = other.read_bytes()
    damaged(path, how, foreign)
    with caplog.at_level(logging.WARNING, "alpa"):
        x = argument()
        np.testing.assert_array_equal(compiled(cache)([x])[0], x + x)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path} of the cache is not used: {reason}")
    assert other.read_bytes() == foreign
    assert sorted(tmp_path.iterdir()) == sorted([path, other])
    assert path.is_file()
    assert not path.is_symlink()
    assert whole is not None
    assert cache.read(path.stem) is not None


def test_a_cache_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    cache = CompileCache(directory=tmp_path / "cache")
    compiled(cache)
    assert stat.S_IMODE(cache.directory.stat().st_mode) == 0o700
    (path,) = cache.directory.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for harmless, mode in ((path, 0o606), (cache.directory, 0o770), (cache.directory, 0o707)):
        before = harmless.stat().st_mode
        harmless.chmod(mode)
        with pytest.raises(UnsafeCacheError, match=r"other users can write to it.*chmod go-w"):
            compiled(cache)
        harmless.chmod(stat.S_IMODE(before))
    compiled(cache)


def test_a_cache_that_cannot_be_written_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    cache = CompileCache(directory=tmp_path / "file" / "cache")
    with caplog.at_level(logging.WARNING, "alpa"):
        x = argument()
        np.testing.assert_array_equal(compiled(cache)([x])[0], x + x)
    (record,) = caplog.records
    assert record.getMessage().endswith("cannot be written to the cache: Not a directory")
