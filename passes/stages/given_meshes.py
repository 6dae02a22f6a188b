"""Options that give meshes, and the places of state that lies on them already.

A function that takes the state of a training step, such as its evaluation, is planned for the
meshes of that step. `alpa.held` on the function says where the arrays of a state lie: for arguments
of the given program, or slices of them, a sharding for each mesh that has a copy,

    alpa.held = [{input = 0 : i64, shardings = [#sdy.sharding<@mesh_0, [{"axis0"}, {}]>]},
                 {input = 1 : i64, slice = array<i64: 0, 0, 2>, shardings = [...]}]

The cut moves as few bytes of them as possible (`solve/stages/stage_dp.py`), and a state that is
read on its own mesh keeps its sharding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from alpa.dialects import func, ir
from alpa.dialects.attributes import HELD, Slice, State, argument_state, read_arguments
from alpa.dialects.plan import MeshAssignment
from alpa.dialects.records import Record, entry
from alpa.dialects.sharding import Sharding
from alpa.passes.base import OptionError, PassError, errors_at, location_of
from alpa.passes.cost.cluster import AnyCluster

Places = Mapping[State, tuple[Sharding, ...]]
"""The shardings of the arrays of a state, one for each mesh that has a copy."""

SHAPE = r"[1-9]\d*(?:x[1-9]\d*){0,3}"
"""A logical mesh shape, such as `4x2`."""
_MESH = re.compile(rf"(\d+)(?:-(\d+))?:({SHAPE})")


def parse_shape(text: str) -> tuple[int, ...] | None:
    """The logical shape that an option such as `4x2` gives every mesh; None for `auto`.

    Raises:
        OptionError: the text is not a shape.
    """
    if text == "auto":
        return None
    if not re.fullmatch(SHAPE, text):
        raise OptionError(
            f"option 'mesh-shape' is '{text}'; expected auto or the sizes of one to four axes, "
            "such as 4x2"
        )
    return tuple(map(int, text.split("x")))


def parse_meshes(text: str, cluster: AnyCluster) -> tuple[MeshAssignment, ...]:
    """The meshes of an option `0-3:2x2,4-7:4`: devices of the cluster and logical shapes, in order.

    Raises:
        OptionError: the cluster does not have these meshes.
    """
    meshes: list[MeshAssignment] = []
    used: set[int] = set()
    for number, word in enumerate(text.split(",")):
        match = _MESH.fullmatch(word.strip())
        if match is None:
            raise OptionError(
                f"option 'meshes' holds '{word}'; expected the first and last device of each mesh "
                "and its logical shape, such as 0-3:2x2,4-7:4"
            )
        first, last = int(match[1]), int(match[2] or match[1])
        shape = tuple(map(int, match[3].split("x")))
        devices = tuple(range(first, last + 1))
        _check(word, devices, shape, cluster)
        if used & {*devices}:
            raise OptionError(
                f"option 'meshes' gives device {min(used & {*devices})} to two meshes"
            )
        used |= {*devices}
        hosts = tuple(range(cluster.host_of(first), cluster.host_of(last) + 1))
        meshes.append(
            MeshAssignment(
                name=f"mesh_{number}",
                hosts=hosts,
                devices=devices,
                logical_shape=shape,
                device=cluster.device_name(hosts),
            )
        )
    return tuple(meshes)


def meshes_text(meshes: Sequence[MeshAssignment]) -> str:
    """The option that gives a plan these meshes."""
    words = (
        f"{mesh.devices[0]}-{mesh.devices[-1]}:{'x'.join(map(str, mesh.logical_shape))}"
        for mesh in meshes
    )
    return ",".join(words)


def _check(
    word: str, devices: tuple[int, ...], shape: tuple[int, ...], cluster: AnyCluster
) -> None:
    """Raises OptionError for a mesh that the cluster does not have."""
    if not devices or devices[-1] >= cluster.num_devices:
        problem = f"the cluster's devices are 0-{cluster.num_devices - 1}"
    elif prod(shape) != len(devices):
        problem = f"that is a shape of {prod(shape)} for {len(devices)} devices"
    else:
        hosts = range(cluster.host_of(devices[0]), cluster.host_of(devices[-1]) + 1)
        sizes = {cluster.host_sizes[host] for host in hosts}
        if len({cluster.number_of((host,)) for host in hosts}) > 1:
            problem = "a mesh is on hosts of one kind"
        elif len(hosts) > 1 and len(devices) != sum(cluster.host_sizes[h] for h in hosts):
            problem = f"a mesh is a part of one host or whole hosts of {sizes.pop()}"
        else:
            return
    raise OptionError(f"option 'meshes' holds '{word}'; {problem}")


@dataclass(frozen=True, kw_only=True)
class _Held(Record):
    """An entry of `alpa.held`."""

    NAME: ClassVar[str] = HELD

    input: int
    slice: Slice | None = entry(None)
    shardings: tuple[Sharding, ...]


def write_held(function: func.FuncOp, places: Places) -> None:
    """Sets `alpa.held`."""
    function.attributes[HELD] = ir.ArrayAttr.get(
        [
            _Held(input=number, slice=part, shardings=shardings).to_attr()
            for (number, part), shardings in places.items()
        ]
    )


def take_held(
    function: func.FuncOp, meshes: Sequence[MeshAssignment]
) -> dict[int, dict[int, Sharding]]:
    """Removes `alpa.held`; returns the shardings of states by argument and mesh.

    Raises:
        PassError: a sharding is not over a given mesh, or does not fit its shape.
    """
    with errors_at(function):
        places = {(it.input, it.slice): it.shardings for it in _Held.read_list(function)}
    if HELD in function.attributes:
        del function.attributes[HELD]
    numbers = {mesh.name: number for number, mesh in enumerate(meshes)}
    found: dict[int, dict[int, Sharding]] = {}
    for argument, attributes in enumerate(read_arguments(function)):
        value = function.arguments[argument]
        for sharding in places.get(argument_state(argument, attributes), ()):
            if sharding.mesh not in numbers:
                given = ", ".join(numbers) or "none"
                raise PassError(
                    location_of(value.location, function.location),
                    f"argument {argument} is held on @{sharding.mesh}, which is not among the "
                    f"given meshes ({given}); name them with the option meshes",
                )
            number = numbers[sharding.mesh]
            axes = {f"axis{i}" for i in range(len(meshes[number].logical_shape))}
            unknown = {axis for dim in sharding.axis_names for axis in dim} - axes
            rank = value.type.rank if isinstance(value.type, ir.RankedTensorType) else 0
            if len(sharding.dims) != rank or unknown:
                raise PassError(
                    location_of(value.location, function.location),
                    f"argument {argument} of type {value.type} cannot be held as "
                    f"{sharding.to_attr()}; a dimension for each of its own, over "
                    f"{', '.join(sorted(axes))}, is expected",
                )
            found.setdefault(argument, {})[number] = sharding
    return found
