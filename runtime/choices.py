"""Choices that a user fixes, while the search finds the rest: `--force`, `parallelize(force=...)`.

    state.params['wte'] = [axis0, -]      an argument's sharding: for each dimension its mesh axes,
    batch* = [axis0+axis1, -, -]          of all arguments whose names begin so
    layers 0-7 on 1x8                     a stage on a submesh of one host with eight devices,
    layers 8-11 on 1x4 as 2x2             in a logical shape
    schedule = zb-v                       the schedule

Arguments are given by name, by number, or by a range of numbers. Files of hints hold one choice per
line (`read_hints`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from alpa.dialects import func
from alpa.passes.analysis.interface_names import Names
from alpa.passes.base import OptionError
from alpa.passes.stages.fixed_stages import FixedStage
from alpa.passes.stages.forced_shardings import Dims, dims_text
from alpa.passes.text_files import read_text

_STAGE = re.compile(r"layers?\s+(\d+(?:-\d+)?)\s+on\s+(\S+)(?:\s+as\s+(\S+))?")
_SHARDING = re.compile(r"(.+?)\s*=\s*\[([^\[\]]*)\]")
_SCHEDULE = re.compile(r"schedule\s*=\s*([^\s\[\]]+)")
_EXPECTED = (
    "expected an argument's sharding, such as \"state.params['wte'] = [axis0, -]\", a stage, such "
    'as "layers 0-7 on 1x8" or "layers 0-7 on 1x8 as 2x4", or a schedule, such as "schedule = zb-v"'
)


@dataclass(frozen=True, kw_only=True)
class ForcedSharding:
    """The sharding of all arguments that a selector means."""

    selector: str
    dims: Dims

    def __str__(self) -> str:
        return f"{self.selector} = {dims_text(self.dims)}"


@dataclass(frozen=True, kw_only=True)
class ForcedSchedule:
    """The schedule, as the option `schedule` has it."""

    schedule: str

    def __str__(self) -> str:
        return f"schedule = {self.schedule}"


Choice = ForcedSharding | FixedStage | ForcedSchedule


class ChoiceError(ValueError):
    """A choice is malformed, or does not suit the program."""


def parse_choice(text: str) -> Choice:
    """Parses a choice.

    Raises:
        ChoiceError: it is none.
    """
    if stage := _STAGE.fullmatch(text.strip()):
        layers, submesh, shape = stage.groups()
        try:
            return FixedStage.parse(":".join(it for it in (layers, submesh, shape) if it))
        except OptionError as error:
            raise ChoiceError(f"{text!r} is no choice: {_EXPECTED}") from error
    if schedule := _SCHEDULE.fullmatch(text.strip()):
        return ForcedSchedule(schedule=schedule[1])
    sharding = _SHARDING.fullmatch(text.strip())
    if sharding is None:
        raise ChoiceError(f"{text!r} is no choice: {_EXPECTED}")
    words = [word.strip() for word in sharding[2].split(",")] if sharding[2].strip() else []
    dims = tuple(() if word == "-" else tuple(map(str.strip, word.split("+"))) for word in words)
    used = [axis for axes in dims for axis in axes]
    if not all(axis.isidentifier() for axis in used):
        raise ChoiceError(f"{text!r} is no choice: {_EXPECTED}")
    if len(set(used)) < len(used):
        raise ChoiceError(f"{text!r} is no choice: a mesh axis splits one dimension at most, once")
    return ForcedSharding(selector=sharding[1], dims=dims)


def stage_text(stage: FixedStage) -> str:
    """`layers 0-7 on 1x8 as 2x4`."""
    layers = f"layers {stage.first}-{stage.last}"
    if stage.first == stage.last:
        layers = f"layer {stage.first}"
    seen = "" if stage.shape is None else f" as {'x'.join(map(str, stage.shape))}"
    return f"{layers} on {'x'.join(map(str, stage.submesh))}{seen}"


def fixed_stages(choices: Sequence[Choice]) -> str:
    """The option `fixed-stages` of the stages among the choices."""
    return ",".join(str(it) for it in choices if isinstance(it, FixedStage))


def forced_schedule(choices: Sequence[Choice], given: str) -> str:
    """The schedule among the choices, or else the one that is given; `auto` leaves it open.

    Raises:
        ChoiceError: there are two.
    """
    for choice in choices:
        if isinstance(choice, ForcedSchedule):
            if given not in ("auto", choice.schedule):
                raise ChoiceError(
                    f"{str(choice)!r} cannot be forced: the schedule is {given} already; leave one "
                    "of them out"
                )
            given = choice.schedule
    return given


def forced_shardings(choices: Sequence[Choice], function: func.FuncOp) -> Mapping[int, Dims]:
    """The shardings among the choices by the numbers of the arguments.

    Raises:
        ChoiceError: there is no such argument, or two choices are of one.
    """
    names, found = Names.of_arguments(function), dict[int, Dims]()
    for choice in choices:
        if not isinstance(choice, ForcedSharding):
            continue
        try:
            numbers = names.select(choice.selector)
        except ValueError as error:
            raise ChoiceError(f"{str(choice)!r} cannot be forced: {error}") from error
        for number in numbers:
            if number in found:
                raise ChoiceError(
                    f"{str(choice)!r} cannot be forced: argument {number} is forced to "
                    f"{dims_text(found[number])} already"
                )
            found[number] = choice.dims
    return found


def read_hints(path: str | Path) -> tuple[str, ...]:
    """The choices in a file: one per line; empty lines and what follows a `#` do not matter.

    Raises:
        ChoiceError: it cannot be read, or a line is no choice.
    """
    try:
        lines = read_text(path).splitlines()
    except OSError as error:
        raise ChoiceError(f"{path}: error: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ChoiceError(f"{path}: error: a file of hints is UTF-8 text") from error
    found: list[str] = []
    for number, line in enumerate(lines, start=1):
        text = line.partition("#")[0].strip()
        if not text:
            continue
        try:
            parse_choice(text)
        except ChoiceError as error:
            raise ChoiceError(f"{path}:{number}: error: {error}") from error
        found.append(text)
    return tuple(found)
