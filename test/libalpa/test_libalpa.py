"""libalpa in a program without Python (`host.c`), and in processes that run Python already."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

import alpa.passes
from alpa.passes.plan.report import PlanReport
from alpa.tools import libalpa
from test.libalpa.building import build, configure, needs_compiler
from test.schemas import read_schema

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
SOURCES = ROOT / "cmake" / "alpa" / "libalpa"
STEP = ROOT / "examples" / "cpp" / "step.mlir"
PLAN = "alpa{cluster=cpu:1x2 num-layers=2 num-stages=2}"
PROGRAM = """\
func.func @main(%x: tensor<4xf32>) -> tensor<4xf32> {
  %0 = stablehlo.add %x, %x : tensor<4xf32>
  return %0 : tensor<4xf32>
}
"""

pytestmark = needs_compiler


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of `host` and of the shared library."""
    folder = tmp_path_factory.mktemp("host")
    build(HERE, folder)
    return folder


def run_host(built: Path, *arguments: str | Path) -> list[str]:
    """The lines that the program prints; it prints nothing on standard error."""
    # Python's variables have no effect.
    environment = os.environ | {"PYTHONHOME": "/nowhere", "PYTHONPATH": "/nowhere"}
    command = [built / "host", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


def test_calls_from_several_threads_at_once_answer_the_same(built: Path) -> None:
    assert run_host(built, "threads", STEP) == ["0 wrong"]


def test_signals_and_the_locale_stay_as_they_are_and_nothing_is_printed(built: Path) -> None:
    assert run_host(built, "settings", STEP) == ["0"]


@pytest.mark.slow
def test_memory_does_not_grow(built: Path, tmp_path: Path) -> None:
    """Each call copies a program of 1 MB several times, and a context takes 1 MB, too."""
    large = tmp_path / "large.mlir"
    numbers = "".join(f"{number:08X}" for number in range(125_000))
    large.write_text(
        "func.func @main() -> tensor<125000xi32> {\n"
        f'  %0 = stablehlo.constant dense<"0x{numbers}"> : tensor<125000xi32>\n'
        "  return %0 : tensor<125000xi32>\n}\n"
    )
    (grown,) = run_host(built, "memory", large, "cse", "40")
    assert int(grown) < 8e6
    (grown,) = run_host(built, "memory", large, "no-such-pass", "40")
    assert int(grown) < 8e6


def test_an_interpreter_that_cannot_be_loaded_is_an_error_and_another_may_follow(
    built: Path,
) -> None:
    libm = next(Path("/").glob("lib*/**/libm.so.6"))
    nowhere = "/nowhere/libpython.so"
    paths = ["/nowhere/python", "", "", nowhere, "", str(libm), "", "", "", nowhere]
    assert run_host(built, "initialize", *paths) == [
        "2 there is no interpreter: /nowhere/python",
        f"2 cannot load libpython: {nowhere}: cannot open shared object file: "
        "No such file or directory",
        f"2 this Python has no Py_GetVersion: {libm}",
        "0 ",
        "0 ",
    ]


def test_another_environment_can_be_named(built: Path, tmp_path: Path) -> None:
    """Python starts as in that environment, so that it finds its packages and can start itself."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "other"], check=True)
    python = tmp_path / "other" / "bin" / "python3"
    (packages,) = (tmp_path / "other" / "lib").glob("python*/site-packages")
    here = sysconfig.get_path("purelib")
    (packages / "here.pth").write_text(f"import site; site.addsitedir({here!r})\n")
    started = tmp_path / "started"
    (packages / "sitecustomize.py").write_text(
        "import sys\n"
        f"said = f'{{sys.executable}} {{sys.prefix}} {{sys.getfilesystemencoding()}}'\n"
        f"open({str(started)!r}, 'w').write(said)\n"
    )
    assert run_host(built, "initialize", python, "") == ["0 "]
    assert started.read_text() == f"{python} {tmp_path / 'other'} utf-8"


def test_an_interpreter_that_cannot_start_is_an_error(built: Path, tmp_path: Path) -> None:
    """Its environment leads to a standard library without modules."""
    version = f"python{sys.version_info.major}.{sys.version_info.minor}"
    library = tmp_path / "base" / "lib" / version
    (library / "lib-dynload").mkdir(parents=True)
    (library / "os.py").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "pyvenv.cfg").write_text(f"home = {tmp_path}/base/bin\n")
    python = tmp_path / "bin" / "python3"
    python.symlink_to(sys.executable)
    command = [built / "host", "initialize", python, "", "", ""]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0
    sentence = f"2 cannot start Python as {python}: "
    assert [line.startswith(sentence) for line in done.stdout.splitlines()] == [True, True]


def test_an_interpreter_without_the_package_is_an_error(built: Path) -> None:
    (library,) = built.glob("libalpa.*")
    code = f"""
import ctypes
alpa = ctypes.CDLL({str(library)!r})
alpa.alpa_result_error.restype = ctypes.c_char_p
alpa.alpa_result_error.argtypes = [ctypes.c_void_p]
result = ctypes.c_void_p()
print(alpa.alpa_initialize(None, None, ctypes.byref(result)))
print(alpa.alpa_result_error(result).decode())
"""
    command = [sys._base_executable, "-I", "-S", "-c", code]  # pyright: ignore[reportAttributeAccessIssue]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout.splitlines() == [
        "2",
        "this process's Python cannot import Alpa: ModuleNotFoundError: No module named 'alpa'",
    ]


class CDiagnostic(ctypes.Structure):
    _fields_ = (
        ("severity", ctypes.c_int),
        ("file", ctypes.c_char_p),
        ("line", ctypes.c_int),
        ("column", ctypes.c_int),
        ("message", ctypes.c_char_p),
    )


@dataclass(frozen=True)
class Result:
    status: int
    error: str | None
    diagnostics: list[tuple[int, str, int, int, str]]
    text: bytes | None
    bytecode: bytes | None
    plan: str | None
    table: str | None


class Library:
    """libalpa in this process, whose Python it uses; `kind` is `ctypes.PyDLL` to keep the GIL."""

    def __init__(self, built: Path, kind: type[ctypes.CDLL] = ctypes.CDLL) -> None:
        (path,) = built.glob("libalpa.*")
        self.functions = kind(str(path))
        for name in ("error", "plan", "table"):
            self._declare(name, ctypes.c_char_p)
        for name in ("text", "bytecode"):
            self._declare(name, ctypes.c_void_p, ctypes.POINTER(ctypes.c_size_t))
        self._declare("num_diagnostics", ctypes.c_size_t)
        self._declare("diagnostic", ctypes.POINTER(CDiagnostic), ctypes.c_size_t)
        self._declare("status", ctypes.c_int)
        self._declare("free", None)

    def _declare(self, name: str, result: object, *others: object) -> None:
        function = getattr(self.functions, f"alpa_result_{name}")
        function.restype, function.argtypes = result, [ctypes.c_void_p, *others]

    def call(self, name: str, program: bytes | None, pipeline: bytes | None) -> Result:
        result = ctypes.c_void_p()
        size = ctypes.c_size_t(len(program or b""))
        function = getattr(self.functions, f"alpa_{name}")
        status = function(program, size, pipeline, ctypes.byref(result))
        with self._freed(result):
            assert self.functions.alpa_result_status(result) == status
            return self._read(status, result)

    @contextmanager
    def _freed(self, result: ctypes.c_void_p) -> Iterator[None]:
        yield
        self.functions.alpa_result_free(result)

    def _read(self, status: int, result: ctypes.c_void_p) -> Result:
        def text(name: str) -> str | None:
            found = getattr(self.functions, f"alpa_result_{name}")(result)
            return None if found is None else found.decode()

        def data(name: str) -> bytes | None:
            size = ctypes.c_size_t(1)
            address = getattr(self.functions, f"alpa_result_{name}")(result, ctypes.byref(size))
            if address is None:
                assert size.value == 0
                return None
            assert ctypes.string_at(address + size.value, 1) == b"\0"
            return ctypes.string_at(address, size.value)

        count = self.functions.alpa_result_num_diagnostics(result)
        found = [self.functions.alpa_result_diagnostic(result, n)[0] for n in range(count)]
        assert not self.functions.alpa_result_diagnostic(result, count)
        return Result(
            status,
            text("error"),
            [(d.severity, d.file.decode(), d.line, d.column, d.message.decode()) for d in found],
            data("text"),
            data("bytecode"),
            text("plan"),
            text("table"),
        )


@pytest.fixture(scope="module")
def library(built: Path) -> Library:
    return Library(built)


def test_a_plan_is_that_of_the_public_functions(library: Library) -> None:
    result = library.call("plan", STEP.read_bytes(), PLAN.encode())
    planned = alpa.passes.run(STEP.read_bytes(), PLAN)
    assert (result.status, result.error) == (0, None)
    assert (result.text or b"").decode() == str(planned)
    assert str(alpa.passes.run(result.bytecode or b"", "")) == str(planned)
    numbers = json.loads(result.plan or "")
    Draft202012Validator(read_schema("alpa.passes.plan", "plan.schema.json")).validate(numbers)
    expected = json.loads(PlanReport.of(planned).to_json())
    changing = {"phases", "search_seconds"}
    assert {k: v for k, v in numbers.items() if k not in changing} == {
        k: v for k, v in expected.items() if k not in changing
    }
    assert numbers["search_seconds"] > 0
    assert "2 stages" in (result.table or "").splitlines()[0]


def test_passes_run_on_text_and_bytecode(library: Library) -> None:
    twice = PROGRAM.replace("  return", "  %1 = stablehlo.negate %0 : tensor<4xf32>\n  return")
    result = library.call("run_passes", twice.encode(), b"canonicalize")
    assert b"negate" not in (result.text or b"negate")
    again = library.call("run_passes", result.bytecode, b"")
    assert (again.status, again.text, again.diagnostics) == (0, result.text, [])
    assert (again.plan, again.table) == (None, None)


def test_errors_have_lines_and_columns(library: Library) -> None:
    broken = PROGRAM.replace("add %x, %x", "add %x, %y")
    result = library.call("plan", broken.encode(), PLAN.encode())
    message = "use of undeclared SSA value name"
    assert result == Result(
        4,
        f"module:2:26: error: {message}",
        [(0, "module", 2, 26, message)],
        text=None,
        bytecode=None,
        plan=None,
        table=None,
    )
    result = library.call("plan", STEP.read_bytes(), PLAN.replace("stages=2", "stages=9").encode())
    assert result.status == 4
    assert (result.error or "").startswith("module:2:1: error: cannot make 9 stages of 2 layer(s)")
    located = PROGRAM.replace("\n}", '\n} loc("model.py":7:3)')
    result = library.call("plan", located.encode(), b"alpa{cluster=cpu:1x2 num-stages=9}")
    assert (result.error or "").startswith("model.py:7:3: error: cannot make 9 stages")
    result = library.call("plan", STEP.read_bytes(), b"cse,\n alpa{cluster=cpu:1x2 num-layer=2}")
    assert result.status == 3
    assert (result.error or "").splitlines()[0] == (
        "pipeline:2:23: error: unknown option 'num-layer' of 'alpa'; did you mean 'num-layers'?"
    )
    assert [each[0] for each in result.diagnostics] == [0, 3]


@pytest.mark.parametrize(
    ("program", "pipeline", "status", "error"),
    [
        (b"// \xff", b"cse", 4, "module:1:4: error: neither MLIR bytecode nor text: this byte is"),
        (b"ML\xefR\xff", b"cse", 4, "module: error: "),
        (PROGRAM.encode(), b"cse,\xe4", 3, "pipeline:1:5: error: this byte is not UTF-8"),
        (PROGRAM.encode(), b"cse", 4, "module:1:1: error: the pipeline leaves no plan: "),
        (b"", b"cse", 4, "module: error: the pipeline leaves no plan: "),
        (None, b"cse", 1, "module is NULL"),
        (PROGRAM.encode(), None, 1, "pipeline is NULL"),
    ],
)
def test_broken_input_is_an_error(
    library: Library, program: bytes | None, pipeline: bytes | None, status: int, error: str
) -> None:
    result = library.call("plan", program, pipeline)
    assert (result.status, result.text, result.plan) == (status, None, None)
    assert (result.error or "").startswith(error)


def test_remarks_are_diagnostics(library: Library) -> None:
    call = "stablehlo.custom_call @unknown(%x) : (tensor<4xf32>) -> tensor<4xf32>"
    program = PROGRAM.replace("stablehlo.add %x, %x : tensor<4xf32>", call)
    result = library.call("plan", program.encode(), b"alpa{cluster=cpu:1x2}")
    assert (result.status, result.error) == (0, None)
    assert [each[:4] for each in result.diagnostics] == [(2, "module", 2, 8)]
    assert "unknown" in result.diagnostics[0][4]


def test_a_thread_with_the_gil_and_others_without_it_do_not_wait_for_each_other(
    library: Library, built: Path
) -> None:
    holding = Library(built, ctypes.PyDLL)
    ready = threading.Barrier(4)

    def work(number: int) -> Result:
        ready.wait()
        one = holding if number % 2 else library
        return one.call("run_passes", STEP.read_bytes(), b"cse")

    with ThreadPoolExecutor(4) as pool:
        first, *others = pool.map(work, range(4))
    assert first.status == 0
    assert others == [first] * 3


def test_no_result_can_be_asked_and_freed(library: Library) -> None:
    nothing = ctypes.c_void_p()
    functions = library.functions
    assert functions.alpa_result_status(nothing) == 7
    assert functions.alpa_result_error(nothing) == b"out of memory"
    assert library._read(7, nothing) == Result(7, "out of memory", [], None, None, None, None)
    functions.alpa_result_free(nothing)
    assert functions.alpa_plan(b"", ctypes.c_size_t(0), b"", None) == 1


def test_a_bug_is_a_traceback(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(source: bytes, pipeline: bytes) -> None:
        raise KeyError("a bug")

    monkeypatch.setattr(libalpa, "plan", broken)
    result = library.call("plan", b"", b"")
    lines = (result.error or "").splitlines()
    assert (result.status, lines[0], lines[-1]) == (
        6,
        "Traceback (most recent call last):",
        "KeyError: 'a bug'",
    )


def test_an_interrupt_is_a_status(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(source: bytes, context: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(libalpa, "parse", interrupted)
    result = library.call("plan", b"", b"")
    assert (result.status, result.error) == (5, "module: error: interrupted")


def test_another_version_of_the_package_is_an_error(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(libalpa, "PROTOCOL", libalpa.PROTOCOL + 1)
    result = library.call("plan", b"", b"")
    assert (result.status, result.error) == (
        2,
        "libalpa and the installed Alpa are of different versions: build libalpa again",
    )


def test_numbers_are_those_of_the_header(library: Library) -> None:
    header, source = (SOURCES / "alpa.h").read_text(), (SOURCES / "alpa.c").read_text()
    numbers = {name: int(n) for name, n in re.findall(r"ALPA_(\w+) = (\d+)", header)}
    assert {it.name: it.value for it in libalpa.Status}.items() <= numbers.items()
    severities = {name.upper(): n for name, n in libalpa._SEVERITIES.items()}
    assert severities.items() <= numbers.items()
    assert f"#define PROTOCOL {libalpa.PROTOCOL} " in source
    version = library.functions.alpa_abi_version()
    assert f"#define ALPA_ABI_VERSION {version}\n" in header


def test_without_a_shared_library_of_python_a_warning_says_what_to_do(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho 'no shared library: install one' >&2\nexit 1")
    python.chmod(0o755)
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.16)\n"
        "project(plan LANGUAGES C)\n"
        "find_package(Alpa REQUIRED)\n"
        "if(TARGET alpa::alpa OR NOT COMMAND alpa_opt)\n"
        "  message(FATAL_ERROR wrong)\n"
        "endif()\n"
    )
    said = " ".join(configure(tmp_path, tmp_path / "build", Alpa_PYTHON=python).split())
    assert "There is no target alpa::alpa. no shared library: install one" in said
    assert f"Alpa_PYTHON is {python}; set it to the interpreter that has Alpa." in said
