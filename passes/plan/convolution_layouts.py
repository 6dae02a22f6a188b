"""The layouts that convolutions on GPUs read and write, and the copies that these cost.

XLA gives a convolution one order of dimensions in memory (`GpuLayoutAssignment`): channels last,
with kernels as output features, space, input features, where matrix units compute it; else channels
first, with kernels as output features, input features, space. Arguments and results of a module lie
as the program writes their dimensions. So an argument in another order is copied before a
convolution reads it. An argument that is padded unevenly is copied, too.

The gradient of a kernel in another order than the kernel's is transposed as it is added to its
accumulator. XLA cannot do that in place: it writes the new sum beside the old one, then copies it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpa.dialects import ir, stablehlo
from alpa.passes.cost.device import Device
from alpa.passes.cost.presets import COMPUTE_CAPABILITY

_NEWEST = (10, 0)
_MATRIX_UNITS_FROM = {"f16": (7, 0), "bf16": (7, 0), "f32": (8, 0)}
"""The generation of GPUs whose matrix units compute a type (f32 as TF32), as XLA uses them."""


def is_copied(op: stablehlo.ConvolutionOp, operand: int, device: Device) -> bool:
    """Whether an operand that is an argument is copied for a convolution."""
    dims = stablehlo.ConvDimensionNumbers(op.dimension_numbers)
    if operand == 1:
        return not _in_order(
            op.operands[1],
            dims.kernel_output_feature_dimension,
            dims.kernel_input_feature_dimension,
            dims.kernel_spatial_dimensions,
            device,
        )
    return _is_padded_unevenly(op) or not _in_order(
        op.operands[0],
        dims.input_batch_dimension,
        dims.input_feature_dimension,
        dims.input_spatial_dimensions,
        device,
    )


def is_transposed(op: stablehlo.ConvolutionOp, device: Device) -> bool:
    """Whether a convolution writes its result in another order than the program's."""
    dims = stablehlo.ConvDimensionNumbers(op.dimension_numbers)
    return not _in_order(
        op.results[0],
        dims.output_batch_dimension,
        dims.output_feature_dimension,
        dims.output_spatial_dimensions,
        device,
    )


def _in_order(
    value: ir.Value, first: int, channel: int, space: Sequence[int], device: Device
) -> bool:
    """Whether a tensor's dimensions lie in memory as a convolution needs them.

    Dimensions of size 1 lie anywhere. In a convolution that computes the gradient of a kernel, the
    batch and the channels have changed places.
    """
    type_ = ir.RankedTensorType(value.type)
    if _channels_last(type_.element_type, device):
        orders = ([first, *space, channel], [channel, *space, first])
    else:
        orders = ([first, channel, *space], [channel, first, *space])
    shape = type_.shape
    return any(order == sorted(order) for order in _longer(orders, shape))


def _longer(orders: Sequence[list[int]], shape: Sequence[int]) -> list[list[int]]:
    return [[dim for dim in order if shape[dim] > 1] for order in orders]


def _channels_last(type_: ir.Type, device: Device) -> bool:
    needed = _MATRIX_UNITS_FROM.get(str(type_))
    return needed is not None and COMPUTE_CAPABILITY.get(device.name, _NEWEST) >= needed


def _is_padded_unevenly(op: stablehlo.ConvolutionOp) -> bool:
    if "padding" not in op.attributes:
        return False
    pairs = np.array(ir.DenseIntElementsAttr(op.attributes["padding"]))
    return bool((pairs[:, 0] != pairs[:, 1]).any())
