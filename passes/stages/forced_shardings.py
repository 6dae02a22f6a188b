"""Shardings that a user fixes for arguments, before the stages and their meshes are known.

`alpa.forced` on the function names the axes of each dimension, for arguments of the given program:

    alpa.forced = [{input = 0 : i64, sharding = #sdy.sharding<@each, [{"axis0"}, {}]>}]

They hold on every mesh that reads the argument, and, of a loop over layers, for every row of the
stack. The search of everything else goes on around them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import ClassVar

from alpa.dialects import func, ir
from alpa.dialects.attributes import FORCED, input_number, read_arguments
from alpa.dialects.records import Record
from alpa.dialects.sharding import Sharding
from alpa.passes.base import PassError, errors_at, location_of
from alpa.passes.stages.merge import Stages

_EACH = "each"
"""Stands for the mesh of each stage that reads the argument."""
Dims = tuple[tuple[str, ...], ...]
"""The names of the axes of each dimension, major first."""


@dataclass(frozen=True, kw_only=True)
class _Forced(Record):
    """An entry of `alpa.forced`."""

    NAME: ClassVar[str] = FORCED

    input: int
    sharding: Sharding


def write_forced(function: func.FuncOp, forced: Mapping[int, Dims]) -> None:
    """Sets `alpa.forced`, by the numbers of arguments."""
    function.attributes[FORCED] = ir.ArrayAttr.get(
        [
            _Forced(input=number, sharding=Sharding.of(_EACH, dims)).to_attr()
            for number, dims in forced.items()
        ]
    )


def take_forced(function: func.FuncOp) -> dict[int, Sharding]:
    """Removes `alpa.forced`; returns the shardings by the arguments of the function.

    Raises:
        PassError: the attribute is malformed, or a sharding has another rank than its argument.
    """
    with errors_at(function):
        by_input = {it.input: it.sharding for it in _Forced.read_list(function)}
    if FORCED in function.attributes:
        del function.attributes[FORCED]
    found: dict[int, Sharding] = {}
    for number, attributes in enumerate(read_arguments(function)):
        sharding = by_input.get(input_number(number, attributes))
        if sharding is None:
            continue
        value = function.arguments[number]
        rank = len(_shape(value))
        if len(sharding.dims) != rank:
            raise PassError(
                location_of(value.location, function.location),
                f"argument {number} of type {value.type} cannot be forced to "
                f"{dims_text(sharding.axis_names)}; give axes, or -, for each of its {rank} "
                "dimension(s)",
            )
        found[number] = sharding
    return found


def forced(
    stages: Stages, shardings: Mapping[int, Sharding], arguments: Sequence[ir.Value]
) -> Stages:
    """The stages with shardings of arguments on each of their meshes.

    Raises:
        PassError: a mesh lacks an axis, splits a dimension unevenly, or the program has another
            sharding for the argument.
    """
    found = dict(stages.shardings)
    for number, sharding in shardings.items():
        value = arguments[number]
        for m, mesh in enumerate(stages.meshes):
            sizes = dict(zip(stages.axis_names(mesh), mesh.logical_shape, strict=True))
            mine = replace(sharding, mesh=mesh.name)
            problem = _problem(mine, _shape(value), sizes)
            given = found.get((number, m), mine)
            if given != mine:
                problem = (
                    f"it is {dims_text(given.axis_names)} in the program or where its state lies"
                )
            if problem:
                raise PassError(
                    location_of(value.location),
                    f"argument {number} of type {value.type} cannot be forced to "
                    f"{dims_text(mine.axis_names)} on @{mesh.name}: {problem}",
                )
            found[number, m] = mine
    return replace(stages, shardings=found)


def _problem(sharding: Sharding, shape: Sequence[int], sizes: Mapping[str, int]) -> str:
    """Why a mesh cannot have a sharding; empty if it can."""
    there = ", ".join(f"{axis}={size}" for axis, size in sizes.items())
    for dim, axes in enumerate(sharding.axis_names):
        missing = [axis for axis in axes if axis not in sizes]
        if missing:
            return (
                f"the mesh has no axis {missing[0]}, it has {there}; mesh-shape and fixed-stages "
                "fix the shapes of meshes"
            )
        ways = prod(sizes[axis] for axis in axes)
        if shape[dim] % ways:
            return f"dimension {dim} has {shape[dim]} elements, which {ways} devices do not divide"
    return ""


def _shape(value: ir.Value) -> tuple[int, ...]:
    return tuple(value.type.shape) if isinstance(value.type, ir.RankedTensorType) else ()


def dims_text(dims: Dims) -> str:
    """`[axis0+axis1, -]`."""
    return f"[{', '.join('+'.join(axes) or '-' for axes in dims)}]"
