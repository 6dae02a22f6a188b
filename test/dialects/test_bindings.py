"""Reading texts: those nested too deep for MLIR's recursive parser; how long a module lives."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpa.dialects import attributes_of, body, ir, parse, parse_file
from alpa.dialects.bindings import main_function

DEEP = {
    "modules": "module {" * 4000 + "}" * 4000,
    "lists": "func.func private @f() attributes {a = " + "[" * 20_000,
    "dictionaries": "func.func private @f() attributes {a = " + "{b = " * 20_000,
    "unclosed strings": '"(\n' * 20_000,
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_what_is_nested_too_deep_is_refused(text: str, tmp_path: Path) -> None:
    message = r"this is not an MLIR module: it has \d+,\d+ nested brackets; at most 1,000"
    path = tmp_path / "deep.mlir"
    path.write_text(text)
    for read, source in ((parse, text), (parse, text.encode()), (parse_file, path)):
        with pytest.raises(ir.MLIRError, match=message):
            read(source)


def test_long_text_and_brackets_in_strings_are_not_deep() -> None:
    function = 'func.func private @f{}() attributes {{a = [[1], [2]], b = "("}} // {{'
    text = "\n".join(function.format(number) for number in range(3000))
    assert len(parse(text).body.operations) == 3000


def test_the_main_function_keeps_its_module_alive() -> None:
    """An op that outlives its module is memory in other use: reading it ended the process."""
    function = main_function(parse("func.func @main() attributes {alpa.a = 1 : i64} { return }"))
    assert function.context._get_live_module_count() == 1
    assert str(function.attributes["alpa.a"]) == "1 : i64"


def test_equal_complex_constants_have_equal_attributes() -> None:
    """jaxlib cannot read them, so they are compared as text, in which no number may differ."""
    module = parse("""
        func.func @main() -> (tensor<complex<f32>>, tensor<complex<f32>>, tensor<complex<f32>>) {
          %a = stablehlo.constant dense<(0.0, 1.0)> : tensor<complex<f32>>
          %b = stablehlo.constant dense<(0.0, 1.0)> : tensor<complex<f32>>
          %c = stablehlo.constant dense<(1.0, 1.0)> : tensor<complex<f32>>
          return %a, %b, %c : tensor<complex<f32>>, tensor<complex<f32>>, tensor<complex<f32>>
        }
    """)
    a, b, c, _ = (attributes_of(op) for op in body(main_function(module)).operations)
    assert a == b != c
