"""Ops of MHLO in text are read as those of CHLO and StableHLO."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpa.dialects import body, file_position, ir, main_function, parse, parse_file
from alpa.dialects.hlo_text import without_mhlo

UNARY = """
func.func @main(%x: tensor<4xf32> {mhlo.sharding = "{replicated}"}) -> tensor<4xf32> {
  %0 = mhlo.erf %x : tensor<4xf32>
  %1 = "mhlo.tan"(%0) : (tensor<4xf32>) -> tensor<4xf32>
  %2 = mhlo.copy %1 {mhlo.sharding = "{replicated}"} : tensor<4xf32>
  %3 = mhlo.cosh %2 {mhlo.sharding = "{replicated}"} : tensor<4xf32>
  return %3 : tensor<4xf32>
}
"""
TOP_K = """
func.func @main(%x: tensor<8xf32>) -> (tensor<3xf32>, tensor<3xi32>) {
  %values, %indices = mhlo.topk(%x, k = 3OPTIONS) : tensor<8xf32> -> (tensor<3xf32>, tensor<3xi32>)
  return %values, %indices : tensor<3xf32>, tensor<3xi32>
}
"""


def names(module: ir.Module) -> list[str]:
    return [op.operation.name for op in body(main_function(module)).operations]


def test_unary_ops() -> None:
    module = parse(UNARY)
    assert names(module) == [
        "chlo.erf",
        "chlo.tan",
        "stablehlo.reshape",
        "chlo.cosh",
        "func.return",
    ]
    ops = list(body(main_function(module)).operations)
    assert "mhlo.sharding" in ops[2].attributes
    assert "mhlo.sharding" in ops[3].attributes


@pytest.mark.parametrize("options", ["", ", largest = true"])
def test_top_k(options: str) -> None:
    assert names(parse(TOP_K.replace("OPTIONS", options))) == ["chlo.top_k", "func.return"]


@pytest.mark.parametrize(
    ("text", "name"),
    [
        (TOP_K.replace("OPTIONS", ", largest = false"), "mhlo.topk"),
        (UNARY.replace("mhlo.erf", "mhlo.stochastic"), "mhlo.stochastic"),
    ],
)
def test_other_ops_are_named(text: str, name: str) -> None:
    with pytest.raises(ir.MLIRError, match=f"(?s)not found for custom op '{name}'"):
        parse(text)


def test_ops_know_their_file(tmp_path: Path) -> None:
    path = tmp_path / "step.mlir"
    path.write_text(UNARY)
    ops = list(body(main_function(parse_file(path))).operations)
    place = file_position(ops[1].location)
    assert place is not None
    assert (place.filename, place.start_line) == (str(path), 4)


def test_other_text_stays() -> None:
    text = b'func.func @main(%x: tensor<4xf32> {mhlo.sharding = "mhlo.erf (x)"}) { return }'
    assert without_mhlo(text) is text
