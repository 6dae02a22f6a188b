"""Runs sharded custom calls on their shards.

XLA does not know what a custom call does: it gathers the operands of a sharded one. If the call has
a sharding rule, it may be applied shard by shard. So a call that is planned as sharded runs in an
`sdy.manual_computation` over all axes of the mesh. JAX's `custom_partitioning` stays as it is: XLA
asks JAX for the program of a shard, in the process that lowered the call.

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%x: !x) -> !x attributes {
        topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
      %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x)
          {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8x4xf32>) {
        %0 = stablehlo.custom_call @kernel(%a) : (tensor<8x4xf32>) -> tensor<8x4xf32>
        mpmd.return %0 : tensor<8x4xf32>
      } : (!x) -> !x
      return %y : !x
    }
    module @m {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
          -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>}) {
        %0 = stablehlo.custom_call @kernel(%a) {
            sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>,
            sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) {i=8, j=4}, custom>}
          : (tensor<8x4xf32>) -> tensor<8x4xf32>
        return %0 : tensor<8x4xf32>
      }
    }

**After**::

    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(…) -> … { … }
    module @m {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
          -> (tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>}) {
        %0 = sdy.manual_computation(%a)
            in_shardings=[<@mesh_0, [{"a"}, {}]>] out_shardings=[<@mesh_0, [{"a"}, {}]>]
            manual_axes={"a"} (%b: tensor<4x4xf32>) {
          %1 = stablehlo.custom_call @kernel(%b) : (tensor<4x4xf32>) -> tensor<4x4xf32>
          sdy.return %1 : tensor<4x4xf32>
        } {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {}]>]>}
          : (tensor<8x4xf32>) -> tensor<8x4xf32>
        return %0 : tensor<8x4xf32>
      }
    }

**Requires**: modules as `outline-fragments` leaves them, whose ops have shardings.

**Ensures**: each custom call that has a rule and a sharded result runs on shards.

**Options**: none.

**Fails when** a fragment has no module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from alpa.dialects import body, func, ir, sdy, stablehlo, walk
from alpa.dialects.sharding import AxisRef, Mesh, Sharding, ShardingRule, op_shardings
from alpa.passes.base import Pass, Remark
from alpa.passes.plan.fragment_modules import SHARDING, fragment_modules
from alpa.passes.sharding.manual import local_type, manual_computation
from alpa.passes.sharding.rules import rule_of

# XLA asks JAX for the program of a shard.
_PARTITIONED_BY_XLA = "CustomSPMDPartitioning"
_RULE = "sdy.sharding_rule"


@dataclass(frozen=True, kw_only=True)
class RunCallsOnShards(Pass):
    """Runs sharded custom calls on their shards."""

    name: ClassVar[str] = "run-calls-on-shards"

    def run(self, module: ir.Module, remark: Remark) -> None:
        for nested in fragment_modules(module):
            _run_calls(nested.function, nested.mesh)


def _run_calls(function: func.FuncOp, mesh: Mesh) -> None:
    """Rewrites each custom call of a function that has a rule and a sharded operand or result."""
    for op in list(walk(function.entry_block)):
        shardings = op_shardings(op)
        if not isinstance(op, stablehlo.CustomCallOp) or shardings is None:
            continue
        if ir.StringAttr(op.attributes["call_target_name"]).value == _PARTITIONED_BY_XLA:
            continue
        rule = rule_of(op)
        if rule is not None and any(axes for s in shardings for axes in s.dims):
            _run_on_shards(op, rule, shardings, mesh)


def _run_on_shards(
    op: stablehlo.CustomCallOp, rule: ShardingRule, results: Sequence[Sharding], mesh: Mesh
) -> None:
    on: dict[int, tuple[AxisRef, ...]] = {}
    for mapping, sharding in zip(rule.results, results, strict=True):
        on.update({dim[0]: axes for dim, axes in zip(mapping, sharding.dims, strict=True) if axes})
    operands = [
        Sharding(
            results[0].mesh, tuple(tuple(a for f in dim for a in on.get(f, ())) for dim in mapping)
        )
        for mapping in rule.operands
    ]
    axes = [name for name, _ in mesh.axes]
    with ir.InsertionPoint(op), op.location:
        types = [value.type for value in op.results]
        manual = manual_computation(list(op.operands), types, operands, results, axes, mesh)
        for old, new in zip(op.results, manual.results, strict=True):
            old.replace_all_uses_with(new)
        manual.attributes[SHARDING] = op.attributes[SHARDING]
        block = body(manual)
        block.append(op)
        with ir.InsertionPoint(block):
            sdy.ReturnOp(list(op.results))
    for i, argument in enumerate(block.arguments):
        op.operands[i] = argument
    for value, sharding in zip(op.results, results, strict=True):
        value.set_type(local_type(value.type, sharding, axes, mesh))
    for name in {SHARDING, _RULE} & {*op.attributes.keys()}:
        del op.attributes[name]
