"""What ops, computations and transfers between stages take, before anything is sharded."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alpa.dialects import body, ir, mpmd
from alpa.dialects.attributes import Part
from alpa.dialects.mpmd_types import Origin
from alpa.passes.analysis import op_cost
from alpa.passes.analysis.graph import Graph
from alpa.passes.cost.cluster import Cluster


def layer_of(origin: Origin) -> int | None:
    """The layer number in `layer_3` or `update_3`; None for update_global."""
    number = origin.name.rpartition("_")[2]
    return int(number) if number.isdigit() else None


def part_of(origin: Origin) -> Part:
    """The part of a step that a named computation belongs to, by its name."""
    if origin.name.startswith("update_"):
        return "update"
    return "backward" if origin.transpose_count else "forward"


@dataclass(frozen=True, kw_only=True, eq=False)
class Boundary:
    """What crosses into layer i, and back, when a stage begins there, per micro-batch."""

    bytes: np.ndarray
    """[K]"""
    values: np.ndarray
    """how many tensors, [K]"""

    def seconds(self, cluster: Cluster, hosts: int, devices: int) -> np.ndarray:
        """Of these transfers for a stage on `hosts` x `devices`, [K]: an estimate.

        A tensor is a message of its own; its parts enter all hosts of the mesh (all devices, where
        the cluster is one host) side by side, and the gathering of replicas is not counted. With
        several hosts a neighbour is taken to be on another one, though two small meshes may share
        a host: some boundary crosses hosts, and the slowest one counts once per micro-batch.
        """
        link, ways = (cluster.inter_host, hosts)
        if cluster.hosts == 1:
            link, ways = (cluster.intra_host, devices)
        return self.bytes / (ways * link.bandwidth) + self.values * link.latency


def boundary_of(graph: Graph, num_layers: int) -> Boundary:
    """What crosses where a program cut into layers is cut into stages."""
    sizes, values = np.zeros(num_layers), np.zeros(num_layers)
    origins = [Origin.from_attr(op.attributes["origin"]) for op in graph.ops]
    for o, results in enumerate(graph.results):
        here = layer_of(origins[o])
        if here is None:
            continue
        for v in results:
            crossed: set[int] = set()
            for reader in (origins[u] for u in graph.users[v]):
                there = layer_of(reader)
                if there is not None and there != here and part_of(reader) != "update":
                    crossed |= set(range(min(here, there) + 1, max(here, there) + 1))
            sizes[list(crossed)] += graph.bytes[v]
            values[list(crossed)] += 1
    return Boundary(bytes=sizes, values=values)


def computation_seconds(op: ir.OpView, cluster: Cluster) -> float:
    """Roofline time of a computation's ops on one device, one after the other."""
    return sum(op_seconds(inner, cluster) for inner in body(op).operations)


def op_seconds(op: ir.OpView, cluster: Cluster) -> float:
    """The larger of FLOPs over the dtype's peak and bytes over memory bandwidth."""
    if isinstance(op, mpmd.ReturnOp):
        return 0.0
    return cluster.device.seconds(op_cost.flops(op), op_cost.memory_bytes(op), dtype_name(op))


def dtype_name(op: ir.OpView) -> str:
    """The element type that an op computes in, as the cluster file names it (`f32`, `i8`)."""
    for value in [*op.operands, *op.results]:
        if isinstance(value.type, ir.RankedTensorType):
            return str(value.type.element_type)
    return "f32"


def intervals(values: np.ndarray) -> np.ndarray:
    """[i, j] = the sum of values i to j inclusive (meaningless where j < i)."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[None, 1:] - total[:-1, None]
