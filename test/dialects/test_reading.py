"""Reading modules: texts nested too deep for MLIR's recursive parser, and portable artifacts."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpa.dialects import bytecode, ir, is_bytecode, parse, parse_file, write_portable
from alpa.dialects.reading import portable_version

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


PROGRAM = """\
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.tanh %x : tensor<4xf32> loc("model.py":7:3)
  return %0 : tensor<4xf32>
}
"""


def test_text_that_is_no_unicode_is_an_error() -> None:
    with pytest.raises(ir.MLIRError, match=r"not an MLIR module: .* surrogates not allowed"):
        parse('func.func @f() attributes {a = "\udc80"} { return }')


def test_a_portable_artifact_is_read_with_its_locations(tmp_path: Path) -> None:
    data = write_portable(parse(PROGRAM), "1.0.0")
    path = tmp_path / "program.mlir.bc"
    path.write_bytes(data)
    assert is_bytecode(data)
    for module in (parse(data), parse_file(path)):
        assert str(module) == str(parse(PROGRAM))
        assert 'loc("model.py":7:3)' in module.operation.get_asm(enable_debug_info=True)


@pytest.mark.parametrize("begin", ["", "\n// A comment.\n  "])
def test_hlo_is_refused_with_the_command_that_converts_it(begin: str, tmp_path: Path) -> None:
    path = tmp_path / "step.hlo.txt"
    path.write_text(f"{begin}HloModule step\n\nENTRY main {{ ROOT p = f32[4] parameter(0) }}\n")
    message = "this is HLO, not MLIR; convert it to StableHLO: alpa-opt --convert-hlo FILE -o OUT"
    for read in (lambda: parse(path.read_text()), lambda: parse_file(path)):
        with pytest.raises(ir.MLIRError, match=message):
            read()


def test_the_version_of_a_portable_artifact() -> None:
    module = parse(PROGRAM)
    assert portable_version(write_portable(module, "1.0.0")) == "1.0.0"
    assert portable_version(bytecode(module.operation)) is None
    assert portable_version(PROGRAM.encode()) is None
    assert portable_version(b"") is None


def test_a_damaged_portable_artifact_is_an_error() -> None:
    data = write_portable(parse(PROGRAM), "1.0.0")
    message = (
        r"this portable artifact of StableHLO 1\.0\.0 cannot be read; .* reads 0\.9\.0 to .*: "
    )
    with pytest.raises(ir.MLIRError, match=message):
        parse(data[: len(data) // 2])


def test_an_artifact_of_a_newer_version_is_refused_by_its_version() -> None:
    data = write_portable(parse(PROGRAM), "1.0.0").replace(b"1.0.0", b"9.9.9")
    message = (
        r"this portable artifact of StableHLO 9\.9\.9 cannot be read; .* reads 0\.9\.0 to [\d.]+$"
    )
    with pytest.raises(ir.MLIRError, match=message):
        parse(data[: len(data) // 2])
