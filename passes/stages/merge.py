"""Merges named computations into fragments on meshes, in a function of mesh tensors.

Fragments come in execution order: the forward of each stage, the backward from the last stage on,
then the updates by level. A mesh may have several stages, which share its arguments; its updates
are those of all of them. The level of an update counts the changes of mesh on the way to it. On
each level and mesh, the updates that other meshes wait for come first, in a fragment of their own.
One transfer takes a value to another mesh that reads it; the dialect's verifier demands that.

An update may read the gradient of another mesh, for example that of tied embeddings, summed over
the micro-batches. Such a gradient first passes through a fragment of the update on its own mesh:
there the devices reduce the partial sums that each has added up, once per step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby

from alpa.dialects import body, func, ir, mpmd, sdy
from alpa.dialects.attributes import (
    FLOPS,
    MESHES,
    PART,
    REMAT,
    SECONDS,
    Argument,
    Part,
    Result,
    input_number,
    output_number,
    read_int,
    state_pairs,
)
from alpa.dialects.mpmd_types import MeshTensor, Origin, fragment, return_, topology_attr
from alpa.dialects.plan import Dropped, MeshAssignment, Plan
from alpa.dialects.records import f64, i64
from alpa.dialects.sharding import Mesh, Sharding
from alpa.dialects.symbols import rename_meshes
from alpa.passes.analysis.graph import Graph
from alpa.passes.cost.cluster import AnyCluster, Cluster
from alpa.passes.cost.collectives import numbered_axes
from alpa.passes.sharding.op_seconds import computation_seconds
from alpa.passes.sharding.user_shardings import UserShardings

Place = tuple[int, int]
"""Numbers of a value and of a mesh."""


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Which stage each layer belongs to, the mesh of each stage, and what a step takes."""

    layer_stage: dict[int, int]
    meshes: list[MeshAssignment]
    mesh_of_stage: Mapping[int, int] = field(default_factory=dict[int, int])
    """the number of the mesh of each stage, where that is not the number of the stage"""
    seconds: float = 0.0
    bound: float = 0.0
    """a lower bound of the seconds of every cut (`Plan.estimated_step_bound`); 0 if unknown"""
    peak_bytes: tuple[int, ...] = ()
    shardings: Mapping[Place, Sharding] = field(default_factory=dict[Place, Sharding])
    """of arguments on meshes, by both numbers, that the plan has to keep"""
    given: UserShardings | None = None
    """of the program, if there are any: every mesh has the axes of the mesh that they name"""
    rematerialised: frozenset[int] = frozenset()
    """layers that are still to be rematerialised (`stages/remat.py`)"""
    dropped: tuple[Dropped, ...] = ()
    """meshes that were left out of the search"""

    def axis_names(self, mesh: MeshAssignment) -> tuple[str, ...]:
        """Of one of the meshes."""
        if self.given is not None:
            return self.given.axis_names
        return numbered_axes(len(mesh.logical_shape))


@dataclass(frozen=True)
class FragmentBuilder:
    """Builds a function of fragments from a graph of named computations, which stay as they are."""

    graph: Graph
    arguments: Sequence[Argument]
    results: Sequence[Result]
    stages: Stages
    is_timed: bool = False
    """whether the fragments say how long they take"""
    class_of: Sequence[int] | None = None
    """the class of each layer, if equal layers have equal computations here, too, apart from those
    that `stages` rematerialises"""
    _values: dict[Place, ir.Value] = field(default_factory=dict[Place, ir.Value])
    """the values that are on a mesh so far"""
    _seconds: dict[Hashable, float] = field(default_factory=dict[Hashable, float])

    def declare_meshes(self) -> None:
        """Adds the meshes at the insertion point."""
        for name, shape in self._shapes.items():
            sdy.MeshOp(name, sdy.MeshAttr(shape.to_attr()))

    def build(self, name: str, plan: Plan, cluster: AnyCluster) -> func.FuncOp:
        """Adds the function at the insertion point."""
        copies = self._argument_copies()
        outputs = self._outputs(copies)
        types = [self._type(v, m) for v, m in copies]
        function_type = ir.FunctionType.get(types, [self._type(v, m) for v, m, _ in outputs])
        new = func.FuncOp(name, function_type, visibility="public")
        new.attributes["topology"] = topology_attr(self._shapes)
        new.attributes[MESHES] = ir.ArrayAttr.get([mesh.to_attr() for mesh in self.stages.meshes])
        plan.write(new)
        self._write_interface(new, copies, outputs)
        block = new.add_entry_block()
        self._values.update(zip(copies, block.arguments, strict=True))
        with ir.InsertionPoint(block):
            for part, same in groupby(self._groups, key=lambda mine: self._origins[mine[0]].part):
                if part == "update" and plan.num_micro_batches > 1:
                    self._build_sums()
                for members in same:
                    self._build(members, cluster)
            func.ReturnOp([self._get(v, m) for v, m, _ in outputs])
        return new

    @cached_property
    def _shapes(self) -> dict[str, Mesh]:
        """Each mesh by its name."""
        found: dict[str, Mesh] = {}
        for mesh in self.stages.meshes:
            sizes = mesh.logical_shape
            found[mesh.name] = Mesh(tuple(zip(self.stages.axis_names(mesh), sizes, strict=True)))
        return found

    def _type(self, value: int, mesh: int) -> ir.Type:
        name = self.stages.meshes[mesh].name
        type_ = ir.RankedTensorType(self.graph.values[value].type)
        return MeshTensor(name, type_, self.stages.shardings.get((value, mesh))).to_type()

    @cached_property
    def _origins(self) -> list[Origin]:
        return [Origin.of(op) for op in self.graph.ops]

    @cached_property
    def _alike(self) -> list[Hashable]:
        """For each computation a key that equal ones share, as far as classes of layers say so."""
        found: list[Hashable] = []
        before = Counter[int]()
        for o, origin in enumerate(self._origins):
            layer = origin.layer
            if layer is None or self.class_of is None:
                found.append(o)
                continue
            again = layer in self.stages.rematerialised
            found.append((self.class_of[layer], again, before[layer]))
            before[layer] += 1
        return found

    def _seconds_of(self, o: int, cluster: Cluster) -> float:
        """The seconds of a computation on one device."""
        key = self._alike[o], cluster.device
        if key not in self._seconds:
            self._seconds[key] = computation_seconds(self.graph.ops[o], cluster)
        return self._seconds[key]

    def _mesh_of_layer(self, layer: int) -> int:
        stage = self.stages.layer_stage[layer]
        return self.stages.mesh_of_stage.get(stage, stage)

    def _place(self, o: int) -> int:
        """The stage of a computation that runs for each micro-batch, the mesh of an update."""
        origin = self._origins[o]
        if origin.layer is None or origin.part == "update":
            return self._mesh_of[o]
        return self.stages.layer_stage[origin.layer]

    @cached_property
    def _mesh_of(self) -> list[int]:
        """The mesh of each computation."""
        graph, found = self.graph, list[int]()
        for o, origin in enumerate(self._origins):
            # A computation of several layers goes where most of what it reads is made.
            weight = Counter[int]()
            for v in graph.operands[o]:
                if graph.producer[v] >= 0:
                    weight[found[graph.producer[v]]] += graph.bytes[v]
            most = max(weight, key=lambda mesh: (weight[mesh], -mesh), default=0)
            found.append(most if origin.layer is None else self._mesh_of_layer(origin.layer))
        return found

    @cached_property
    def _home(self) -> dict[int, int]:
        """The mesh of each value that a computation makes."""
        made = zip(self.graph.results, self._mesh_of, strict=True)
        return {v: mesh for values, mesh in made for v in values}

    @cached_property
    def _groups(self) -> list[list[int]]:
        """The computations of each fragment, in execution order (see the top of the file)."""
        graph, where = self.graph, self._mesh_of
        level: dict[int, int] = {}
        for o, origin in enumerate(self._origins):
            if origin.part == "update":
                producers = [graph.producer[v] for v in graph.operands[o]]
                level[o] = max(
                    (level[p] + (where[p] != where[o]) for p in producers if p in level), default=0
                )
        awaited: set[int] = set()
        for o in reversed(level):
            users = {u for v in graph.results[o] for u in graph.users[v]}
            if any(where[u] != where[o] or (u in awaited and level[u] == level[o]) for u in users):
                awaited.add(o)
        groups: dict[tuple[int, ...], list[int]] = {}
        for o, origin in enumerate(self._origins):
            place = self._place(o)
            if origin.part == "forward":
                key = (0, place)
            elif origin.part == "backward":
                key = (1, -place)
            else:
                key = (2, level[o], o not in awaited, place)
            groups.setdefault(key, []).append(o)
        return [groups[key] for key in sorted(groups)]

    def _argument_copies(self) -> list[Place]:
        """Each argument on each mesh that reads it; without readers, where it has a sharding, else
        on mesh 0."""
        count = self.graph.num_arguments
        unread = dict.fromkeys(range(count), 0) | dict(sorted(self.stages.shardings, reverse=True))
        read = [{self._mesh_of[o] for o in self.graph.users[a]} for a in range(count)]
        return [(a, mesh) for a in range(count) for mesh in sorted(read[a] or {unread[a]})]

    def _outputs(self, copies: list[Place]) -> list[tuple[int, int, int]]:
        """(value, mesh, number in the given program) of each result. A state returns to all its
        meshes; the one that computes it comes first."""
        pairs = state_pairs(self.arguments, self.results)
        meshes_of: dict[int, list[int]] = {}
        for a, mesh in copies:
            meshes_of.setdefault(a, []).append(mesh)
        outputs: list[tuple[int, int, int]] = []
        for r, v in enumerate(self.graph.returned):
            # The numbers of arguments are those of their values.
            meshes = list(meshes_of.get(pairs.get(r, v), [self._home.get(v, 0)]))
            if r not in pairs:
                meshes = meshes[:1]
            first = self._home.get(v, meshes[0])
            meshes.sort(key=lambda mesh, first=first: (mesh != first, mesh))
            outputs += [(v, mesh, r) for mesh in meshes]
        return outputs

    def _write_interface(
        self, new: func.FuncOp, copies: list[Place], outputs: list[tuple[int, int, int]]
    ) -> None:
        pairs = state_pairs(self.arguments, self.results)
        position = {(pairs[r], mesh): i for i, (_, mesh, r) in enumerate(outputs) if r in pairs}
        arguments: list[Argument] = []
        for a, mesh in copies:
            old = self.arguments[a]
            donated = old.donor or old.aliasing_output is not None
            arguments.append(
                replace(
                    old,
                    input=input_number(a, old),
                    aliasing_output=position.get((a, mesh)) if donated else None,
                    donor=donated and (a, mesh) not in position,
                )
            )
        results = [
            replace(self.results[r], output=output_number(r, self.results[r]))
            for _, _, r in outputs
        ]
        for name, records in (("arg_attrs", arguments), ("res_attrs", results)):
            new.attributes[name] = ir.ArrayAttr.get([record.to_attr() for record in records])

    def _get(self, v: int, mesh: int) -> ir.Value:
        """A value on a mesh; a transfer brings it there once."""
        if (v, mesh) not in self._values:
            source = self._home.get(v)
            if source is None:
                source = next(m for a, m in self._values if a == v)
            transfer = mpmd.TransferOp(
                self._type(v, mesh),
                self._values[v, source],
                loc=self.graph.values[v].location,
            )
            self._values[v, mesh] = transfer.result
        return self._values[v, mesh]

    def _fragment(
        self,
        mesh: int,
        stage: int,
        part: Part,
        origins: Sequence[Origin],
        inputs: Sequence[int],
        outputs: Sequence[int],
        location: ir.Location,
    ) -> tuple[mpmd.FragmentOp, ir.Block]:
        """A fragment without ops. From now on, its results are the outputs' values on its mesh."""
        op, block = fragment(
            self.stages.meshes[mesh].name,
            origins,
            stage,
            [self._get(v, mesh) for v in inputs],
            [self._type(v, mesh) for v in outputs],
            loc=location,
        )
        op.attributes[PART] = ir.StringAttr.get(part)
        self._values.update({(v, mesh): r for v, r in zip(outputs, op.results, strict=True)})
        return op, block

    def _build_sums(self) -> None:
        """Fragments for the gradients that leave a mesh of several devices as sums."""
        crossing: dict[int, list[int]] = {}
        for v in totals_of(self.graph, self._home):
            home = self._home[v]
            leaves = any(self._mesh_of[u] != home for u in self.graph.users[v])
            if leaves and len(self.stages.meshes[home].devices) > 1:
                crossing.setdefault(home, []).append(v)
        for mesh, mine in sorted(crossing.items()):
            makers = [self.graph.producer[v] for v in mine]
            layers = dict.fromkeys(self._origins[o].layer for o in makers)
            origins = [Origin(f"update_{layer}") for layer in layers]
            location = self.graph.ops[makers[0]].location
            op, block = self._fragment(mesh, mesh, "update", origins, mine, mine, location)
            with ir.InsertionPoint(block), op.location:
                return_(list(block.arguments))
            op.attributes[SECONDS] = f64(0.0)
            op.attributes[FLOPS] = i64(0)

    def _build(self, members: Sequence[int], cluster: AnyCluster) -> None:
        graph, mesh = self.graph, self._mesh_of[members[0]]
        inputs, outputs = graph.interface(members)
        computations = [graph.ops[o] for o in members]
        origins = [self._origins[o] for o in members]
        op, block = self._fragment(
            mesh,
            self._place(members[0]),
            origins[0].part,
            origins,
            inputs,
            outputs,
            computations[0].location,
        )
        inside: dict[ir.Value, ir.Value] = dict(
            zip((graph.values[v] for v in inputs), block.arguments, strict=True)
        )
        for computation in computations:
            results = _inlined(computation, [inside[v] for v in computation.operands], block)
            inside.update(zip(computation.results, results, strict=True))
        with ir.InsertionPoint(block), op.location:
            return_([inside[graph.values[v]] for v in outputs])
        given, name = self.stages.given, self.stages.meshes[mesh].name
        if given is not None and given.name != name:
            rename_meshes(block, {given.name}, name)
        again = sorted(
            origin.layer or 0
            for origin, computation in zip(origins, computations, strict=True)
            if REMAT in computation.attributes
        )
        if again:
            op.attributes[REMAT] = ir.DenseI64ArrayAttr.get(again)
        if self.is_timed:
            assigned = self.stages.meshes[mesh]
            its, devices = cluster.of(assigned.hosts), len(assigned.devices)
            seconds = sum(self._seconds_of(o, its) for o in members) / devices
            op.attributes[SECONDS] = f64(seconds)
        op.attributes[FLOPS] = i64(sum(read_int(c, FLOPS) or 0 for c in computations))


def totals_of(graph: Graph, values: Iterable[int]) -> list[int]:
    """The values that are gradients and that only updates read: these read sums over the
    micro-batches."""

    def part(o: int) -> Part:
        return Origin.of(graph.ops[o]).part

    returned = set(graph.returned)
    return [
        v
        for v in values
        if v not in returned
        and graph.producer[v] >= 0
        and part(graph.producer[v]) == "backward"
        and all(part(u) == "update" for u in graph.users[v])
    ]


def _inlined(
    computation: ir.OpView, operands: Sequence[ir.Value], block: ir.Block
) -> list[ir.Value]:
    """Appends copies of a computation's ops to a block; returns the values of its results."""
    copy = computation.operation.clone(ip=ir.InsertionPoint(block))
    inner = body(copy)
    for argument, value in zip(inner.arguments, operands, strict=True):
        argument.replace_all_uses_with(value)
    *ops, end = inner.operations
    for op in ops:
        block.append(op.operation)
    results = list(end.operands)
    copy.erase()
    return results
