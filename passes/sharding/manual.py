"""`sdy.manual_computation` (shard_map): its fixed shardings and its explicit collectives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Literal

from alpa.dialects import body, ir, sdy, stablehlo
from alpa.dialects.sharding import Mesh, Sharding
from alpa.passes.analysis import op_cost
from alpa.passes.analysis.collective_axes import collective_axes
from alpa.passes.analysis.graph import type_bytes
from alpa.passes.cost import collectives
from alpa.passes.cost.collectives import LogicalMesh

Kind = Literal["all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute"]

_KINDS: dict[str, Kind] = {
    "stablehlo.all_gather": "all-gather",
    "stablehlo.all_reduce": "all-reduce",
    "stablehlo.all_to_all": "all-to-all",
    "stablehlo.collective_permute": "collective-permute",
    "stablehlo.reduce_scatter": "reduce-scatter",
}


@dataclass(frozen=True, kw_only=True)
class Written:
    """A collective that a manual computation runs `times` times.

    `bytes` are of the full array on one device: the result of an all-gather, the operand of any
    other collective.
    """

    kind: Kind
    axes: tuple[int, ...]
    bytes: int
    times: int

    def seconds(self, mesh: LogicalMesh) -> float:
        """Seconds of all runs, axis by axis. A permutation sends the whole array once."""
        if self.kind == "all-reduce":
            return self.times * float(collectives.all_reduce(mesh, self.axes, float(self.bytes)))
        if self.kind == "collective-permute":
            links = [mesh.links[axis] for axis in self.axes]
            return self.times * sum(link.latency + self.bytes / link.bandwidth for link in links)
        one = {
            "all-gather": collectives.all_gather,
            "all-to-all": collectives.all_to_all,
            "reduce-scatter": collectives.reduce_scatter,
        }[self.kind]
        total, part = 0.0, float(self.bytes)
        for axis in self.axes:
            total += float(one(mesh, axis, part))
            part /= 1 if self.kind == "all-to-all" else mesh.sizes[axis]
        return self.times * total


def fixed_shardings(op: sdy.ManualComputationOp) -> tuple[list[Sharding], list[Sharding]]:
    """Those of the operands and of the results; open dimensions stay as they are."""
    inputs, outputs = (
        [
            Sharding.from_attr(sharding)
            for sharding in sdy.TensorShardingPerValueAttr(op.attributes[name]).shardings
        ]
        for name in ("in_shardings", "out_shardings")
    )
    return inputs, outputs


def manual_computation(
    operands: Sequence[ir.Value],
    types: Sequence[ir.Type],
    inputs: Sequence[Sharding],
    outputs: Sequence[Sharding],
    axes: Sequence[str],
    mesh: Mesh,
) -> sdy.ManualComputationOp:
    """A manual computation of some operands, at the insertion point. Its body is empty.

    `types` are those of its results, `inputs` and `outputs` the shardings of operands and results.
    """
    given, made = (
        sdy.TensorShardingPerValueAttr.get([sharding.to_attr() for sharding in shardings])
        for shardings in (inputs, outputs)
    )
    names = sdy.ManualAxesAttr.get([ir.StringAttr.get(name) for name in axes])
    manual = sdy.ManualComputationOp(types, operands, given, made, names)
    values = zip(operands, inputs, strict=True)
    manual.regions[0].blocks.append(*(local_type(v.type, s, axes, mesh) for v, s in values))
    return manual


def local_type(type_: ir.Type, sharding: Sharding, axes: Sequence[str], mesh: Mesh) -> ir.Type:
    """The type that a tensor has inside a manual computation, which cuts it along `axes` only."""
    tensor = ir.RankedTensorType(type_)
    shape = [
        size // prod(mesh.axis_size(axis) for axis in on if axis.name in axes)
        for size, on in zip(tensor.shape, sharding.dims, strict=True)
    ]
    return ir.RankedTensorType.get(shape, tensor.element_type)


def written_collectives(op: sdy.ManualComputationOp, mesh: LogicalMesh) -> list[Written]:
    """The collectives in the body, those in loops as often as the loop runs; none on one device.

    Raises:
        PassError: a collective's groups are not those of axes of the mesh.
    """
    return list(_written(body(op), mesh, 1)) if mesh.num_devices > 1 else []


def _written(block: ir.Block, mesh: LogicalMesh, times: int) -> Iterator[Written]:
    for op in block.operations:
        kind = _KINDS.get(op.operation.name)
        if kind is None:
            inside = times
            if isinstance(op, stablehlo.WhileOp):
                inside *= op_cost.trip_count_or_default(op)
            for region in op.regions:
                for inner in region.blocks:
                    yield from _written(inner, mesh, inside)
            continue
        values = op.results if kind == "all-gather" else op.operands
        axes = collective_axes(op, mesh.axis_names, mesh.sizes)
        if axes:
            for value in values:
                yield Written(kind=kind, axes=axes, bytes=type_bytes(value.type), times=times)
