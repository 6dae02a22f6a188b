"""Functions that share a state: later ones are planned for the meshes on which it lies.

A training step leaves its state in the shardings of its plan. Its evaluation, made `like` it, and
the same step planned again for other shapes use the meshes of that plan. They read each array of
the state on a mesh that has it, in its sharding there. `held_by` finds the arrays of a step's
arguments in the state of a plan; the pass `stage-mesh-partition` uses the result (its option
`meshes`, and `alpa.held`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from alpa.dialects import ir, main_function
from alpa.dialects.attributes import State, argument_state, read_arguments
from alpa.dialects.mpmd_types import MeshTensor, read_topology
from alpa.dialects.plan import MeshAssignment, Plan, read_meshes
from alpa.dialects.sharding import Mesh, Sharding
from alpa.passes.stages.given_meshes import Places, meshes_text
from alpa.runtime.calls import Leaf, LeafType, Path
from alpa.runtime.executable import Executable
from alpa.runtime.interrupts import Lost


@dataclass(frozen=True, kw_only=True)
class PlannedState:
    """The state of a planned step: its leaves by number, the plan's meshes, and the shardings.

    Axes have the names that the search gives to meshes, in order.
    """

    cluster: str
    meshes: tuple[MeshAssignment, ...]
    leaves: Mapping[int, tuple[Path, LeafType]]
    places: Places

    @classmethod
    def of(cls, module: ir.Module, state: Mapping[int, Leaf]) -> PlannedState:
        """The state of a planned module whose arguments of these numbers hold it."""
        function = main_function(module)
        plan, meshes = Plan.read(function), read_meshes(function)
        names = {mesh.name: number for number, mesh in enumerate(meshes)}
        topology = read_topology(function)
        places: dict[State, tuple[Sharding, ...]] = {}
        for position, (argument, type_) in enumerate(
            zip(read_arguments(function), function.type.inputs, strict=True)
        ):
            key, tensor = argument_state(position, argument), MeshTensor.from_type(type_)
            if key[0] in state:
                held = _numbered(tensor, names[tensor.mesh], topology[tensor.mesh])
                places[key] = (*places.get(key, ()), held)
        return cls(
            cluster="" if plan is None else plan.cluster,
            meshes=tuple(meshes),
            leaves={n: (leaf.path, leaf.type.strong) for n, leaf in state.items() if leaf.type},
            places=places,
        )

    @property
    def option(self) -> str | None:
        """The meshes as the passes' option, or None if they are not ranges of devices."""
        ranges = (tuple(range(it.devices[0], it.devices[-1] + 1)) for it in self.meshes)
        same = all(mesh.devices == it for mesh, it in zip(self.meshes, ranges, strict=True))
        return meshes_text(self.meshes) if same else None

    def held_by(self, leaves: Mapping[int, Leaf]) -> Places:
        """The shardings of another step's arguments that are this state, or parts of it."""
        arguments: dict[str, dict[Path, tuple[int, LeafType]]] = {}
        for n, leaf in leaves.items():
            if leaf.type is not None:
                arguments.setdefault(leaf.argument, {})[leaf.path[1:]] = (n, leaf.type.strong)
        found = {n: r for name, own in arguments.items() for n, r in self._match(name, own)}
        return {
            (n, part): shardings
            for n, r in found.items()
            for (number, part), shardings in self.places.items()
            if number == r
        }

    def _match(
        self, name: str, own: Mapping[Path, tuple[int, LeafType]]
    ) -> Iterator[tuple[int, int]]:
        """Pairs the numbers of leaves below a name with the numbers of the state's leaves.

        Matches a tree of the state that has all the leaves. Preferred are trees of the same name,
        then trees with few other leaves, then trees near the root. Otherwise, each part of the tree
        is matched separately; a single array is found by its name.
        """
        best: tuple[tuple[bool, int, int], dict[Path, int]] | None = None
        for prefix, inside in self._subtrees.items():
            named = _name(prefix[-1]) == name
            types = {path: type_ for path, (_, type_) in inside.items()}
            if any(types.get(path) != type_ for path, (_, type_) in own.items()):
                continue
            if not named and () in own:
                continue
            rank = (not named, len(inside) - len(own), len(prefix))
            if best is None or rank < best[0]:
                best = (rank, {path: number for path, (number, _) in inside.items()})
        if best is not None:
            yield from ((n, best[1][path]) for path, (n, _) in own.items())
        elif () not in own:
            parts: dict[str, dict[Path, tuple[int, LeafType]]] = {}
            for (key, *rest), leaf in own.items():
                parts.setdefault(_name(key), {})[tuple(rest)] = leaf
            for key, part in parts.items():
                yield from self._match(key, part)

    @cached_property
    def _subtrees(self) -> dict[Path, dict[Path, tuple[int, LeafType]]]:
        """Maps each path to the leaves below it, by the rest of their paths."""
        found: dict[Path, dict[Path, tuple[int, LeafType]]] = {}
        for number, (path, type_) in self.leaves.items():
            for depth in range(1, len(path) + 1):
                found.setdefault(path[:depth], {})[path[depth:]] = (number, type_)
        return found


def _name(key: Any) -> str:
    """The name of one step of a path: an argument, an attribute, or an entry."""
    return key if isinstance(key, str) else jax.tree_util.keystr((key,), simple=True)


def _numbered(tensor: MeshTensor, number: int, mesh: Mesh) -> Sharding:
    """The sharding of a tensor, with mesh and axes named by number."""
    axes = {name: f"axis{i}" for i, (name, _) in enumerate(mesh.axes)}
    dims = tensor.sharding.axis_names if tensor.sharding else ((),) * tensor.type.rank
    return Sharding.of(f"mesh_{number}", tuple(tuple(axes[a] for a in dim) for dim in dims))


@dataclass
class Family:
    """What functions that use each other's state share: their cluster, their executor, and the
    states of the plans of the first function."""

    cluster: str
    """what they are planned for: the hosts that lived when that was last looked at"""
    executables: list[Executable] = field(default_factory=list[Executable])
    """those on Ray"""
    states: list[PlannedState] = field(default_factory=list[PlannedState])
    lost: Lost = field(default_factory=Lost)
    """what was donated to their steps that were interrupted"""
