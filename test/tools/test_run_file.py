"""`alpa.tools.run_file`: small programs against one device, and differences that it must find."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from alpa import passes, runtime
from alpa.dialects import ir, parse
from alpa.runtime.pjrt import separate
from alpa.runtime.planning import Clock
from alpa.runtime.reference import run_unplanned
from alpa.tools import run_file

# One step of a linear regression: momentum is a state that only the update reads.
STEP = """
func.func @main(
    %w: tensor<16x16xf32> {alpa.role = "state"}, %m: tensor<16x16xf32> {alpa.role = "state"},
    %n: tensor<i32> {alpa.role = "state"},
    %x: tensor<8x16xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<16x16xf32> {alpa.result = "state:0"}, tensor<16x16xf32> {alpa.result = "state:1"},
        tensor<i32> {alpa.result = "state:2"}, tensor<f32> {alpa.result = "mean"},
        tensor<8x16xf32> {alpa.result = "concat:0"}) {
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
       : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
  %e = stablehlo.subtract %y, %x : tensor<8x16xf32>
  %s = stablehlo.multiply %e, %e : tensor<8x16xf32>
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %loss = stablehlo.reduce(%s init: %zero) applies stablehlo.add across dimensions = [0, 1]
          : (tensor<8x16xf32>, tensor<f32>) -> tensor<f32>
  %g = stablehlo.dot_general %x, %e, contracting_dims = [0] x [0]
       : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
  %half = stablehlo.constant dense<0.5> : tensor<16x16xf32>
  %decayed = stablehlo.multiply %m, %half : tensor<16x16xf32>
  %m2 = stablehlo.add %decayed, %g : tensor<16x16xf32>
  %rate = stablehlo.constant dense<0.001> : tensor<16x16xf32>
  %change = stablehlo.multiply %m2, %rate : tensor<16x16xf32>
  %w2 = stablehlo.subtract %w, %change : tensor<16x16xf32>
  %one = stablehlo.constant dense<1> : tensor<i32>
  %n2 = stablehlo.add %n, %one : tensor<i32>
  return %w2, %m2, %n2, %loss, %y
      : tensor<16x16xf32>, tensor<16x16xf32>, tensor<i32>, tensor<f32>, tensor<8x16xf32>
}
"""
OPTIONS = {"cluster": "cpu:2x4", "num-layers": "1", "num-stages": "1"}


def planned_and_compared(
    source: ir.Module, planned: ir.Module, seed: int = 0
) -> Sequence[run_file.Row]:
    return run_file.run(source, run_file.plan(planned, OPTIONS, Clock()), seed, Clock())


def wrong(rows: Sequence[run_file.Row]) -> list[int]:
    return [row.comparison.index for row in rows if not row.comparison.ok]


@pytest.mark.parametrize("batches", [1, 2])
def test_step_is_equal(batches: int) -> None:
    options, clock = {**OPTIONS, "num-micro-batches": str(batches)}, Clock()
    source = parse(STEP)
    planned = run_file.plan(separate(source.operation), options, clock)
    rows = run_file.run(source, planned, 0, clock)
    assert wrong(rows) == []
    assert [row.type for row in rows] == [
        "tensor<16x16xf32>",
        "tensor<16x16xf32>",
        "tensor<i32>",
        "tensor<f32>",
        "tensor<8x16xf32>",
    ]
    runs = ["compile", "first run", "second run", "one device"]
    assert [*clock.seconds] == [*passes.pipeline.PIPELINES["alpa"], *runs]


def test_state_that_the_forward_part_carries_is_equal() -> None:
    text = """
    func.func @main(%r: tensor<16xf32> {alpa.role = "state"},
                    %w: tensor<16x16xf32> {alpa.role = "constant"},
                    %x: tensor<8x16xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
        -> (tensor<16xf32> {alpa.result = "state:0"}, tensor<8x16xf32> {alpa.result = "concat:0"},
            tensor<16xf32> {alpa.result = "sum"}) {
      %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
           : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %s = stablehlo.reduce(%y init: %zero) applies stablehlo.add across dimensions = [0]
           : (tensor<8x16xf32>, tensor<f32>) -> tensor<16xf32>
      %r2 = stablehlo.add %r, %s : tensor<16xf32>
      return %r2, %y, %s : tensor<16xf32>, tensor<8x16xf32>, tensor<16xf32>
    }
    """
    source, options = parse(text), {**OPTIONS, "num-micro-batches": "3"}
    planned = run_file.plan(separate(source.operation), options, Clock())
    assert wrong(run_file.run(source, planned, 0, Clock())) == []


def test_change_of_a_parameter_is_seen() -> None:
    """The step moves the parameters by less than the bound on the parameters themselves."""
    still = STEP.replace("dense<0.001>", "dense<0.000001>")
    rows = planned_and_compared(parse(still), parse(still.replace("0.000001", "0.0")))
    assert wrong(rows) == [0]


def test_lost_gradient_is_seen() -> None:
    """The new momentum would hide it, did the old one not start at zero."""
    lost = STEP.replace("%m2 = stablehlo.add %decayed, %g", "%m2 = stablehlo.add %decayed, %m")
    assert wrong(planned_and_compared(parse(STEP), parse(lost))) == [0, 1]


def test_whole_numbers_are_exact() -> None:
    other = STEP.replace("%one = stablehlo.constant dense<1>", "%one = stablehlo.constant dense<2>")
    assert wrong(planned_and_compared(parse(STEP), parse(other))) == [2]


def test_result_of_16_bit_floats_has_their_bound() -> None:
    text = """
    func.func @main(%x: tensor<8x8xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32>) {
      %0 = stablehlo.convert %x : (tensor<8x8xf32>) -> tensor<8x8xbf16>
      %1 = stablehlo.convert %0 : (tensor<8x8xbf16>) -> tensor<8x8xf32>
      %2 = stablehlo.add %x, %x : tensor<8x8xf32>
      return %1, %2 : tensor<8x8xf32>, tensor<8x8xf32>
    }
    """
    narrow, wide = (row.comparison for row in planned_and_compared(parse(text), parse(text)))
    assert narrow.bound > 100 * wide.bound


def test_noise_that_an_optimizer_amplifies_is_held_against_64_bits() -> None:
    """What adding a large number and taking it away again loses is all that moves the parameter."""
    text = """
    func.func @main(
        %w: tensor<64xf32> {alpa.role = "state"}, %x: tensor<64xf32>, %y: tensor<64xf32>)
        -> (tensor<64xf32> {alpa.result = "state:0"}) {
      %large = stablehlo.constant dense<1.0e5> : tensor<64xf32>
      %a = stablehlo.multiply %y, %large : tensor<64xf32>
      %b = stablehlo.add %x, %a : tensor<64xf32>
      %c = stablehlo.subtract %b, %a : tensor<64xf32>
      %noise = stablehlo.subtract %x, %c : tensor<64xf32>
      %loud = stablehlo.multiply %noise, %large : tensor<64xf32>
      %w2 = stablehlo.add %w, %loud : tensor<64xf32>
      return %w2 : tensor<64xf32>
    }
    """
    other = text.replace("stablehlo.subtract %x, %c", "stablehlo.subtract %c, %x")
    (row,) = planned_and_compared(parse(text), parse(other))
    assert row.comparison.ok
    assert row.by == "4 max|xla-f64|"
    louder = other.replace("%noise, %large", "%noise, %louder").replace(
        "%a = ", "%louder = stablehlo.constant dense<5.0e5> : tensor<64xf32>\n      %a = "
    )
    assert wrong(planned_and_compared(parse(text), parse(louder))) == [0]


def test_widened_program_rounds_nowhere() -> None:
    module = parse("""
    func.func @main(%x: tensor<4xf32>) -> tensor<4xbf16> {
      %0 = stablehlo.constant dense<[1.0, 2.0, 3.0, 4.0]> : tensor<4xf32>
      %zero = sdy.constant dense<0.0> : tensor<4xf32>
      %one = stablehlo.add %x, %0 : tensor<4xf32>
      %1 = stablehlo.add %one, %zero : tensor<4xf32>
      %2 = stablehlo.reduce_precision %1, format = e8m7 : tensor<4xf32>
      %3 = stablehlo.convert %2 : (tensor<4xf32>) -> tensor<4xbf16>
      return %3 : tensor<4xbf16>
    }
    """)
    x = np.array([1e-9, 1e-8, 1e-7, 1e-6])
    (result,) = run_unplanned(run_file.widened(module), [x])
    np.testing.assert_array_equal(result, x + np.arange(1.0, 5.0))


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
    assert "\n1 of 1 results are equal" in done.stdout
    assert "tensor<24x16xf32>" in done.stdout
    inputs = runtime.load(plan).program.arguments
    assert [argument.attributes.role for argument in inputs] == [None, "constant"]


def test_command_says_where_a_program_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "step.mlir"
    path.write_text("func.func @main(%x: tensor<4xf32>) {\n  return %y : tensor<4xf32>\n}\n")
    assert run_file.main([str(path), "--cluster", "cpu:0x4"]) == 1
    assert "is no shape" in capsys.readouterr().err


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


def test_command_says_where_roles_are_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    roles = tmp_path / "roles.toml"
    roles.write_text("[inputs]\n0 = 'state'\n")
    assert run_file.main(["step.mlir", "--roles", str(roles)]) == 1
    message = f"{roles}:1: error: 'inputs' is neither [arguments] nor [results]"
    assert message in capsys.readouterr().err
