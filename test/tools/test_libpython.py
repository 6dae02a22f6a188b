"""What `python -m alpa.tools.libpython` finds, also in interpreters that are installed oddly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from alpa.tools.libpython import NoLibpythonError, headers, shared_library
from test.libalpa.building import needs_compiler


@needs_compiler
def test_this_interpreter_has_headers_and_a_library_that_can_be_loaded() -> None:
    command = [sys.executable, "-P", "-E", "-m", "alpa.tools.libpython"]
    done = subprocess.run(command, capture_output=True, text=True)
    python, include, library = done.stdout.splitlines()
    assert python == sys.executable
    assert (Path(include) / "Python.h").is_file()
    version = f"{sys.version_info.major}.{sys.version_info.minor}."
    code = "import ctypes, sys; f = ctypes.CDLL(sys.argv[1]).Py_GetVersion; "
    code += "f.restype = ctypes.c_char_p; print(f().decode())"
    done = subprocess.run([sys.executable, "-c", code, library], capture_output=True, text=True)
    assert done.stdout.startswith(version)


STATIC = {"LDVERSION": "3.11", "LDLIBRARY": "libpython3.11.a", "INSTSONAME": "libpython3.11.a"}
SHARED = {
    "LDVERSION": "3.11",
    "LDLIBRARY": "libpython3.11.so",
    "INSTSONAME": "libpython3.11.so.1.0",
}


@pytest.mark.parametrize(
    ("variables", "file"),
    [
        (SHARED | {"LIBDIR": "{}/lib64"}, "lib64/libpython3.11.so.1.0"),
        # The interpreter was moved after it was built.
        (SHARED | {"LIBDIR": "/install/lib"}, "lib/libpython3.11.so.1.0"),
        # The interpreter is static, and has a shared library beside it, as conda's.
        (STATIC | {"LIBDIR": "{}/lib"}, "lib/libpython3.11.so.1.0"),
        # A framework of macOS.
        (
            {
                "LDVERSION": "3.11",
                "LDLIBRARY": "Python.framework/Versions/3.11/Python",
                "PYTHONFRAMEWORKPREFIX": "{}",
            },
            "Python.framework/Versions/3.11/Python",
        ),
    ],
)
def test_the_shared_library_is_found(tmp_path: Path, variables: dict[str, str], file: str) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libpython3.11.a").touch()
    library = tmp_path / file
    library.parent.mkdir(parents=True, exist_ok=True)
    library.touch()
    given = {name: value.replace("{}", str(tmp_path)) for name, value in variables.items()}
    assert shared_library(given, tmp_path) == library


def test_a_static_interpreter_is_an_error_that_says_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libpython3.11.a").touch()
    sentence = r"has no shared library \(libpython3.11.so\): install one .*--enable-shared"
    with pytest.raises(NoLibpythonError, match=sentence):
        shared_library(STATIC | {"LIBDIR": str(tmp_path / "lib")}, tmp_path)
    with pytest.raises(NoLibpythonError, match=r"has no headers: .*Python.h is missing"):
        headers(tmp_path)
