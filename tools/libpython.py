"""Prints what `libalpa` is built with, for `AlpaConfig.cmake`: three lines.

    python -m alpa.tools.libpython

The first is this interpreter, the second the folder of its headers, the third its shared library.
The exit status is 1, with the reason on standard error, if it lacks one of them.
"""

from __future__ import annotations

import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path


class NoLibpythonError(Exception):
    """The interpreter cannot be embedded. The message says what to install."""


def shared_library(variables: Mapping[str, object], prefix: Path) -> Path:
    """The shared library of an interpreter.

    Args:
        variables: those of `sysconfig`.
        prefix: where the interpreter is installed. One that was moved there names another place.

    Raises:
        NoLibpythonError: there is none.
    """
    version = variables.get("LDVERSION")
    given = [variables.get("INSTSONAME"), variables.get("LDLIBRARY")]
    # Some interpreters are static and have a shared library beside them all the same.
    usual = [f"libpython{version}.so.1.0", f"libpython{version}.so", f"libpython{version}.dylib"]
    names = [name for name in [*given, *usual] if isinstance(name, str) and name[-2:] != ".a"]
    folders = [variables.get("LIBDIR"), prefix / "lib", variables.get("PYTHONFRAMEWORKPREFIX")]
    for folder in folders:
        for name in names if folder else []:
            path = Path(str(folder)) / name
            if path.is_file():
                return path
    raise NoLibpythonError(
        f"{sys.executable} has no shared library (libpython{version}.so): install one (on Debian: "
        f"apt install libpython{version}), or an interpreter that has one (pyenv: "
        "PYTHON_CONFIGURE_OPTS=--enable-shared pyenv install), and Alpa in an environment of it"
    )


def headers(folder: Path) -> Path:
    """The folder of the headers, if they are there.

    Raises:
        NoLibpythonError: they are missing.
    """
    if (folder / "Python.h").is_file():
        return folder
    raise NoLibpythonError(
        f"{sys.executable} has no headers: {folder / 'Python.h'} is missing (on Debian: "
        f"apt install python{sysconfig.get_python_version()}-dev)"
    )


def of_this_interpreter() -> tuple[Path, Path]:
    """The folder of the headers, and the shared library.

    Raises:
        NoLibpythonError: one of them is missing.
    """
    include = headers(Path(sysconfig.get_path("include")))
    return include, shared_library(sysconfig.get_config_vars(), Path(sys.base_prefix))


def main() -> int:
    """Prints the three lines; returns the exit status."""
    try:
        include, library = of_this_interpreter()
    except NoLibpythonError as error:
        print(error, file=sys.stderr)
        return 1
    print(sys.executable, include, library, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
