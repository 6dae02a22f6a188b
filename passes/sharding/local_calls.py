"""Runs sharded custom calls on their shards.

XLA does not know what a custom call does: where its operands are sharded it gathers them. Its
sharding rule says that it may be applied shard by shard, so a call that is planned as sharded runs
in an `sdy.manual_computation` over all axes of the mesh. jax's `custom_partitioning` needs none:
XLA asks jax for the program of a shard, in the process that lowered the call.

Before::

    %0 = stablehlo.custom_call @kernel(%x) {sdy.sharding = …[<@mesh_0, [{"axis0"}, {}]>],
                                            sdy.sharding_rule = …<([i, j])->([i, j]) …>}
      : (tensor<8x16xf32>) -> tensor<8x16xf32>

After, on four devices::

    %0 = sdy.manual_computation(%x) in_shardings=[<@mesh_0, [{"axis0"}, {}]>]
        out_shardings=[<@mesh_0, [{"axis0"}, {}]>] manual_axes={"axis0"} (%a: tensor<2x16xf32>) {
      %1 = stablehlo.custom_call @kernel(%a) : (tensor<2x16xf32>) -> tensor<2x16xf32>
      sdy.return %1
    } …
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from alpa.dialects import func, ir, sdy, stablehlo, walk
from alpa.dialects.sharding import AxisRef, Mesh, Sharding, ShardingRule, op_shardings
from alpa.passes.sharding.rules import rule_of

# XLA asks jax for the program of a shard.
_PARTITIONED_BY_XLA = "CustomSPMDPartitioning"
_OURS = ("sdy.sharding", "sdy.sharding_rule")


def run_calls_on_shards(function: func.FuncOp, mesh: Mesh) -> None:
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
    with ir.InsertionPoint(op), op.location:
        manual = sdy.ManualComputationOp(
            [value.type for value in op.results],
            list(op.operands),
            _per_value(operands),
            _per_value(results),
            sdy.ManualAxesAttr.get([ir.StringAttr.get(name) for name, _ in mesh.axes]),
        )
        types = [_local(v.type, s, mesh) for v, s in zip(op.operands, operands, strict=True)]
        block = manual.regions[0].blocks.append(*types)
        with ir.InsertionPoint(block):
            call = ir.Operation.create(
                op.operation.name,
                results=[_local(v.type, s, mesh) for v, s in zip(op.results, results, strict=True)],
                operands=list(block.arguments),
                attributes={
                    name: op.attributes[name]
                    for name in op.attributes.keys()  # noqa: SIM118 - the bindings' map is no dict
                    if name not in _OURS
                },
            )
            sdy.ReturnOp(list(call.results))
    manual.attributes["sdy.sharding"] = op.attributes["sdy.sharding"]
    for old, new in zip(op.results, manual.results, strict=True):
        old.replace_all_uses_with(new)
    op.operation.erase()


def _per_value(shardings: Sequence[Sharding]) -> ir.Attribute:
    return sdy.TensorShardingPerValueAttr.get([sharding.to_attr() for sharding in shardings])


def _local(type_: ir.Type, sharding: Sharding, mesh: Mesh) -> ir.Type:
    tensor = ir.RankedTensorType(type_)
    shape = [
        size // prod(mesh.axis_size(axis) for axis in axes)
        for size, axes in zip(tensor.shape, sharding.dims, strict=True)
    ]
    return ir.RankedTensorType.get(shape, tensor.element_type)
