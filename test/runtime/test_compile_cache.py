"""A module is compiled once for its devices and options."""

from __future__ import annotations

from pathlib import Path

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from alpa.dialects import parse
from alpa.runtime.compile_cache import CompileCache
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


def test_an_executable_is_read_back_where_all_is_equal(tmp_path: Path) -> None:
    cache = CompileCache(directory=tmp_path / "deep" / "cache")
    x = jax.device_put(np.arange(4, dtype=np.float32), jax.devices()[0])
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
    executable = other.read_bytes()
    other.unlink()
    compiled(cache)
    (path,) = tmp_path.iterdir()
    path.write_bytes(executable)
    x = jax.device_put(np.arange(4, dtype=np.float32), jax.devices()[0])
    np.testing.assert_array_equal(compiled(cache)([x])[0], x * x)
