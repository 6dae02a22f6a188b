"""`alpa-opt`: runs Alpa's and MLIR's passes on a program, for users and tests.

Reads text, bytecode, a portable artifact or, with `--convert-hlo`, HLO from a file or standard
input. Writes text, bytecode with `--emit-bytecode`, or a portable artifact with `--emit-vhlo`. The
exit status is 0, or 1 after an error. Errors go to standard error as `file:line:column: error:
message`, and nothing is written then. The exception is `--list-passes`: it lists the passes that
can be used, and then reports those of other packages that cannot. `--server` answers requests of
other programs instead (`server/`).
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from alpa.dialects import bytecode, ir, is_bytecode, passmanager, write_portable
from alpa.dialects.checks import CheckError
from alpa.dialects.hlo_files import HloError, read_hlo
from alpa.passes import pipeline
from alpa.passes.base import Pass
from alpa.passes.pipelines import packages
from alpa.passes.pipelines.clock import Clock
from alpa.passes.pipelines.diagnostics import Diagnostic, Place, place_of
from alpa.passes.pipelines.expected import mismatches, read_expected
from alpa.passes.pipelines.text import PipelineError
from alpa.tools.arguments import add_version, count, dimension_size
from alpa.tools.guard import guard, parsing, read_input
from alpa.tools.interrupts import until_interrupted
from alpa.tools.run_pipeline import (
    NotTextError,
    Source,
    decoded,
    make_unthreaded_context,
    run_pipeline,
    text_of,
)
from alpa.tools.stablehlo_versions import stablehlo_version

_SPLIT_MARKER = "// -----"
_LARGE_CONSTANT = 16
_STDIN, _STDOUT = 0, 1
_WIDTH = 120
_MAX_REQUEST_BYTES = 1 << 28
_EXAMPLES = """\
examples:
  alpa-opt step.mlir --pipeline='simplify-trivial-ops,layer-cluster{num-layers=8}'
  alpa-opt step.mlir --pipeline='alpa{cluster=h100:1x8 num-layers=8}' -o planned.mlir
  alpa-opt step.mlir --pipeline='func.func(canonicalize,cse)' --timing
  alpa-opt --server --socket "$XDG_RUNTIME_DIR/alpa.sock"
"""
_FLAGS = {
    "--convert-hlo": "read HLO, text or a serialised proto, and convert it to StableHLO",
    "--emit-bytecode": "write MLIR bytecode instead of text",
    "--split-input-file": f"split the input at lines '{_SPLIT_MARKER}' into separate modules",
    "--verify-diagnostics": "compare the diagnostics with comments 'expected-error {{...}}'",
    "--print-ir-after-all": "print the IR to standard error after each pass",
    "--mlir-print-debuginfo": "print the locations of ops",
    "--timing": "print the seconds of each pass to standard error",
    "--list-passes": "print Alpa's passes with their options and exit",
}


class _CommandError(Exception):
    """The command cannot run. The message is complete."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    options = parser().parse_args(arguments)
    try:
        _check_server_options(options)
        if options.server:
            _serve(options)
            return 0
        if options.list_passes:
            problems: list[packages.PackageError] = []
            _write("-", "\n".join(_pass_list(problems)).encode())
            for problem in problems:
                _say(f"alpa-opt: error: {problem}")
            return 1 if problems else 0
        return _process(options)
    except (_CommandError, PipelineError) as error:
        _say(str(error))
    except ConnectionError:
        pass  # The reader of our output has closed the pipe.
    return 1


def command(arguments: Sequence[str] | None = None) -> NoReturn:
    """The command `alpa-opt`."""
    guard("alpa-opt")
    sys.exit(until_interrupted("alpa-opt", lambda: main(arguments)))


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(1, f"{self.format_usage()}alpa-opt: error: {message}\n")


class _Once(argparse.Action):
    """Stores an option, which may be there once."""

    def __call__(
        self, _: argparse.ArgumentParser, options: argparse.Namespace, values: Any, *__: Any
    ) -> None:
        if getattr(options, self.dest) is not None:
            raise argparse.ArgumentError(self, "it is there twice; give one, with all passes")
        setattr(options, self.dest, values)


def parser() -> argparse.ArgumentParser:
    """The parser of the command; an invalid command line ends it with status 1."""
    result = _Parser(
        prog="alpa-opt",
        description="Runs passes on a StableHLO program and prints the result.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_version(result)
    result.add_argument(
        "file",
        nargs="?",
        default="-",
        metavar="FILE",
        help="text, bytecode or portable artifact; - is standard input",
    )
    result.add_argument(
        "--pipeline",
        action=_Once,
        help="comma-separated passes, also MLIR's; see --list-passes",
    )
    result.add_argument(
        "--refine",
        action="append",
        default=[],
        type=dimension_size,
        metavar="NAME=SIZE",
        help="the size of a symbolic dimension, such as b=8; may be repeated. Runs the pass "
        "refine-dimensions before the pipeline",
    )
    result.add_argument("-o", default="-", dest="output", metavar="OUT", help="where to write")
    result.add_argument(
        "--emit-vhlo",
        type=stablehlo_version,
        metavar="VERSION",
        help="write a portable artifact of this version of StableHLO, such as 1.0.0; current: of "
        "jaxlib's own",
    )
    for flag, text in _FLAGS.items():
        result.add_argument(flag, action="store_true", help=text)
    server = result.add_argument_group("server", "docs/embedding.md has the protocol")
    server.add_argument(
        "--server",
        action="store_true",
        help="answer requests, one JSON-RPC message per line, on standard input and output",
    )
    server.add_argument(
        "--socket",
        metavar="PATH",
        help="make a Unix socket for this user and answer requests there, of many clients",
    )
    server.add_argument(
        "--max-request-bytes",
        type=count,
        metavar="N",
        help=f"answer longer requests with an error (default: {_MAX_REQUEST_BYTES})",
    )
    return result


def _serve(options: argparse.Namespace) -> None:
    """Serves until the end of the input, or on a socket until a signal."""
    from alpa.tools.server import serve  # noqa: PLC0415 - only servers need it

    limit = options.max_request_bytes or _MAX_REQUEST_BYTES
    if options.socket is None:
        serve.serve_standard_input(limit)
        return
    try:
        serve.serve_socket(Path(options.socket), limit)
    except OSError as error:
        raise _CommandError(f"{options.socket}: error: {error.strerror}") from error


def _check_server_options(options: argparse.Namespace) -> None:
    """Raises _CommandError for options that do not go together."""
    if options.server:
        others = {"FILE": options.file != "-", "--pipeline": options.pipeline}
        others |= {"-o": options.output != "-", "--refine": options.refine}
        others |= {"--emit-vhlo": options.emit_vhlo}
        others |= {flag: getattr(options, flag[2:].replace("-", "_")) for flag in _FLAGS}
        for name, given in others.items():
            if given:
                text = f"alpa-opt: error: with --server, requests say what to do; drop {name}"
                raise _CommandError(text)
    elif options.socket is not None or options.max_request_bytes is not None:
        name = "--max-request-bytes" if options.socket is None else "--socket"
        raise _CommandError(f"alpa-opt: error: {name} is for a server; add --server")


def _process(options: argparse.Namespace) -> int:
    if options.emit_bytecode and options.emit_vhlo:
        raise _CommandError("alpa-opt: error: pass --emit-bytecode or --emit-vhlo, not both")
    if (options.emit_bytecode or options.emit_vhlo) and options.split_input_file:
        raise _CommandError("alpa-opt: error: bytecode holds one module; drop --split-input-file")
    if options.convert_hlo and (options.split_input_file or options.verify_diagnostics):
        name = "--split-input-file" if options.split_input_file else "--verify-diagnostics"
        raise _CommandError(f"alpa-opt: error: HLO is no MLIR text; drop {name}")
    options.pipeline = options.pipeline or ""
    pipeline.check(options.pipeline)
    if options.refine:
        steps = (f"refine-dimensions{{sizes={','.join(options.refine)}}}", options.pipeline)
        options.pipeline = ",".join(filter(None, steps))
    outputs: list[bytes] = []
    failed = False
    for source in _sources(options.file, options.split_input_file, hlo=options.convert_hlo):
        if options.verify_diagnostics:
            found: list[Diagnostic] = []
            module = _run(source, options, found.append)
            failed |= not _verified(source, found)
        else:
            module = _run(source, options, _printer(source))
            failed |= module is None
        if module is not None:
            try:
                outputs.append(_serialised(module, options))
            except CheckError as error:
                place = source.place(place_of(error.location))
                _printer(source)(Diagnostic("error", place, error.message))
                failed = True
    if not failed:
        _write(options.output, f"{_SPLIT_MARKER}\n".encode().join(outputs))
    return 1 if failed else 0


def _run(
    source: Source, options: argparse.Namespace, sink: Callable[[Diagnostic], None]
) -> ir.Module | None:
    """Returns the module after the pipeline, or None after an error; diagnostics go to `sink`."""
    clock = Clock()

    def print_ir(manager: passmanager.PassManager) -> None:
        if options.print_ir_after_all:
            manager.enable_ir_printing(large_elements_limit=_LARGE_CONSTANT)

    try:
        return run_pipeline(
            make_unthreaded_context(),
            source,
            options.pipeline,
            sink,
            clock,
            on_manager=print_ir,
            timing=options.timing,
        )
    finally:
        if options.timing:
            _say("\n".join(_seconds(clock)))


def _seconds(clock: Clock) -> Iterator[str]:
    """The seconds of Alpa's passes, also inside `alpa`, which MLIR's report lacks."""
    yield "our passes, all their runs:"
    for name, seconds in clock.seconds.items():
        yield f"  {seconds:8.4f} s  {name}"


def _printer(source: Source) -> Callable[[Diagnostic], None]:
    """Returns a function that prints diagnostics with their line of the source."""
    lines = source.lines
    last: Place | None = None

    def show(diagnostic: Diagnostic) -> None:
        nonlocal last
        _say(str(diagnostic))
        previous, last = last, diagnostic.place
        place = diagnostic.place
        if diagnostic.severity == "note" and place == previous:
            return
        if place.file == source.file and 0 < place.line <= len(lines):
            _say(_marked(lines[place.line - 1], place.column))

    return show


def _marked(line: str, column: int) -> str:
    """A line with a caret below the column; a long line is cut around it."""
    line = "".join(char if char.isprintable() else " " for char in line.rstrip())
    begin = max(0, column - _WIDTH // 2)
    before, after = "..." * (begin > 0), "..." * (begin + _WIDTH < len(line))
    caret = " " * (len(before) + column - 1 - begin) + "^"
    return f"  {before}{line[begin : begin + _WIDTH]}{after}\n  {caret}"


def _verified(source: Source, found: Sequence[Diagnostic]) -> bool:
    """Whether the diagnostics are those that the source expects; prints the others."""
    try:
        expected = read_expected(source.lines)
    except ValueError as error:
        raise _CommandError(f"{source.file}:{error}") from error
    errors = mismatches(expected, found, source.file)
    for error in errors:
        _say(str(error))
    return not errors


def _sources(file: str, split: bool, *, hlo: bool) -> Iterator[Source]:
    """Reads the modules of an input.

    Raises:
        _CommandError: the file cannot be read, or is neither text nor bytecode, nor HLO if it
            should be.
    """
    name = "<stdin>" if file == "-" else file
    try:
        data = read_input(_STDIN if file == "-" else file)
    except OSError as error:
        raise _CommandError(f"{name}: error: {error.strerror}") from error
    if hlo:
        data = _converted(name, data)
    if is_bytecode(data):
        yield Source(file=name, data=data)
        return
    try:
        text = decoded(data, name)
    except NotTextError as error:
        raise _CommandError(f"{error.place}: error: {error}") from error
    if not split:
        yield Source(file=name, data=data, path=file if _can_be_read_again(file) else None)
        return
    begin = 0
    for marker in re.finditer(rf"^{_SPLIT_MARKER}.*$|\Z", text, re.MULTILINE):
        # Empty lines in front keep the line numbers.
        before = "\n" * text.count("\n", 0, begin)
        yield Source(file=name, data=(before + text[begin : marker.start()]).encode())
        begin = marker.end()


def _converted(name: str, data: bytes) -> bytes:
    """The bytecode of an HLO file. Raises _CommandError."""
    try:
        with parsing(len(data)):
            return bytecode(read_hlo(data, make_unthreaded_context()))
    except HloError as error:
        place = Place(name, error.line, error.column) if error.line else name
        raise _CommandError(f"{place}: error: {error}") from error


def _can_be_read_again(file: str) -> bool:
    """Whether MLIR can open the file itself, and so put its name into the locations."""
    return os.path.isfile(file) and file.isprintable()


def _serialised(module: ir.Module, options: argparse.Namespace) -> bytes:
    """The output of a module. Raises CheckError."""
    if options.emit_vhlo:
        return write_portable(module, options.emit_vhlo)
    if options.emit_bytecode:
        return bytecode(module.operation)
    return text_of(module, locations=options.mlir_print_debuginfo).encode()


def _write(file: str, data: bytes) -> None:
    """Writes all output without Python's own buffer, which would report failures late."""
    try:
        with open(_STDOUT if file == "-" else file, "wb", closefd=file != "-") as stream:
            stream.write(data)
    except BrokenPipeError:
        raise
    except OSError as error:
        name = "<stdout>" if file == "-" else file
        raise _CommandError(f"{name}: error: {error.strerror}") from error


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _pass_list(problems: list[packages.PackageError]) -> Iterator[str]:
    """The passes, in lines. Adds to `problems` what is wrong with those of other packages."""
    yield "Our passes:"
    for name in pipeline.PASSES:
        yield from _described(name, pipeline.load_pass(name))
    found = pipeline.installed(make_unthreaded_context())
    problems += found.problems.values()
    others: dict[str, type[Pass]] = {}
    for name, entry in found.passes.items():
        try:
            others[name] = packages.load(entry)
        except packages.PackageError as error:
            problems.append(error)
    if others:
        yield "\nPasses of other packages:"
    for name, kind in others.items():
        yield from _described(name, kind)
    yield "\nPasses of MLIR, StableHLO and Shardy can be used in the same pipeline, for example:"
    yield f"  {' '.join(pipeline.upstream_names())}"
    yield "Passes that run on functions are written func.func(pass).\n"


def _described(name: str, kind: type[Pass]) -> Iterator[str]:
    """A pass and its options, in lines."""
    yield f"  {name}"
    yield f"      {kind.summary()}"
    for option, known in kind.options().items():
        default = known.default_text()
        given = f", default {default}" if default else ""
        yield f"      {option}: {known.help} ({known.values()}{given})"


if __name__ == "__main__":
    command()
