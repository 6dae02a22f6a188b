"""The packages that Alpa needs, beside those that are installed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from importlib import metadata

from packaging.markers import Marker
from packaging.requirements import Requirement
from packaging.version import Version

_ALPA = "alpa-mlir"
_FOR_DEVELOPERS = ("dev", "docs", "test")
"""Extras that a user does not miss."""
_PLUG_INS = ("jax-cuda12-", "jax-cuda13-", "jax-rocm")


@dataclass(frozen=True, kw_only=True)
class Package:
    """A package that Alpa or one of its extras needs."""

    name: str
    needed: str
    """the versions that fit, such as `>=0.10.2`; empty: all"""
    version: str | None
    """None if it is not installed"""
    fits: bool

    @property
    def problem(self) -> str:
        """What is wrong, in words; empty if nothing is."""
        if self.fits:
            return ""
        if self.version is None:
            return f"{self.name} is not installed"
        return f"{self.name} is {self.version}, which is not {self.needed}"


def required() -> tuple[Package, ...]:
    """The packages that Alpa always needs."""
    return tuple(_package(it) for it in _requirements(_ALPA, ""))


def extras() -> dict[str, tuple[Package, ...]]:
    """The packages of each extra that a user may want, by the extra's name."""
    names = metadata.metadata(_ALPA).get_all("Provides-Extra") or []
    wanted = (name for name in names if name not in _FOR_DEVELOPERS)
    found = {name: tuple(_of_extra(_ALPA, name)) for name in wanted}
    return {name: packages for name, packages in found.items() if packages}


def plug_ins() -> dict[str, str]:
    """The versions of JAX's plug-ins for GPUs that are installed."""
    names = ((it.name, it.version) for it in metadata.distributions())
    return {name: version for name, version in sorted(names) if name.startswith(_PLUG_INS)}


def install(packages: tuple[Package, ...]) -> str:
    """The command that installs the packages that do not fit."""
    wanted = (f"'{it.name}{it.needed}'" for it in packages if not it.fits)
    return f"pip install {' '.join(wanted)}"


def same(version: str, other: str) -> bool:
    """Whether two versions are of one release; their suffixes may differ."""
    return Version(version).release == Version(other).release


def _of_extra(package: str, extra: str) -> Iterator[Package]:
    """The packages of an extra, and of the extras that it names, as far as these are installed."""
    for it in _requirements(package, extra):
        yield _package(it)
        for name in it.extras:
            yield from _of_extra(it.name, name)


def _requirements(package: str, extra: str) -> Iterator[Requirement]:
    """What a package needs for an extra, or without any; nothing if it is not installed."""
    try:
        texts = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return
    for it in map(Requirement, texts):
        if it.name == package:  # An extra may name others of its package.
            continue
        if _applies(it.marker, extra) and (not extra or not _applies(it.marker, "")):
            yield it


def _applies(marker: Marker | None, extra: str) -> bool:
    return marker is None or marker.evaluate({"extra": extra})


def _package(it: Requirement) -> Package:
    try:
        version = metadata.version(it.name)
    except metadata.PackageNotFoundError:
        version = None
    fits = version is not None and it.specifier.contains(version, prereleases=True)
    name = f"{it.name}[{','.join(sorted(it.extras))}]" if it.extras else it.name
    return Package(name=name, needed=str(it.specifier), version=version, fits=fits)
