"""`alpa.tools.run_file`: the command, from a file to a comparison."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from alpa import runtime
from alpa.tools import run_file


def test_command_makes_its_devices_and_fills_elided_constants(tmp_path: Path) -> None:
    path, plan = tmp_path / "step.mlir", tmp_path / "planned.mlir"
    path.write_text("""
    func.func @main(%x: tensor<96x16xf32>) -> tensor<96x16xf32> {
      %w = stablehlo.constant dense_resource<__elided__> : tensor<16x16xf32>
      %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
           : (tensor<96x16xf32>, tensor<16x16xf32>) -> tensor<96x16xf32>
      return %y : tensor<96x16xf32>
    }
    """)
    command = [sys.executable, "-m", "alpa.tools.run_file", path, "--cluster", "cpu:1x2"]
    command += ["--num-layers", "1", "--num-stages", "1", "--dim", "96=24", "-o", plan]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n1 of 1 results are equal to XLA on one device" in done.stdout
    assert "tensor<24x16xf32>" in done.stdout
    inputs = runtime.load(plan).program.arguments
    assert [argument.attributes.role for argument in inputs] == [None, "constant"]


def test_command_says_where_a_program_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.mlir"
    path.write_text("func.func @main(%x: tensor<4xf32>) {\n  return %y : tensor<4xf32>\n}\n")
    assert run_file.main([str(path), "--cluster", "cpu:0x4"]) == 1
    assert "is not a shape" in capsys.readouterr().err


def test_command_takes_roles_from_a_file(tmp_path: Path) -> None:
    """Several micro-batches need them, and the program says none."""
    path, roles, plan = (tmp_path / name for name in ("step.mlir", "roles.toml", "planned.mlir"))
    path.write_text("""
    func.func @main(%w: tensor<16x16xf32>, %x: tensor<8x16xf32>)
        -> (tensor<16x16xf32>, tensor<8x16xf32>) {
      %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
           : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
      %g = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0]
           : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
      %w2 = stablehlo.subtract %w, %g : tensor<16x16xf32>
      return %w2, %y : tensor<16x16xf32>, tensor<8x16xf32>
    }
    """)
    roles.write_text(
        '[arguments]\n0 = "state"\n1 = "batch"\n[results]\n0 = "state:0"\n1 = "concat:0"\n'
    )
    command = [sys.executable, "-m", "alpa.tools.run_file", path, "--cluster", "cpu:1x2"]
    command += ["--num-layers", "1", "--num-micro-batches", "2", "--roles", roles, "-o", plan]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "\n2 of 2 results are equal" in done.stdout
    inputs = runtime.load(plan).program.arguments
    assert [argument.attributes.role for argument in inputs] == ["state", "batch"]


def test_command_takes_roles_of_elements_of_tuples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, roles = tmp_path / "step.mlir", tmp_path / "roles.toml"
    path.write_text("""
    func.func @main(%t: tuple<tensor<4xf32>, tensor<8x4xf32>>) -> tuple<tensor<8x4xf32>> {
      %w = stablehlo.get_tuple_element %t[0]
        : (tuple<tensor<4xf32>, tensor<8x4xf32>>) -> tensor<4xf32>
      %x = stablehlo.get_tuple_element %t[1]
        : (tuple<tensor<4xf32>, tensor<8x4xf32>>) -> tensor<8x4xf32>
      %b = stablehlo.broadcast_in_dim %w, dims = [1] : (tensor<4xf32>) -> tensor<8x4xf32>
      %y = stablehlo.add %x, %b : tensor<8x4xf32>
      %r = stablehlo.tuple %y : tuple<tensor<8x4xf32>>
      return %r : tuple<tensor<8x4xf32>>
    }
    """)
    roles.write_text('[arguments]\n0 = "constant"\n1 = "batch"\n[results]\n0 = "concat:0"\n')
    command = [str(path), "--cluster", "cpu:1x1", "--num-micro-batches", "2"]
    assert run_file.main([*command, "--roles", str(roles)]) == 0
    assert "1 of 1 results are equal" in capsys.readouterr().out


def test_command_says_where_roles_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = tmp_path / "roles.toml"
    roles.write_text("[inputs]\n0 = 'state'\n")
    assert run_file.main(["step.mlir", "--roles", str(roles)]) == 1
    message = f"{roles}:1: error: 'inputs' is neither [arguments] nor [results]"
    assert message in capsys.readouterr().err


def test_command_widens_what_is_in_tuples(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.mlir"
    path.write_text("""
    func.func @main(%x: tensor<8x4xf16>) -> tuple<tensor<8x4xf16>, tensor<8x4xf16>> {
      %y = stablehlo.add %x, %x : tensor<8x4xf16>
      %both = stablehlo.tuple %x, %y : tuple<tensor<8x4xf16>, tensor<8x4xf16>>
      return %both : tuple<tensor<8x4xf16>, tensor<8x4xf16>>
    }
    """)
    assert run_file.main([str(path), "--cluster", "cpu:1x1", "--widen"]) == 0
    assert "2 of 2 results are equal" in capsys.readouterr().out
