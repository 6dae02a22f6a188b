"""Leaves out shardings of convolutions that XLA's partitioner (jaxlib 0.10.2) gets wrong."""

from __future__ import annotations

from dataclasses import replace

from alpa.dialects import ir, stablehlo
from alpa.dialects.sharding import ShardingRule
from alpa.passes.cost.reshard import Layout
from alpa.passes.sharding.strategies import Strategy


def sound_rule(op: stablehlo.ConvolutionOp, rule: ShardingRule) -> ShardingRule:
    """The rule without the factors that XLA's partitioner (jaxlib 0.10.2) gets wrong.

    * Factors that the spatial dimensions of image and kernel share, as in a kernel's gradient: the
      result is wrong if both are split along the window and a mesh axis is unused.
    * Factors of the kernel alone in a convolution with batch groups: XLA aborts the process.
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
    """The strategies without those that XLA's partitioner (jaxlib 0.10.2) gets wrong.

    Both cases need a mesh axis that the strategy leaves unused.

    * Partial sums of a convolution with batch groups: the result is wrong.
    * Split features of a depthwise convolution with one tap: XLA aborts the process.
    """
    if not isinstance(op, stablehlo.ConvolutionOp):
        return strategies
    axes = {axis for axis, size in enumerate(sizes) if size > 1}
    if _has_batch_groups(op):
        strategies = tuple(
            s for s in strategies if not s.reduced or all(_axes(o) == axes for o in s.operands)
        )
    if _scales_features(op):
        features = stablehlo.ConvDimensionNumbers(op.dimension_numbers).output_feature_dimension
        strategies = tuple(
            s for s in strategies if not s.results[0][features] or _axes(s.results[0]) == axes
        )
    return strategies


def _axes(layout: Layout) -> set[int]:
    return {axis for dim in layout for axis in dim}


def _has_batch_groups(op: stablehlo.ConvolutionOp) -> bool:
    return ir.IntegerAttr(op.batch_group_count).value > 1


def _scales_features(op: stablehlo.ConvolutionOp) -> bool:
    """Whether each feature is multiplied by numbers of its own, one by one."""
    dims = stablehlo.ConvDimensionNumbers(op.dimension_numbers)
    kernel = ir.RankedTensorType(op.rhs.type).shape
    each = (dims.kernel_input_feature_dimension, *dims.kernel_spatial_dimensions)
    return ir.IntegerAttr(op.feature_group_count).value > 1 and all(kernel[d] == 1 for d in each)
