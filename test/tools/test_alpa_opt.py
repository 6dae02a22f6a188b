"""The command line of `alpa-opt`: inputs and outputs of every kind, and never a traceback."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ALPA_OPT = Path(sys.executable).parent / "alpa-opt"
PROGRAM = """\
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""
PRINTED = """\
module {
  func.func @main(%arg0: tensor<4xf32>) -> tensor<4xf32> {
    %0 = stablehlo.add %arg0, %arg0 : tensor<4xf32>
    return %0 : tensor<4xf32>
  }
}
"""


def alpa_opt(
    *arguments: str | Path, stdin: bytes = b"", cwd: Path | None = None
) -> tuple[int, bytes, str]:
    """Exit status, standard output and standard error."""
    command = [ALPA_OPT, *arguments]
    done = subprocess.run(command, input=stdin, capture_output=True, check=False, cwd=cwd)
    return done.returncode, done.stdout, done.stderr.decode()


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.mlir"
    path.write_text(PROGRAM)
    return path


def test_file_and_standard_input_are_read(program: Path) -> None:
    expected = (0, PRINTED.encode(), "")
    assert alpa_opt(program) == expected
    assert alpa_opt("-", stdin=PROGRAM.encode()) == expected
    assert alpa_opt(stdin=PROGRAM.encode()) == expected


def test_a_pipe_is_read_and_an_endless_input_is_refused(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with subprocess.Popen([ALPA_OPT, pipe], stdout=subprocess.PIPE) as process:
        pipe.write_text(PROGRAM)
        assert process.communicate()[0] == PRINTED.encode()
    sentence = "error: it does not end within 2 GiB; write it to a file first\n"
    assert alpa_opt("/dev/zero") == (1, b"", f"/dev/zero: {sentence}")


def test_control_characters_of_a_program_do_not_reach_the_terminal(program: Path) -> None:
    role = '{alpa.role = "\\1B[2J\x9b"}'
    program.write_text(PROGRAM.replace("%x: tensor<4xf32>", f"%x: tensor<4xf32> {role}"))
    status, out, error = alpa_opt(program, "--pipeline=alpa{cluster=cpu:1x2}")
    assert (status, out) == (1, b"")
    assert "\\x1b[2J" in error
    assert all(line.isprintable() for line in error.splitlines())


def test_bytecode_goes_out_and_in(program: Path, tmp_path: Path) -> None:
    bytecode = tmp_path / "program.mlirbc"
    assert alpa_opt(program, "--emit-bytecode", "-o", bytecode) == (0, b"", "")
    assert bytecode.read_bytes().startswith(b"ML\xefR")
    assert alpa_opt(bytecode) == (0, PRINTED.encode(), "")
    assert alpa_opt(stdin=bytecode.read_bytes()) == (0, PRINTED.encode(), "")


def test_a_portable_artifact_goes_out_and_in(program: Path, tmp_path: Path) -> None:
    artifact = tmp_path / "program.mlir.bc"
    assert alpa_opt(program, "--emit-vhlo", "1.0.0", "-o", artifact) == (0, b"", "")
    assert artifact.read_bytes().startswith(b"ML\xefR\rStableHLO_v1.0.0\0")
    assert alpa_opt(artifact) == (0, PRINTED.encode(), "")
    assert alpa_opt(stdin=artifact.read_bytes()) == (0, PRINTED.encode(), "")
    artifact.write_bytes(artifact.read_bytes()[:60])
    status, out, error = alpa_opt(artifact)
    assert (status, out) == (1, b"")
    assert error.startswith(f"{artifact}: error: this portable artifact of StableHLO 1.0.0 cannot")


def test_what_a_portable_artifact_cannot_hold_is_shown_at_its_line(program: Path) -> None:
    program.write_text(PROGRAM.replace("stablehlo.add %x, %x", "stablehlo.tan %x"))
    status, out, error = alpa_opt(program, "--emit-vhlo=1.0.0")
    assert (status, out) == (1, b"")
    first, line, caret = error.splitlines()
    assert first.startswith(f"{program}:2:8: error: this stablehlo.tan cannot be written in ")
    assert line.index("stablehlo.tan") == caret.index("^")


SYMBOLIC = """\
func.func @main(%x: tensor<?xf32>) -> tensor<?xf32> {
  %n = stablehlo.get_dimension_size %x, dim = 0 : (tensor<?xf32>) -> tensor<i32>
  %1 = stablehlo.constant dense<1> : tensor<i32>
  %2 = stablehlo.compare GE, %n, %1 : (tensor<i32>, tensor<i32>) -> tensor<i1>
  stablehlo.custom_call @shape_assertion(%2, %n) {api_version = 2 : i32, has_side_effect = true,
    error_message = "Expected value >= 1 for dimension variable 'b'. Obtained dimension variables: \
'b' = {0} from specification 'b' for dimension x.shape[0] (= {0}), ."}
    : (tensor<i1>, tensor<i32>) -> ()
  %3 = stablehlo.add %x, %x : tensor<?xf32>
  return %3 : tensor<?xf32>
}
"""


def test_symbolic_dimensions_are_refined_before_the_pipeline(program: Path) -> None:
    program.write_text(SYMBOLIC)
    options = ["--refine", "b=4", "--pipeline=canonicalize"]
    assert alpa_opt(program, *options) == (0, PRINTED.encode(), "")
    status, _, said = alpa_opt(program, "--pipeline=simplify-trivial-ops")
    assert status == 1
    assert said.startswith(
        f"{program}:1:1: error: dimension 0 of argument 0 is 'b' (x.shape[0]), of any size; give it"
    )
    status, _, said = alpa_opt(program, "--refine", "b=0")
    assert status == 1
    assert said.startswith(
        f"{program}:1:1: error: b=0 is not what the program expects: Expected value >= 1 for "
        "dimension variable 'b'; choose another size"
    )
    status, _, said = alpa_opt(program, "--refine", "b=4", "--pipeline=layer-clutser")
    assert said.startswith("pipeline:1:1: error: unknown pass 'layer-clutser'")


def test_locations_name_the_file(program: Path) -> None:
    _, printed, _ = alpa_opt(program, "--mlir-print-debuginfo")
    assert f'loc("{program}":2:8)'.encode() in printed


def test_an_error_at_an_unknown_location_names_the_file(program: Path) -> None:
    """The module that JAX writes has none."""
    program.write_text(f"module {{\n{PROGRAM}}} loc(unknown)\n")
    status, out, error = alpa_opt(program, "--pipeline=refine-dimensions")
    assert (status, out) == (1, b"")
    assert error.startswith(f"{program}: error: refine-dimensions: option 'sizes' is ''")


def test_empty_input_is_an_empty_module_until_a_pass_needs_more() -> None:
    assert alpa_opt() == (0, b"module {\n}\n", "")
    for empty in (b"", b"module {\n}\n"):
        status, printed, said = alpa_opt("--pipeline=simplify-trivial-ops", stdin=empty)
        assert (status, printed) == (1, b"")
        assert said.startswith("<stdin>")
        assert ": error: " in said


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"module {\n  foo\n}\n", "2:3: error: custom op 'foo' is unknown (tried 'builtin.foo'"),
        (b"func.func @f() {\n", "1:17: error: expected operation name in quotes"),
        (b"\x7fELF\x02\x01\x01\x00\xff", "1:9: error: neither MLIR bytecode nor text"),
        (b"module {\n} // caf\xe9", "2:9: error: neither MLIR bytecode nor text"),
        (b"PK\x03\x04\x00\x00", "1:3: error: unexpected character"),
        (b"ML\xefR", " error: attempting to parse a byte at the end of the bytecode"),
        (b"ML\xefR\x0dgarbage\x00\x01\x02", " error: "),
        (b'func.func @f() { func.call @"\\FE"() : () -> () return }', "1:18: error: the input"),
    ],
)
def test_bad_input_is_a_located_error(data: bytes, message: str, tmp_path: Path) -> None:
    bad = tmp_path / "bad.mlir"
    bad.write_bytes(data)
    status, printed, said = alpa_opt("bad.mlir", cwd=tmp_path)
    assert (status, printed) == (1, b"")
    assert said.startswith(f"bad.mlir:{message}")
    assert "Traceback" not in said


def test_a_name_that_is_not_utf_8(tmp_path: Path) -> None:
    program = r'sdy.mesh @"\FE" = <["a"=2]>' + f"\n{PROGRAM}"
    (tmp_path / "bad.mlir").write_text(program)
    status, _, said = alpa_opt("bad.mlir", "--pipeline=simplify-trivial-ops", cwd=tmp_path)
    assert status == 1
    assert "error: simplify-trivial-ops: a name in the program is not UTF-8" in said
    assert "Traceback" not in said


def test_error_shows_its_line() -> None:
    status, _, said = alpa_opt(stdin=PROGRAM.replace("%x, %x", "%x, %y").encode())
    assert status == 1
    assert said.splitlines() == [
        "<stdin>:2:26: error: use of undeclared SSA value name",
        "    %0 = stablehlo.add %x, %y : tensor<4xf32>",
        "                           ^",
    ]


def test_error_shows_what_is_around_it_in_a_long_line() -> None:
    source = f"func.func private @{'x' * 500}() foo attributes {{ {'y' * 500} }}"
    _, _, said = alpa_opt(stdin=source.encode())
    place, line, caret = said.splitlines()
    column = int(place.split(":")[2])
    assert len(line) < 140
    assert line[caret.index("^") :].startswith(source[column - 1 :][:3])
    assert line.startswith("  ...x")
    assert line.endswith("y...")


def test_cannot_read_or_write(program: Path, tmp_path: Path) -> None:
    missing = tmp_path / "missing" / "file.mlir"
    expected = (1, b"", f"{missing}: error: No such file or directory\n")
    assert alpa_opt(missing) == expected
    assert alpa_opt(program, "-o", missing) == expected
    directory = (1, b"", f"{tmp_path}: error: Is a directory\n")
    assert alpa_opt(tmp_path) == directory
    assert alpa_opt(program, "-o", tmp_path) == directory


def test_failed_run_leaves_the_output_as_it_was(tmp_path: Path) -> None:
    output = tmp_path / "out.mlir"
    output.write_text("before")
    assert alpa_opt("-o", output, stdin=b"foo")[0] == 1
    assert output.read_text() == "before"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_full_disk_is_an_error(program: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = subprocess.run([ALPA_OPT, program], stdout=full, stderr=subprocess.PIPE, check=False)
    assert (done.returncode, done.stderr) == (1, b"<stdout>: error: No space left on device\n")


def test_reader_that_has_gone_hears_no_more(program: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    command = [ALPA_OPT, program]
    done = subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, check=False)
    os.close(writing)
    assert (done.returncode, done.stderr) == (1, b"")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--pipeline=layer-clutser"], "pipeline:1:1: error: unknown pass 'layer-clutser'; did"),
        (["--pipeline=layer-cluster{num-layers=x}"], "pipeline:1:26: error: option 'num-layers'"),
        (["--pipeline=cse,"], "pipeline:1:5: error: expected the name of a pass"),
        (["--no-such-flag"], "usage: alpa-opt"),
        (["--emit-bytecode", "--split-input-file"], "alpa-opt: error: bytecode holds one module"),
        (["--emit-vhlo=1.0.0", "--split-input-file"], "alpa-opt: error: bytecode holds one module"),
        (["--emit-vhlo=1.0.0", "--emit-bytecode"], "alpa-opt: error: pass --emit-bytecode or"),
    ],
)
def test_bad_command_line_has_status_1(arguments: list[str], message: str) -> None:
    status, printed, said = alpa_opt(*arguments, stdin=PROGRAM.encode())
    assert (status, printed) == (1, b"")
    assert said.startswith(message)
    assert "Traceback" not in said


@pytest.mark.parametrize("first", ["cse", ""])
def test_two_pipelines_are_refused(first: str) -> None:
    arguments = f"--pipeline={first}", "--pipeline=alpa"
    status, printed, said = alpa_opt(*arguments, stdin=PROGRAM.encode())
    assert (status, printed) == (1, b"")
    assert "error: argument --pipeline: it is there twice; give one, with all passes" in said


def test_a_version_that_cannot_be_written() -> None:
    status, _, said = alpa_opt("--emit-vhlo=0.1.0", stdin=PROGRAM.encode())
    assert status == 1
    message = "alpa-opt: error: argument --emit-vhlo: '0.1.0' is not a version of StableHLO that "
    assert said.splitlines()[-1].startswith(f"{message}this jaxlib writes; it writes 0.9.0 to ")


def test_timing_is_a_table_of_all_passes_in_order(program: Path) -> None:
    status, _, said = alpa_opt(program, "--pipeline=cse,simplify-trivial-ops,cse", "--timing")
    assert status == 0
    names = [line.split()[-1] for line in said.splitlines() if "%)" in line]
    passes = [name for name in names if name in ("CSEPass", "simplify-trivial-ops", "Total")]
    assert passes == ["CSEPass", "simplify-trivial-ops", "CSEPass", "Total"]


def test_ir_is_printed_after_each_pass(program: Path) -> None:
    pipeline = "--pipeline=func.func(cse),simplify-trivial-ops"
    status, _, said = alpa_opt(program, pipeline, "--print-ir-after-all")
    assert status == 0
    dumps = [line.split()[5] for line in said.splitlines() if "IR Dump After" in line]
    assert dumps == ["CSEPass:", "simplify-trivial-ops:"]


def test_help_and_list_passes() -> None:
    status, printed, _ = alpa_opt("--help")
    assert status == 0
    assert b"alpa-opt step.mlir --pipeline=" in printed
    status, printed, _ = alpa_opt("--list-passes")
    assert status == 0
    assert b"num-layers: number of layers; `auto` cuts at the markers" in printed
    assert b" (an integer or auto, default auto)" in printed
    assert b"canonicalize" in printed


def test_start_imports_no_jax_and_looks_for_no_packages() -> None:
    program = """\
import sys
before = {*sys.modules}
import alpa.tools.alpa_opt
assert not {"jax", "importlib.metadata"} & ({*sys.modules} - before)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


HLO = """\
HloModule step, input_output_alias={ {1}: (0, {}, may-alias) }

ENTRY main {
  w = f32[4] parameter(0)
  x = f32[4] parameter(1)
  c = f32[4] constant({...})
  y = f32[4] multiply(x, c)
  new = f32[4] subtract(w, y)
  ROOT both = (f32[4], f32[4]) tuple(y, new)
}
"""
CONVERTED = """\
module @step {
  func.func @main(%arg0: tensor<4xf32> {tf.aliasing_output = 1 : i32}, %arg1: tensor<4xf32>) \
-> (tensor<4xf32>, tensor<4xf32>) {
    %cst = stablehlo.constant dense_resource<__elided__> : tensor<4xf32>
    %0 = stablehlo.multiply %arg1, %cst : tensor<4xf32>
    %1 = stablehlo.subtract %arg0, %0 : tensor<4xf32>
    return %0, %1 : tensor<4xf32>, tensor<4xf32>
  }
}
"""


def test_hlo_is_converted_before_the_pipeline(tmp_path: Path) -> None:
    path = tmp_path / "step.hlo"
    path.write_text(HLO)
    status, output, said = alpa_opt("--convert-hlo", path, "--pipeline=import-hlo")
    text = re.sub(r" attributes {mhlo[^\n]*} {", " {", output.decode())
    assert (status, text) == (0, CONVERTED)
    assert "1 constant is elided" in said


def test_what_is_no_hlo_is_an_error_at_its_place(tmp_path: Path) -> None:
    path = tmp_path / "step.hlo"
    path.write_text(HLO.replace("multiply(x, c)", "multiply(x, d)"))
    status, output, said = alpa_opt("--convert-hlo", path)
    assert (status, output) == (1, b"")
    assert said.startswith(f"{path}:7:")
    path.write_bytes(b"\x0a\x05other")
    status, _, said = alpa_opt("--convert-hlo", path)
    sentence = "this is neither HLO text nor a serialised HLO module"
    assert (status, said) == (1, f"{path}: error: {sentence}\n")
    status, _, said = alpa_opt("--convert-hlo", "--split-input-file", path)
    assert (status, said) == (1, "alpa-opt: error: HLO is no MLIR text; drop --split-input-file\n")
