"""Runs a program on one device on random arguments, as a reference for its plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

from alpa.dialects import separate
from alpa.dialects.attributes import GRADIENT, LAYER_BOUNDARY
from alpa.dialects.bindings import func, ir, main_function, sdy, stablehlo, walk
from alpa.dialects.sharding import Mesh, Sharding
from alpa.runtime.comparison import compare
from alpa.runtime.dtypes import is_integer, numpy_dtype
from alpa.runtime.pjrt import compile_module

__all__ = ["compare", "index_bounds", "random_arguments", "run_unplanned", "unplanned"]

_IDENTITIES = (LAYER_BOUNDARY, GRADIENT, "Sharding")
# Ops between an index and its use, or between a variance and its root.
_THROUGH = (
    stablehlo.AbsOp,
    stablehlo.AddOp,
    stablehlo.AndOp,
    stablehlo.BroadcastInDimOp,
    stablehlo.ClampOp,
    stablehlo.ConcatenateOp,
    stablehlo.ConvertOp,
    stablehlo.DivOp,
    stablehlo.MaxOp,
    stablehlo.MinOp,
    stablehlo.MulOp,
    stablehlo.OptimizationBarrierOp,
    stablehlo.OrOp,
    stablehlo.PadOp,
    stablehlo.RemOp,
    stablehlo.ReshapeOp,
    stablehlo.ReverseOp,
    stablehlo.SelectOp,
    stablehlo.SliceOp,
    stablehlo.SubtractOp,
    stablehlo.TransposeOp,
)
# Ops that repeat a value and leave its elements unchanged.
_COPIES = (
    stablehlo.BroadcastInDimOp,
    stablehlo.ConvertOp,
    stablehlo.OptimizationBarrierOp,
    stablehlo.ReshapeOp,
    stablehlo.TransposeOp,
)
_ROOTS = (
    stablehlo.CbrtOp,
    stablehlo.LogOp,
    stablehlo.PowOp,
    stablehlo.RsqrtOp,
    stablehlo.SqrtOp,
)

_BATCH_NORMS = (
    stablehlo.BatchNormGradOp,
    stablehlo.BatchNormInferenceOp,
    stablehlo.BatchNormTrainingOp,
)


def run_unplanned(module: ir.Module, arguments: Sequence[Any]) -> tuple[jax.Array, ...]:
    """Runs an unplanned program on the first device. Nothing is donated.

    A part that is written for the shards of a mesh (`sdy.manual_computation`) runs on as many
    devices, with the program's arguments and results replicated.

    Raises:
        ValueError: JAX has fewer devices than that mesh.
    """
    return unplanned(module)(arguments)


def unplanned(module: ir.Module) -> Callable[[Sequence[Any]], tuple[jax.Array, ...]]:
    """Compiles a program for several runs of `run_unplanned`."""
    plain = separate(module.operation)
    with plain.context:
        mesh = _manual_mesh(plain)
        _strip(plain, mesh)
    main = main_function(plain)
    types = [ir.RankedTensorType(type_) for type_ in main.type.results]
    devices = jax.devices()[: 1 if mesh is None else mesh[1].size]
    if mesh is None:
        sharding = SingleDeviceSharding(devices[0])
    elif len(devices) < mesh[1].size:
        raise ValueError(
            f"the program computes on the shards of @{mesh[0]}, {mesh[1].size} devices; JAX has "
            f"{len(devices)}"
        )
    else:
        sharding = NamedSharding(jax.make_mesh((len(devices),), ("all",)), PartitionSpec())
    compiled = compile_module(plain, devices, [(tuple(t.shape), sharding) for t in types])
    inputs = [ir.RankedTensorType(type_) for type_ in main.type.inputs]
    dtypes = [numpy_dtype(str(type_.element_type)) for type_ in inputs]

    def run(arguments: Sequence[Any]) -> tuple[jax.Array, ...]:
        with jax.enable_x64(True):
            arrays = [
                jax.device_put(np.asarray(array, dtype), sharding, may_alias=False)
                for array, dtype in zip(arguments, dtypes, strict=True)
            ]
            return tuple(compiled(arrays))

    return run


def _manual_mesh(module: ir.Module) -> tuple[str, Mesh] | None:
    """The mesh of the program's manual computations."""
    meshes = {
        op.sym_name.value: Mesh.from_attr(op.mesh)
        for op in module.body.operations
        if isinstance(op, sdy.MeshOp)
    }
    for op in walk(module.body):
        if isinstance(op, sdy.ManualComputationOp):
            given = sdy.TensorShardingPerValueAttr(op.attributes["out_shardings"]).shardings
            name = Sharding.from_attr(given[0]).mesh
            return name, meshes[name]
    return None


def _strip(module: ir.Module, mesh: tuple[str, Mesh] | None) -> None:
    """Removes shardings, and markers, which lower to the identity.

    Computations on the shards of a mesh stay; arguments and results are then replicated.
    """
    main = main_function(module)
    main.attributes["sym_name"] = ir.StringAttr.get("main")
    for name in ("arg_attrs", "res_attrs"):
        if name in main.attributes:
            del main.attributes[name]
    if mesh is not None:
        for name, types in (("arg_attrs", main.type.inputs), ("res_attrs", main.type.results)):
            main.attributes[name] = ir.ArrayAttr.get(
                [ir.DictAttr.get({"sdy.sharding": _whole(mesh[0], type_)}) for type_ in types]
            )
    for op in list(walk(module.body)):
        target = op.attributes.get("call_target_name")
        marker = target is not None and ir.StringAttr(target).value in _IDENTITIES
        if marker or isinstance(op, sdy.ShardingConstraintOp):
            for result, operand in zip(op.results, op.operands, strict=False):
                result.replace_all_uses_with(operand)
            op.operation.erase()
        elif "sdy.sharding" in op.attributes:
            del op.attributes["sdy.sharding"]
    for op in list(module.body.operations):
        if isinstance(op, sdy.MeshOp) and mesh is None:
            op.operation.erase()


def _whole(mesh: str, type_: ir.Type) -> ir.Attribute:
    return Sharding.of(mesh, ((),) * ir.RankedTensorType(type_).rank).to_attr()


def random_arguments(
    module: ir.Module, seed: int, *, integer_range: tuple[int, int] | None = None
) -> list[np.ndarray]:
    """Draws arrays for every argument of `@main`.

    Floats are small and normally distributed, except where that would make the program infinite or
    ill-conditioned. They are at least 0.1 if a root or a logarithm of a value computed from them is
    taken. They are at least 1 if they divide, bound others from above or scale a batch norm.
    Integers that index stay in range if the dimension is visible; other integers are 0 or 1.
    `integer_range` (the upper end is excluded) overrides both.
    """
    generator = np.random.default_rng(seed)
    arrays: list[np.ndarray] = []
    for argument in main_function(module).entry_block.arguments:
        type_ = ir.RankedTensorType(argument.type)
        dtype, shape = numpy_dtype(str(type_.element_type)), tuple(type_.shape)
        if dtype.kind == "b":
            arrays.append(generator.integers(0, 2, shape).astype(dtype))
        elif is_integer(dtype):
            low, high = integer_range or (0, min(index_bounds(argument), default=2))
            arrays.append(generator.integers(low, max(high, low + 1), shape).astype(dtype))
        elif dtype.kind == "c":
            parts = generator.normal(size=(2, *shape)) * 0.1
            arrays.append((parts[0] + 1j * parts[1]).astype(dtype))
        else:
            array = generator.normal(size=shape) * 0.1
            if (least := _least(argument)) is not None:
                array = least + np.abs(array)
            arrays.append(array.astype(dtype))
    return arrays


def index_bounds(value: ir.Value) -> Iterator[int]:
    """The sizes of all dimensions that an integer value visibly indexes."""
    for user, operand in _reached(value):
        if isinstance(user, stablehlo.GatherOp) and operand == 1:
            numbers = stablehlo.GatherDimensionNumbers(user.attributes["dimension_numbers"])
            slices = ir.DenseI64ArrayAttr(user.attributes["slice_sizes"])
            shape = _shape(user.operands[0])
            yield from (shape[d] - slices[d] + 1 for d in numbers.start_index_map)
        elif isinstance(user, stablehlo.ScatterOp) and operand == len(user.operands) // 2:
            numbers = stablehlo.ScatterDimensionNumbers(
                user.attributes["scatter_dimension_numbers"]
            )
            shape = _shape(user.operands[0])
            yield from (shape[d] for d in numbers.scattered_dims_to_operand_dims)
        elif isinstance(user, stablehlo.DynamicSliceOp) and operand >= 1:
            slices = ir.DenseI64ArrayAttr(user.attributes["slice_sizes"])
            yield _shape(user.operands[0])[operand - 1] - slices[operand - 1] + 1
        elif isinstance(user, stablehlo.DynamicUpdateSliceOp) and operand >= 2:
            whole, part = _shape(user.operands[0]), _shape(user.operands[1])
            yield whole[operand - 2] - part[operand - 2] + 1
        elif isinstance(user, stablehlo.CompareOp):
            yield from _iota_extent(user.operands[1 - operand])


def _least(value: ir.Value) -> float | None:
    """The smallest element allowed for a float argument, None for any."""
    for user, operand in _reached(value, _COPIES):
        if isinstance(user, stablehlo.DivOp) and operand == 1:
            return 1.0
        if isinstance(user, stablehlo.MinOp) and not _shape(value):
            return 1.0
        if isinstance(user, stablehlo.ClampOp) and operand == 2:
            return 1.0
        if isinstance(user, _BATCH_NORMS) and operand == 1:
            return 1.0
        if isinstance(user, stablehlo.BatchNormGradOp) and operand == 3:
            return 0.1
        if isinstance(user, stablehlo.BatchNormInferenceOp) and operand == 4:
            return 0.1
    return 0.1 if any(isinstance(user, _ROOTS) for user, _ in _reached(value)) else None


def _shape(value: ir.Value) -> list[int]:
    return list(ir.RankedTensorType(value.type).shape)


def _iota_extent(value: ir.Value) -> Iterator[int]:
    """The size of an iota that a value copies: a comparison with it makes a one-hot."""
    while isinstance(value.owner, ir.Operation | ir.OpView):
        op = value.owner.opview if isinstance(value.owner, ir.Operation) else value.owner
        if isinstance(op, stablehlo.IotaOp):
            yield _shape(op.result)[ir.IntegerAttr(op.attributes["iota_dimension"]).value]
        if not isinstance(
            op, stablehlo.BroadcastInDimOp | stablehlo.ReshapeOp | stablehlo.ConvertOp
        ):
            return
        value = op.operands[0]


def _reached(
    start: ir.Value, through: tuple[type[ir.OpView], ...] = _THROUGH
) -> Iterator[tuple[ir.OpView, int]]:
    """The uses of a value, also through ops of these kinds, loops and calls."""
    seen: set[ir.Value] = set()
    waiting = [start]
    while waiting:
        value = waiting.pop()
        if value in seen:
            continue
        seen.add(value)
        for use in value.uses:
            op = use.owner.opview if isinstance(use.owner, ir.Operation) else use.owner
            yield op, use.operand_number
            if isinstance(op, through):
                waiting += op.results
            elif isinstance(op, stablehlo.WhileOp):
                inner = [region.blocks[0].arguments[use.operand_number] for region in op.regions]
                waiting += [*inner, op.results[use.operand_number]]
            elif isinstance(op, func.CallOp):
                waiting += _callee(op).entry_block.arguments[use.operand_number :][:1]
            elif isinstance(op, func.ReturnOp):
                waiting += _call_results(op, use.operand_number)


def _callee(call: func.CallOp) -> func.FuncOp:
    name = ir.FlatSymbolRefAttr(call.attributes["callee"]).value
    return next(
        f for f in _functions(call) if ir.StringAttr(f.attributes["sym_name"]).value == name
    )


def _call_results(op: func.ReturnOp, number: int) -> list[ir.Value]:
    """The results of the calls of a private function that returns this operand."""
    parent = op.operation.parent
    name = None if parent is None else ir.StringAttr(parent.attributes["sym_name"]).value
    return [
        call.results[number]
        for function in _functions(op)
        for call in walk(function.entry_block)
        if isinstance(call, func.CallOp)
        and ir.FlatSymbolRefAttr(call.attributes["callee"]).value == name
    ]


def _functions(op: ir.OpView) -> list[func.FuncOp]:
    parent: Any = op.operation
    while parent.name != "builtin.module":
        parent = parent.parent.operation
    return [f for f in parent.regions[0].blocks[0].operations if isinstance(f, func.FuncOp)]
