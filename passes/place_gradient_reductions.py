"""Marks where an update reduces a gradient that may still be partial sums.

With several micro-batches the devices of a mesh may keep a gradient as partial sums and reduce it
once per step; `ilp-shard-annotate` decides whether they do. With one micro-batch they may keep a
gradient that adds up those of several uses of a parameter. This pass inserts an
`sdy.sharding_constraint` that is open in all dimensions before the first reader of each gradient in
its update. All readers then share one reduction.

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>>
    !w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
    sdy.mesh @mesh_0 = <["axis0"=2]>
    func.func public @main(%x: !x) -> !w attributes {
        topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>>,
        alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>,
                        logical_shape = array<i64: 2>}],
        alpa.plan = {cluster = "cpu:1x2", num_micro_batches = 4 : i64, schedule = "1f1b",
                     predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
      %g = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%x)
          {alpa.part = "backward"} (%a: tensor<8x4xf32>) {
        %0 = stablehlo.dot_general %a, %a, contracting_dims = [0] x [0]
          : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
        mpmd.return %0 : tensor<4x4xf32>
      } : (!x) -> !w
      %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%g)
          {alpa.part = "update"} (%a: tensor<4x4xf32>) {
        %0 = stablehlo.negate %a : tensor<4x4xf32>
        mpmd.return %0 : tensor<4x4xf32>
      } : (!w) -> !w
      return %n : !w
    }

**After**::

    sdy.mesh @mesh_0 = <["axis0"=2]>
    func.func public @main(%x: …) -> … attributes {…} {
      %g = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%x) …
      %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"], stage=0> (%g)
          {alpa.part = "update"} (%a: tensor<4x4xf32>) {
        %1 = sdy.sharding_constraint %a <@mesh_0, [{?}, {?}]> : tensor<4x4xf32>
        %0 = stablehlo.negate %1 : tensor<4x4xf32>
        mpmd.return %0 : tensor<4x4xf32>
      } : …
      return %n : …
    }

**Requires**: a plan without shardings, as `stage-mesh-partition` leaves it.

**Ensures**: each gradient that only updates of its mesh read is read there through one constraint.
With one micro-batch, this holds for gradients that are sums of others.

**Options**: none.

**Fails when** the module has no plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from alpa.dialects import ir
from alpa.passes.analysis.input_checks import check_input
from alpa.passes.base import Pass, Remark
from alpa.passes.plan.attribute import plan_and_any_cluster
from alpa.passes.sharding.gradient_reductions import place_reductions


@dataclass(frozen=True, kw_only=True)
class PlaceGradientReductions(Pass):
    """Marks where an update reduces a gradient that may still be partial sums."""

    name: ClassVar[str] = "place-gradient-reductions"

    def run(self, module: ir.Module, remark: Remark) -> None:
        function = check_input(module, is_checked=self.is_checked)
        plan, _ = plan_and_any_cluster(function)
        place_reductions(function, plan.num_micro_batches)
