"""`alpa.tools.shrink`: the command."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpa.dialects import ir, parse
from alpa.tools.shrink import main

RESHAPED = """\
func.func @main(%x: tensor<4x8xf32>) -> tensor<32xf32> {
  %0 = stablehlo.reshape %x : (tensor<4x8xf32>) -> tensor<32xf32>
  return %0 : tensor<32xf32>
}
"""


def text(module: ir.Module) -> str:
    module.operation.verify()
    return str(module)


def test_command_writes_what_shrinks(tmp_path: Path) -> None:
    source, target = tmp_path / "step.mlir", tmp_path / "small.mlir"
    source.write_text(RESHAPED)
    dims = ["--dim", "4=2", "--dim", "32=16"]
    assert main([str(source), *dims, "-o", str(target)]) == 0
    small = RESHAPED.replace("4x8", "2x8").replace("32xf32", "16xf32")
    assert text(parse(target.read_text())) == text(parse(small))


def test_command_locates_what_does_not_verify(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = tmp_path / "step.mlir", tmp_path / "small.mlir"
    source.write_text(RESHAPED)
    assert main([str(source), "--dim", "4=2", "-o", str(target)]) == 1
    assert capsys.readouterr().err.startswith(f"{source}:2:8: error: number of output elements")
    assert not target.exists()


@pytest.mark.parametrize("size", ["4", "4=", "4=0", "4=8", "x=2"])
def test_command_refuses_an_invalid_size(size: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["step.mlir", "--dim", size])
    assert f"'{size}' is not OLD=NEW" in capsys.readouterr().err


def test_command_refuses_two_sizes_for_one(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["step.mlir", "--dim", "4=2", "--dim", "4=1"])
    error = capsys.readouterr().err
    assert "--dim replaces 4 by 2 and by 1; leave one of them out" in error
