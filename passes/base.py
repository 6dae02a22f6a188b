"""What a pass is: a frozen dataclass whose fields are its options."""

from __future__ import annotations

import dataclasses
import math
import traceback
import types
import typing
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator
from contextlib import contextmanager
from reprlib import Repr
from types import TracebackType
from typing import Any, ClassVar, Literal, Protocol, Self, TypeVar

from alpa.dialects import body, file_position, func, ir, terminator
from alpa.dialects.checks import CheckError

E = TypeVar("E", bound=BaseException)


class PassError(Exception):
    """A pass cannot go on: a sentence at an op, with notes on others where they disagree.

    The pass manager turns it into a located MLIR error.
    """

    def __init__(
        self,
        where: ir.OpView | ir.Operation | ir.Location,
        message: str,
        notes: tuple[tuple[ir.OpView | ir.Operation | ir.Location, str], ...] = (),
    ) -> None:
        super().__init__(message)
        self.location = location_of(where)
        self.message = message
        self.notes = tuple((location_of(other), note) for other, note in notes)


class NoRoomError(PassError):
    """A program does not fit into memory.

    `missing` is a lower bound of what a mesh needs beyond its memory, as a share of that; None if
    no solution that fits was found in time, though there may be one.
    """

    def __init__(
        self, where: ir.OpView | ir.Operation, message: str, missing: float | None
    ) -> None:
        super().__init__(where, message)
        self.missing = missing


class MeshOverHostsError(PassError):
    """A plan needs a mesh over several hosts, and the options allow none."""


class NotFasterError(PassError):
    """No plan is predicted as fast as requested: each takes at least `bound` seconds per step."""

    def __init__(self, where: ir.OpView | ir.Operation, message: str, bound: float) -> None:
        super().__init__(where, message)
        self.bound = bound


def kept(error: E) -> E:
    """An error to keep, without tracebacks: its own, and those of its causes.

    A traceback has the frames of all callers. If one of them keeps the error, this is a cycle: what
    the callers hold, such as the arrays of a call, lives until Python collects cycles. What was
    handled when the error was raised may be the user's own: it stays as it is.
    """
    one: BaseException | None = error
    while one is not None:
        one.__traceback__ = one.__context__ = None
        one = one.__cause__
    return error


def fresh(error: E) -> E:
    """A kept error to raise: a copy, which no frame of its traceback keeps."""
    copy = type(error).__new__(type(error), *error.args)
    copy.__dict__.update(error.__dict__)
    copy.__cause__ = error.__cause__
    copy.__suppress_context__ = error.__suppress_context__
    return copy


@contextmanager
def errors_at(where: ir.OpView | ir.Operation | ir.Location) -> Generator[None]:
    """Raises what is wrong inside as a PassError: a ValueError here, a CheckError at its place."""
    try:
        yield
    except CheckError as error:
        raise PassError(error.location, error.message) from error
    except ValueError as error:
        raise PassError(where, str(error)) from error


@dataclasses.dataclass(frozen=True)
class UsersCode:
    """Runs a user's code: what that raises becomes what `fail` makes of its name and place."""

    fail: Callable[[str], Exception]

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, Exception):
            *_, where = traceback.extract_tb(trace)
            place = f"{where.filename}:{where.lineno}"
            raise self.fail(f"{type(error).__name__}: {error} ({place})") from error


_SHORT = Repr()
_SHORT.maxstring = _SHORT.maxother = 80
"""A whole program may be passed where something else is expected."""


def check_kind(name: str, value: Any, *kinds: Any) -> None:
    """Raises TypeError if an argument is of none of the kinds; None is one if it is listed."""
    if not isinstance(value, kinds):
        words = " or ".join("None" if it is type(None) else it.__name__ for it in kinds)
        raise TypeError(
            f"{name} is {_SHORT.repr(value)}, of type {type(value).__name__}; expected {words}"
        )


class OptionError(ValueError):
    """An option of a pass has an unknown name or a value that does not fit."""


Remark = Callable[[ir.Location, str], None]


class Show(Protocol):
    """Hears what is being done and, where that can be counted, how much of it has ended."""

    def __call__(self, what: str, done: int = 0, total: int = 0) -> None:
        """`done` of `total` have ended; 0 of 0 if nothing is counted."""
        ...


def quiet(what: str, done: int = 0, total: int = 0) -> None:
    """Shows nothing."""


@dataclasses.dataclass(frozen=True)
class Option:
    """An option of a pass. `type` is that of the pass's field, or a union of types."""

    type: Any
    default: Any
    help: str

    def values(self) -> str:
        """The values that it takes, in words."""
        return describe_type(self.type)

    def default_text(self) -> str:
        """The default as it is written in a pipeline; empty where there is none."""
        if isinstance(self.default, bool):
            return str(self.default).lower()
        return "" if self.default is None else str(self.default)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pass(ABC):
    """One rewrite of a module. Subclasses set `name` and add options as fields.

    A field `num_layers` is the option `num-layers`; `option(default, help)` declares it.
    """

    name: ClassVar[str]
    is_checked: bool = False
    """another pass has checked all shapes of the module (`check_input`), and its layers if it has
    any (`check_layers`)"""
    show: Show = quiet
    """hears how far the pass is"""

    @abstractmethod
    def run(self, module: ir.Module, remark: Remark) -> None:
        """Rewrites the module in place.

        Raises:
            PassError: the module or the options do not allow it; nothing is promised of the
                module afterwards.
        """

    @classmethod
    def summary(cls) -> str:
        """The first line of the class's docstring."""
        return (cls.__doc__ or "").strip().partition("\n")[0]

    @classmethod
    def from_options(cls, options: dict[str, str]) -> Self:
        """A pass from option texts by their names with dashes.

        Raises:
            OptionError: a value does not fit its field's type. Unknown names are the caller's to
                report, which knows their position.
        """
        values = {
            name.replace("-", "_"): _convert(name, options[name], known.type)
            for name, known in cls.options().items()
            if name in options
        }
        return cls(**values)

    @classmethod
    def options(cls) -> dict[str, Option]:
        """The options by their names with dashes."""
        return cls.own_options()

    @classmethod
    def own_options(cls) -> dict[str, Option]:
        """Those that are fields of the pass itself."""
        hints = typing.get_type_hints(cls)
        return {
            field.name.replace("_", "-"): Option(
                hints[field.name], field.default, field.metadata["help"]
            )
            for field in dataclasses.fields(cls)
            if "help" in field.metadata
        }


RunPass = Callable[[Pass, ir.Module, Remark], None]
"""Runs a pass on a module, and MLIR's verifier after it. Raises PassError and ir.MLIRError."""


class Driver(Pass):
    """A pass that runs other passes, on copies of the module where it compares what they make."""

    @abstractmethod
    def drive(self, module: ir.Module, remark: Remark, run_pass: RunPass) -> None:
        """As `run`; the other passes are run by `run_pass`."""

    def run(self, module: ir.Module, remark: Remark) -> None:
        """Runs `drive`, and MLIR's verifier after each of the other passes."""

        def run_pass(step: Pass, inner: ir.Module, say: Remark) -> None:
            step.run(inner, say)
            inner.operation.verify()

        self.drive(module, remark, run_pass)


def option(default: Any, help: str) -> Any:
    """A field of a pass that is an option."""
    return dataclasses.field(default=default, metadata={"help": help})


def location_of(*candidates: ir.OpView | ir.Operation | ir.Location) -> ir.Location:
    """The location of the first that has a position in a file, or of the first.

    jax gives functions and meshes none: what a function returns stands for it.
    """
    places: list[ir.Location] = []
    for where in candidates:
        places.append(where if isinstance(where, ir.Location) else where.location)
        if isinstance(where, func.FuncOp) and where.regions[0].blocks:
            places.append(terminator(body(where)).location)
    return next((place for place in places if file_position(place) is not None), places[0])


def _convert(name: str, text: str, hint: Any) -> Any:
    """An option's text as a value of its field's type: bool, int, float, str, Literal, unions."""
    for kind in _alternatives(hint):
        if typing.get_origin(kind) is Literal:
            if text in typing.get_args(kind):
                return text
        elif kind is bool:
            if text in ("true", "false"):
                return text == "true"
        elif kind is str:
            return text
        elif kind in (int, float):
            try:
                value = kind(text)
            except ValueError:
                continue
            if kind is float and not math.isfinite(value):
                raise OptionError(f"option '{name}' is '{text}'; expected a finite number")
            return value
    raise OptionError(f"option '{name}' is '{text}'; expected {describe_type(hint)}")


def describe_type(hint: Any) -> str:
    """The values that a field takes, in words."""
    words: list[str] = []
    for kind in _alternatives(hint):
        if typing.get_origin(kind) is Literal:
            words += [str(value) for value in typing.get_args(kind)]
        else:
            names = {bool: "true or false", int: "an integer", float: "a number", str: "a text"}
            words.append(names[kind])
    return " or ".join(words)


def _alternatives(hint: Any) -> tuple[Any, ...]:
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        return tuple(kind for kind in typing.get_args(hint) if kind is not type(None))
    return (hint,)
