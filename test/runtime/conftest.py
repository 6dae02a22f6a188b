"""A program for several executors."""

from __future__ import annotations

import pytest

# `c` is carried, written on mesh_1 and read on both; `k` is moved once per step; the sum of `s`
# reaches an update by a transfer that nothing else needs; results that are transfers or arguments.
_MOVES = """
!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<4xf32>>
!x1 = !mpmd.mesh_tensor<"mesh_1", tensor<4xf32>, sharding=<@mesh_1, [{"a"}]>>
!c1 = !mpmd.mesh_tensor<"mesh_1", tensor<4xf32>>
!b0 = !mpmd.mesh_tensor<"mesh_0", tensor<4xbf16>>
!b1 = !mpmd.mesh_tensor<"mesh_1", tensor<4xbf16>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  sdy.mesh @mesh_1 = <["a"=2]>
  func.func public @main(
      %c0: !x0 {alpa.input = 0 : i64, alpa.role = "state"},
      %c1: !c1 {alpa.input = 0 : i64, alpa.role = "state"},
      %p: !x1 {alpa.input = 1 : i64, alpa.role = "state"},
      %k1: !x1 {alpa.input = 2 : i64, alpa.role = "constant"},
      %x: !x0 {alpa.input = 3 : i64, alpa.role = "batch", alpa.batch_dim = 0 : i64})
      -> (!c1 {alpa.result = "state:0"}, !x1 {alpa.result = "state:1"},
          !x1 {alpa.result = "sum"}, !x0 {alpa.result = "concat:0"}, !x0 {alpa.result = "mean"},
          !b0 {alpa.result = "sum"}, !x0, !x1 {alpa.result = "last"}, !x0 {alpa.result = "sum"})
      attributes {
        topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>, <"mesh_1" : <["a"=2]>>>,
        alpa.meshes = [
          {name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0>,
           logical_shape = array<i64: 1>},
          {name = "mesh_1", hosts = array<i64: 0>, devices = array<i64: 1, 2>,
           logical_shape = array<i64: 2>}],
        alpa.plan = {num_micro_batches = 3 : i64, schedule = "gpipe",
                     predicted_step_seconds = 1.0e-3 : f64,
                     predicted_peak_bytes = array<i64: 1, 1>}} {
    %k0 = mpmd.transfer %k1 : (!x1) -> !x0
    %h, %s, %b = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)]> (%c0, %k0, %x)
        {alpa.part = "forward"} (%a: tensor<4xf32>, %k: tensor<4xf32>, %d: tensor<4xf32>) {
      %0 = stablehlo.multiply %a, %d : tensor<4xf32>
      %1 = stablehlo.add %0, %k : tensor<4xf32>
      %2 = stablehlo.multiply %d, %d : tensor<4xf32>
      %3 = stablehlo.convert %d : (tensor<4xf32>) -> tensor<4xbf16>
      mpmd.return %1, %2, %3 : tensor<4xf32>, tensor<4xf32>, tensor<4xbf16>
    } : (!x0, !x0, !x0) -> (!x0, !x0, !b0)
    %h1 = mpmd.transfer %h : (!x0) -> !x1
    %s1 = mpmd.transfer %s : (!x0) -> !x1
    %c2 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(0)]> (%c1, %h1)
        {alpa.part = "forward"} (%a: tensor<4xf32>, %d: tensor<4xf32>) {
      %0 = stablehlo.add %a, %d : tensor<4xf32>
      mpmd.return %0 : tensor<4xf32>
    } : (!c1, !x1) -> !c1
    %q = mpmd.fragment<mesh="mesh_1", origin=["update_1"(0)]> (%p, %s1)
        {alpa.part = "update"} (%a: tensor<4xf32>, %d: tensor<4xf32>) {
      %0 = stablehlo.add %a, %d : tensor<4xf32>
      mpmd.return %0 : tensor<4xf32>
    } : (!x1, !x1) -> !x1
    return %c2, %q, %h1, %x, %x, %b, %k0, %h1, %s
      : !c1, !x1, !x1, !x0, !x0, !b0, !x0, !x1, !x0
  }
}
"""


@pytest.fixture
def moves() -> str:
    """A planned program whose values move in every way."""
    return _MOVES
