"""Passes of other packages: entry points of the group `alpa.passes`.

    [project.entry-points."alpa.passes"]
    count-ops = "my_package.count_ops:CountOps"

They are looked for only if a pipeline has a name that neither Alpa nor MLIR knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from alpa.passes.base import Pass, UsersCode

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "alpa.passes"


class PackageError(Exception):
    """A package's pass cannot be used: which pass of which package, and why."""


@dataclass(frozen=True)
class Installed:
    """The passes of all installed packages, by name."""

    passes: dict[str, EntryPoint]
    problems: dict[str, PackageError]
    """of names that cannot be used: one of Alpa's or MLIR's, or that of two packages' passes"""


def installed(ours: Collection[str], is_registered: Callable[[str], bool]) -> Installed:
    """The passes of all installed packages.

    Args:
        ours: the names of Alpa's passes.
        is_registered: whether MLIR has a pass of a name.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - costs start-up time

    passes: dict[str, EntryPoint] = {}
    problems: dict[str, PackageError] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in ours or is_registered(entry.name):
            whose = "Alpa" if entry.name in ours else "MLIR"
            problems[entry.name] = PackageError(
                f"{_title(entry)} has the name of a pass of {whose}; rename it or uninstall the "
                "package"
            )
            continue
        other = passes.setdefault(entry.name, entry)
        if other.value != entry.value:
            problems[entry.name] = PackageError(
                f"{_title(entry)} has the name of a pass of package {_package(other)!r}; uninstall "
                "one of them"
            )
    usable = {name: entry for name, entry in passes.items() if name not in problems}
    return Installed(usable, problems)


def load(entry: EntryPoint) -> type[Pass]:
    """The class of a package's pass.

    Raises:
        PackageError: it cannot be imported, is no pass, or has another name.
    """
    with UsersCode(lambda reason: PackageError(f"{_title(entry)} does not load: {reason}")):
        kind = entry.load()
        if not (isinstance(kind, type) and issubclass(kind, Pass)):
            raise TypeError(f"{entry.value} is no subclass of alpa.passes.Pass")
        if kind.name != entry.name:
            raise ValueError(f"{entry.value} has the name {kind.name!r}")
        kind.options()
    return kind


def _title(entry: EntryPoint) -> str:
    return f"pass '{entry.name}' of package {_package(entry)!r}"


def _package(entry: EntryPoint) -> str:
    return "unknown" if entry.dist is None else entry.dist.name
