"""Writes partial sums as parts along a leading dimension.

A value with `unreduced` axes is a partial sum: each device holds a part of it, and the parts are
added up later. XLA reduces such a value at once, or refuses it. So the pass writes its parts along
an extra leading dimension, sharded over those axes. Each op that makes or passes on a partial sum
runs in an `sdy.manual_computation` over them (tried on jaxlib 0.10.2 and 0.12: no collective until
the parts are reduced). The constraint that ends a partial sum becomes a sum over that dimension.

**Before**::

    !x = !mpmd.mesh_tensor<"mesh_0", tensor<8x4xf32>, sharding=<@mesh_0, [{"a"}, {}]>>
    !w = !mpmd.mesh_tensor<"mesh_0", tensor<4x4xf32>>
    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(%x: !x) -> !w attributes {
        topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>} {
      %w = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x)
          {alpa.module = @m, alpa.part = "forward"} (%a: tensor<8x4xf32>) {
        %0 = stablehlo.dot_general %a, %a, contracting_dims = [0] x [0]
          : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
        mpmd.return %0 : tensor<4x4xf32>
      } : (!x) -> !w
      return %w : !w
    }
    module @m {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
          -> (tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {}]>}) {
        %0 = stablehlo.dot_general %a, %a, contracting_dims = [0] x [0]
            {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {}], unreduced={"a"}>]>}
          : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
        %1 = sdy.sharding_constraint %0 <@mesh_0, [{}, {}]>
            {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {}]>]>} : tensor<4x4xf32>
        return %1 : tensor<4x4xf32>
      }
    }

**After**::

    sdy.mesh @mesh_0 = <["a"=2]>
    func.func public @main(…) -> … { … }
    module @m {
      sdy.mesh @mesh_0 = <["a"=2]>
      func.func public @main(
          %a: tensor<8x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{"a"}, {}]>})
          -> (tensor<4x4xf32> {sdy.sharding = #sdy.sharding<@mesh_0, [{}, {}]>}) {
        %parts = sdy.manual_computation(%a, %a)
            in_shardings=[<@mesh_0, [{"a"}, {}]>, <@mesh_0, [{"a"}, {}]>]
            out_shardings=[<@mesh_0, [{"a"}, {}, {}]>]
            manual_axes={"a"} (%b: tensor<4x4xf32>, %c: tensor<4x4xf32>) {
          %2 = stablehlo.dot_general %b, %c, contracting_dims = [0] x [0]
            : (tensor<4x4xf32>, tensor<4x4xf32>) -> tensor<4x4xf32>
          %3 = sdy.sharding_constraint %2 <@mesh_0, [{}, {}]> : tensor<4x4xf32>
          %4 = stablehlo.reshape %3 : (tensor<4x4xf32>) -> tensor<1x4x4xf32>
          sdy.return %4 : tensor<1x4x4xf32>
        } : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<2x4x4xf32>
        %zero = stablehlo.constant dense<0.000000e+00> : tensor<f32>
        %sum = stablehlo.reduce(%parts init: %zero) applies stablehlo.add across dimensions = [0]
          : (tensor<2x4x4xf32>, tensor<f32>) -> tensor<4x4xf32>
        %1 = sdy.sharding_constraint %sum <@mesh_0, [{}, {}]>
            {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {}]>]>} : tensor<4x4xf32>
        return %1 : tensor<4x4xf32>
      }
    }

**Requires**: modules as `outline-fragments` leaves them.

**Ensures**: no sharding of an argument, a result or an op outside of regions is unreduced. A
partial sum that enters or leaves the function does so as parts.

**Options**: none.

**Fails when** an op that is planned as a partial sum cannot make or pass on one, or a fragment has
no module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from alpa.dialects import body, filled, ir, sdy, stablehlo
from alpa.dialects.sharding import Mesh, Sharding, op_shardings
from alpa.passes.base import Pass, PassError, Remark
from alpa.passes.plan.fragment_modules import SHARDING, FragmentModule, fragment_modules
from alpa.passes.sharding.manual import manual_computation
from alpa.passes.sharding.sums import linear_operands, starts_sums, stored

_Known = dict[ir.Value, Sharding]


@dataclass(frozen=True, kw_only=True)
class LowerPartialSums(Pass):
    """Writes partial sums as parts along a leading dimension."""

    name: ClassVar[str] = "lower-partial-sums"

    def run(self, module: ir.Module, remark: Remark) -> None:
        for nested in fragment_modules(module):
            _lower(nested)


def _lower(nested: FragmentModule) -> None:
    block, mesh = nested.function.entry_block, nested.mesh
    known: _Known = {}
    for argument, attrs in zip(block.arguments, nested.arguments, strict=True):
        known[argument] = sharding = Sharding.from_attr(attrs[SHARDING])
        tensor = ir.RankedTensorType(argument.type)
        shape, _ = stored(tensor.shape, sharding, mesh)
        argument.set_type(ir.RankedTensorType.get(shape, tensor.element_type))
    for attrs in (*nested.arguments, *nested.results):
        _, outer = stored((), Sharding.from_attr(attrs[SHARDING]), mesh)
        attrs[SHARDING] = outer.to_attr()
    _rewrite(list(block.operations)[:-1], known, mesh)
    nested.write_signature()


def _rewrite(operations: Sequence[ir.OpView], known: _Known, mesh: Mesh) -> None:
    """Rewrites the ops on partial sums. `known` has the shardings of the function's arguments.

    Arguments and the results of rewritten ops have the shapes of `stored`.
    """
    for op in operations:
        shardings = op_shardings(op)
        if shardings is None:
            continue
        source = known.get(op.operands[0]) if isinstance(op, sdy.ShardingConstraintOp) else None
        if source is not None and source.unreduced:
            _reduce(op, source, shardings[0])
        elif any(sharding.unreduced for sharding in shardings):
            known.update(_run_on_parts(op, shardings[0], known, mesh))
        else:
            known.update(zip(op.results, shardings, strict=True))


def _reduce(op: ir.OpView, source: Sharding, target: Sharding) -> None:
    """Writes an all-reduce, then a slice; XLA combines them where it has a reduce-scatter."""
    with ir.InsertionPoint(op), op.location:
        total = _sum(op.operands[0], ir.RankedTensorType(op.results[0].type))
        whole = replace(source, unreduced=())
        if whole != target:
            total = sdy.ShardingConstraintOp(total, whole.to_attr()).result
    op.operands[0] = total


def _sum(parts: ir.Value, type_: ir.RankedTensorType) -> ir.Value:
    scalar = ir.RankedTensorType.get([], type_.element_type)
    dims = ir.DenseI64ArrayAttr.get([0])
    reduce = stablehlo.ReduceOp([type_], [parts], [filled(scalar, 0.0)], dims)
    block = reduce.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        stablehlo.ReturnOp([stablehlo.add(*block.arguments)])
    return reduce.results[0]


def _run_on_parts(op: ir.OpView, sharding: Sharding, known: _Known, mesh: Mesh) -> _Known:
    """Puts an op whose one result is a partial sum into a manual computation over its axes."""
    axes = [axis.name for axis in sharding.unreduced]
    inputs = [known[value] for value in op.operands]
    parts = tuple(i for i, given in enumerate(inputs) if given.unreduced)
    if not (parts == linear_operands(op) if parts else starts_sums(op)):
        raise PassError(
            op,
            f"{op.name} cannot leave its result unreduced over {', '.join(axes)}; plan this value "
            "as a replica or as a shard",
        )
    result = op.results[0]
    type_ = ir.RankedTensorType(result.type)
    shape, outer = stored(type_.shape, sharding, mesh)
    types = [ir.RankedTensorType.get(shape, type_.element_type)]
    outer_inputs = [stored((), given, mesh)[1] for given in inputs]
    with ir.InsertionPoint(op), op.location:
        manual = manual_computation(op, types, outer_inputs, [outer], axes, mesh)
        result.replace_all_uses_with(manual.results[0])
        block = body(manual)
        block.append(op)
        del op.attributes[SHARDING]
        with ir.InsertionPoint(op):
            for i, (argument, given) in enumerate(zip(block.arguments, inputs, strict=True)):
                op.operands[i] = _without_parts(argument) if given.unreduced else argument
        with ir.InsertionPoint(block):
            free = sdy.ShardingConstraintOp(result, replace(sharding, unreduced=()).to_attr())
            part = ir.RankedTensorType.get((1, *type_.shape), type_.element_type)
            sdy.ReturnOp([stablehlo.reshape(part, free.result)])
    return {manual.results[0]: sharding}


def _without_parts(value: ir.Value) -> ir.Value:
    tensor = ir.RankedTensorType(value.type)
    return stablehlo.reshape(
        ir.RankedTensorType.get(list(tensor.shape)[1:], tensor.element_type), value
    )
