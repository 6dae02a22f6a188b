"""What a stage costs before it is sharded: the simple model behind `stage-mesh-partition`.

Compute is the roofline of every op, divided evenly by the mesh's devices; an update adds one
all-reduce of the stage's gradients over the whole mesh. Memory is divided evenly as well.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alpa.dialects import body, ir, mpmd
from alpa.dialects.attributes import Part
from alpa.dialects.mpmd_types import Origin
from alpa.passes.analysis import op_cost
from alpa.passes.analysis.graph import Graph
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh, all_reduce


@dataclass(frozen=True)
class LayerCosts:
    """Per layer, on one device: seconds and bytes of one micro-batch, seconds of one update.

    `boundary[i]` are the bytes that cross into layer i and back when a stage begins there.
    """

    forward: np.ndarray
    backward: np.ndarray
    update: np.ndarray
    gradient_bytes: np.ndarray
    state_bytes: np.ndarray
    activation_bytes: np.ndarray
    boundary: np.ndarray


def layer_of(origin: Origin) -> int | None:
    """The layer number in `layer_3` or `update_3`; None for update_global."""
    number = origin.name.rpartition("_")[2]
    return int(number) if number.isdigit() else None


def part_of(origin: Origin) -> Part:
    """The part of a step that a named computation belongs to, by its name."""
    if origin.name.startswith("update_"):
        return "update"
    return "backward" if origin.transpose_count else "forward"


def layer_costs(graph: Graph, state: set[int], cluster: Cluster, num_layers: int) -> LayerCosts:
    """Costs of the layers whose named computations are the graph's ops.

    `state` holds the numbers of @main's state arguments.
    """
    seconds = {part: np.zeros(num_layers) for part in ("forward", "backward", "update")}
    gradient, kept = np.zeros(num_layers), np.zeros(num_layers)
    activation, boundary = np.zeros(num_layers), np.zeros(num_layers)
    origins = [Origin.from_attr(op.attributes["origin"]) for op in graph.ops]
    owned: set[tuple[int, int]] = set()
    for op, origin, operands in zip(graph.ops, origins, graph.operands, strict=True):
        layer = layer_of(origin)
        if layer is None:
            continue
        seconds[part_of(origin)][layer] += computation_seconds(op, cluster)
        for v in operands:
            # A state that several layers read, a tied embedding, may have a copy on each mesh.
            if v in state and (v, layer) not in owned:
                owned.add((v, layer))
                kept[layer] += graph.bytes[v]
    for o, results in enumerate(graph.results):
        here = layer_of(origins[o])
        for v in results:
            if here is not None:
                _count_flow(graph, origins, o, here, v, gradient, activation, boundary)
    return LayerCosts(
        seconds["forward"],
        seconds["backward"],
        seconds["update"],
        gradient,
        kept,
        activation,
        boundary,
    )


def _count_flow(
    graph: Graph,
    origins: list[Origin],
    o: int,
    here: int,
    v: int,
    gradient: np.ndarray,
    activation: np.ndarray,
    boundary: np.ndarray,
) -> None:
    """Adds one value to what accumulates, is kept for the backward part, or crosses stages."""
    part = part_of(origins[o])
    readers = [(part_of(origins[u]), layer_of(origins[u])) for u in graph.users[v]]
    if part == "backward" and any(kind == "update" for kind, _ in readers):
        gradient[here] += graph.bytes[v]
    if part == "forward" and any(kind == "backward" for kind, _ in readers):
        activation[here] += graph.bytes[v]
    crossed: set[int] = set()
    for kind, there in readers:
        if there is not None and kind != "update" and there != here:
            low, high = min(here, there), max(here, there)
            crossed |= set(range(low + 1, high + 1))
    boundary[list(crossed)] += graph.bytes[v]


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


@dataclass(frozen=True)
class StageTables:
    """The inputs of `solve.stage_dp`, indexed [first layer, last layer, submesh]."""

    seconds: np.ndarray
    update_seconds: np.ndarray
    max_in_flight: np.ndarray
    transfer_seconds: np.ndarray


# More micro-batches in flight than any schedule has: memory is no limit.
_NO_LIMIT = 1 << 30


def stage_tables(
    costs: LayerCosts, cluster: Cluster, submeshes: tuple[tuple[int, int], ...]
) -> StageTables:
    """t, u and the memory check for every interval of layers and every submesh."""
    num_layers = len(costs.forward)
    shape = (num_layers, num_layers, len(submeshes))
    seconds, update = np.full(shape, np.inf), np.full(shape, np.inf)
    in_flight = np.zeros(shape, dtype=np.int64)
    work = _intervals(costs.forward + costs.backward)
    updates, gradients = _intervals(costs.update), _intervals(costs.gradient_bytes)
    state = _intervals(costs.state_bytes) + gradients
    activation = _intervals(costs.activation_bytes)
    valid = np.triu(np.ones((num_layers, num_layers), dtype=bool))
    for m, (hosts, devices) in enumerate(submeshes):
        count = hosts * devices
        mesh = LogicalMesh.of(cluster, hosts, devices, (hosts, devices))
        sync = all_reduce(mesh, (0, 1), gradients)
        seconds[:, :, m] = np.where(valid, work / count, np.inf)
        update[:, :, m] = np.where(valid, updates / count + sync, np.inf)
        free = cluster.device.memory - state / count
        with np.errstate(divide="ignore"):
            fits = np.where(activation > 0, free // (activation / count), _NO_LIMIT)
        in_flight[:, :, m] = np.where(valid & (free > 0), np.clip(fits, 0, _NO_LIMIT), 0)
    link = cluster.inter_host if cluster.hosts > 1 else cluster.intra_host
    transfer = costs.boundary / link.bandwidth + link.latency * (costs.boundary > 0)
    return StageTables(seconds, update, in_flight, transfer)


def _intervals(values: np.ndarray) -> np.ndarray:
    """[i, j] = the sum of values i to j inclusive (meaningless where j < i)."""
    total = np.concatenate([[0.0], np.cumsum(values)])
    return total[None, 1:] - total[:-1, None]
