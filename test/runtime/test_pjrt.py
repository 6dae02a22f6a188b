from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from alpa.dialects import parse
from alpa.runtime.pjrt import compile_module, lowering_platform, platform_versions

CONTRACTION = """
module {
  sdy.mesh @m = <["a"=2, "b"=2]>
  func.func public @main(
      %x: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@m, [{}, {"b", "a"}]>},
      %sum: tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@m, [{}, {}]>,
                             tf.aliasing_output = 0 : i32})
      -> (tensor<8x8xf32> {sdy.sharding = #sdy.sharding<@m, [{}, {}]>}) {
    %0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [1]
      : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %1 = stablehlo.add %sum, %0 : tensor<8x8xf32>
    return %1 : tensor<8x8xf32>
  }
}
"""


def test_a_partitioned_program_on_some_of_the_devices() -> None:
    devices = jax.devices()[2:6]
    mesh = Mesh(np.array(devices).reshape(2, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2)
    whole = NamedSharding(mesh, PartitionSpec())
    compiled = compile_module(parse(CONTRACTION), devices, [((8, 8), whole)])
    value = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    x = jax.device_put(value, NamedSharding(mesh, PartitionSpec(None, ("b", "a"))))
    total = jax.device_put(np.ones((8, 8), np.float32), whole)
    (result,) = compiled([x, total])
    np.testing.assert_allclose(result, value @ value.T + 1, rtol=1e-5, atol=1e-5)
    assert result.sharding.device_set == set(devices)
    assert total.is_deleted()
    assert not x.is_deleted()
    assert "all-reduce" in compiled.hlo_text()
    assert compiled.memory().argument_size_in_bytes == 8 * 8 * 4 // 4 + 8 * 8 * 4


def test_an_error_names_the_stage() -> None:
    text = CONTRACTION.replace("stablehlo.add %sum, %0", "stablehlo.custom_call @nobody(%sum, %0)")
    text = text.replace(
        "%1 = stablehlo.custom_call @nobody(%sum, %0) : tensor<8x8xf32>",
        """
      %1 = stablehlo.custom_call @nobody(%sum, %0)
        : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>""",
    )
    with pytest.raises(jax.errors.JaxRuntimeError) as error:
        compile_module(parse(text), jax.devices()[:4], [], name="mesh_0.layer_0.forward")
    assert error.value.__notes__ == ["while compiling @mesh_0.layer_0.forward for 4 devices"]


LAPACK = """
import jax, sys
from alpa.dialects import parse
from alpa.runtime.reference import run_unplanned
module = parse(sys.stdin.read())
import numpy as np
(result,) = run_unplanned(module, [4 * np.eye(3, dtype=np.float32)])
print(result.trace())
"""


def test_lapack_is_found_where_jax_has_lowered_nothing() -> None:
    """JAX passes LAPACK's address to jaxlib when it lowers a call; a file comes without that."""
    text = jax.jit(jax.numpy.linalg.cholesky).lower(np.eye(3, dtype=np.float32)).as_text()
    assert "lapack_spotrf" in text
    found = subprocess.run(
        [sys.executable, "-c", LAPACK], input=text, capture_output=True, text=True, check=False
    )
    assert (found.returncode, found.stdout) == (0, "6.0\n"), found.stderr


@pytest.mark.parametrize(
    ("platform", "version", "name"),
    [
        ("cpu", "cpu", "cpu"),
        ("tpu", "libtpu", "tpu"),
        ("gpu", "PJRT C API\ncuda 12090", "cuda"),
        ("gpu", "PJRT C API\nROCM 60342134", "rocm"),
    ],
)
def test_devices_have_other_names_to_lowering(platform: str, version: str, name: str) -> None:
    client = SimpleNamespace(platform_version=version)
    device = SimpleNamespace(platform=platform, client=client, id=0, device_kind="")
    assert lowering_platform(device) == name
    assert lowering_platform(jax.devices()[0]) == "cpu"


def test_versions_of_a_gpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert platform_versions(jax.devices()[0]).keys() == {"runtime"}
    # Packages as pip would install them.
    for name in ("jax_cuda12_plugin", "nvidia_cudnn_cu12", "other"):
        folder = tmp_path / f"{name}-1.2.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Name: {name.replace('_', '-')}\nVersion: 1.2\n")
    monkeypatch.syspath_prepend(tmp_path)
    client = SimpleNamespace(platform_version="PJRT C API\ncuda 12090")
    found = platform_versions(SimpleNamespace(platform="gpu", client=client))
    assert found["runtime"].endswith("cuda 12090")
    assert found["jax-cuda12-plugin"] == found["nvidia-cudnn-cu12"] == "1.2"
    assert "other" not in found


def test_an_executable_for_other_processes() -> None:
    devices = jax.devices()[:1]
    text = "func.func public @main(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }"
    sharding = SingleDeviceSharding(devices[0])
    given = compile_module(parse(text), devices, [((), sharding)]).serialised()
    again = compile_module(parse(text), devices, [((), sharding)], executable=given)
    assert again.serialised() == given
    assert again([jax.device_put(np.float32(3), devices[0])]) == [3]
