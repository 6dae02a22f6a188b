"""Constants whose values were left out when a program was printed.

MLIR prints `dense_resource<__elided__>` for large constants if it is asked to be short, as by
`--mlir-elide-elementsattrs-if-larger`, or by `repr` of a module.
"""

from __future__ import annotations

from collections.abc import Iterable

from alpa.dialects.bindings import ir, ops_where, sdy, stablehlo

# MLIR numbers further constants of the same name: __elided___1.
_ELIDED = "dense_resource<__elided__"

CONSTANTS = ("stablehlo.constant", "sdy.constant")
Constant = stablehlo.ConstantOp | sdy.ConstantOp
"""Shardy's passes create its own constants from StableHLO's."""


def elided_constants(root: ir.Module | ir.OpView) -> list[Constant]:
    """The ops in the regions of one that are constants without values."""
    return elided_among(ops_where(root, lambda op: op.name in CONSTANTS))


def elided_among(ops: Iterable[ir.OpView]) -> list[Constant]:
    """Those of some ops that are constants without values."""
    return [op for op in ops if isinstance(op, Constant) and _is_elided(op)]


def _is_elided(op: Constant) -> bool:
    try:
        value = op.attributes["value"]
    except TypeError:
        return False  # Dense complex numbers have no class in Python.
    return not isinstance(value, ir.DenseElementsAttr) and str(value).startswith(_ELIDED)
