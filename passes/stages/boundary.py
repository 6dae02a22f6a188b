"""What crosses between stages, and how long that takes: estimated before anything is sharded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from alpa.dialects.attributes import Argument, Result, state_pairs
from alpa.dialects.mpmd_types import Origin
from alpa.passes.analysis.graph import Graph
from alpa.passes.cost.cluster import Cluster, Link
from alpa.passes.stages.intervals import intervals, pairs_inside


@dataclass(frozen=True, kw_only=True, eq=False)
class Boundary:
    """What crosses between stages.

    In each micro-batch, values go into the stage that begins with layer i, and from there back.
    Once per step, the updates of layers i to j read values of other layers.
    """

    bytes: np.ndarray
    """into and back, [2, K]"""
    values: np.ndarray
    """how many tensors, [2, K]"""
    once: np.ndarray
    """bytes and tensors from one layer to the update of another, [2, K, K]"""

    def seconds(
        self, cluster: Cluster, hosts: int, devices: int, other: Link | None = None
    ) -> np.ndarray:
        """Estimated seconds of a micro-batch's transfers into a stage on a submesh, [2, K, 2].

        The first row is from the stage before into a stage that begins with layer i, the second
        from the stage behind into a stage that ends before layer i. The last dimension
        distinguishes a sender on the same host and one on another host; with a link to hosts of
        other kinds, [2, K, 3], also one of these. A tensor is a message of its own. Its parts enter
        all devices of the mesh at the same time, each as fast as the link inside its host; from
        other hosts, also no faster than the links of all hosts of the mesh. Gathering replicas is
        not counted.
        """
        ways = [
            _seconds(self.bytes, self.values, cluster, link, hosts, devices)
            for link in _links(cluster, other)
        ]
        return np.stack(ways, axis=2)

    def overlaps(self, cluster: Cluster, other: Link | None = None) -> list[float]:
        """The `transfer_overlap` of the links into a stage, by the last dimension of `seconds`."""
        return [link.transfer_overlap for link in _links(cluster, other)]

    def once_seconds(
        self, cluster: Cluster, hosts: int, devices: int, other: Link | None = None
    ) -> np.ndarray:
        """Seconds of a step's transfers, [K, K], estimated in the same way; if there are several
        hosts, all come from other hosts, of the same kind if there are such."""
        size, values = self.once_from_outside
        return _seconds(size, values, cluster, _once(cluster, other), hosts, devices)

    def once_between(
        self, source: range, target: range, cluster: Cluster, hosts: int, devices: int
    ) -> float:
        """What of `once_seconds` of the target's layers comes from the source's."""
        size, values = self.once[:, source][:, :, target].sum(axis=(1, 2)).tolist()
        return float(_seconds(size, values, cluster, _once(cluster), hosts, devices))

    @cached_property
    def once_from_outside(self) -> np.ndarray:
        """Bytes and tensors from other layers to the updates of layers i to j, [2, K, K]."""
        return np.stack([_from_outside(each) for each in self.once])


def _links(cluster: Cluster, other: Link | None) -> list[Link]:
    """The links into a stage from the same host, from another one and, if there is a link to them,
    from one of another kind."""
    links = [cluster.intra_host, cluster.intra_host if cluster.hosts == 1 else cluster.inter_host]
    return links if other is None else [*links, other]


def _once(cluster: Cluster, other: Link | None = None) -> Link:
    """The link of a step's transfers into a submesh."""
    if cluster.hosts > 1:
        return cluster.inter_host
    return cluster.intra_host if other is None else other


def _seconds(
    sizes: np.ndarray, values: np.ndarray, cluster: Cluster, link: Link, hosts: int, devices: int
) -> np.ndarray:
    """Seconds of so many bytes and values over a link into a submesh, as `solve/transfers` has
    them: a device's port is as fast as the link inside its host."""
    bandwidth = hosts * devices * cluster.intra_host.between_meshes.bandwidth
    if link is not cluster.intra_host:
        bandwidth = min(bandwidth, hosts * link.between_meshes.bandwidth)
    return sizes / bandwidth + values * link.between_meshes.latency


def boundary_of(
    graph: Graph, arguments: Sequence[Argument], results: Sequence[Result], num_layers: int
) -> Boundary:
    """What crosses between stages of a clustered program.

    A state that several layers read is computed in one of them, and returns to the others once per
    step.
    """
    # Bytes and numbers of values; into a stage and back, by the layer that it begins with.
    crossing = np.zeros((2, 2, num_layers))
    once = np.zeros((2, num_layers, num_layers))
    origins = [Origin.of(op) for op in graph.ops]
    states: dict[int, list[int]] = {}
    for r, a in state_pairs(arguments, results).items():
        states.setdefault(graph.returned[r], []).append(a)
    for origin, made in zip(origins, graph.results, strict=True):
        here = origin.layer
        if here is None:
            continue
        for v in made:
            size = np.array([graph.bytes[v], 1.0])
            readers = [origins[u] for u in graph.users[v]]
            layers = [it.layer for it in readers if it.part != "update" and it.layer is not None]
            crossing[:, 0, here + 1 : max(layers, default=here) + 1] += size[:, None]
            crossing[:, 1, min(layers, default=here) + 1 : here + 1] += size[:, None]
            wanted = {origins[u].layer for a in states.get(v, ()) for u in graph.users[a]}
            wanted |= {it.layer for it in readers if it.part == "update"}
            for there in wanted - {None, here}:
                once[:, here, there] += size
    return Boundary(
        bytes=crossing[0],
        values=crossing[1],
        once=once,
    )


def _from_outside(pairs: np.ndarray) -> np.ndarray:
    """``[i, j]``: the sum of ``pairs[a, b]`` with b in i..j and a outside."""
    return intervals(pairs.sum(axis=0)) - pairs_inside(np.triu(pairs) + np.tril(pairs, -1).T)
