"""Times of collectives on a logical device mesh, in the alpha-beta model with ring algorithms.

With n devices on the axis, latency a and bandwidth w (bytes/s per device and direction):

* all-gather, reduce-scatter:  (n - 1) a +     (n - 1) / n * bytes / w
* all-reduce:                2 (n - 1) a + 2 * (n - 1) / n * bytes / w
* all-to-all:                  (n - 1) a +     (n - 1) / n * bytes / w'

``bytes`` is always what one device holds of the *full* array of that collective: the result of an
all-gather, the operand of a reduce-scatter, an all-reduce or an all-to-all. All functions take
arrays of bytes too. An axis of size 1 costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from math import prod
from typing import TypeVar

import numpy as np

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import Link

Bytes = TypeVar("Bytes", float, np.ndarray)

_AXIS_NAMES = ("x", "y", "z", "w")


@dataclass(frozen=True, kw_only=True)
class LogicalMesh:
    """A logical view of a submesh: named axes, each with the link that its collectives see.

    ``links[k]`` is what one device gets in a ring along axis k, ``exchange_links[k]`` what it gets
    in an all-to-all. They differ where an axis has several devices in one host: a ring leaves the
    host once, an all-to-all with every device's data. Left out, they are the same.
    """

    axis_names: tuple[str, ...]
    sizes: tuple[int, ...]
    links: tuple[Link, ...]
    exchange_links: tuple[Link, ...] = ()

    def __post_init__(self) -> None:
        if not self.exchange_links:
            object.__setattr__(self, "exchange_links", self.links)
        lengths = {len(self.axis_names), len(self.sizes), len(self.links), len(self.exchange_links)}
        if len(lengths) != 1:
            raise ValueError(
                f"a mesh has one name, size and link per axis, not {len(self.axis_names)} names, "
                f"{len(self.sizes)} sizes and {len(self.links)} links"
            )
        if any(size < 1 for size in self.sizes):
            raise ValueError(f"mesh axis sizes must be at least 1, not {self.sizes}")

    @property
    def num_devices(self) -> int:
        return prod(self.sizes)

    @staticmethod
    def of(
        cluster: Cluster,
        hosts: int,
        devices_per_host: int,
        logical_shape: tuple[int, ...],
        axis_names: tuple[str, ...] | None = None,
    ) -> LogicalMesh:
        """The view of ``hosts`` x ``devices_per_host`` devices of ``cluster`` as ``logical_shape``.

        Devices are numbered host by host and laid out row-major, so the last axis has neighbours.
        An axis whose groups lie inside one host uses the intra-host link. Otherwise its groups
        cross hosts, and the groups that pass through one host share its bandwidth: if neighbours on
        the axis are ``s`` devices apart, there are ``min(s, devices_per_host)`` rings per host.
        Raises ``ValueError`` if the shape has the wrong number of devices, or if the submesh does
        not fit into the cluster.
        """
        if hosts > cluster.hosts or devices_per_host > cluster.devices_per_host:
            raise ValueError(
                f"a submesh of {hosts}x{devices_per_host} does not fit into a cluster of "
                f"{cluster.hosts}x{cluster.devices_per_host}"
            )
        if prod(logical_shape) != hosts * devices_per_host:
            raise ValueError(
                f"logical shape {logical_shape} has {prod(logical_shape)} devices, the submesh "
                f"{hosts}x{devices_per_host} has {hosts * devices_per_host}"
            )
        views = [
            _axis_links(cluster, devices_per_host, size, prod(logical_shape[k + 1 :]))
            for k, size in enumerate(logical_shape)
        ]
        return LogicalMesh(
            axis_names=axis_names or _AXIS_NAMES[: len(logical_shape)],
            sizes=logical_shape,
            links=tuple(ring for ring, _ in views),
            exchange_links=tuple(exchange for _, exchange in views),
        )


def _axis_links(cluster: Cluster, devices_per_host: int, size: int, step: int) -> tuple[Link, Link]:
    """(ring link, all-to-all link) of an axis of ``size`` devices that lie ``step`` apart."""
    span = size * step
    if size == 1 or (span <= devices_per_host and devices_per_host % span == 0):
        return cluster.intra_host, cluster.intra_host
    fast, slow = cluster.intra_host, cluster.inter_host
    latency = max(fast.latency, slow.latency)
    ring = slow.bandwidth / min(step, devices_per_host)
    # Of the size - 1 parts that a device sends, size - inside leave the host, from each device.
    inside = min(size, max(1, devices_per_host // step))
    exchange = slow.bandwidth / devices_per_host * (size - 1) / max(size - inside, 1)
    return (
        Link(bandwidth=min(fast.bandwidth, ring), latency=latency),
        Link(bandwidth=min(fast.bandwidth, exchange), latency=latency),
    )


def all_gather(mesh: LogicalMesh, axis: int, num_bytes: Bytes) -> Bytes:
    """Seconds until each device on ``axis`` holds the result of ``num_bytes`` bytes."""
    return _ring(mesh.links[axis], mesh.sizes[axis], num_bytes)


def reduce_scatter(mesh: LogicalMesh, axis: int, num_bytes: Bytes) -> Bytes:
    """Seconds to sum an operand of ``num_bytes`` bytes per device, a part of it on each device."""
    return _ring(mesh.links[axis], mesh.sizes[axis], num_bytes)


def all_to_all(mesh: LogicalMesh, axis: int, num_bytes: Bytes) -> Bytes:
    """Seconds to exchange parts of an operand of ``num_bytes`` bytes per device along ``axis``."""
    return _ring(mesh.exchange_links[axis], mesh.sizes[axis], num_bytes)


def all_reduce(mesh: LogicalMesh, axes: int | tuple[int, ...], num_bytes: Bytes) -> Bytes:
    """Seconds to sum an operand of ``num_bytes`` bytes per device over one axis or several.

    Over several it is hierarchical: reduce-scatters axis by axis, then all-gathers backwards, in
    the order that is cheapest for the largest ``num_bytes``.
    """
    if isinstance(axes, int):
        return 2 * _ring(mesh.links[axes], mesh.sizes[axes], num_bytes)
    orders = permutations(axes)
    return min((_hierarchical(mesh, order, num_bytes) for order in orders), key=np.max)


def _hierarchical(mesh: LogicalMesh, order: tuple[int, ...], num_bytes: Bytes) -> Bytes:
    seconds, part = 0 * num_bytes, num_bytes
    for axis in order:
        seconds = seconds + 2 * _ring(mesh.links[axis], mesh.sizes[axis], part)
        part = part / mesh.sizes[axis]
    return seconds


def _ring(link: Link, size: int, num_bytes: Bytes) -> Bytes:
    return (size - 1) * link.latency + (size - 1) / size / link.bandwidth * num_bytes
