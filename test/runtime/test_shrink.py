"""`alpa.runtime.shrink`: sizes change together, and an error names the op that cannot shrink."""

from __future__ import annotations

import pytest

from alpa.dialects import ir, main_function, parse
from alpa.passes import PassError
from alpa.runtime.shrink import elided_to_arguments, shrink

SLICED = """
func.func @main(%x: tensor<4x128xf32>, %i: tensor<i32>) -> (tensor<4x64xf32>, tensor<4xf32>) {
  %0 = stablehlo.slice %x [0:4, 64:128] : (tensor<4x128xf32>) -> tensor<4x64xf32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %x, %zero, %i, sizes = [4, 64]
       : (tensor<4x128xf32>, tensor<i32>, tensor<i32>) -> tensor<4x64xf32>
  %2 = func.call @sum(%0, %1) : (tensor<4x64xf32>, tensor<4x64xf32>) -> tensor<4x64xf32>
  %n = stablehlo.constant dense<1.280000e+02> : tensor<4xf32>
  return %2, %n : tensor<4x64xf32>, tensor<4xf32>
}
func.func private @sum(%a: tensor<4x64xf32>, %b: tensor<4x64xf32>) -> tensor<4x64xf32> {
  %table = stablehlo.constant dense<[1.0, 2.0, 3.0, 64.0]> : tensor<4xf32>
  %0 = stablehlo.broadcast_in_dim %table, dims = [0] : (tensor<4xf32>) -> tensor<4x64xf32>
  %1 = stablehlo.add %a, %0 : tensor<4x64xf32>
  %2 = stablehlo.add %1, %b : tensor<4x64xf32>
  return %2 : tensor<4x64xf32>
}
"""
SLICED_SMALL = """
func.func @main(%x: tensor<3x16xf32>, %i: tensor<i32>) -> (tensor<3x8xf32>, tensor<3xf32>) {
  %0 = stablehlo.slice %x [0:3, 8:16] : (tensor<3x16xf32>) -> tensor<3x8xf32>
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %1 = stablehlo.dynamic_slice %x, %zero, %i, sizes = [3, 8]
       : (tensor<3x16xf32>, tensor<i32>, tensor<i32>) -> tensor<3x8xf32>
  %2 = func.call @sum(%0, %1) : (tensor<3x8xf32>, tensor<3x8xf32>) -> tensor<3x8xf32>
  %n = stablehlo.constant dense<1.600000e+01> : tensor<3xf32>
  return %2, %n : tensor<3x8xf32>, tensor<3xf32>
}
func.func private @sum(%a: tensor<3x8xf32>, %b: tensor<3x8xf32>) -> tensor<3x8xf32> {
  %table = stablehlo.constant dense<[1.0, 2.0, 3.0]> : tensor<3xf32>
  %0 = stablehlo.broadcast_in_dim %table, dims = [0] : (tensor<3xf32>) -> tensor<3x8xf32>
  %1 = stablehlo.add %a, %0 : tensor<3x8xf32>
  %2 = stablehlo.add %1, %b : tensor<3x8xf32>
  return %2 : tensor<3x8xf32>
}
"""
# The bound of the loop is the number of layers, and so is the size that is added to an index.
LOOP = """
func.func @main(%x: tensor<8x4xf32>) -> (tensor<i32>, tensor<8x4xf32>) {
  %zero = stablehlo.constant dense<0> : tensor<i32>
  %0:2 = stablehlo.while(%i = %zero, %w = %x) : tensor<i32>, tensor<8x4xf32>
  cond {
    %layers = stablehlo.constant dense<8> : tensor<i32>
    %1 = stablehlo.compare LT, %i, %layers : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %1 : tensor<i1>
  } do {
    %one = stablehlo.constant dense<1> : tensor<i32>
    %wrap = stablehlo.constant dense<8> : tensor<i32>
    %1 = stablehlo.add %i, %one : tensor<i32>
    %2 = stablehlo.add %i, %wrap : tensor<i32>
    %3 = stablehlo.maximum %1, %2 : tensor<i32>
    stablehlo.return %3, %w : tensor<i32>, tensor<8x4xf32>
  }
  return %0#0, %0#1 : tensor<i32>, tensor<8x4xf32>
}
"""
ELIDED = """
func.func @main(%x: tensor<4x8xf32> {jax.buffer_donor = true}) -> tensor<4x8xf32> {
  %0 = stablehlo.constant dense_resource<__elided__> : tensor<4x8xf32>
  %1 = stablehlo.constant dense_resource<__elided__> : tensor<8xf32>
  %2 = stablehlo.broadcast_in_dim %1, dims = [1] : (tensor<8xf32>) -> tensor<4x8xf32>
  %3 = stablehlo.add %x, %0 : tensor<4x8xf32>
  %4 = stablehlo.multiply %3, %2 : tensor<4x8xf32>
  return %4 : tensor<4x8xf32>
}
"""
ARGUMENTS = """
func.func @main(%x: tensor<4x8xf32> {jax.buffer_donor = true},
                %0: tensor<4x8xf32> {alpa.role = "constant"},
                %1: tensor<8xf32> {alpa.role = "constant"}) -> tensor<4x8xf32> {
  %2 = stablehlo.broadcast_in_dim %1, dims = [1] : (tensor<8xf32>) -> tensor<4x8xf32>
  %3 = stablehlo.add %x, %0 : tensor<4x8xf32>
  %4 = stablehlo.multiply %3, %2 : tensor<4x8xf32>
  return %4 : tensor<4x8xf32>
}
"""


def text(module: ir.Module) -> str:
    module.operation.verify()
    return str(module)


def test_types_slices_and_constants_shrink_together() -> None:
    module = parse(SLICED)
    shrink(module, {128: 16, 64: 8, 4: 3})
    assert text(module) == text(parse(SLICED_SMALL))


def test_sizes_are_replaced_once() -> None:
    module = parse("func.func @main(%x: tensor<16x8xf32>) { return }")
    shrink(module, {16: 8, 8: 4})
    assert text(module) == text(parse("func.func @main(%x: tensor<8x4xf32>) { return }"))


@pytest.mark.parametrize("trip_counts", [False, True])
def test_bounds_of_loops_change_only_on_demand(trip_counts: bool) -> None:
    module = parse(LOOP)
    shrink(module, {8: 2}, trip_counts=trip_counts)
    expected = LOOP.replace("8x4xf32", "2x4xf32").replace(
        "%wrap = stablehlo.constant dense<8>", "%wrap = stablehlo.constant dense<2>"
    )
    if trip_counts:
        expected = expected.replace("dense<8>", "dense<2>")
    assert text(module) == text(parse(expected))


def test_elided_constants_stay_or_become_arguments_before_they_shrink() -> None:
    module = parse(ELIDED)
    with pytest.raises(PassError, match="if elided, make it an argument"):
        shrink(module, {8: 2})
    module = parse(ELIDED)
    elided_to_arguments(module)
    shrink(module, {8: 2})
    assert text(module) == text(parse(ARGUMENTS.replace("8xf32", "2xf32")))


def test_elided_constants_become_arguments() -> None:
    module = parse(ELIDED)
    assert elided_to_arguments(module) == 2
    assert text(module) == text(parse(ARGUMENTS))


def test_elided_constant_of_another_function_is_refused() -> None:
    module = parse(
        """
        func.func @main() -> tensor<8xf32> {
          %0 = func.call @weight() : () -> tensor<8xf32>
          return %0 : tensor<8xf32>
        }
        func.func private @weight() -> tensor<8xf32> {
          %0 = stablehlo.constant dense_resource<__elided__> : tensor<8xf32>
          return %0 : tensor<8xf32>
        }
        """
    )
    with pytest.raises(PassError, match="simplify-trivial-ops") as caught:
        elided_to_arguments(module)
    assert "7:16" in str(caught.value.location)
    assert len(main_function(module).type.inputs) == 0


def test_size_that_does_not_occur_is_refused() -> None:
    with pytest.raises(ValueError, match=r"no dimension has size 7; .* sizes are 4, 64, 128"):
        shrink(parse(SLICED), {7: 2})
