"""What the annotations of a planned fragment say: the layout of each value, and its bytes.

A layout holds numbers of mesh axes per dimension, as in `cost/reshard.py`; that of an unreduced
value has one entry more, the axes whose parts of a sum the devices hold (`sharding/sums.py`). A
value without an annotation is replicated.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import ceil, prod

from alpa.dialects import body, func, ir, main_function, mpmd, sdy, walk
from alpa.dialects.mpmd_types import MeshTensor, mesh_of, read_topology
from alpa.dialects.plan import Plan, read_meshes
from alpa.dialects.sharding import Sharding, op_shardings
from alpa.passes.analysis.graph import element_bytes
from alpa.passes.analysis.op_kinds import CONTROL_FLOW
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.device import Link
from alpa.passes.cost.reshard import Layout
from alpa.passes.plan.attribute import plan_and_any_cluster
from alpa.passes.sharding.layouts import layout_of


@dataclass(frozen=True)
class Annotated:
    """A sharded fragment on its mesh."""

    fragment: mpmd.FragmentOp
    mesh: LogicalMesh
    _layouts: dict[ir.Value, Layout] = field(default_factory=dict, repr=False)
    _numbered: dict[Sharding, Layout] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, fragment: mpmd.FragmentOp, mesh: LogicalMesh) -> Annotated:
        """Reads the annotations.

        Raises:
            PassError: a sharding uses an axis that the mesh does not have, or a part of one.
        """
        annotated = cls(fragment, mesh)
        block = body(fragment)
        for argument, operand in zip(block.arguments, fragment.operands, strict=True):
            annotated._layouts[argument] = annotated.outer_layout(operand)
        for op in walk(block):
            annotated._read(op)
        return annotated

    def outer_layout(self, value: ir.Value) -> Layout:
        """The layout of a value of @main, which its type holds."""
        tensor = MeshTensor.from_type(value.type)
        if tensor.sharding is None:
            return ((),) * tensor.type.rank
        return self._layout(self.fragment, tensor.sharding)

    def layout(self, value: ir.Value) -> Layout:
        """The layout of a value inside the fragment."""
        layout = self._layouts.get(value)
        return ((),) * rank(value) if layout is None else layout

    def local_bytes(self, value: ir.Value, layout: Layout | None = None) -> int:
        """Bytes on one device, in a layout or in the value's own; 0 for tokens and the like.

        A dimension that does not divide is padded. A part of a sum is as large as the sum.
        """
        type_ = value.type
        if not isinstance(type_, ir.RankedTensorType):
            return 0
        dims = (self.layout(value) if layout is None else layout)[: type_.rank]
        elements = prod(
            ceil(size / self.ways(axes)) for size, axes in zip(type_.shape, dims, strict=True)
        )
        return elements * element_bytes(type_.element_type)

    def ways(self, axes: tuple[int, ...]) -> int:
        """Into how many parts these axes cut."""
        return prod(self.mesh.sizes[axis] for axis in axes)

    def _read(self, op: ir.OpView) -> None:
        if isinstance(op, sdy.ShardingConstraintOp):
            sharding = Sharding.from_attr(op.attributes["sharding"])
            self._layouts[op.results[0]] = self._layout(op, sharding)
            return
        shardings = op_shardings(op)
        if shardings is not None:
            for result, sharding in zip(op.results, shardings, strict=False):
                self._layouts[result] = self._layout(op, sharding)
        if op.operation.name == "stablehlo.while":
            for region in range(2):
                for argument, result in zip(body(op, region).arguments, op.results, strict=True):
                    self._layouts[argument] = self.layout(result)

    def _layout(self, op: ir.OpView, sharding: Sharding) -> Layout:
        layout = self._numbered.get(sharding)
        if layout is None:
            layout = self._numbered[sharding] = layout_of(op, sharding, self.mesh)
        return layout


def annotated_fragments(module: ir.Module) -> Iterator[Annotated]:
    """The fragments of a planned module, in program order.

    Raises:
        PassError: a sharding does not fit the mesh.
    """
    function = main_function(module)
    meshes = logical_meshes(function)
    for op in list(body(function).operations):
        if isinstance(op, mpmd.FragmentOp):
            yield Annotated.of(op, meshes[mesh_of(op)])


def logical_meshes(function: func.FuncOp) -> dict[str, LogicalMesh]:
    """The meshes of a planned @main with the links that the plan's cluster gives their axes.

    Where the plan names no cluster, all links are alike: fewest bytes are best.

    Raises:
        PassError: the cluster is unknown here.
    """
    plan = Plan.read(function)
    cluster = plan_and_any_cluster(function)[1] if plan is not None and plan.cluster else None
    assigned = {mesh.name: mesh for mesh in read_meshes(function)}
    meshes: dict[str, LogicalMesh] = {}
    for name, mesh in read_topology(function).items():
        names, sizes = (tuple(part) for part in zip(*mesh.axes, strict=True))
        if cluster is None or name not in assigned:
            alike = (Link(bandwidth=1.0, latency=0.0),) * len(sizes)
            meshes[name] = LogicalMesh(axis_names=names, sizes=sizes, links=alike)
            continue
        hosts, devices = len(assigned[name].hosts), len(assigned[name].devices)
        meshes[name] = LogicalMesh.of(
            cluster.of(assigned[name].hosts), hosts, devices // hosts, sizes, names
        )
    return meshes


def rank(value: ir.Value) -> int:
    """A tensor's rank; 0 for tokens and the like, which have no layout."""
    return value.type.rank if isinstance(value.type, ir.RankedTensorType) else 0


def has_own_ops(op: ir.OpView) -> bool:
    """Whether an op's regions hold ops on tensors of the fragment: loops and branches."""
    return op.operation.name in CONTROL_FLOW
