"""Checks of planned modules that the upstream verifiers do not make.

The mpmd verifier checks the values of its own ops: their meshes are in the topology, their
shardings fit, and transfers keep the global type. It does not check `alpa.meshes`, arguments that
no op reads, meshes without values, or the shardings inside a fragment.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from alpa.dialects.bindings import body, func, ir, main_function, mpmd, sdy, walk
from alpa.dialects.mpmd_types import MeshTensor, mesh_of, read_topology
from alpa.dialects.plan import MeshAssignment, read_meshes
from alpa.dialects.sharding import Mesh, Sharding, op_shardings

NOT_PLANNED = (
    "the function has no mpmd.topology: it is not planned yet; run alpa{cluster=...} first"
)
"""The error of what reads plans, for a program without one."""


class CheckError(Exception):
    """A module is not a valid planned module."""

    def __init__(self, location: ir.Location, message: str) -> None:
        super().__init__(message)
        self.location = location
        self.message = message


def check_planned(module: ir.Module) -> None:
    """Checks a planned module's meshes, topology, arguments, fragments and their shardings.

    Raises:
        CheckError: at the op that is wrong.
    """
    try:
        main = main_function(module)
    except ValueError as error:
        raise CheckError(module.operation.location, str(error)) from error
    meshes = check_meshes(main)
    for op in module.body.operations:
        if isinstance(op, sdy.MeshOp):
            _check_mesh_symbol(op, meshes)
    for number, argument in enumerate(main.entry_block.arguments):
        _check_value(main, f"argument {number}", argument, meshes)
    for op in main.entry_block.operations:
        if isinstance(op, mpmd.FragmentOp):
            _check_fragment(op, meshes)


def check_meshes(main: func.FuncOp) -> dict[str, Mesh]:
    """Returns the meshes of the topology, after checking that `alpa.meshes` gives them devices.

    Raises:
        CheckError: topology and `alpa.meshes` disagree.
    """
    try:
        topology, assigned = read_topology(main), read_meshes(main)
    except ValueError as error:
        raise CheckError(main.location, str(error)) from error
    for problem in _mesh_problems(topology, assigned):
        raise CheckError(main.location, problem)
    return topology


def _mesh_problems(topology: dict[str, Mesh], assigned: list[MeshAssignment]) -> Iterator[str]:
    """What is wrong with the meshes, in words; later problems may follow from the first one."""
    if not topology:
        yield NOT_PLANNED
    names = [mesh.name for mesh in assigned]
    if sorted(names) != sorted(topology):
        yield f"the topology names {_list(topology)}, alpa.meshes {_list(names)}"
    owners: dict[int, str] = {}
    for mesh in assigned:
        hosts, devices, sizes = mesh.hosts, mesh.devices, topology[mesh.name].sizes
        if mesh.logical_shape != sizes:
            yield (
                f"{mesh.name} has logical_shape {mesh.logical_shape} in alpa.meshes and axes of "
                f"sizes {sizes} in the topology"
            )
        if prod(sizes) != len(devices):
            yield (
                f"{mesh.name} of shape {sizes} needs {prod(sizes)} devices, alpa.meshes gives it "
                f"{len(devices)}"
            )
        if not hosts or len(devices) % len(hosts) or len({*hosts}) != len(hosts):
            yield (
                f"{mesh.name} has {len(devices)} devices on hosts {list(hosts)}, but each of "
                "its hosts must have equally many"
            )
        if min(*hosts, *devices) < 0:
            yield (
                f"{mesh.name} has hosts {list(hosts)} and devices {list(devices)}; they must "
                "be numbers of at least 0"
            )
        for device in devices:
            if device in owners:
                yield f"device {device} is in {owners[device]} and again in {mesh.name}"
            owners[device] = mesh.name


def _check_mesh_symbol(op: sdy.MeshOp, topology: dict[str, Mesh]) -> None:
    name = ir.StringAttr(op.attributes["sym_name"]).value
    mesh = Mesh.from_attr(op.attributes["mesh"])
    if name in topology and mesh != topology[name]:
        raise CheckError(
            op.location,
            f"sdy.mesh @{name} has axes {_axes(mesh)}, {name} in the topology "
            f"{_axes(topology[name])}",
        )


def _check_value(op: ir.OpView, what: str, value: ir.Value, meshes: dict[str, Mesh]) -> None:
    try:
        tensor = MeshTensor.from_type(value.type)
    except ValueError as error:
        raise CheckError(op.location, f"{what}: {error}") from error
    if tensor.mesh not in meshes:
        raise CheckError(
            op.location, f"{what} is on {tensor.mesh}; the topology has {_list(meshes)}"
        )
    if tensor.sharding is not None:
        problem = sharding_problem(tensor.sharding, tensor.mesh, meshes[tensor.mesh], tensor.type)
        if problem:
            raise CheckError(op.location, f"{what} {problem}")


def _check_fragment(op: mpmd.FragmentOp, meshes: dict[str, Mesh]) -> None:
    name = mesh_of(op)
    if name not in meshes:
        raise CheckError(
            op.location, f"the fragment is on {name}; the topology has {_list(meshes)}"
        )
    fitting: set[tuple[Sharding, ir.Type]] = set()  # most of thousands of values are alike
    for inner in walk(body(op)):
        shardings = op_shardings(inner)
        if shardings is None:
            continue
        for number, (value, sharding) in enumerate(zip(inner.results, shardings, strict=False)):
            type_ = value.type
            if (sharding, type_) in fitting or not isinstance(type_, ir.RankedTensorType):
                continue
            # Ops may shard dimensions unevenly: XLA pads inside an executable.
            problem = sharding_problem(sharding, name, meshes[name], type_, uneven=True)
            if problem:
                raise CheckError(inner.location, f"result {number} of {inner.name} {problem}")
            fitting.add((sharding, type_))


def sharding_problem(
    sharding: Sharding, name: str, mesh: Mesh, type_: ir.RankedTensorType, *, uneven: bool = False
) -> str | None:
    """Describes what is wrong with a sharding of a tensor on a mesh, or returns None."""
    if sharding.mesh != name:
        return f"is sharded over @{sharding.mesh} but lives on {name}"
    if len(sharding.dims) != type_.rank:
        return f"of type {type_} has a sharding of rank {len(sharding.dims)}"
    seen: set[tuple[str, tuple[int, int] | None]] = set()
    for axis in (*(a for dim in sharding.dims for a in dim), *sharding.unreduced):
        if axis.name not in dict(mesh.axes):
            return f'is sharded over axis "{axis.name}"; {name} has {_axes(mesh)}'
        if (axis.name, axis.sub) in seen:
            return f'is sharded over axis "{axis.name}" twice'
        seen.add((axis.name, axis.sub))
    for number, (size, axes) in enumerate(zip(type_.shape, sharding.dims, strict=True)):
        shards = prod(mesh.axis_size(axis) for axis in axes)
        if not uneven and size % shards:
            return f"has {size} elements in dimension {number}, cut into {shards} shards"
    return None


def _axes(mesh: Mesh) -> str:
    return "[" + ", ".join(f'"{name}"={size}' for name, size in mesh.axes) + "]"


def _list(names: object) -> str:
    return ", ".join(map(str, names)) if isinstance(names, (list, dict)) and names else "none"
