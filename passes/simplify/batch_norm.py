"""Batch normalisation in plain StableHLO, as XLA's BatchNormExpander computes it.

All arithmetic is in the operand's element type. N is the number of elements per feature.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partialmethod

from alpa.dialects import ir, stablehlo
from alpa.passes.simplify.rewriter import Rewriter


class _Builder:
    """StableHLO's arithmetic at the place of a batch-norm op."""

    def __init__(self, op: ir.OpView, rewriter: Rewriter) -> None:
        self.rewriter = rewriter
        self.location = op.location
        self.full = ir.RankedTensorType(op.operands[0].type)
        self.feature = ir.RankedTensorType(op.operands[1].type)
        self.dim = ir.IntegerAttr(op.attributes["feature_index"]).value
        self.epsilon = ir.FloatAttr(op.attributes["epsilon"]).value
        count = math.prod(size for i, size in enumerate(self.full.shape) if i != self.dim)
        self.count = float(count)

    def new(self, kind: Callable[..., ir.OpView], *args: object) -> ir.Value:
        return self.rewriter.new(kind, *args)

    def fill(self, number: float, type_: ir.RankedTensorType) -> ir.Value:
        value = ir.FloatAttr.get(type_.element_type, number, loc=self.location)
        attr = ir.DenseElementsAttr.get_splat(type_, value)
        return self.new(stablehlo.ConstantOp, attr)

    def spread(self, feature: ir.Value) -> ir.Value:
        """A value per feature, broadcast over all other dimensions."""
        return self.new(stablehlo.BroadcastInDimOp, self.full, feature, [self.dim])

    def total(self, x: ir.Value) -> ir.Value:
        """The sum over all dimensions but the feature's."""
        scalar = ir.RankedTensorType.get([], self.full.element_type, loc=self.location)
        zero = self.fill(0.0, scalar)
        dims = [i for i in range(self.full.rank) if i != self.dim]
        total = self.new(stablehlo.ReduceOp, [self.feature], [x], [zero], dims)
        region = ir.OpResult(total).owner.regions[0]
        block = region.blocks.append(scalar, scalar, arg_locs=[self.location] * 2)
        with self.location, ir.InsertionPoint(block):
            left, right = block.arguments
            stablehlo.ReturnOp([stablehlo.AddOp(left, right).result])
        return total

    add = partialmethod(new, stablehlo.AddOp)
    subtract = partialmethod(new, stablehlo.SubtractOp)
    multiply = partialmethod(new, stablehlo.MulOp)
    divide = partialmethod(new, stablehlo.DivOp)
    rsqrt = partialmethod(new, stablehlo.RsqrtOp)

    def mean(self, x: ir.Value) -> ir.Value:
        """x / N."""
        return self.divide(x, self.fill(self.count, ir.RankedTensorType(x.type)))

    def shifted(self, variance: ir.Value) -> ir.Value:
        """variance + epsilon."""
        return self.add(variance, self.fill(self.epsilon, ir.RankedTensorType(variance.type)))


# Pattern: batch_norm_training(x, scale, offset) -> normalised x, E[x], Var[x]
def batch_norm_training(op: ir.OpView, rewriter: Rewriter) -> Sequence[ir.Value]:
    """y = (x - E[x]) * rsqrt(Var[x] + epsilon) * scale + offset, Var[x] = E[x^2] - E[x]^2."""
    b = _Builder(op, rewriter)
    x, scale, offset = op.operands
    total = b.total(x)
    total_of_squares = b.total(b.multiply(x, x))
    mean = b.mean(total)
    variance = b.subtract(b.mean(total_of_squares), b.multiply(mean, mean))
    deviation = b.rsqrt(b.shifted(b.spread(variance)))
    normalised = b.multiply(b.subtract(x, b.spread(mean)), deviation)
    output = b.add(b.multiply(normalised, b.spread(scale)), b.spread(offset))
    return output, mean, variance


# Pattern: batch_norm_inference(x, scale, offset, mean, variance) -> x * s + (offset - mean * s)
def batch_norm_inference(op: ir.OpView, rewriter: Rewriter) -> Sequence[ir.Value]:
    """s = scale * rsqrt(variance + epsilon)."""
    b = _Builder(op, rewriter)
    x, scale, offset, mean, variance = op.operands
    true_scale = b.multiply(scale, b.rsqrt(b.shifted(variance)))
    true_offset = b.subtract(offset, b.multiply(mean, true_scale))
    return (b.add(b.multiply(x, b.spread(true_scale)), b.spread(true_offset)),)


# Pattern: batch_norm_grad(x, scale, mean, variance, dy) -> d x, d scale, d offset
def batch_norm_grad(op: ir.OpView, rewriter: Rewriter) -> Sequence[ir.Value]:
    """The gradients, with r = rsqrt(variance + epsilon) and c = sum(dy * (x - mean)).

    d_x = scale * r / N * (N * dy - sum(dy) - (x - mean) * c / (variance + epsilon)),
    d_scale = c * r, d_offset = sum(dy).
    """
    b = _Builder(op, rewriter)
    x, scale, mean, variance, dy = op.operands
    shifted = b.shifted(b.spread(variance))
    centred = b.subtract(x, b.spread(mean))
    correlation = b.total(b.multiply(dy, centred))
    d_offset = b.total(dy)
    d_scale = b.multiply(correlation, b.rsqrt(b.shifted(variance)))
    pull = b.divide(b.multiply(b.spread(correlation), centred), shifted)
    weighted = b.multiply(dy, b.fill(b.count, b.full))
    push = b.subtract(b.subtract(weighted, b.spread(d_offset)), pull)
    factor = b.mean(b.multiply(b.spread(scale), b.rsqrt(shifted)))
    return b.multiply(factor, push), d_scale, d_offset
