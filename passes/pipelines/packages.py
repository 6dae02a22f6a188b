"""Passes of other packages: entry points of the group `alpa.passes`.

    [project.entry-points."alpa.passes"]
    count-ops = "my_package.count_ops:CountOps"

They are looked for only if a pipeline has a name that neither Alpa nor MLIR knows.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import TYPE_CHECKING

from alpa.passes.base import Pass, UsersCode

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "alpa.passes"


class PackageError(Exception):
    """A package's pass cannot be used: which pass of which package, and why."""


def installed(ours: Collection[str], is_registered: Callable[[str], bool]) -> dict[str, EntryPoint]:
    """The passes of all installed packages, by name.

    Args:
        ours: the names of Alpa's passes.
        is_registered: whether MLIR has a pass of a name.

    Raises:
        PackageError: a name is one of Alpa's or MLIR's, or that of two packages' passes.
    """
    from importlib.metadata import entry_points  # noqa: PLC0415 - costs start-up time

    found: dict[str, EntryPoint] = {}
    for entry in entry_points(group=GROUP):
        if entry.name in ours or is_registered(entry.name):
            whose = "Alpa" if entry.name in ours else "MLIR"
            raise PackageError(
                f"{_title(entry)} has the name of a pass of {whose}; rename it or uninstall the "
                "package"
            )
        other = found.setdefault(entry.name, entry)
        if other.value != entry.value:
            raise PackageError(
                f"{_title(entry)} has the name of a pass of package {_package(other)!r}; uninstall "
                "one of them"
            )
    return found


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
