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

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from alpa.dialects import body, filled, ir, sdy, stablehlo
from alpa.dialects.sharding import AxisRef, Mesh, Sharding, op_shardings, set_op_shardings
from alpa.passes.analysis.graph import replace_op
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
            _reduce(op, source, shardings[0], mesh)
        elif isinstance(op, stablehlo.OptimizationBarrierOp):
            known.update(_pass_on(op, shardings, mesh))
        elif any(sharding.unreduced for sharding in shardings):
            known.update(_run_on_parts(op, shardings[0], known, mesh))
        else:
            known.update(zip(op.results, shardings, strict=True))


def _reduce(op: ir.OpView, source: Sharding, target: Sharding, mesh: Mesh) -> None:
    """Writes an all-reduce, then a slice; XLA combines them where it has a reduce-scatter.

    It combines those that cut one dimension over all reduced axes. So axes that cut different
    dimensions, or none, are reduced one after the other, those that cut none at last.
    """
    steps = list(_steps(source, target))
    parts, held = op.operands[0], source
    with ir.InsertionPoint(op), op.location:
        if len(steps) > 1:
            parts = _one_dimension_per_axis(parts, source, mesh)
        for axes, dims in steps:
            numbers = [i for i, axis in enumerate(held.unreduced) if axis in axes]
            left = tuple(axis for axis in held.unreduced if axis not in axes)
            parts = _sum(parts, numbers if len(steps) > 1 else [0])
            outer = tuple((axis,) for axis in left)
            for layout in dict.fromkeys((held.dims, dims)):
                if left or layout != target.dims:
                    sharding = Sharding(source.mesh, (*outer, *layout))
                    parts = sdy.ShardingConstraintOp(parts, sharding.to_attr()).result
            held = replace(source, dims=dims, unreduced=left)
    op.operands[0] = parts


def _steps(
    source: Sharding, target: Sharding
) -> Iterator[tuple[tuple[AxisRef, ...], tuple[tuple[AxisRef, ...], ...]]]:
    """The axes to reduce at once, and how each dimension is sharded afterwards."""
    dims, left = list(source.dims), source.unreduced
    added = [new[len(old) :] for old, new in zip(source.dims, target.dims, strict=True)]
    cuts = all(
        new[: len(old)] == old for old, new in zip(source.dims, target.dims, strict=True)
    ) and all(axis in left for axes in added for axis in axes)
    for d, axes in enumerate(added if cuts else ()):
        if axes:
            dims[d] = target.dims[d]
            left = tuple(axis for axis in left if axis not in axes)
            yield axes, tuple(dims)
    if left:
        yield left, tuple(dims)


def _one_dimension_per_axis(parts: ir.Value, source: Sharding, mesh: Mesh) -> ir.Value:
    type_, sizes = ir.RankedTensorType(parts.type), dict(mesh.axes)
    leading = [sizes[axis.name] for axis in source.unreduced]
    shape = ir.RankedTensorType.get([*leading, *type_.shape[1:]], type_.element_type)
    outer = tuple((axis,) for axis in source.unreduced)
    sharding = Sharding(source.mesh, (*outer, *source.dims))
    return sdy.ShardingConstraintOp(stablehlo.reshape(shape, parts), sharding.to_attr()).result


def _sum(parts: ir.Value, numbers: Sequence[int]) -> ir.Value:
    given = ir.RankedTensorType(parts.type)
    shape = [size for d, size in enumerate(given.shape) if d not in numbers]
    type_ = ir.RankedTensorType.get(shape, given.element_type)
    scalar = ir.RankedTensorType.get([], type_.element_type)
    dims = ir.DenseI64ArrayAttr.get(list(numbers))
    reduce = stablehlo.ReduceOp([type_], [parts], [filled(scalar, 0.0)], dims)
    block = reduce.regions[0].blocks.append(scalar, scalar)
    with ir.InsertionPoint(block):
        stablehlo.ReturnOp([stablehlo.add(*block.arguments)])
    return reduce.results[0]


def _pass_on(
    barrier: stablehlo.OptimizationBarrierOp, shardings: Sequence[Sharding], mesh: Mesh
) -> _Known:
    """Gives the results of a barrier the types of its operands, which may be parts by now."""
    with ir.InsertionPoint(barrier), barrier.location:
        new = stablehlo.OptimizationBarrierOp(list(barrier.operands))
    set_op_shardings(new, tuple(stored((), sharding, mesh)[1] for sharding in shardings))
    replace_op(barrier, new.results)
    return dict(zip(new.results, shardings, strict=True))


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
        manual = manual_computation(list(op.operands), types, outer_inputs, [outer], axes, mesh)
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
