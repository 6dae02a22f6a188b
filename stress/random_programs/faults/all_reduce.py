"""Omits an all-reduce: each device continues with its own partial sum."""

from __future__ import annotations

from collections.abc import Sequence

from alpa.dialects import body, ir, main_function, sdy, stablehlo
from alpa.dialects.sharding import AxisRef, Mesh, Sharding, signature_shardings
from stress.random_programs.faults.at_ops import Place, at_one_op

Axes = tuple[AxisRef, ...]


def _has_all_reduce(place: Place) -> bool:
    return bool(_summed_axes(place))


def _drop(place: Place) -> None:
    """Runs the op on shards of its summed dimensions, and claims that all devices have the same."""
    op, mesh = place.op, place.fragment.mesh
    (result,) = op.results
    summed = _summed_axes(place)
    inputs = [
        Sharding(mesh, tuple(summed.get((number, dim), ()) for dim in range(_rank(operand))))
        for number, operand in enumerate(op.operands)
    ]
    manual = sdy.ManualComputationOp(
        [result.type],
        list(op.operands),
        _per_value(inputs),
        _per_value([Sharding(mesh, ((),) * _rank(result))]),
        sdy.ManualAxesAttr.get(
            [ir.StringAttr.get(name) for name, _ in place.mesh.axes if name in _names(summed)]
        ),
    )
    shards = [
        _shard(operand.type, sharding, place.mesh)
        for operand, sharding in zip(op.operands, inputs, strict=True)
    ]
    block = manual.regions[0].blocks.append(*shards)
    with ir.InsertionPoint(block):
        copy = op.operation.clone()
        for number, argument in enumerate(block.arguments):
            copy.operands[number] = argument
        sdy.ReturnOp(list(copy.results))
    result.replace_all_uses_with(manual.results[0])
    op.operation.erase()


def _summed_axes(place: Place) -> dict[tuple[int, int], Axes]:
    """The axes that share an op's sum, by each summed operand and dimension."""
    found: dict[tuple[int, int], Axes] = {}
    for ends in _summed_dims(place.op):
        cut = [
            sharding.on(place.mesh).dims[dim]
            for operand, dim in ends
            if (sharding := _sharding(place, place.op.operands[operand])) is not None
        ]
        axes = max(cut, key=len, default=())
        if axes and not any(axis.sub for axis in axes):
            found |= dict.fromkeys(ends, axes)
    return found


def _summed_dims(op: ir.OpView) -> list[list[tuple[int, int]]]:
    """The dimensions that an op sums over, by operand."""
    if isinstance(op, stablehlo.DotGeneralOp):
        numbers = stablehlo.DotDimensionNumbers(op.dot_dimension_numbers)
        left, right = numbers.lhs_contracting_dimensions, numbers.rhs_contracting_dimensions
        return [[(0, a), (1, b)] for a, b in zip(left, right, strict=True)]
    if not isinstance(op, stablehlo.ReduceOp) or len(op.results) > 1:
        return []
    if not isinstance(body(op).operations[0], stablehlo.AddOp):
        return []
    return [[(0, dim)] for dim in ir.DenseI64ArrayAttr(op.dimensions)]


def _sharding(place: Place, value: ir.Value) -> Sharding | None:
    """The sharding written at a value, if any."""
    if isinstance(value, ir.BlockArgument):
        function = main_function(place.module)
        if value.owner != function.entry_block:
            return None
        return signature_shardings(function, "arg_attrs").get(value.arg_number)
    assert not isinstance(value.owner, ir.Block)
    owner = value.owner.opview
    if isinstance(owner, sdy.ManualComputationOp):
        made = sdy.TensorShardingPerValueAttr(owner.out_shardings).shardings
        return Sharding.from_attr(made[ir.OpResult(value).result_number])
    if isinstance(owner, sdy.ShardingConstraintOp):
        return Sharding.from_attr(owner.sharding)
    return None


def _names(summed: dict[tuple[int, int], Axes]) -> set[str]:
    return {axis.name for axes in summed.values() for axis in axes}


def _rank(value: ir.Value) -> int:
    return ir.RankedTensorType(value.type).rank


def _shard(type_: ir.Type, sharding: Sharding, mesh: Mesh) -> ir.Type:
    tensor, shape = ir.RankedTensorType(type_), list[int]()
    for size, axes in zip(tensor.shape, sharding.dims, strict=True):
        for axis in axes:
            size //= mesh.axis_size(axis)
        shape.append(size)
    return ir.RankedTensorType.get(shape, tensor.element_type)


def _per_value(shardings: Sequence[Sharding]) -> ir.Attribute:
    return sdy.TensorShardingPerValueAttr.get([sharding.to_attr() for sharding in shardings])


DROPPED_ALL_REDUCE = at_one_op("an all-reduce is dropped", where=_has_all_reduce, change=_drop)
