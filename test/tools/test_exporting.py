"""The modules of stages in each form. IREE, another compiler, runs them as XLA does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from alpa.dialects import ir, parse, parse_file, walk
from alpa.dialects.reading import portable_version
from alpa.runtime.comparison import compare
from alpa.runtime.reference import random_arguments, run_unplanned
from alpa.tools import zoo
from alpa.tools.alpa_plan import main

SMALL = {
    "num_layers": 2,
    "hidden_size": 16,
    "num_heads": 2,
    "vocab_size": 32,
    "sequence_length": 8,
    "optimizer": "sgd",
}


@pytest.fixture(scope="module")
def step(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("step") / "step.mlir"
    path.write_text(zoo.get("gpt-tiny", **SMALL).lower(2, locations=True))
    return path


def export(step: Path, folder: Path, *options: str, cluster: str = "cpu:2x1") -> list[Path]:
    command = [str(step), "--cluster", cluster, "--num-stages", "2", "--num-micro-batches", "2"]
    command += ["--export", str(folder), "--no-executables", *options]
    assert main(command) == 0
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


@pytest.fixture(scope="module")
def for_xla(step: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return export(step, tmp_path_factory.mktemp("stages"))


def dialects(module: ir.Module) -> set[str]:
    return {op.operation.name.partition(".")[0] for op in walk(module.body)}


def unit_arguments(module: ir.Module) -> list[np.ndarray]:
    """Floats of unit scale; those that must be positive stay as they are."""
    arrays = random_arguments(module, 0)
    return [a * 10 if a.dtype.kind == "f" and a.size and a.min() < 0 else a for a in arrays]


def run_by_iree(data: bytes, arguments: Sequence[np.ndarray]) -> list[np.ndarray]:
    compiler = pytest.importorskip("iree.compiler.tools", reason="needs the extra iree")
    runtime = pytest.importorskip("iree.runtime", reason="needs the extra iree")
    binary = compiler.compile_str(
        data,
        target_backends=["llvm-cpu"],
        input_type="stablehlo",
        extra_args=["--iree-llvmcpu-target-cpu=host"],
    )
    context = runtime.SystemContext(config=runtime.Config("local-sync"))
    module = runtime.VmModule.copy_buffer(context.instance, binary)
    context.add_vm_module(module)
    results = context.modules[module.name].main(*arguments)
    return [np.asarray(result) for result in (results if isinstance(results, tuple) else [results])]


def test_files_of_an_earlier_plan_are_removed_and_others_stay(step: Path, tmp_path: Path) -> None:
    folder = tmp_path / "stages"
    former = export(step, folder)
    # Names like those of an export make no difference.
    own = [folder / name for name in ("mesh_0.edited.mlir", "mesh_9.layer_0.mlir", "mesh.txt")]
    own[0].write_text(former[0].read_text())
    own[1].write_text(step.read_text())
    own[2].write_text("mine")
    found = export(own[1], folder, "--export-format", "vhlo")
    assert {path.name for path in found if path not in own} == {f"{it.name}.bc" for it in former}
    assert {*own} <= {*found}


def test_the_program_stays_where_an_earlier_export_wrote_it(step: Path, tmp_path: Path) -> None:
    former = export(step, tmp_path)
    command = [str(former[0]), "--cluster", "cpu:1x1", "--export", str(tmp_path)]
    assert main([*command, "--no-executables", "--export-format", "vhlo"]) == 0
    assert former[0].exists()
    assert not former[1].exists()


@pytest.mark.parametrize("form", ["vhlo:1.0.0", pytest.param("stablehlo", marks=pytest.mark.slow)])
def test_iree_runs_every_stage_as_xla_does(
    form: str, step: Path, for_xla: list[Path], tmp_path: Path
) -> None:
    """Another compiler rounds in its own way: this is the exception from how equal is equal."""
    pytest.importorskip("iree.compiler.tools", reason="needs the extra iree")
    paths = export(step, tmp_path, "--export-format", form, "--strip-sdy")
    assert len(paths) == len(for_xla) == 6
    for path, original in zip(paths, for_xla, strict=True):
        assert path.name.removesuffix(".bc") == original.name
        module = parse_file(original)
        arguments = unit_arguments(module)
        expected = run_unplanned(module, arguments)
        found = run_by_iree(path.read_bytes(), arguments)
        for one, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(one, np.asarray(other), rtol=5e-3, atol=5e-3)


def test_each_form_has_its_dialects(step: Path, for_xla: list[Path], tmp_path: Path) -> None:
    assert any("chlo" in dialects(parse_file(path)) for path in for_xla)
    for number, (options, expected, version) in enumerate(
        [
            (["--export-format", "xla", "--strip-sdy"], {"stablehlo", "func", "chlo"}, None),
            (["--export-format", "stablehlo"], {"stablehlo", "func", "sdy"}, None),
            (["--export-format", "vhlo"], {"stablehlo", "func", "sdy"}, "newest"),
            (["--export-format", "vhlo:0.9.0", "--strip-sdy"], {"stablehlo", "func"}, "0.9.0"),
        ]
    ):
        paths = export(step, tmp_path / str(number), *options)
        assert {path.name.removesuffix(".bc") for path in paths} == {p.name for p in for_xla}
        assert set.union(*(dialects(parse_file(path)) for path in paths)) == expected
        versions = {portable_version(path.read_bytes()) for path in paths}
        assert versions == {version} or (version == "newest" and None not in versions)


def test_stages_of_several_devices_are_programs_of_one_without_sdy(
    step: Path, tmp_path: Path
) -> None:
    """Partial sums are computed shard by shard, and results are those of the whole tensors."""
    options = ["--intra", "data-parallel"]
    sharded = export(step, tmp_path / "sharded", *options, cluster="cpu:2x2")
    plain = export(step, tmp_path / "plain", *options, "--strip-sdy", cluster="cpu:2x2")
    assert any("sdy.manual_computation" in path.read_text() for path in sharded)
    for path, other in zip(sharded, plain, strict=True):
        assert "sdy" not in other.read_text()
        arguments = unit_arguments(parse_file(path))
        expected = run_unplanned(parse_file(path), arguments)
        found = run_unplanned(parse_file(other), arguments)
        assert all(row.ok for row in compare(found, expected))


def test_a_version_that_lacks_an_op_is_named_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`tan` came with StableHLO 1.4; nothing is written where one module cannot be."""
    path = tmp_path / "step.mlir"
    path.write_text(
        "func.func public @main(%x: tensor<8x8xf32>, %w: tensor<8x8xf32>) -> tensor<8x8xf32> {\n"
        "  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]\n"
        "    : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>\n"
        "  %1 = stablehlo.tan %0 : tensor<8x8xf32>\n"
        "  return %1 : tensor<8x8xf32>\n}\n"
    )
    stages = tmp_path / "stages"
    command = [str(path), "--cluster", "cpu:1x1", "--export", str(stages), "--no-executables"]
    assert main([*command, "--export-format", "vhlo:1.0.0"]) == 1
    assert capsys.readouterr().err.startswith(
        f"{path}:4:8: error: this stablehlo.tan cannot be written in StableHLO 1.0.0; write a later"
    )
    assert not list(stages.iterdir())
    assert main([*command, "--export-format", "vhlo:1.4.0"]) == 0
    (written,) = stages.glob("*.mlir.bc")
    assert "stablehlo.tan" in str(parse(written.read_bytes()))
