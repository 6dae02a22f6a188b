"""The layouts that convolutions on GPUs read and write, and the copies that these cost.

XLA gives a convolution one order of dimensions in memory (`GpuLayoutAssignment`): channels last,
with kernels as output features, space, input features, where matrix units compute it; else channels
first, with kernels as output features, input features, space. Arguments and results of a module lie
as the program writes their dimensions. So an argument in another order is copied before a
convolution reads it. An argument that is padded unevenly is copied, too. The convolution that
computes an input's gradient reverses the kernel itself, so it reads the argument behind a reverse.

The gradient of a kernel in another order than the kernel's is transposed as it is added to its
accumulator. XLA cannot do that in place: it writes the new sum beside the old one, then copies it.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np

from alpa.dialects import ir, stablehlo
from alpa.passes.cost.device import Device
from alpa.passes.cost.presets import COMPUTE_CAPABILITY

_NEWEST = (10, 0)
_MATRIX_UNITS_FROM = {"f16": (7, 0), "bf16": (7, 0), "f32": (8, 0)}
"""The generation of GPUs whose matrix units compute a type (f32 as TF32), as XLA uses them."""


def argument_of(op: stablehlo.ConvolutionOp, operand: int) -> ir.Value | None:
    """The argument of a module that a convolution reads, if it does; a kernel also where it is
    reversed, which the convolution does itself."""
    value = op.operands[operand]
    if operand == 1 and _is_reversed(op):
        value = value.owner.opview.operands[0]
    return value if isinstance(value.owner, ir.Block) else None


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
            swapped=_makes_kernel(op) or _is_reversed(op),
        )
    return _is_padded_unevenly(op) or not _in_order(
        op.operands[0],
        dims.input_batch_dimension,
        dims.input_feature_dimension,
        dims.input_spatial_dimensions,
        device,
        swapped=_makes_kernel(op),
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
        swapped=_makes_kernel(op),
    )


def _in_order(
    value: ir.Value,
    first: int,
    channel: int,
    space: Sequence[int],
    device: Device,
    *,
    swapped: bool,
) -> bool:
    """Whether a tensor's dimensions lie in memory as a convolution needs them.

    Dimensions of size 1 lie anywhere. Where the convolution computes a gradient, the batch and the
    channels may be `swapped`.
    """
    type_ = ir.RankedTensorType(value.type)
    if swapped:
        first, channel = channel, first
    last = _channels_last(type_.element_type, device)
    order = [first, *space, channel] if last else [first, channel, *space]
    longer = [dim for dim in order if type_.shape[dim] > 1]
    return longer == sorted(longer)


def _makes_kernel(op: stablehlo.ConvolutionOp) -> bool:
    """Whether a convolution computes the gradient of a kernel, so that it has more taps than
    results."""
    dims = stablehlo.ConvDimensionNumbers(op.dimension_numbers)
    taps, results = (
        prod(ir.RankedTensorType(value.type).shape[dim] for dim in space)
        for value, space in (
            (op.operands[1], dims.kernel_spatial_dimensions),
            (op.results[0], dims.output_spatial_dimensions),
        )
    )
    return taps > results


def _is_reversed(op: stablehlo.ConvolutionOp) -> bool:
    """Whether a convolution reverses its kernel, as that which computes its input's gradient."""
    maker = op.operands[1].owner
    return not isinstance(maker, ir.Block) and isinstance(maker.opview, stablehlo.ReverseOp)


def _channels_last(type_: ir.Type, device: Device) -> bool:
    needed = _MATRIX_UNITS_FROM.get(str(type_))
    return needed is not None and COMPUTE_CAPABILITY.get(device.name, _NEWEST) >= needed


def _is_padded_unevenly(op: stablehlo.ConvolutionOp) -> bool:
    if "padding" not in op.attributes:
        return False
    pairs = np.array(ir.DenseIntElementsAttr(op.attributes["padding"]))
    return bool((pairs[:, 0] != pairs[:, 1]).any())
