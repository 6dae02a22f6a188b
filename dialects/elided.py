"""Constants whose values were left out when a program was printed.

MLIR prints `dense_resource<__elided__>` for large constants if it is asked to be short, as by
`--mlir-elide-elementsattrs-if-larger`, or by `repr` of a module.
"""

from __future__ import annotations

from alpa.dialects.bindings import ir, ops_where, sdy, stablehlo

# MLIR numbers further constants of the same name: __elided___1.
_ELIDED = "dense_resource<__elided__"

_CONSTANTS = ("stablehlo.constant", "sdy.constant")
Constant = stablehlo.ConstantOp | sdy.ConstantOp
"""Shardy's passes create its own constants from StableHLO's."""


def elided_constants(root: ir.Module | ir.OpView) -> list[Constant]:
    """The ops in the regions of one that are constants without values."""
    constants = ops_where(root, lambda op: op.name in _CONSTANTS)
    return [op for op in constants if isinstance(op, Constant) and _is_elided(op)]


def _is_elided(op: Constant) -> bool:
    try:
        value = op.attributes["value"]
    except TypeError:
        return False  # Dense complex numbers have no class in Python.
    return not isinstance(value, ir.DenseElementsAttr) and str(value).startswith(_ELIDED)
