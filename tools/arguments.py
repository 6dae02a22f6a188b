"""Command line arguments that several commands take, and their types."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import alpa


class _Version(argparse.Action):
    """Prints the version. argparse's own action needs it when the parser is made, which takes a
    tenth of a second."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        print(f"{parser.prog} {alpa.__version__}")
        parser.exit()


def add_version(parser: argparse.ArgumentParser) -> None:
    """Adds `--version`."""
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the version of Alpa and exit"
    )


def count(text: str) -> int:
    """A number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is less than 1")
    return number


def count_or_zero(text: str) -> int:
    """A number of at least 0."""
    return 0 if text == "0" else count(text)


def count_or_auto(text: str) -> int | str:
    """A number of at least 1, or `auto`."""
    return text if text == "auto" else count(text)


def share(text: str) -> float:
    """A fraction of at least 0, such as 0.02; may exceed 1."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{number} is not a finite share of at least 0")
    return number


def amount(text: str) -> float:
    """A finite number of at least 0, such as seconds."""
    number = float(text)
    if not 0 <= number < float("inf"):
        raise argparse.ArgumentTypeError(f"{number} is not a finite number of at least 0")
    return number


def compiler_option(text: str) -> tuple[str, str | bool | int | float]:
    """One of XLA's options, such as `xla_gpu_enable_triton_gemm=false`."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    if value.lower() in ("true", "false"):
        return name, value.lower() == "true"
    for kind in (int, float):
        try:
            return name, kind(value)
        except ValueError:
            continue
    return name, value


def dimension_size(text: str) -> str:
    """The size of a symbolic dimension, such as `b=8`."""
    name, equals, size = text.partition("=")
    if not (equals and name.isidentifier() and size.isascii() and size.isdigit()):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=SIZE, such as b=8")
    return text


def parse_size(text: str) -> tuple[int, int]:
    """The two numbers of `N=M`, sizes of a program and of a smaller one."""
    old, equals, new = text.partition("=")
    if not (equals and old.isdigit() and new.isdigit() and 0 < int(new) <= int(old)):
        raise argparse.ArgumentTypeError(f"'{text}' is not OLD=NEW with 0 < NEW <= OLD")
    return int(old), int(new)


def check_sizes(option: str, sizes: Sequence[tuple[int, int]]) -> None:
    """Raises ValueError if an option replaces a size by two others."""
    found = dict[int, int]()
    for old, new in sizes:
        if found.setdefault(old, new) != new:
            raise ValueError(
                f"{option} replaces {old} by {found[old]} and by {new}; leave one of them out"
            )


# The names of the types in argparse's messages.
count.__name__ = "whole number"
count_or_zero.__name__ = "whole number"
count_or_auto.__name__ = "whole number or auto"
share.__name__ = "share"
amount.__name__ = "number"
