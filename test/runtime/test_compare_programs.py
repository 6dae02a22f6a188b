"""`alpa.runtime.compare_programs`: small programs against one device, and planted faults."""

from __future__ import annotations

import pytest

from alpa.dialects import ir, parse, separate
from alpa.passes.pipelines.clock import Clock
from alpa.runtime.compare_programs import compare_programs
from alpa.runtime.comparison import Comparison
from alpa.runtime.planning import run_pass

# One step of a linear regression. The momentum is a state that only the update reads.
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


def planned(module: ir.Module, **options: str) -> ir.Module:
    module = separate(module.operation)
    run_pass("alpa", {**OPTIONS, **options}, module, Clock())
    return module


def compared(source: str, other: str) -> Comparison:
    """A program and the plan of another program."""
    return compare_programs(parse(source), planned(parse(other)))


def wrong(report: Comparison) -> list[str]:
    return [tensor.label for tensor in report.tensors if tensor.verdict != "equal"]


@pytest.mark.parametrize("batches", [1, 2])
def test_step_is_equal(batches: int) -> None:
    source, clock = parse(STEP), Clock()
    plan = planned(source, **{"num-micro-batches": str(batches)})
    report = compare_programs(source, plan, clock=clock)
    assert wrong(report) == []
    assert [tensor.type for tensor in report.tensors] == [
        "tensor<16x16xf32>",
        "tensor<16x16xf32>",
        "tensor<i32>",
        "tensor<f32>",
        "tensor<8x16xf32>",
    ]
    assert [tensor.label for tensor in report.tensors] == ["0", "1", "2", "3", "4"]
    assert [*clock.seconds] == [
        *("compile", "first run", "second run", "one device"),
        *("one device, perturbed", "one device, sums reordered"),
    ]


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
    source = parse(text)
    report = compare_programs(source, planned(source, **{"num-micro-batches": "3"}))
    assert wrong(report) == []


def test_change_of_a_parameter_is_seen() -> None:
    """The step moves the parameters by less than the bound on the parameters themselves."""
    still = STEP.replace("dense<0.001>", "dense<0.000001>")
    assert wrong(compared(still, still.replace("0.000001", "0.0"))) == ["0"]


def test_lost_gradient_is_seen() -> None:
    """The new momentum would hide the fault if the old one did not start at zero."""
    lost = STEP.replace("%m2 = stablehlo.add %decayed, %g", "%m2 = stablehlo.add %decayed, %m")
    report = compared(STEP, lost)
    assert wrong(report) == ["0", "1"]
    assert report.is_fault


def test_whole_numbers_are_exact() -> None:
    other = STEP.replace("%one = stablehlo.constant dense<1>", "%one = stablehlo.constant dense<2>")
    assert wrong(compared(STEP, other)) == ["2"]


def test_result_of_16_bit_floats_has_their_bound() -> None:
    text = """
    func.func @main(%x: tensor<8x8xf32>) -> (tensor<8x8xf32>, tensor<8x8xf32>) {
      %0 = stablehlo.convert %x : (tensor<8x8xf32>) -> tensor<8x8xbf16>
      %1 = stablehlo.convert %0 : (tensor<8x8xbf16>) -> tensor<8x8xf32>
      %2 = stablehlo.add %x, %x : tensor<8x8xf32>
      return %1, %2 : tensor<8x8xf32>, tensor<8x8xf32>
    }
    """
    narrow, wide = compared(text, text).tensors
    assert narrow.bound > 100 * wide.bound


def test_noise_that_an_optimizer_amplifies_is_no_fault() -> None:
    """The parameter moves by the difference of one sum in two orders, which is rounding."""
    text = """
    func.func @main(%w: tensor<f32> {alpa.role = "state"}, %x: tensor<4096xf32>)
        -> (tensor<f32> {alpa.result = "state:0"}) {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %a = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0]
          : (tensor<4096xf32>, tensor<f32>) -> tensor<f32>
      %x0 = stablehlo.slice %x [0:1000] : (tensor<4096xf32>) -> tensor<1000xf32>
      %x1 = stablehlo.slice %x [1000:4096] : (tensor<4096xf32>) -> tensor<3096xf32>
      %b0 = stablehlo.reduce(%x0 init: %zero) applies stablehlo.add across dimensions = [0]
          : (tensor<1000xf32>, tensor<f32>) -> tensor<f32>
      %b1 = stablehlo.reduce(%x1 init: %zero) applies stablehlo.add across dimensions = [0]
          : (tensor<3096xf32>, tensor<f32>) -> tensor<f32>
      %b = stablehlo.add %b0, %b1 : tensor<f32>
      %noise = stablehlo.subtract %a, %b : tensor<f32>
      %large = stablehlo.constant dense<1.0e5> : tensor<f32>
      %loud = stablehlo.multiply %noise, %large : tensor<f32>
      %w2 = stablehlo.add %w, %loud : tensor<f32>
      return %w2 : tensor<f32>
    }
    """
    report = compared(text, text.replace("stablehlo.subtract %a, %b", "stablehlo.subtract %b, %a"))
    assert report.is_noise
    (tensor,) = report.tensors
    assert tensor.difference > 10 * tensor.bound
    assert tensor.noise > tensor.bound
    assert compared(text, text.replace("1.0e5", "5.0e7")).is_fault


@pytest.mark.parametrize("kind", ["i2", "ui2", "i4", "ui4"])
def test_states_of_few_bits_are_compared_exactly(kind: str) -> None:
    """Arguments are 0 and 1, as those of wider integers."""
    text = f"""
    func.func @main(%w: tensor<16x8x{kind}> {{alpa.role = "state"}}, %x: tensor<16x8x{kind}>)
        -> (tensor<16x8x{kind}> {{alpa.result = "state:0"}}) {{
      %y = stablehlo.add %w, %x : tensor<16x8x{kind}>
      return %y : tensor<16x8x{kind}>
    }}
    """
    (tensor,) = compared(text, text).tensors
    assert (tensor.difference, tensor.bound, tensor.verdict) == (0.0, 0.0, "equal")
    assert compared(text, text.replace("add %w, %x", "subtract %w, %x")).is_fault


def test_upper_bound_that_is_an_argument_keeps_the_program_well_conditioned() -> None:
    """A batch norm of constants divides by rounding.

    Below zero the ReLU would make all activations equal, and the norm would return only noise.
    """
    text = """
    func.func @main(%x: tensor<64x8xf32>, %most: tensor<f32>, %s: tensor<8xf32>, %b: tensor<8xf32>)
        -> (tensor<64x8xf32>) {
      %zero = stablehlo.constant dense<0.0> : tensor<64x8xf32>
      %m = stablehlo.broadcast_in_dim %most, dims = [] : (tensor<f32>) -> tensor<64x8xf32>
      %y = stablehlo.clamp %zero, %x, %m : tensor<64x8xf32>
      %0:3 = "stablehlo.batch_norm_training"(%y, %s, %b)
          {epsilon = 1.0e-30 : f32, feature_index = 1 : i64}
          : (tensor<64x8xf32>, tensor<8xf32>, tensor<8xf32>)
          -> (tensor<64x8xf32>, tensor<8xf32>, tensor<8xf32>)
      return %0#0 : tensor<64x8xf32>
    }
    """
    for seed in range(4):
        source = parse(text)
        report = compare_programs(source, planned(source), seed=seed)
        assert wrong(report) == []
        (tensor,) = report.tensors
        assert tensor.noise < 1e-4
