"""Shardings of convolutions for which XLA's partitioner (jaxlib 0.10.2) goes wrong, left out."""

from __future__ import annotations

from dataclasses import replace

from alpa.dialects import ir, stablehlo
from alpa.dialects.sharding import ShardingRule
from alpa.passes.sharding.strategies import Strategy


def sound_rule(op: stablehlo.ConvolutionOp, rule: ShardingRule) -> ShardingRule:
    """Keeps those factors whole along which XLA's partitioner (jaxlib 0.10.2) goes wrong.

    * What image and kernel share in their spatial dimensions, as in a kernel's gradient: the
      result is wrong where both are cut along the window and another mesh axis is left over.
    * What only the kernel has where there are batch groups: the process is aborted.
    """
    dims = stablehlo.ConvDimensionNumbers(op.dimension_numbers)
    image, kernel = ({f for dim in tensor for f in dim} for tensor in rule.operands)
    whole = {f for d in dims.input_spatial_dimensions for f in rule.operands[0][d]} & {
        f for d in dims.kernel_spatial_dimensions for f in rule.operands[1][d]
    }
    if _has_batch_groups(op):
        whole |= kernel - image
    return replace(rule, need_replication=rule.need_replication | whole)


def sound_strategies(
    op: ir.OpView, strategies: tuple[Strategy, ...], sizes: tuple[int, ...]
) -> tuple[Strategy, ...]:
    """Without those for which XLA's partitioner (jaxlib 0.10.2) computes a wrong result: partial
    sums of a convolution with batch groups, where an axis of the mesh is left over."""
    if not (isinstance(op, stablehlo.ConvolutionOp) and _has_batch_groups(op)):
        return strategies
    axes = {axis for axis, size in enumerate(sizes) if size > 1}
    return tuple(
        s
        for s in strategies
        if not s.reduced or all({a for dim in o for a in dim} == axes for o in s.operands)
    )


def _has_batch_groups(op: stablehlo.ConvolutionOp) -> bool:
    return ir.IntegerAttr(op.batch_group_count).value > 1
