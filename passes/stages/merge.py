"""Merges named computations into fragments on meshes, and moves @main onto mesh tensors.

Fragments come in execution order: the forward of each stage, the backward from the last stage on,
then the updates by level, one more for each change of mesh on the way to them. Of a level and mesh
those come first, in a fragment of their own, that updates of other meshes wait for. A value that
another mesh reads crosses by one transfer; the dialect's verifier demands it here already.

A gradient whose sum over the micro-batches another mesh's update reads, as of tied embeddings,
first passes through a fragment of the mesh that made it, part of the update: devices that each have
added up a part of it reduce it there, once per step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import groupby

from alpa.dialects import body, func, ir, mpmd, sdy
from alpa.dialects.attributes import (
    FLOPS,
    MESHES,
    PART,
    REMAT,
    SECONDS,
    Argument,
    Dropped,
    MeshAssignment,
    Part,
    Plan,
    Result,
    argument_attrs,
    f64,
    input_number,
    output_number,
    read_int,
    result_attrs,
    state_pairs,
)
from alpa.dialects.mpmd_types import MeshTensor, Origin, fragment, return_, topology_attr
from alpa.dialects.sharding import Mesh, Sharding
from alpa.passes.analysis.graph import Graph
from alpa.passes.cost.cluster import Cluster
from alpa.passes.sharding.op_seconds import computation_seconds


@dataclass(frozen=True, kw_only=True)
class Stages:
    """Which stage each layer belongs to, the mesh of each stage, and what a step takes."""

    layer_stage: dict[int, int]
    meshes: list[MeshAssignment]
    seconds: float = 0.0
    bound: float = 0.0
    """seconds that no other cut undercuts (`Plan.estimated_step_bound`)"""
    peak_bytes: tuple[int, ...] = ()
    axis_names: tuple[str, ...] | None = None
    """of every mesh, where the program names them"""
    rematerialised: frozenset[int] = frozenset()
    """layers whose backward parts are still to be changed (`stages/remat.py`)"""
    dropped: tuple[Dropped, ...] = ()
    """meshes that were left out of the search"""


@dataclass(frozen=True)
class _Group:
    """Named computations that become one fragment."""

    mesh: int
    part: Part
    members: list[int] = field(default_factory=list[int])


@dataclass(frozen=True)
class FragmentBuilder:
    """Builds the new @main before the old one, then erases that."""

    module: ir.Module
    old: func.FuncOp
    graph: Graph
    arguments: list[Argument]
    results: list[Result]
    stages: Stages
    shardings: Mapping[tuple[int, int], Sharding]
    """of arguments on meshes, by both numbers, that the plan has to keep"""

    def rewrite(self, plan: Plan, cluster: Cluster) -> None:
        groups = self._groups()
        home = {v: g.mesh for g in groups for o in g.members for v in self.graph.results[o]}
        copies = self._argument_copies(groups)
        outputs = self._outputs(home, copies)
        meshes = self.stages.meshes
        with ir.InsertionPoint(self.old), self.old.location:
            shapes = {mesh.name: _mesh_of(mesh, self.stages.axis_names) for mesh in meshes}
            for name, shape in shapes.items():
                sdy.MeshOp(name, sdy.MeshAttr(shape.to_attr()))
            types = [self._type(v, m) for v, m in copies]
            function_type = ir.FunctionType.get(types, [self._type(v, m) for v, m, _ in outputs])
            new = func.FuncOp("main", function_type, visibility="public")
        new.attributes["topology"] = topology_attr(shapes)
        new.attributes[MESHES] = ir.ArrayAttr.get([mesh.to_attr() for mesh in meshes])
        plan.write(new)
        self._write_interface(new, copies, outputs)
        block = new.add_entry_block()
        values = dict(zip(copies, block.arguments, strict=True))
        with ir.InsertionPoint(block):
            for part, same in groupby(groups, key=lambda group: group.part):
                if part == "update" and plan.num_micro_batches > 1:
                    self._build_sums(groups, values, home)
                for group in same:
                    self._build(group, values, home, cluster)
            with self.old.location:
                func.ReturnOp([self._get(values, home, v, m) for v, m, _ in outputs])
        self.old.erase()

    def _type(self, value: int, mesh: int) -> ir.Type:
        name = self.stages.meshes[mesh].name
        type_ = ir.RankedTensorType(self.graph.values[value].type)
        return MeshTensor(name, type_, self.shardings.get((value, mesh))).to_type()

    def _groups(self) -> list[_Group]:
        """Fragments in execution order: forward by stage, backward by stage from the last, then
        updates by level, one more for each change of mesh on the way to them, those that others
        wait for first."""
        parts: dict[int, Part] = {}
        level: dict[int, int] = {}
        where: dict[int, int] = {}
        for o, op in enumerate(self.graph.ops):
            origin = Origin.from_attr(op.attributes["origin"])
            parts[o] = origin.part
            where[o] = self._mesh_of_computation(o, origin, where)
            if parts[o] == "update":
                producers = [self.graph.producer[v] for v in self.graph.operands[o]]
                level[o] = max(
                    (level[p] + (where[p] != where[o]) for p in producers if p in level), default=0
                )
        awaited: set[int] = set()
        for o in reversed(level):
            users = {u for v in self.graph.results[o] for u in self.graph.users[v]}
            if any(where[u] != where[o] or (u in awaited and level[u] == level[o]) for u in users):
                awaited.add(o)
        groups: dict[tuple[int, ...], _Group] = {}
        for o, part in parts.items():
            mesh = where[o]
            if part == "forward":
                key = (0, mesh)
            elif part == "backward":
                key = (1, -mesh)
            else:
                key = (2, level[o], o not in awaited, mesh)
            groups.setdefault(key, _Group(mesh, part)).members.append(o)
        return [groups[key] for key in sorted(groups)]

    def _mesh_of_computation(self, o: int, origin: Origin, where: dict[int, int]) -> int:
        layer = origin.layer
        if layer is not None:
            return self.stages.layer_stage[layer]
        # What mixes layers goes where most of what it reads is made.
        weight: dict[int, int] = {}
        for v in self.graph.operands[o]:
            if self.graph.producer[v] >= 0:
                mesh = where[self.graph.producer[v]]
                weight[mesh] = weight.get(mesh, 0) + self.graph.bytes[v]
        return max(weight, key=lambda mesh: (weight[mesh], -mesh), default=0)

    def _argument_copies(self, groups: list[_Group]) -> list[tuple[int, int]]:
        """(argument, mesh) for each mesh that reads it; one that nothing reads is where it has a
        sharding, else on mesh 0."""
        count = self.graph.num_arguments
        unread = [0] * count
        for a, mesh in sorted(self.shardings, reverse=True):
            unread[a] = mesh
        read: list[set[int]] = [set() for _ in range(count)]
        for group in groups:
            for o in group.members:
                for v in self.graph.operands[o]:
                    if v < count:
                        read[v].add(group.mesh)
        return [(a, mesh) for a in range(count) for mesh in sorted(read[a] or {unread[a]})]

    def _outputs(
        self, home: dict[int, int], copies: list[tuple[int, int]]
    ) -> list[tuple[int, int, int]]:
        """(value, mesh, number in the given program) of each result; a state returns to all
        its meshes, to the one that computed it first."""
        pairs = state_pairs(self.arguments, self.results)
        meshes_of: dict[int, list[int]] = {}
        for a, mesh in copies:
            meshes_of.setdefault(a, []).append(mesh)
        outputs: list[tuple[int, int, int]] = []
        for r, v in enumerate(self.graph.returned):
            # An argument has the number of the value that it is.
            meshes = list(meshes_of.get(pairs.get(r, v), [home.get(v, 0)]))
            if r not in pairs:
                meshes = meshes[:1]
            first = home.get(v, meshes[0])
            meshes.sort(key=lambda mesh, first=first: (mesh != first, mesh))
            outputs += [(v, mesh, r) for mesh in meshes]
        return outputs

    def _write_interface(
        self,
        new: func.FuncOp,
        copies: list[tuple[int, int]],
        outputs: list[tuple[int, int, int]],
    ) -> None:
        pairs = state_pairs(self.arguments, self.results)
        position = {(pairs[r], mesh): i for i, (_, mesh, r) in enumerate(outputs) if r in pairs}
        attrs: list[ir.DictAttr] = []
        for a, mesh in copies:
            old = self.arguments[a]
            donated = old.donor or old.aliasing_output is not None
            target = position.get((a, mesh)) if donated else None
            attrs.append(
                argument_attrs(
                    replace(
                        old,
                        input=input_number(a, old),
                        aliasing_output=target,
                        donor=donated and target is None,
                    )
                )
            )
        new.attributes["arg_attrs"] = ir.ArrayAttr.get(attrs)
        new.attributes["res_attrs"] = ir.ArrayAttr.get(
            [
                result_attrs(
                    replace(
                        self.results[r],
                        output=output_number(r, self.results[r]),
                    )
                )
                for _, _, r in outputs
            ]
        )

    def _get(
        self, values: dict[tuple[int, int], ir.Value], home: dict[int, int], v: int, mesh: int
    ) -> ir.Value:
        """A value on a mesh; a transfer brings it there once."""
        if (v, mesh) not in values:
            source = home.get(v)
            if source is None:
                source = next(m for a, m in values if a == v)
            transfer = mpmd.TransferOp(
                self._type(v, mesh), values[v, source], loc=self.graph.values[v].location
            )
            values[v, mesh] = transfer.result
        return values[v, mesh]

    def _build_sums(
        self,
        groups: list[_Group],
        values: dict[tuple[int, int], ir.Value],
        home: dict[int, int],
    ) -> None:
        """Fragments for the gradients that leave a mesh of several devices as sums: from now on
        these are what such a fragment returns."""
        place = {o: group.mesh for group in groups for o in group.members}
        crossing: dict[int, list[int]] = {}
        for v in totals_of(self.graph, home):
            if any(place[u] != home[v] for u in self.graph.users[v]):
                crossing.setdefault(home[v], []).append(v)
        for mesh, mine in sorted(crossing.items()):
            if len(self.stages.meshes[mesh].devices) == 1:
                continue
            makers = [self.graph.ops[self.graph.producer[v]] for v in mine]
            layers = dict.fromkeys(Origin.from_attr(o.attributes["origin"]) for o in makers)
            op, block = fragment(
                self.stages.meshes[mesh].name,
                [Origin(f"update_{origin.layer}") for origin in layers],
                mesh,
                [values[v, mesh] for v in mine],
                [self._type(v, mesh) for v in mine],
                loc=makers[0].location,
            )
            with ir.InsertionPoint(block), op.location:
                return_(list(block.arguments))
            op.attributes[PART] = ir.StringAttr.get("update")
            op.attributes[SECONDS] = f64(0.0)
            op.attributes[FLOPS] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), 0)
            values.update({(v, mesh): r for v, r in zip(mine, op.results, strict=True)})

    def _build(
        self,
        group: _Group,
        values: dict[tuple[int, int], ir.Value],
        home: dict[int, int],
        cluster: Cluster,
    ) -> None:
        graph, members = self.graph, set(group.members)
        made = {v for o in members for v in graph.results[o]}
        inputs = list(
            dict.fromkeys(v for o in group.members for v in graph.operands[o] if v not in made)
        )
        returned = set(graph.returned)
        outputs = [
            v
            for o in group.members
            for v in graph.results[o]
            if v in returned or any(u not in members for u in graph.users[v])
        ]
        computations = [graph.ops[o] for o in group.members]
        op, block = fragment(
            self.stages.meshes[group.mesh].name,
            [Origin.from_attr(c.attributes["origin"]) for c in computations],
            group.mesh,
            [self._get(values, home, v, group.mesh) for v in inputs],
            [self._type(v, group.mesh) for v in outputs],
            loc=computations[0].location,
        )
        devices = len(self.stages.meshes[group.mesh].devices)
        seconds = sum(computation_seconds(c, cluster) for c in computations) / devices
        inside: dict[int, ir.Value] = dict(zip(inputs, block.arguments, strict=True))
        for o, computation in zip(group.members, computations, strict=True):
            inside.update(_inline(graph, o, computation, inside, block))
        with ir.InsertionPoint(block), op.location:
            return_([inside[v] for v in outputs])
        again = [c for c in computations if REMAT in c.attributes]
        layers = sorted(Origin.from_attr(c.attributes["origin"]).layer or 0 for c in again)
        if layers:
            op.attributes[REMAT] = ir.DenseI64ArrayAttr.get(layers)
        op.attributes[PART] = ir.StringAttr.get(group.part)
        op.attributes[SECONDS] = f64(seconds)
        op.attributes[FLOPS] = ir.IntegerAttr.get(
            ir.IntegerType.get_signless(64), sum(read_int(c, FLOPS) or 0 for c in computations)
        )
        values.update({(v, group.mesh): r for v, r in zip(outputs, op.results, strict=True)})


def totals_of(graph: Graph, values: Iterable[int]) -> list[int]:
    """Those of a clustered program's values that are gradients which only updates read: what counts
    is their sum over the micro-batches."""

    def part(o: int) -> Part:
        return Origin.from_attr(graph.ops[o].attributes["origin"]).part

    returned = set(graph.returned)
    return [
        v
        for v in values
        if v not in returned
        and graph.producer[v] >= 0
        and part(graph.producer[v]) == "backward"
        and all(part(u) == "update" for u in graph.users[v])
    ]


def _inline(
    graph: Graph,
    o: int,
    computation: ir.OpView,
    inside: dict[int, ir.Value],
    block: ir.Block,
) -> dict[int, ir.Value]:
    """Moves a computation's ops into a fragment's block; returns what its results became."""
    inner = body(computation)
    number = {graph.values[v]: v for v in graph.operands[o]}
    for argument, value in zip(inner.arguments, computation.operands, strict=True):
        argument.replace_all_uses_with(inside[number[value]])
    *ops, end = inner.operations
    for op in ops:
        block.append(op.operation)
    return dict(zip(graph.results[o], end.operands, strict=True))


def _mesh_of(mesh: MeshAssignment, names: tuple[str, ...] | None) -> Mesh:
    names = names or tuple(f"axis{i}" for i in range(len(mesh.logical_shape)))
    return Mesh(tuple(zip(names, mesh.logical_shape, strict=True)))
