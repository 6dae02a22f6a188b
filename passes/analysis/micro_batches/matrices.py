"""Rules of ops of linear algebra, which compute the last dimensions together."""

from __future__ import annotations

import re
from collections.abc import Sequence

from alpa.dialects import ir
from alpa.passes.analysis.micro_batches import indexing
from alpa.passes.analysis.micro_batches.context import Context
from alpa.passes.analysis.micro_batches.relation import Relation, as_rows, without_samples

CALLS = ("lapack_", "cusolver_", "hipsolver_", "Qr", "Eigh", "LuDecomposition")
"""Custom calls of linear algebra: dimensions in front of the last two are computed apart."""
TRIANGULAR_SOLVE = re.compile(r"lapack_[sdcz]trsm(_ffi)?")


def of_matrices(
    context: Context,
    op: ir.OpView,
    operands: Sequence[Relation],
    together: int = 2,
    *,
    linear: bool = False,
) -> Relation:
    """Of an op that computes its last dimensions, so many `together`, apart from the others."""
    rank = max(len(context.shape(value)) for value in op.operands)
    last = range(rank - together, rank)
    text = "computes several samples together"
    return indexing.apart(context, op, operands, last, text, linear=linear)


def triangular_solve(
    context: Context, op: ir.OpView, operands: Sequence[Relation], *, on_left: bool
) -> Relation:
    """Linear in the right-hand sides, which are computed apart where the matrix is one for all."""
    matrix, sides = operands
    if matrix.is_fixed and sides.of_step:
        return without_samples([sides], [matrix], linear=True)
    rank = len(context.shape(op.operands[1]))
    apart = rank - 1 if on_left else rank - 2
    if matrix.is_fixed and (sides.kind, sides.dim) == ("rows", apart):
        return as_rows(op, sides, [sides], linear=True)
    if matrix.is_plain:
        return of_matrices(context, op, [matrix.with_scale(sides.scaled), sides], linear=True)
    return of_matrices(context, op, operands)
