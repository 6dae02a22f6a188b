"""Executes unreduced values: what devices add up alone and reduce later.

XLA all-reduces a value with `unreduced` axes at once, or refuses it. So for it the parts lie along
an extra leading dimension, sharded over those axes, and each op that makes or passes on such a
value runs in an `sdy.manual_computation` over them (tried on jaxlib 0.10.2 and 0.12: no
collective until the parts are reduced).

Before::

    %0 = stablehlo.dot_general %x, %y … {sdy.sharding = …[<@mesh_0, [{}, {}], unreduced={"axis0"}>]}
    %1 = sdy.sharding_constraint %0 <@mesh_0, [{"axis0"}, {}]>

After (`axis0` has 2 devices)::

    %0 = sdy.manual_computation(%x, %y) in_shardings=…
        out_shardings=[<@mesh_0, [{"axis0"}, {}, {}]>] manual_axes={"axis0"}
        (%a: tensor<8x16xf32>, %b: tensor<8x16xf32>) {
      %2 = stablehlo.dot_general %a, %b …
      %3 = stablehlo.reshape %2 : (tensor<16x16xf32>) -> tensor<1x16x16xf32>
      sdy.return %3
    } : … -> tensor<2x16x16xf32>
    %4 = stablehlo.reduce(%0 init: 0.0) applies stablehlo.add across dimensions = [0]
    %5 = sdy.sharding_constraint %4 <@mesh_0, [{}, {}]>
    %1 = sdy.sharding_constraint %5 <@mesh_0, [{"axis0"}, {}]>
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from alpa.dialects import ir, sdy, stablehlo
from alpa.dialects.sharding import Mesh, Sharding, op_shardings
from alpa.passes.base import PassError
from alpa.passes.sharding.sums import linear_operands, starts_sums

_Known = dict[ir.Value, Sharding]


def stored(
    shape: Sequence[int], sharding: Sharding, mesh: Mesh
) -> tuple[tuple[int, ...], Sharding]:
    """Shape and sharding of a value in memory: the parts of an unreduced one stand in front."""
    if not sharding.unreduced:
        return tuple(shape), sharding
    parts = prod(dict(mesh.axes)[axis.name] for axis in sharding.unreduced)
    dims = (sharding.unreduced, *sharding.dims)
    return (parts, *shape), Sharding(sharding.mesh, dims)


def lower_sums(operations: Sequence[ir.OpView], known: _Known, mesh: Mesh) -> None:
    """Rewrites the ops on unreduced values; `known` are the shardings of what they start from.

    Values in `known` and the results of rewritten ops are as `stored` says.
    """
    for op in operations:
        shardings = op_shardings(op)
        if shardings is None:
            continue
        if isinstance(op, sdy.ShardingConstraintOp) and _is_unreduced(op.operands[0], known):
            _reduce(op, known[op.operands[0]], shardings[0])
        elif any(sharding.unreduced for sharding in shardings):
            known.update(_run_on_parts(op, shardings[0], known, mesh))
        else:
            known.update(zip(op.results, shardings, strict=True))


def _is_unreduced(value: ir.Value, known: _Known) -> bool:
    return value in known and bool(known[value].unreduced)


def _reduce(op: sdy.ShardingConstraintOp, source: Sharding, target: Sharding) -> None:
    """All-reduce first, then a slice: XLA makes a reduce-scatter of the two where it has one."""
    element = ir.RankedTensorType(op.results[0].type).element_type
    with ir.InsertionPoint(op), op.location:
        total = _sum(op.operands[0], op.results[0].type, element)
        whole = replace(source, unreduced=())
        if whole != target:
            total = sdy.ShardingConstraintOp(total, whole.to_attr()).result
    op.operands[0] = total


def _sum(parts: ir.Value, type_: ir.Type, element: ir.Type) -> ir.Value:
    zero = stablehlo.constant(ir.Attribute.parse(f"dense<0.0> : tensor<{element}>"))
    dims = ir.DenseI64ArrayAttr.get([0])
    reduce = stablehlo.ReduceOp([type_], [parts], [zero], dims)
    scalar = ir.RankedTensorType.get([], element)
    block = reduce.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        stablehlo.ReturnOp([stablehlo.add(*block.arguments)])
    return reduce.results[0]


def _run_on_parts(op: ir.OpView, sharding: Sharding, known: _Known, mesh: Mesh) -> _Known:
    """Puts an op with one, unreduced result into a manual computation over those axes."""
    axes = [axis.name for axis in sharding.unreduced]
    inputs = [known[value] for value in op.operands]
    parts = tuple(i for i, given in enumerate(inputs) if given.unreduced)
    if not (parts == linear_operands(op) if parts else starts_sums(op)):
        raise PassError(
            op,
            f"{op.name} cannot leave its result unreduced over {', '.join(axes)}; plan this value "
            "as a replica or as a shard",
        )
    outer_inputs = [stored((), given, mesh)[1] for given in inputs]
    shape = tuple(ir.RankedTensorType(op.results[0].type).shape)
    outer_shape, outer = stored(shape, sharding, mesh)
    element = ir.RankedTensorType(op.results[0].type).element_type
    with ir.InsertionPoint(op), op.location:
        manual = sdy.ManualComputationOp(
            [ir.RankedTensorType.get(outer_shape, element)],
            list(op.operands),
            _per_value(outer_inputs),
            _per_value([outer]),
            sdy.ManualAxesAttr.get([ir.StringAttr.get(name) for name in axes]),
        )
        types = [
            _local_type(value.type, given, axes, mesh)
            for value, given in zip(op.operands, outer_inputs, strict=True)
        ]
        block = manual.regions[0].blocks.append(*types)
        with ir.InsertionPoint(block):
            operands = [
                _without_parts(argument) if given.unreduced else argument
                for argument, given in zip(block.arguments, inputs, strict=True)
            ]
            copy = op.operation.clone()
            del copy.attributes["sdy.sharding"]
            for i, operand in enumerate(operands):
                copy.operands[i] = operand
            free = sdy.ShardingConstraintOp(
                copy.results[0], replace(sharding, unreduced=()).to_attr()
            )
            sdy.ReturnOp(
                [stablehlo.reshape(ir.RankedTensorType.get((1, *shape), element), free.result)]
            )
    op.results[0].replace_all_uses_with(manual.results[0])
    op.operation.erase()
    return {manual.results[0]: sharding}


def _local_type(type_: ir.Type, sharding: Sharding, axes: Sequence[str], mesh: Mesh) -> ir.Type:
    """Only the manual axes cut the types inside a manual computation."""
    tensor, sizes = ir.RankedTensorType(type_), dict(mesh.axes)
    shape = [
        size // prod(sizes[axis.name] for axis in on if axis.name in axes)
        for size, on in zip(tensor.shape, sharding.dims, strict=True)
    ]
    return ir.RankedTensorType.get(shape, tensor.element_type)


def _without_parts(value: ir.Value) -> ir.Value:
    tensor = ir.RankedTensorType(value.type)
    return stablehlo.reshape(
        ir.RankedTensorType.get(list(tensor.shape)[1:], tensor.element_type), value
    )


def _per_value(shardings: Sequence[Sharding]) -> ir.Attribute:
    return sdy.TensorShardingPerValueAttr.get([sharding.to_attr() for sharding in shardings])
