"""Widens programs to 64 bits."""

from __future__ import annotations

import numpy as np

from alpa.dialects import ir, separate, stablehlo, walk
from alpa.runtime.shrink import Constant, dense, numpy_elements, rewrite_types


def widened(module: ir.Module) -> ir.Module:
    """A copy of a program that computes all real floats in 64 bits, without rounding in between."""
    module = separate(module.operation)

    def new_type(type_: ir.Type) -> ir.Type:
        if not isinstance(type_, ir.RankedTensorType):
            return type_
        if not isinstance(type_.element_type, ir.FloatType):
            return type_
        return ir.RankedTensorType.get(type_.shape, ir.F64Type.get(), type_.encoding)

    def new_constant(op: Constant) -> ir.Attribute:
        type_ = ir.RankedTensorType(new_type(op.results[0].type))
        if type_ == op.results[0].type:
            return op.attributes["value"]
        elements = ir.DenseElementsAttr(op.attributes["value"])
        if not elements.is_splat:
            return dense(numpy_elements(op).astype(np.float64), type_)
        value = ir.FloatAttr(elements.get_splat_value()).value
        return ir.DenseElementsAttr.get_splat(type_, ir.FloatAttr.get(ir.F64Type.get(), value))

    with module.context, ir.Location.unknown():
        rewrite_types(module, new_type, new_constant)
        for op in list(walk(module.body)):
            if isinstance(op, stablehlo.ReducePrecisionOp):
                op.result.replace_all_uses_with(op.operand)
                op.operation.erase()
    module.operation.verify()
    return module
