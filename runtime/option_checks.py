"""Checks options where they are given. Each error states the value and the expected values."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any, get_args

import numpy as np

from alpa.passes.base import check_kind
from alpa.passes.schedules.planned import TERAPIPE, checked, of_words


def check_literal(name: str, value: Any, kind: Any) -> None:
    """Raises ValueError if an option has none of the values of a Literal."""
    allowed = get_args(kind)
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name} is {value!r}; expected one of {', '.join(allowed)}")


def schedule_text(schedule: Any) -> str:
    """The option `schedule` as the planner takes it, from its text or from lists of work.

    Raises:
        TypeError: it is of another type.
        ValueError: it is no schedule that plans can use.
    """
    check_kind("schedule", schedule, str, list, tuple)
    if not isinstance(schedule, str):
        for row in schedule:
            check_kind("a mesh's list in schedule", row, list, tuple)
            for work in row:
                check_kind("work in schedule", work, str)
        return of_words(schedule)
    return schedule if schedule in ("auto", TERAPIPE) else checked(schedule)


def check_count(name: str, value: Any, least: int) -> None:
    """Raises ValueError if an option is not a whole number of at least `least`."""
    if isinstance(value, bool) or not isinstance(value, Integral) or int(value) < least:
        raise ValueError(f"{name} is {value!r}; expected a whole number of at least {least}")


def check_count_or_auto(name: str, value: Any) -> None:
    """Checks an option that is a whole number of at least 1, or `auto`.

    Raises:
        TypeError: it is of another type.
        ValueError: it is another text, or smaller.
    """
    if isinstance(value, bool) or not isinstance(value, Integral | str):
        raise TypeError(
            f"{name} is {value!r}, of type {type(value).__name__}; expected a whole number or "
            '"auto"'
        )
    if value != "auto" and (isinstance(value, str) or int(value) < 1):
        raise ValueError(f'{name} is {value!r}; expected a whole number of at least 1, or "auto"')


def check_seconds(name: str, value: Any) -> None:
    """Raises ValueError if a timeout is not positive, not finite, or too long for Python."""
    is_number = not isinstance(value, bool) and isinstance(value, Real)
    if not is_number or not 0 < float(value) <= threading.TIMEOUT_MAX:
        raise ValueError(
            f"{name} is {value!r}; expected a number of seconds above 0, at most "
            f"{threading.TIMEOUT_MAX:.2g}"
        )


def check_folders(name: str, value: Any) -> tuple[Path, ...]:
    """Returns one folder or several as absolute paths.

    Raises:
        TypeError: one is not a path.
    """
    check_kind(name, value, str, Path, list, tuple)
    folders = [value] if isinstance(value, str | Path) else value
    for folder in folders:
        check_kind(f"a folder in {name}", folder, str, Path)
    return tuple(Path(folder).expanduser().absolute() for folder in folders)


def check_devices(devices: Sequence[Any] | None) -> None:
    """Checks the devices for a plan; None leaves the choice to JAX.

    Raises:
        TypeError: one is not a JAX device.
        ValueError: the list is empty, or a device is given twice.
    """
    if devices is None:
        return
    check_kind("devices", devices, Sequence, np.ndarray)
    if not len(devices):
        raise ValueError("devices is empty; name at least one device, or omit devices=")
    for number, device in enumerate(devices):
        if not hasattr(device, "device_kind"):
            raise TypeError(
                f"devices[{number}] is {device!r}, of type {type(device).__name__}; expected "
                "JAX devices, such as jax.devices()[:4]"
            )
    first: dict[int, int] = {}
    for number, device in enumerate(devices):
        other = first.setdefault(id(device), number)
        if other != number:
            raise ValueError(
                f"devices[{other}] and devices[{number}] are both {device}; name each device once"
            )


def check_compiler_options(options: Any) -> None:
    """Checks XLA's compiler options; XLA checks the names.

    Raises:
        TypeError: they do not map names to values.
        ValueError: a value is not finite.
    """
    check_kind("compiler_options", options, Mapping, type(None))
    for name, value in (options or {}).items():
        check_kind("a name in compiler_options", name, str)
        check_kind(f"compiler_options[{name!r}]", value, str, bool, int, float)
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"compiler_options[{name!r}] is {value!r}; expected a finite number")
