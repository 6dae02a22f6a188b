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
from alpa.runtime.compile_cache import CompileCache, Key, UnsafeCacheError, xla_flags
from alpa.runtime.pjrt import Compiled, compile_module, nameless_text, platform_versions

TEXT = """
func.func public @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %y = stablehlo.SUM %x, %x : tensor<4xf32>
  return %y : tensor<4xf32>
}
"""


def compiled(
    cache: CompileCache | None, device: int = 0, op: str = "add", level: int = 1
) -> Compiled:
    where = jax.devices()[device]
    return compile_module(
        parse(TEXT.replace("SUM", op)),
        [where],
        [((4,), SingleDeviceSharding(where))],
        name="stage",
        compiler_options={"xla_backend_optimization_level": level},
        cache=cache,
    )


def key(op: str = "add", level: int = 1) -> Key:
    """The key of `compiled`."""
    options = {"xla_backend_optimization_level": level}
    text = nameless_text(parse(TEXT.replace("SUM", op)))
    devices = jax.devices()[:1]
    return CompileCache().key(text, devices, options, platform_versions(devices[0]))


def argument() -> jax.Array:
    return jax.device_put(np.arange(4, dtype=np.float32), jax.devices()[0])


def test_an_executable_is_read_back_where_all_is_equal(tmp_path: Path) -> None:
    cache = CompileCache(directory=tmp_path / "deep" / "cache")
    x = argument()
    assert compiled(cache).read_from is None
    (path,) = cache.directory.iterdir()
    assert path.name == key().file_name
    written = path.stat().st_mtime_ns
    again = compiled(cache)
    assert again.read_from == path
    (result,) = again([x])
    np.testing.assert_array_equal(result, x + x)
    assert again.memory().argument_size_in_bytes == 16
    assert path.stat().st_mtime_ns == written
    for number, change in enumerate(({"op": "multiply"}, {"level": 0}), start=2):
        assert compiled(cache, **change).read_from is None
        assert len(list(cache.directory.iterdir())) == number


def test_an_executable_serves_any_device_of_the_kind(tmp_path: Path) -> None:
    cache = CompileCache(directory=tmp_path)
    compiled(cache)
    other = compiled(cache, device=5)
    assert other.read_from is not None
    x = jax.device_put(argument(), jax.devices()[5])
    (result,) = other([x])
    np.testing.assert_array_equal(result, x + x)
    assert result.devices() == {jax.devices()[5]}


def test_a_module_is_recognised_without_its_names_and_locations() -> None:
    named = """
      module @NAME {
        sdy.mesh @MESH = <["a"=2]>
        func.func public @main(%x: tensor<4xf32> {sdy.sharding = #sdy.sharding<@MESH, [{"a"}]>})
            -> tensor<4xf32> {
          return %x : tensor<4xf32> loc("here")
        }
      }
    """

    def text(name: str, mesh: str) -> str:
        return nameless_text(parse(named.replace("NAME", name).replace("MESH", mesh)))

    assert text("mesh_0.forward", "mesh_0") == text("mesh_11.forward", "mesh_11")
    other = nameless_text(parse(named.replace('"a"', '"b"')))
    assert other != text("mesh_0.forward", "mesh_0")


def test_the_key_has_what_decides() -> None:
    two = jax.devices()[:2]
    parts = CompileCache().key("text", two, {"xla_b": 1, "xla_a": True}, {}).parts
    assert parts.keys() == {
        *("module", "jaxlib", "plug-in", "platform", "device", "devices", "processes", "machine"),
        *("options", "flags"),
    }
    assert (parts["devices"], parts["processes"]) == (2, [0, 0])
    assert parts["options"] == [["xla_a", "True"], ["xla_b", "1"]]
    assert f"{len(os.sched_getaffinity(0))} cores" in parts["machine"]


def test_the_number_of_virtual_devices_is_no_part_of_the_flags(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flags = "--xla_cpu_max_isa=AVX2 --xla_force_host_platform_device_count=8"
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert xla_flags() == "--xla_cpu_max_isa=AVX2"


def test_what_is_found_is_not_compiled(tmp_path: Path) -> None:
    cache = CompileCache(directory=tmp_path)
    compiled(cache, op="multiply")
    found = cache.read(key("multiply"), "stage")
    assert found is not None
    found.path.unlink()
    cache.write(key("add"), found.executable, ["stage"])
    x = argument()
    np.testing.assert_array_equal(compiled(cache)([x])[0], x * x)


def gpu(number: int = 0, **changed: Any) -> Any:
    plain = {"id": number, "platform": "gpu", "device_kind": "H100", "process_index": 0}
    return SimpleNamespace(**{**plain, **changed})


def test_a_key_has_everything_that_decides_the_result() -> None:
    cache, module = CompileCache(), "module"
    options, versions = {"xla_a": True}, {"cudnn": "90800", "nvidia-nccl-cu12": "2.27"}
    key = cache.key(module, [gpu(), gpu(1)], options, versions)
    equal = [
        cache.key(module, [gpu(), gpu(1)], dict(options), dict(versions)),
        cache.key(module, [gpu(2), gpu(5)], options, versions),
        cache.key(module, [gpu(process_index=3), gpu(1, process_index=3)], options, versions),
    ]
    assert {it.file_name for it in equal} == {key.file_name}
    others = [
        cache.key("other", [gpu(), gpu(1)], options, versions),
        cache.key(module, [gpu()], options, versions),
        cache.key(module, [gpu(device_kind="H200"), gpu(1)], options, versions),
        cache.key(module, [gpu(), gpu(1, process_index=1)], options, versions),
        cache.key(module, [gpu(), gpu(1)], {"xla_a": False}, versions),
        cache.key(module, [gpu(), gpu(1)], options, {**versions, "cudnn": "91000"}),
        cache.key(module, [gpu(), gpu(1)], options, {**versions, "driver": "570"}),
    ]
    assert len({it.file_name for it in (key, *others)}) == 1 + len(others)


def test_the_platform_s_versions_do_not_travel() -> None:
    devices, cache = [gpu()], CompileCache()
    exported = cache.key("module", devices, {}, {})
    here = cache.key("module", devices, {}, {"driver": "570"})
    assert here.travelling.file_name == exported.file_name != here.file_name


def export(folder: Path, op: str = "add", level: int = 1, **parts: str) -> Path:
    """Writes an executable that travels, under a key with other parts; returns its file."""
    made = Key(parts={**key(op, level).parts, **parts}, local={})
    executable = compiled(None, op=op, level=level).serialised()
    CompileCache(directory=folder).write(made, executable, ["stage"])
    return folder / made.file_name


def exported(folder: Path) -> CompileCache:
    return CompileCache(exported=(folder,))


def test_an_exported_executable_is_read_and_nothing_is_written(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = export(tmp_path / "exported")
    cache = CompileCache(directory=tmp_path / "cache", exported=(tmp_path / "exported",))
    assert compiled(cache).read_from == path
    assert not (tmp_path / "cache").exists()
    # What is exported nowhere is kept in the cache, with one warning.
    assert compiled(cache, op="multiply").read_from is None
    assert (
        compiled(cache, op="multiply").read_from == tmp_path / "cache" / key("multiply").file_name
    )
    assert list((tmp_path / "exported").iterdir()) == [path]
    assert len(caplog.records) == 1


@pytest.mark.parametrize(
    ("what", "reason"),
    [
        ("another version", "{folder} has it for jaxlib 0.0.1 (here {jaxlib})"),
        (
            "another option",
            '{folder} has it for options [["xla_backend_optimization_level", "0"]] '
            '(here [["xla_backend_optimization_level", "1"]])',
        ),
        (
            "another program",
            "{folder} has a module of this name, but with another program; export it again",
        ),
        ("another module", "{folder} has no such module"),
        ("nothing", "{folder} has no executables"),
        ("no folder", "{folder} has no executables"),
        ("a cache of this machine", "{folder} has no executables"),
        ("other files", "{folder} has no such module"),
    ],
)
def test_a_warning_says_why_an_exported_executable_is_not_used(
    what: str, reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "exported"
    if what == "another version":
        export(folder, jaxlib="0.0.1")
    elif what == "another option":
        export(folder, level=0)
    elif what == "another program":
        export(folder, op="multiply")
    elif what == "another module":
        made = Key(parts=key("multiply").parts, local={})
        CompileCache(directory=folder).write(made, b"", ["another stage"])
    elif what == "a cache of this machine":
        compiled(CompileCache(directory=folder))
    elif what == "other files":
        folder.mkdir()
        (folder / "notes.xla").write_text("notes")
        (folder / "folder.xla").mkdir()
        for number, line in enumerate(["[" * 100_000, "3", '{"modules": 3}', "{}", ""]):
            (folder / f"{number}.xla").write_text(f"alpa executable 2 0\n{line}\n")
        os.mkfifo(folder / "pipe.xla")
    elif what == "nothing":
        folder.mkdir()
    x = argument()
    again = compiled(exported(folder))
    np.testing.assert_array_equal(again([x])[0], x + x)
    assert again.read_from is None
    (record,) = caplog.records
    jaxlib = key().parts["jaxlib"]
    expected = f"@stage is compiled: {reason.format(folder=folder, jaxlib=jaxlib)}"
    assert record.getMessage() == expected


def test_the_nearest_executable_gives_the_reason(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export(tmp_path, jaxlib="0.0.1", device="tpu")
    export(tmp_path, device="gpu")
    compiled(exported(tmp_path))
    (record,) = caplog.records
    assert record.getMessage() == f"@stage is compiled: {tmp_path} has it for device gpu (here cpu)"


def test_what_xla_cannot_load_is_compiled(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache = CompileCache(directory=tmp_path)
    cache.write(key().travelling, b"not an executable", ["stage"])
    x = argument()
    again = compiled(exported(tmp_path))
    np.testing.assert_array_equal(again([x])[0], x + x)
    assert again.read_from is None
    (record,) = caplog.records
    path = tmp_path / key().travelling.file_name
    assert record.getMessage().startswith(f"{path} is not used: XLA cannot")


def damaged(path: Path, how: str, foreign: bytes) -> None:
    """Damages a file of the cache."""
    content = bytearray(path.read_bytes())
    path.unlink()
    if how == "a flipped bit":
        content[-len(content) // 2] ^= 4
        path.write_bytes(content)
    elif how == "a flipped bit of the hash":
        content[30] ^= 4
        path.write_bytes(content)
    elif how == "other parts of the key":
        path.write_bytes(content.replace(b'"devices": 1', b'"devices": 2'))
    elif how == "truncated":
        path.write_bytes(content[:-8])
    elif how == "longer":
        path.write_bytes(content + b"more")
    elif how == "empty":
        path.touch()
    elif how == "another program's":
        path.write_bytes(foreign)
    elif how == "a bare executable":
        path.write_bytes(content.split(b"\n", 2)[2])
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
        ("other parts of the key", "it is damaged, or another program's"),
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
    whole = cache.read(key(), "stage")
    compiled(cache, op="multiply")
    (other,) = set(tmp_path.iterdir()) - {path}
    foreign = other.read_bytes()
    damaged(path, how, foreign)
    with caplog.at_level(logging.WARNING, "alpa"):
        x = argument()
        np.testing.assert_array_equal(compiled(cache)([x])[0], x + x)
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{path} is not used: {reason}")
    assert other.read_bytes() == foreign
    assert sorted(tmp_path.iterdir()) == sorted([path, other])
    assert path.is_file()
    assert not path.is_symlink()
    assert whole is not None
    assert cache.read(key(), "stage") is not None


@pytest.mark.parametrize("how", ["a flipped bit", "truncated", "another program's"])
def test_a_damaged_exported_executable_is_refused_in_one_line(
    how: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = export(tmp_path)
    damaged(path, how, b"alpa executable 2 0\n{}\n")
    content, x = path.read_bytes(), argument()
    again = compiled(exported(tmp_path))
    np.testing.assert_array_equal(again([x])[0], x + x)
    assert again.read_from is None
    (record,) = caplog.records
    assert record.getMessage() == (
        f"{path} is not used: it is damaged, or another program's; it is compiled again"
    )
    assert path.read_bytes() == content


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
