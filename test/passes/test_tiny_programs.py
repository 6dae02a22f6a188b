"""Programs of one op or none are planned, or refused by a message to their author."""

from __future__ import annotations

from itertools import product

import pytest

import alpa.passes
from alpa.dialects import ir

_T = "tensor<8x8xf32>"
_ADD = f"%0 = stablehlo.add %x, %y : {_T}"
_BARRIER = f"%1 = stablehlo.optimization_barrier %0 : {_T}"
_MARK = "stablehlo.custom_call @alpa.layer_boundary() : () -> ()"

PROGRAMS = {
    "one-op": (_ADD, "%0"),
    "no-ops": ("", ""),
    "argument": ("", "%x"),
    "twice": ("", "%x, %x"),
    "barrier": (f"{_ADD}\n{_BARRIER}", "%1"),
    "marked-barrier": (f"{_ADD}\n{_MARK}\n{_BARRIER}", "%1"),
    "constant": (f"%0 = stablehlo.constant dense<1.0> : {_T}", "%0"),
}
REFUSALS = "there is nothing to plan|cannot make 2 stages of 1 layer|cannot cut [01] forward ops"


@pytest.mark.parametrize("name", PROGRAMS)
def test_tiny_programs_are_planned_or_refused_with_a_reason(name: str) -> None:
    ops, returned = PROGRAMS[name]
    types = ", ".join([_T] * returned.count("%"))
    result = f"-> ({types})" if returned else ""
    end = f"return {returned} : {types}" if returned else "return"
    text = f"func.func public @main(%x: {_T}, %y: {_T}) {result} {{\n{ops}\n{end}\n}}"
    is_planned = bool(returned)
    for stages, layers in product(("auto", 1, 2), ("auto", 1, 2)):
        pipeline = f"alpa{{cluster=cpu:1x4 num-stages={stages} num-layers={layers}}},export-stages"
        if is_planned and 2 not in (stages, layers):
            alpa.passes.run(text, pipeline)
        else:
            with pytest.raises(ir.MLIRError, match=REFUSALS):
                alpa.passes.run(text, pipeline)
