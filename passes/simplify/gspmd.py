"""GSPMD's annotations, the world before Shardy: `@Sharding` calls and `mhlo.*` attributes."""

from __future__ import annotations

from alpa.dialects import func, ir, ops_where
from alpa.dialects.attributes import call_target, read_int, take_from_signature
from alpa.passes.analysis.graph import replace_op
from alpa.passes.analysis.op_kinds import SHARD_MAP_CALLS, SHARDING_CALLS
from alpa.passes.base import PassError, Remark, errors_at

_SHARDING = "mhlo.sharding"
_REPLICAS = "mhlo.num_replicas"
_MODULE_ATTRIBUTES = (
    "mhlo.is_dynamic",
    "mhlo.num_partitions",
    _REPLICAS,
    "mhlo.spmd_output_sharding",
    "mhlo.spmd_parameters_shardings",
    "mhlo.use_auto_spmd_partitioning",
)


def drop_gspmd(module: ir.Module, remark: Remark) -> None:
    """Removes what a partitioner of an earlier world was told; one remark says what was there.

    Raises:
        PassError: the program is written for several replicas (`pmap`), or holds a `shard_map`
            for several devices that `import-hlo` has not seen, or the number of replicas is no
            integer.
    """
    attributes = module.operation.attributes
    with errors_at(module.operation):
        replicas = read_int(module.operation, _REPLICAS) or 1
    if replicas > 1:
        raise PassError(
            module.operation,
            f"a program for {replicas} replicas (mhlo.num_replicas); "
            "give the program of one device: lower it with jit instead of pmap",
        )
    for name in _MODULE_ATTRIBUTES:
        if name in attributes:
            del attributes[name]

    calls = 0
    annotations = 0
    for function in module.body.operations:
        if not isinstance(function, func.FuncOp):
            continue
        for name in ("arg_attrs", "res_attrs"):
            annotations += len(take_from_signature(function, name, _SHARDING))
        for op in ops_where(function, _may_be_annotated):
            if _is_sharding_call(op):
                replace_op(op, op.operands)
                calls += 1
            elif _SHARDING in op.attributes:
                del op.attributes[_SHARDING]
                annotations += 1
    if calls or annotations:
        remark(
            module.operation.location,
            f"ignored the GSPMD shardings of this module ({calls} @Sharding calls and "
            f"{annotations} mhlo.sharding attributes): the shardings are searched; "
            "sdy.sharding on arguments and results and sdy.sharding_constraint are kept",
        )


def _may_be_annotated(op: ir.Operation) -> bool:
    return op.name == "stablehlo.custom_call" or _SHARDING in op.attributes


def _is_sharding_call(op: ir.OpView) -> bool:
    target = call_target(op)
    if target in SHARD_MAP_CALLS and op.operands[0].type != op.results[0].type:
        raise PassError(
            op,
            f"@{target} is shard_map in GSPMD's form; run import-hlo first, which writes it as "
            "sdy.manual_computation",
        )
    return target in SHARDING_CALLS or target in SHARD_MAP_CALLS
