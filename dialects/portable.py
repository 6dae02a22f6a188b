"""Writes portable artifacts: StableHLO as VHLO bytecode, which other versions of StableHLO read."""

from __future__ import annotations

import re
from typing import Any, cast

from alpa.dialects.bindings import ir, stablehlo, walk
from alpa.dialects.checks import CheckError
from alpa.dialects.reading import separate

_DIALECTS = ("stablehlo", "func", "builtin", "sdy")
_REFUSED = re.compile(r"failed to legalize operation 'vhlo\.(\w+?)_v\d+'")


def portable_versions() -> tuple[str, str]:
    """The oldest and the newest version of StableHLO that portable artifacts can have."""
    return stablehlo.get_minimum_version(), stablehlo.get_current_version()


def is_portable_version(version: str) -> bool:
    """Whether portable artifacts can have a version of StableHLO, such as 1.0.0."""
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        return False
    oldest, newest = portable_versions()
    smaller = stablehlo.get_smaller_version
    return smaller(oldest, version) == oldest and smaller(version, newest) == version


def write_portable(module: ir.Module, version: str | None = None) -> bytes:
    """A module as a portable artifact of a version of StableHLO, by default of jaxlib's own.

    Ops and attributes of Shardy stay as they are: a reader needs a Shardy that knows them.

    Raises:
        CheckError: an op is not in this version of StableHLO, or of another dialect.
        ValueError: jaxlib does not write this version.
    """
    oldest, newest = portable_versions()
    target = version or newest
    if not is_portable_version(target):
        raise ValueError(f"StableHLO {target} cannot be written; {oldest} to {newest} can")
    for op in walk(module.body):
        name = op.operation.name
        if name.partition(".")[0] not in _DIALECTS:
            raise CheckError(op.location, f"{name} is not StableHLO{_advice(name)}")
    refused: list[CheckError] = []

    def hear(diagnostic: Any) -> bool:
        found = _REFUSED.match(diagnostic.message)
        message = diagnostic.message
        if found:
            message = (
                f"this stablehlo.{found[1]} cannot be written in StableHLO {target}; write a "
                f"later version, up to {newest}"
            )
        refused.append(CheckError(diagnostic.location, message))
        return True

    copy = separate(module.operation)  # StableHLO converts it in place.
    handler = cast(Any, module.context.attach_diagnostic_handler(hear))
    try:
        return stablehlo.serialize_portable_artifact(copy, target, True)
    except ValueError as error:
        raise refused[0] if refused else error from error
    finally:
        handler.detach()


def _advice(name: str) -> str:
    if name.startswith("chlo."):
        return "; run func.func(chlo-legalize-to-stablehlo) first"
    if name.startswith("mpmd."):
        return ": a plan is no portable program; write the modules of its stages"
    return ""
