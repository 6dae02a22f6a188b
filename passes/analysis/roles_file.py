"""The roles of arguments and results from a TOML file, for programs that do not carry them.

    [arguments]
    "0-15" = "state"                        # a number, a range of numbers,
    "batch['x']" = "batch"                  # a name,
    "params*" = "constant"                  # or all names that begin so
    17 = { role = "batch", batch_dim = 1 }  # the default is dimension 0

    [results]
    "0-15" = "state:0-15"                   # the new values of these arguments, in their order
    "result[1]" = "mean"                    # or "sum", "last", "concat:0"

Names of arguments are those of their locations, names of results their `jax.result_info`: JAX
writes them with `lower(...).as_text(debug_info=True)`. The roles in the file replace those in the
program; others stay.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast, get_args

from alpa.dialects import ir, main_function
from alpa.dialects.attributes import (
    Argument,
    ResultRole,
    Role,
    read_arguments,
    read_results,
    write_interface,
)
from alpa.passes.analysis.interface_names import Names
from alpa.passes.text_files import read_text

_ENTRY = re.compile(r"""\s*("(?:[^"\\]|\\.)*"|'[^']*'|[\w-]+)\s*[=.]""")
_HEADER = re.compile(r"\s*\[\s*(\w+)\s*\]")


class RolesError(ValueError):
    """A file of roles cannot be used: `file:line: error: message`."""

    def __init__(self, path: str, line: int, message: str) -> None:
        super().__init__(f"{path}:{line}: error: {message}" if line else f"{path}: {message}")


@dataclass(frozen=True, kw_only=True)
class _Entry:
    path: str
    line: int
    selector: str
    value: Any

    def error(self, message: str) -> RolesError:
        return RolesError(self.path, self.line, message)


@dataclass(frozen=True, kw_only=True)
class RolesFile:
    """The entries of a file, not yet checked against a program."""

    arguments: tuple[_Entry, ...]
    results: tuple[_Entry, ...]

    @classmethod
    def read(cls, path: str | Path) -> RolesFile:
        """Reads a file.

        Raises:
            RolesError: it cannot be read, is not TOML, or has another table than these two.
        """
        try:
            text = read_text(path)
        except OSError as error:
            raise RolesError(str(path), 0, f"error: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise RolesError(str(path), 0, "error: a file of roles is UTF-8 text") from error
        return cls.parse(text, str(path))

    @classmethod
    def parse(cls, text: str, path: str) -> RolesFile:
        """As `read`, from the text; `path` is for messages only."""
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            at = re.search(r" \(at line (\d+), column \d+\)", str(error))
            line = int(at[1]) if at else text.count("\n") + 1
            message = re.sub(r" \(at .*\)", "", str(error))
            raise RolesError(path, line, f"not valid TOML: {message}") from error
        lines = _lines(text)
        for name, table in tables.items():
            if name not in ("arguments", "results") or not isinstance(table, dict):
                line = lines.get((name,), lines.get(("", name), 1))
                raise RolesError(path, line, f"{name!r} is neither [arguments] nor [results]")

        def entries(name: str) -> tuple[_Entry, ...]:
            table = cast("dict[str, Any]", tables.get(name, {}))
            return tuple(
                _Entry(path=path, line=lines.get((name, key), 1), selector=key, value=value)
                for key, value in table.items()
            )

        return cls(arguments=entries("arguments"), results=entries("results"))

    def apply(self, module: ir.Module) -> None:
        """Writes `alpa.role`, `alpa.batch_dim` and `alpa.result` on @main.

        Raises:
            RolesError: an entry names an argument or result that the program lacks or that has a
                role already, or gives a role that does not fit; with its line.
            ValueError: the program has no public function, or a malformed role of its own.
        """
        function = main_function(module)
        arguments, results = read_arguments(function), read_results(function)
        given = _Selected(Names.of_arguments(function))
        returned = _Selected(Names.of_results(function))
        for number, entry in given.chosen(self.arguments).items():
            arguments[number] = _argument(entry, given, number, arguments[number])
        for number, entry in returned.chosen(self.results).items():
            results[number] = replace(results[number], role=_role(entry, given, returned, number))
        with module.context:
            write_interface(function, arguments, results)


def _lines(text: str) -> dict[tuple[str, ...], int]:
    """The line (from 1) of each table, and of each key by its table."""
    lines: dict[tuple[str, ...], int] = {}
    table = ""
    for number, line in enumerate(text.splitlines(), start=1):
        if header := _HEADER.match(line):
            table = header[1]
            lines.setdefault((table,), number)
        elif entry := _ENTRY.match(line):
            # TOML itself says what a quoted key means.
            (key,) = tomllib.loads(f"{entry[1]} = 0")
            lines.setdefault((table, key), number)
    return lines


@dataclass(frozen=True)
class _Selected:
    """Arguments or results that the entries of a file name."""

    names: Names

    def chosen(self, entries: Sequence[_Entry]) -> dict[int, _Entry]:
        """The entry of each number that one names."""
        found: dict[int, _Entry] = {}
        for entry in entries:
            for number in self.select(entry, entry.selector):
                if number in found:
                    line, noun = found[number].line, self.names.noun
                    raise entry.error(f"{noun} {number} has a role from line {line} already")
                found[number] = entry
        return found

    def check_dim(self, entry: _Entry, number: int, dim: int) -> None:
        type_, noun = self.names.types[number], self.names.noun
        rank = type_.rank if isinstance(type_, ir.RankedTensorType) else 0
        if not 0 <= dim < rank:
            raise entry.error(f"{noun} {number} is {type_}, which has no dimension {dim}")

    def select(self, entry: _Entry, selector: str) -> list[int]:
        """The numbers that a selector of an entry means; there is one at least."""
        try:
            return self.names.select(selector)
        except ValueError as error:
            raise entry.error(str(error)) from error


def _argument(entry: _Entry, given: _Selected, number: int, old: Argument) -> Argument:
    """An argument with the role that an entry gives it."""
    value = {"role": entry.value} if isinstance(entry.value, str) else entry.value
    if not isinstance(value, dict) or not set(value) <= {"role", "batch_dim"}:
        raise entry.error('expected a role such as "state", or { role = "batch", batch_dim = 1 }')
    table = cast("dict[str, Any]", value)
    role, dim = table.get("role"), table.get("batch_dim")
    if role not in get_args(Role):
        raise entry.error(f"the role is {role!r}; expected {', '.join(get_args(Role))}")
    if role != "batch":
        if dim is not None:
            raise entry.error(f"batch_dim belongs to the role batch, not to {role}")
        return replace(old, role=role, batch_dim=None)
    dim = 0 if dim is None else dim
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise entry.error(f"batch_dim is {dim!r}; expected the number of a dimension")
    given.check_dim(entry, number, dim)
    return replace(old, role="batch", batch_dim=dim)


def _role(entry: _Entry, given: _Selected, returned: _Selected, number: int) -> ResultRole:
    """The role that an entry gives a result."""
    text = entry.value
    if not isinstance(text, str):
        raise entry.error(f'the role is {text!r}; expected a text such as "mean"')
    kind, _, which = text.partition(":")
    if kind == "state" and which:
        return ResultRole("state", _state(entry, which, given, returned, number))
    try:
        role = ResultRole.parse(text)
    except ValueError as error:
        raise entry.error(
            f"the role is {text!r}; expected concat:<dim>, mean, sum, last or state:<arguments>"
        ) from error
    if role.kind == "concat":
        returned.check_dim(entry, number, role.index or 0)
    return role


def _state(entry: _Entry, which: str, given: _Selected, returned: _Selected, number: int) -> int:
    """The argument whose new value a result is."""
    news, olds = returned.select(entry, entry.selector), given.select(entry, which)
    if len(news) != len(olds):
        raise entry.error(
            f"{entry.selector} is {len(news)} result(s), {which} is {len(olds)} argument(s); "
            "each result is the new value of one argument"
        )
    old = olds[news.index(number)]
    before, after = given.names.types[old], returned.names.types[number]
    if before != after:
        raise entry.error(
            f"result {number} is {after} and cannot be the new value of argument {old}, which is "
            f"{before}"
        )
    return old
