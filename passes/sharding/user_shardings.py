"""Reads the shardings of the given program, which the plan keeps.

Each mesh of the plan has the axes of the mesh that they name. The sharding of an argument goes into
its `!mpmd.mesh_tensor` type, the sharding of a result into a constraint on the returned value. A
state keeps its layout over a step, so a sharding of the argument or of the result holds for both.

Unused axes may shard an open dimension further, but not a closed one. `replicated` axes shard
nothing. Priorities order Shardy's propagation and have no effect on the search, which observes all
shardings at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

from alpa.dialects import body, func, ir, sdy, terminator, walk_outside_manual
from alpa.dialects.attributes import take_from_signature
from alpa.dialects.plan import MeshAssignment
from alpa.dialects.sharding import Mesh, Sharding, narrower
from alpa.dialects.symbols import lift_inlined_meshes, named_meshes, rename_meshes
from alpa.passes.base import PassError, Remark, location_of
from alpa.passes.cost.cluster import AnyCluster
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.reshard import Layout
from alpa.passes.sharding.manual import fixed_shardings

_SHARDING = "sdy.sharding"
_MOST_AXES = 3


@dataclass(frozen=True, kw_only=True)
class UserShardings:
    """The mesh that a program names, and the shardings of its arguments by number."""

    name: str
    mesh: Mesh
    place: ir.Location
    """of the mesh, or of a sharding over it"""
    arguments: Mapping[int, Sharding] = field(default_factory=dict[int, Sharding])

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Of the mesh, and of each mesh of the plan."""
        return tuple(name for name, _ in self.mesh.axes)

    def __str__(self) -> str:
        """`@mesh of 2x2x1`."""
        return f"@{self.name} of {'x'.join(map(str, self.mesh.sizes))}"

    def on(self, meshes: Sequence[str]) -> dict[tuple[int, int], Sharding]:
        """The shardings of arguments on each of some meshes, by the numbers of both."""
        return {
            (argument, number): replace(sharding, mesh=mesh)
            for argument, sharding in self.arguments.items()
            for number, mesh in enumerate(meshes)
        }

    def are_stages(self, meshes: Sequence[MeshAssignment]) -> bool:
        """Whether some meshes are those of several stages: each has the shape of the mesh."""
        return len(meshes) > 1 and all(it.logical_shape == self.mesh.sizes for it in meshes)

    def check_size(self, cluster: AnyCluster, num_stages: int) -> None:
        """Checks that the stages, each on such a mesh, are the whole cluster.

        Raises:
            PassError: they are more devices, or fewer.
        """
        size, devices = self.mesh.size, cluster.num_devices
        if size * num_stages == devices:
            return
        ways = [f"plan for a cluster of {size * num_stages}"]
        if devices % size == 0:
            ways.append(f"set num-stages={devices // size}")
        if num_stages > 1 and devices % num_stages == 0:
            ways.append(f"make @{self.name} the {devices // num_stages} device(s) of one stage")
        each = f", for each of {num_stages} stages" if num_stages > 1 else ""
        raise PassError(
            self.place,
            f"the program's shardings are over @{self.name}, which has {size} device(s){each}, and "
            f"the cluster has {devices}; {', '.join(ways)}, or remove the shardings",
        )


def take_user_shardings(
    module: ir.Module, function: func.FuncOp, pairs: Mapping[int, int], remark: Remark
) -> UserShardings | None:
    """Removes the program's meshes and the shardings of its signature, and returns them.

    Shardings of results become constraints. If the program has no binding sharding, the result is
    None and no `sdy` op is left. Otherwise ops still name the mesh.

    Raises:
        PassError: a sharding names a part of an axis or splits a dimension unevenly; there are
            several meshes; a state or a returned value has two shardings.
    """
    lift_inlined_meshes(module)
    meshes = named_meshes(module)
    arguments, results = _take(function, "arg_attrs"), _take(function, "res_attrs")
    ops = _drop_hints(function, remark)
    asked = list(_asked(function, ops, arguments, results))
    name = _the_mesh(meshes, asked)
    if name is None:
        _erase_constraints(ops)
        given = None
    else:
        mesh = Mesh.from_attr(meshes[name].mesh)
        # JAX gives meshes no location; then that of a sharding over it counts.
        over = [where for where, sharding, _ in asked if sharding.mesh == name]
        place = location_of(meshes[name], *over)
        _check_mesh(name, mesh, place)
        for where, sharding, type_ in asked:
            _check_sharding(where, sharding, type_, mesh)
        for found in (arguments, results):
            found.update({number: replace(old, mesh=name) for number, old in found.items()})
        if others := set(meshes) - {name}:
            rename_meshes(body(function), others, name)
        _settle(function, arguments, results, pairs, mesh)
        given = UserShardings(name=name, mesh=mesh, place=place, arguments=arguments)
    for op in meshes.values():
        op.operation.erase()
    return given


def layouts_within(
    sharding: Sharding, layouts: Sequence[Layout], mesh: LogicalMesh
) -> tuple[Layout, ...]:
    """The sharding's own layout, then the `layouts` that its open dimensions admit.

    Axes of one device split nothing and are left out.
    """
    axes = zip(mesh.axis_names, range(len(mesh.sizes)), mesh.sizes, strict=True)
    numbers = {name: number for name, number, size in axes if size > 1}
    own = tuple(tuple(numbers[a.name] for a in dim if a.name in numbers) for dim in sharding.dims)
    banned = {numbers[axis.name] for axis in sharding.replicated if axis.name in numbers}

    def fits(layout: Layout) -> bool:
        return all(
            axes == given or (d in sharding.open_dims and axes[: len(given)] == given)
            for d, (axes, given) in enumerate(zip(layout, own, strict=True))
        ) and not banned & {a for axes in layout for a in axes}

    return (own, *(layout for layout in layouts if layout != own and fits(layout)))


Where = ir.OpView | ir.Location
Asked = tuple[Where, Sharding, ir.Type]


def _asked(
    function: func.FuncOp,
    ops: Sequence[ir.OpView],
    arguments: dict[int, Sharding],
    results: dict[int, Sharding],
) -> Iterator[Asked]:
    """All binding shardings, each with its place and its type."""
    block = body(function)
    for number, sharding in arguments.items():
        argument = block.arguments[number]
        yield argument.location, sharding, argument.type
    yield from _asked_inside(ops)
    for number, sharding in results.items():
        yield function, sharding, function.type.results[number]


def _settle(
    function: func.FuncOp,
    arguments: dict[int, Sharding],
    results: dict[int, Sharding],
    pairs: Mapping[int, int],
    mesh: Mesh,
) -> None:
    """Makes the shardings of results those of arguments, or constraints.

    `pairs` maps the results that are new states to the arguments that hold the old ones.
    """
    block = body(function)
    numbers = {value: number for number, value in enumerate(block.arguments)}
    returned: dict[ir.Value, Sharding] = {}
    computed: set[ir.Value] = set()
    for number, new in results.items():
        value = terminator(block).operands[number]
        old = returned.get(value, new)
        message = (
            f"result {number} is returned with another sharding before: {old.to_attr()} and "
            f"{new.to_attr()}; run simplify-trivial-ops before this pass"
        )
        returned[value] = _agreed(function, old, new, mesh, message)
        targets = {a for a in (numbers.get(value), pairs.get(number)) if a is not None}
        if not targets:
            computed.add(value)
        for target in sorted(targets):
            old = arguments.get(target, new)
            message = (
                f"result {number} is the new value of argument {target}, which keeps its layout, "
                f"but they are given {new.to_attr()} and {old.to_attr()}; give both the same "
                "sharding"
            )
            arguments[target] = _agreed(function, old, new, mesh, message)
    for value, sharding in returned.items():
        if value in computed:
            _constrain(value, sharding)


def _agreed(
    function: func.FuncOp, old: Sharding, new: Sharding, mesh: Mesh, message: str
) -> Sharding:
    """The sharding that two of one buffer agree on; raises PassError where there is none."""
    both = narrower(old, new, mesh)
    if both is None:
        raise PassError(function, message)
    return both


def _take(function: func.FuncOp, name: Literal["arg_attrs", "res_attrs"]) -> dict[int, Sharding]:
    taken = take_from_signature(function, name, _SHARDING)
    return {number: Sharding.from_attr(attr) for number, attr in taken.items()}


def _asked_inside(ops: Iterable[ir.OpView]) -> Iterator[Asked]:
    for op in ops:
        if isinstance(op, sdy.ShardingConstraintOp):
            yield op, Sharding.from_attr(op.attributes["sharding"]), op.results[0].type
        elif isinstance(op, sdy.ManualComputationOp):
            inputs, outputs = fixed_shardings(op)
            values = zip([*op.operands, *op.results], [*inputs, *outputs], strict=True)
            yield from ((op, sharding, value.type) for value, sharding in values)


def _drop_hints(function: func.FuncOp, remark: Remark) -> list[ir.OpView]:
    """Removes hints: shardings on ordinary ops, which XLA ignores, and sharding groups. Returns the
    ops that are left, outside of manual computations."""
    dropped: list[ir.OpView] = []
    left: list[ir.OpView] = []
    for op in walk_outside_manual(body(function)):
        if isinstance(op, sdy.ShardingGroupOp):
            dropped.append(op)
            op.operation.erase()
            continue
        if isinstance(op, sdy.PropagationBarrierOp):
            op.results[0].replace_all_uses_with(op.operands[0])
            op.operation.erase()
            continue
        left.append(op)
        if _SHARDING in op.attributes:
            dropped.append(op)
            del op.attributes[_SHARDING]
    if dropped:
        remark(
            function.location,
            f"ignored {len(dropped)} shardings on ordinary ops and sharding groups, as XLA does: "
            "shardings of arguments and results and sdy.sharding_constraint are kept",
        )
    return left


def _erase_constraints(ops: Iterable[ir.OpView]) -> None:
    for op in ops:
        if isinstance(op, sdy.ShardingConstraintOp):
            op.results[0].replace_all_uses_with(op.operands[0])
            op.operation.erase()


def _the_mesh(meshes: dict[str, sdy.MeshOp], asked: Iterable[Asked]) -> str | None:
    """The mesh of the shardings. Meshes with the same axes, or without axes, count as the same."""
    name: str | None = None
    first: ir.Location | None = None
    for where, sharding, _ in asked:
        mesh = Mesh.from_attr(meshes[sharding.mesh].mesh)
        place = location_of(meshes[sharding.mesh], where)
        if not mesh.axes and mesh.device_ids:
            raise PassError(
                place,
                f"@{sharding.mesh} is device {mesh.device_ids[0]} alone, but the plan places "
                f"all ops: remove the shardings over @{sharding.mesh}",
            )
        if not mesh.axes:
            continue
        if name is None or first is None:
            name, first = sharding.mesh, place
        elif mesh != Mesh.from_attr(meshes[name].mesh):
            raise PassError(
                place,
                f"the program's shardings are over the meshes @{name} and @{sharding.mesh}; the "
                "plan of a program with shardings has one mesh: use it in all of them",
                ((first, f"@{name} is here"),),
            )
    return name


def _check_mesh(name: str, mesh: Mesh, where: ir.Location) -> None:
    cut = [axis for axis, size in mesh.axes if size > 1]
    if mesh.device_ids and mesh.device_ids != tuple(range(mesh.size)):
        raise PassError(
            where,
            f"@{name} lists its devices as {list(mesh.device_ids)}, but the plan numbers the "
            "cluster's devices host by host: remove device_ids from the mesh",
        )
    if len(cut) > _MOST_AXES:
        raise PassError(
            where,
            f"@{name} has {len(cut)} axes of two devices or more ({', '.join(cut)}); at most "
            f"{_MOST_AXES} are searched: merge some of them",
        )


def _check_sharding(
    where: ir.OpView | ir.Location, sharding: Sharding, type_: ir.Type, mesh: Mesh
) -> None:
    axes = [axis for dim in sharding.dims for axis in dim]
    part = next((axis for axis in (*axes, *sharding.replicated) if axis.sub is not None), None)
    if part is not None:
        raise PassError(
            where,
            f"a sharding over a part of the axis {part.name}; the search uses axes whole: split "
            f"{part.name} into two axes of the mesh",
        )
    if sharding.unreduced:
        raise PassError(
            where,
            "a sharding with unreduced axes: the search decides which values stay partial sums; "
            "remove the axes",
        )
    for d, (size, dim) in enumerate(
        zip(ir.RankedTensorType(type_).shape, sharding.dims, strict=True)
    ):
        ways = prod(mesh.axis_size(axis) for axis in dim)
        if size % ways or not size:
            raise PassError(
                where,
                f"dimension {d} of {type_} cannot be split into {ways} equal shards over "
                f"{', '.join(axis.name for axis in dim)}; pad it or shard another dimension",
            )


def _constrain(value: ir.Value, sharding: Sharding) -> None:
    """Fixes the sharding of a value that a computation returns."""
    owner = value.owner
    assert not isinstance(owner, ir.Block), "the type of an argument holds its sharding"
    end = terminator(body(owner))
    number = ir.OpResult(value).result_number
    with ir.InsertionPoint(end), owner.location:
        constraint = sdy.ShardingConstraintOp(end.operands[number], sharding.to_attr())
    end.operands[number] = constraint.result
