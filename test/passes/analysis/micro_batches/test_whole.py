"""A program compared with itself at the size of the whole batch."""

from __future__ import annotations

import pytest

from alpa.dialects import body, main_function, parse
from alpa.dialects.attributes import WHOLE
from alpa.passes.analysis.micro_batches.whole import MisalignedError, align

X = "tensor<{size}x3xf32>"


def aligned(micro: str, whole: str) -> list[str]:
    """The attributes written on the ops of the program of 2 samples, beside that of 4."""
    modules = [
        parse(f"func.func public @main(%x: {x}, %y: {x}) -> {x} {{ {text.format(x=x)} }}")
        for text, x in ((micro, X.format(size=2)), (whole, X.format(size=4)))
    ]
    block = body(main_function(modules[0]))
    align(block, body(main_function(modules[1])))
    return [str(op.attributes[WHOLE]) for op in block.operations if WHOLE in op.attributes]


def test_types_of_the_whole_batch() -> None:
    text = "%0 = stablehlo.add %x, %y : {x} return %0 : {x}"
    assert aligned(text, text) == ["{types = [tensor<4x3xf32>]}"]


def test_elements_of_complex_constants() -> None:
    text = "%0 = stablehlo.constant dense<({n}.0, 1.0)> : tensor<complex<f32>> return %x : {x}"
    found = aligned(text.replace("{n}", "2"), text.replace("{n}", "4"))
    assert found == ['{value = "<(4.000000e+00,1.000000e+00)>"}']


@pytest.mark.parametrize(
    ("whole", "message"),
    [
        ("%0 = stablehlo.subtract %y, %x : {x} return %0 : {x}", "reads other values"),
        ("%0 = stablehlo.subtract %x, %y : {x} return %x : {x}", "func.return reads other values"),
        ("%0 = stablehlo.add %x, %y : {x} return %0 : {x}", "for the whole batch stablehlo.add"),
        (
            "%0 = stablehlo.subtract %x, %y : {x} %1 = stablehlo.abs %0 : {x} return %1 : {x}",
            "for the whole batch stablehlo.abs",
        ),
    ],
)
def test_another_program_is_refused(whole: str, message: str) -> None:
    with pytest.raises(MisalignedError, match=message):
        aligned("%0 = stablehlo.subtract %x, %y : {x} return %0 : {x}", whole)


def test_another_rank_is_refused() -> None:
    other = "%0 = stablehlo.iota dim = 0 : tensor<{n}xi32> return %x : {x}"
    with pytest.raises(MisalignedError, match="iota of tensor<2xi32> here, for the whole batch"):
        aligned(other.replace("{n}", "2"), other.replace("{n}", "2x4"))


def test_an_attribute_that_is_gone_is_refused() -> None:
    text = "%0 = stablehlo.add %x, %y {marked} : {x} return %0 : {x}"
    with pytest.raises(MisalignedError, match="add has marked for a micro-batch, and none"):
        aligned(text.replace("{marked}", '{{marked = "here"}}'), text.replace("{marked}", ""))
