"""Different plans of one program: the search, the baselines, two stages, and random ones.

A random plan has a random mesh of all devices and random shardings of arguments, which the planner
keeps as it keeps a user's. All arguments of one type are sharded alike: the weights of equal layers
and their optimizer states.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import cast

import numpy as np

from alpa.dialects import body, ir, main_function, sdy, separate
from alpa.dialects.attributes import MESHES, PLAN, SOLVER, signature_attrs
from alpa.dialects.mpmd_types import read_topology
from alpa.dialects.plan import Plan, read_meshes
from alpa.dialects.sharding import Mesh, Sharding
from alpa.passes.cost.cluster import Cluster
from alpa.passes.pipelines.clock import Clock
from alpa.runtime.planning import PlanningError, run_pass

_MESH = "mesh_0"
_HALVES = 2


@dataclass(frozen=True, kw_only=True)
class RankedPlan:
    """One plan of a program."""

    name: str
    module: ir.Module

    @property
    def plan(self) -> Plan:
        return Plan.read(main_function(self.module)) or Plan()

    @property
    def key(self) -> str:
        """The plan without its predictions: equal plans have equal keys.

        Meshes of one group of devices are equal, whatever their shapes, where no sharding tells
        their axes apart.
        """
        copy = separate(self.module.operation)
        function = main_function(copy)
        meshes, topology = read_meshes(function), read_topology(function)
        for name in (PLAN, SOLVER, MESHES, "topology"):
            if name in function.attributes:
                del function.attributes[name]
        text = cast(str, function.operation.get_asm(enable_debug_info=False))
        names = {tuple(f'"{axis}"' for axis, _ in mesh.axes) for mesh in topology.values()}
        shapes = [mesh.logical_shape for mesh in meshes]
        if len(names) == 1:  # Otherwise an axis may be all of one mesh and a part of another.
            (axes,) = names
            together = text.replace(", ".join(axes), '"all"')
            if not any(axis in together for axis in axes):
                text, shapes = together, [(len(mesh.devices),) for mesh in meshes]
        placed = [(mesh.hosts, mesh.devices) for mesh in meshes]
        return f"{self.plan.schedule} {placed} {shapes} {text}"


def distinct_plans(
    module: ir.Module,
    cluster: str,
    num_micro_batches: int,
    *,
    count: int = 10,
    seed: int = 0,
    tries: int = 60,
) -> list[RankedPlan]:
    """So many different plans of a program at the size of one micro-batch, `auto` first.

    Of random plans at most `tries` are made; some do not fit, or equal others.

    Raises:
        PlanningError: the search finds no plan; or there are fewer plans, and this is why the last
            of the others was refused.
        ValueError: there are fewer plans, and none was refused.
    """
    common = {
        "cluster": cluster,
        "num-micro-batches": str(num_micro_batches),
        "processes": "0",
    }
    found: dict[str, RankedPlan] = {}
    refused: PlanningError | None = None
    for name, options, program in _requests(module, Cluster.parse(cluster), seed, tries):
        copy = separate(program.operation)
        try:
            run_pass("alpa", {**common, **options}, copy, Clock())
        except PlanningError as error:
            if not found:
                raise
            refused = error
            continue
        made = RankedPlan(name=name, module=copy)
        found.setdefault(made.key, made)
        if len(found) == count:
            return list(found.values())
    if refused is not None:
        raise refused
    raise ValueError(f"the program has {len(found)} different plans, not {count}")


Request = tuple[str, Mapping[str, str], ir.Module]
"""A name, the options of `alpa`, and the program with the shardings that it keeps."""


def _requests(module: ir.Module, cluster: Cluster, seed: int, tries: int) -> Iterator[Request]:
    devices = cluster.num_devices
    one = {"num-stages": "1"}
    yield "auto", {}, module
    for intra in ("data-parallel", "zero2", "zero3", "heuristic"):
        yield intra, {"intra": intra, **one}, module
    if devices % _HALVES == 0 and devices > _HALVES:
        shape = f"{devices // _HALVES}x{_HALVES}"
        yield f"megatron {shape}", {"intra": "megatron", "mesh-shape": shape}, module
        stages = {"num-layers": str(_HALVES), "num-stages": str(_HALVES)}
        yield f"{_HALVES} stages", stages, module
    for number in range(tries):
        generator = np.random.default_rng([seed, number])
        yield f"random {number}", one, randomly_sharded(module, devices, generator)


def randomly_sharded(module: ir.Module, devices: int, generator: np.random.Generator) -> ir.Module:
    """A copy whose arguments have random shardings over a random mesh of all devices."""
    copy = separate(module.operation)
    function = main_function(copy)
    shapes = _mesh_shapes(devices)
    sizes = shapes[int(generator.integers(len(shapes)))]
    mesh = Mesh(tuple((f"axis{k}", size) for k, size in enumerate(sizes)))
    # A plan with all shardings fixed is rarely a good one; with none, it is the search's.
    share = float(generator.choice([0.3, 0.6, 1.0]))
    drawn: dict[str, Sharding | None] = {}
    arguments = list(body(function).arguments)
    attributes = signature_attrs(function, "arg_attrs", len(arguments))
    with copy.context, ir.Location.unknown():
        for argument, attrs in zip(arguments, attributes, strict=True):
            type_ = str(argument.type)
            if type_ not in drawn:
                chosen = generator.random() < share
                shape = ir.RankedTensorType(argument.type).shape
                drawn[type_] = _draw(mesh, shape, generator) if chosen and shape else None
            sharding = drawn[type_]
            if sharding is not None:
                attrs["sdy.sharding"] = sharding.to_attr()
        if any(drawn.values()):
            with ir.InsertionPoint.at_block_begin(copy.body):
                sdy.MeshOp(_MESH, sdy.MeshAttr(mesh.to_attr()))
        function.attributes["arg_attrs"] = ir.ArrayAttr.get(
            [ir.DictAttr.get(attrs) for attrs in attributes]
        )
    return copy


def _mesh_shapes(devices: int) -> list[tuple[int, ...]]:
    """Meshes of all devices with one axis or two."""
    pairs = [(n, devices // n) for n in range(2, devices) if devices % n == 0]
    return [(devices,), *pairs]


def _draw(mesh: Mesh, shape: list[int], generator: np.random.Generator) -> Sharding:
    """Each axis, as often as not, is on a dimension that it divides evenly."""
    dims: list[tuple[str, ...]] = [()] * len(shape)
    sizes = dict(mesh.axes)
    for axis, size in mesh.axes:
        fitting = [
            d
            for d, length in enumerate(shape)
            if length % (size * prod(sizes[other] for other in dims[d])) == 0
        ]
        if fitting and generator.random() < 0.5:
            dim = int(generator.choice(fitting))
            dims[dim] = (*dims[dim], axis)
    return Sharding.of(_MESH, tuple(dims))
