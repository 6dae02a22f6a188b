"""Times of collectives on a logical device mesh, in the alpha-beta model.

``bytes`` is always what one device holds of the *full* array of that collective: the result of an
all-gather, the operand of any other. All functions take arrays of bytes too. An axis of size 1
costs nothing.

**Ideal links.** With n devices on the axis, latency a and bandwidth w (bytes/s per device and
direction), rings take

* all-gather, reduce-scatter:  (n - 1) a +     (n - 1) / n * bytes / w
* all-reduce:                2 (n - 1) a + 2 * (n - 1) / n * bytes / w
* all-to-all:                  (n - 1) a +     (n - 1) / n * bytes / w'
* collective-permute:                  a +                   bytes / w'

A ring over several hosts has the bandwidth and the latency of its slowest link. A collective over
several axes goes axis by axis.

**Measured links** (``Link.collectives``). Inside a host, a collective takes what was measured for
groups of its size, between two sizes something between; over whole hosts, what was measured for so
many hosts. For other groups:

* A ring has the slow link's latency only in the share of its steps that is between hosts.
* A collective is one for all of its axes, as XLA runs it: a sum over both axes of a 2x4 mesh
  takes what was measured for eight devices.
* An all-reduce is hierarchical over hosts: the devices of a host reduce and scatter, a tree of
  hosts reduces each part, and the devices gather. The three overlap, so that the slowest of them
  counts. (NCCL's trees; NVIDIA, *Massively Scale Your Deep Learning Training with NCCL 2.4*.)

The share of a collective that computation hides (``Link.overlap``) is not counted.

**Combined collectives** (``LogicalMesh.combined``). XLA for GPUs combines independent collectives
of one kind and group until their results have 30 MiB. Which meet is not known where each is priced
alone. One with a result of less than 12 MiB takes its share, by bytes, of one of 12 MiB; but no
less than its part of one of as many as can meet.

**The equation of TAPAS** (``equation.Equation``), if a cluster has it, prices all of them, each one
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from math import gcd, log2, prod
from typing import TypeVar, cast

import numpy as np

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import Collective, Cost, Curve, Link
from alpa.passes.cost.equation import Equation

Bytes = TypeVar("Bytes", float, np.ndarray)
Axes = int | tuple[int, ...]

_COMBINED = 12 * 2**20
"""Bytes of the result of a combined collective, as collectives share it. In 226 modules of
`tools/plan_ranking`, compiled for eight H100s, 3,788 all-gathers and reduce-scatters became 747. By
these shares they are 712: 231 reduce-scatters and 239 all-gathers in updates (compiled: 235 and
247), 119 and 124 all-gathers of arguments in backward and forward parts (131 and 134)."""


def numbered_axes(count: int) -> tuple[str, ...]:
    """The names of axes that a program does not name."""
    return tuple(f"axis{number}" for number in range(count))


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
    measured: Measured | None = None
    """instead of both, if links were measured"""
    combines: bool = False
    """whether the devices' compiler combines independent collectives"""
    combined: int = 1
    """how many all-gathers, reduce-scatters or all-reduces may share a start"""
    equation: Equation | None = None
    """instead of all of these, if there is one"""
    backward: bool = False
    """whether messages are of backward or update parts, for the equation"""

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

    @property
    def joins_axes(self) -> bool:
        """Whether collectives over several axes have a price of their own."""
        return self.measured is not None and self.equation is None

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
            axis_names=axis_names or numbered_axes(len(logical_shape)),
            sizes=logical_shape,
            links=tuple(ring for ring, _ in views),
            exchange_links=tuple(exchange for _, exchange in views),
            measured=Measured.of(cluster, devices_per_host, logical_shape),
            combines=_combines(cluster),
            equation=cluster.equation,
        )

    def by_equation(
        self, equation: Equation, kind: Collective, axes: Sequence[int], num_bytes: Bytes
    ) -> Bytes:
        """Seconds of a collective over some axes together, on the slowest of their links."""
        links = [self.links[axis] for axis in axes if self.sizes[axis] > 1]
        slowest = min(links, key=lambda link: link.bandwidth, default=self.links[axes[0]])
        workers = prod(self.sizes[axis] for axis in axes)
        return equation.seconds(kind, slowest, workers, num_bytes, backward=self.backward)


def _combines(cluster: Cluster) -> bool:
    """GPUs' compiler does; on ideal devices, and in TAPAS' equation, each collective is alone."""
    device = cluster.device
    return device.name != "CPU" and device.efficiency is not None and cluster.equation is None


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


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Collectives on links that were measured, for groups along the axes of a logical mesh."""

    fast: Link
    slow: Link
    devices_per_host: int
    inside: tuple[int, ...]
    """of each axis: the devices of a group that are in one host"""
    hosts: tuple[int, ...]
    """of each axis: the hosts of a group"""

    @classmethod
    def of(
        cls, cluster: Cluster, devices_per_host: int, logical_shape: tuple[int, ...]
    ) -> Measured | None:
        """None if no link of the cluster was measured."""
        if not cluster.intra_host.collectives and not cluster.inter_host.collectives:
            return None
        steps = [prod(logical_shape[k + 1 :]) for k in range(len(logical_shape))]
        sizes = list(zip(logical_shape, steps, strict=True))
        inside = tuple(gcd(size, max(1, devices_per_host // step)) for size, step in sizes)
        return cls(
            fast=cluster.intra_host,
            slow=cluster.inter_host,
            devices_per_host=devices_per_host,
            inside=inside,
            hosts=tuple(size // few for size, few in zip(logical_shape, inside, strict=True)),
        )

    def seconds(self, kind: Collective, axes: Sequence[int], num_bytes: Bytes) -> Bytes:
        """Seconds of a collective over some axes together."""
        inside, hosts = (prod(sizes[k] for k in axes) for sizes in (self.inside, self.hosts))
        if inside * hosts == 1:
            return 0 * num_bytes
        cost = self._cost(kind, inside, hosts)
        link = self.fast if hosts == 1 else self.slow
        return (1 - link.overlap) * cost.seconds(num_bytes)

    def permute_seconds(self, axes: Sequence[int], num_bytes: Bytes) -> Bytes:
        """Seconds of a message from each device to another one along some axes.

        If they cross hosts, all devices of a host share its network.
        """
        if prod(self.hosts[k] for k in axes) > 1:
            return message_seconds(self.slow, self.devices_per_host, num_bytes)
        return message_seconds(self.fast, 1, num_bytes)

    def _cost(self, kind: Collective, inside: int, hosts: int) -> Cost | Curve:
        if hosts == 1:
            return inside_host(kind, self.fast, inside)
        if inside == self.devices_per_host:
            found = _between(self.slow.collectives.get(kind, {}), hosts)
            if found is not None:
                return found
        size, groups = inside * hosts, self.devices_per_host // inside
        if kind == "all-reduce":
            within = inside_host(kind, self.fast, inside).line if inside > 1 else Cost(0.0, 0.0)
            # All groups of a host share its network, each with a part of its operand per device.
            across = 2 * (hosts - 1) / hosts * groups / self.slow.bandwidth
            start = within.start + 2 * log2(hosts) * self.slow.latency
            return Cost(start, max(within.per_byte, across))
        if kind == "all-to-all":
            leaving = (size - inside) / size * self.devices_per_host / self.slow.bandwidth
            staying = (inside - 1) / size / self.fast.bandwidth
            return Cost((size - 1) * self.slow.latency, max(leaving, staying))
        return ring_over_hosts(self.fast, self.slow, size, crossings=hosts, rings=groups)


def inside_host(kind: Collective, link: Link, size: int) -> Cost | Curve:
    """Of a group of devices in one host: measured, or a ring."""
    found = _between(link.collectives.get(kind, {}), size)
    if found is not None:
        return found
    times = 2 if kind == "all-reduce" else 1
    return Cost(times * (size - 1) * link.latency, times * (size - 1) / size / link.bandwidth)


def ring_over_hosts(fast: Link, slow: Link, size: int, *, crossings: float, rings: int) -> Cost:
    """An all-gather in a ring, of whose links so many are between hosts; so many such rings leave
    or enter a host."""
    bandwidth = min(fast.bandwidth, slow.bandwidth / rings)
    if fast.collectives or slow.collectives:
        share = crossings / size
        latency = share * slow.latency + (1 - share) * fast.latency
    else:
        latency = max(fast.latency, slow.latency)
    return Cost((size - 1) * latency, (size - 1) / size / bandwidth)


def _between(measured: Mapping[int, Cost | Curve], size: int) -> Cost | Curve | None:
    """The measured cost of a size, or between those of the next smaller and larger one: linear in
    the logarithm of the size."""
    if size in measured:
        return measured[size]
    below = max((it for it in measured if it < size), default=None)
    above = min((it for it in measured if it > size), default=None)
    if below is None or above is None:
        return None
    share = log2(size / below) / log2(above / below)
    few, many = measured[below], measured[above]
    if isinstance(few, Cost) and isinstance(many, Cost):
        return Cost(*((1 - share) * a + share * b for a, b in zip(few, many, strict=True)))
    sizes = sorted({b for one in (few, many) if isinstance(one, Curve) for b, _ in one.points})
    return Curve(tuple((b, (1 - share) * few.seconds(b) + share * many.seconds(b)) for b in sizes))


def all_gather(mesh: LogicalMesh, axes: Axes, num_bytes: Bytes) -> Bytes:
    """Seconds until each device along the axes holds the result of ``num_bytes`` bytes.

    Several ideal axes are gathered from the last to the first.
    """

    def alone(size: Bytes) -> Bytes:
        return _gather(mesh, "all-gather", _tuple(axes), size)

    return _share(mesh, alone, num_bytes)


def reduce_scatter(mesh: LogicalMesh, axes: Axes, num_bytes: Bytes) -> Bytes:
    """Seconds to sum an operand of ``num_bytes`` bytes per device, a part of it on each device.

    Several ideal axes are scattered from the first to the last.
    """

    def alone(size: Bytes) -> Bytes:
        return _gather(mesh, "reduce-scatter", _tuple(axes), size)

    parts = prod(mesh.sizes[axis] for axis in _tuple(axes))
    return _share(mesh, alone, num_bytes, parts=parts)


def _gather(mesh: LogicalMesh, kind: Collective, axes: tuple[int, ...], num_bytes: Bytes) -> Bytes:
    if mesh.joins_axes:
        return cast(Bytes, _given(mesh, kind, axes, num_bytes))
    seconds, part = 0 * num_bytes, num_bytes
    for axis in axes:
        found = _given(mesh, kind, (axis,), part)
        ring = _ring(mesh.links[axis], mesh.sizes[axis], part) if found is None else found
        seconds, part = seconds + ring, part / mesh.sizes[axis]
    return seconds


def _tuple(axes: Axes) -> tuple[int, ...]:
    return (axes,) if isinstance(axes, int) else axes


def _given(
    mesh: LogicalMesh, kind: Collective, axes: tuple[int, ...], num_bytes: Bytes
) -> Bytes | None:
    """Seconds by the mesh's equation or by what was measured; None if it has neither."""
    if mesh.equation is not None:
        return mesh.by_equation(mesh.equation, kind, axes, num_bytes)
    if mesh.measured is not None:
        return mesh.measured.seconds(kind, axes, num_bytes)
    return None


def _share(
    mesh: LogicalMesh, alone: Callable[[Bytes], Bytes], num_bytes: Bytes, parts: int = 1
) -> Bytes:
    """Seconds of a collective, or of its share of a combined one whose results are so many parts
    of its operands."""
    if mesh.combined == 1 or mesh.equation is not None:
        return alone(num_bytes)
    share = share_of_start(cast(Bytes, num_bytes / parts), mesh.combined)
    return cast(Bytes, share * alone(cast(Bytes, num_bytes / share)))


def share_of_start(result_bytes: Bytes, combined: int) -> Bytes:
    """Which part of a combined collective is one with a result of so many bytes, among as many as
    can meet: the starts of all of them add up to the number of combined ones."""
    share = np.minimum(1.0, np.maximum(result_bytes / _COMBINED, 1 / combined))
    return cast(Bytes, share)


def all_to_all(mesh: LogicalMesh, axes: Axes, num_bytes: Bytes) -> Bytes:
    """Seconds to exchange parts of an operand of ``num_bytes`` bytes per device along the axes."""
    over = _tuple(axes)
    if mesh.joins_axes:
        return cast(Bytes, _given(mesh, "all-to-all", over, num_bytes))
    return sum((_exchange(mesh, axis, num_bytes) for axis in over), 0 * num_bytes)


def _exchange(mesh: LogicalMesh, axis: int, num_bytes: Bytes) -> Bytes:
    found = _given(mesh, "all-to-all", (axis,), num_bytes)
    return _ring(mesh.exchange_links[axis], mesh.sizes[axis], num_bytes) if found is None else found


def message_seconds(link: Link, senders: int, num_bytes: Bytes) -> Bytes:
    """Seconds of a message from each of some devices that share a link."""
    return (1 - link.overlap) * (link.latency + senders * num_bytes / link.bandwidth)


def collective_permute(mesh: LogicalMesh, axes: tuple[int, ...], num_bytes: Bytes) -> Bytes:
    """Seconds to send ``num_bytes`` bytes from each device to another one along ``axes``."""
    if mesh.equation is not None:
        return mesh.by_equation(mesh.equation, "all-to-all", axes, num_bytes)
    if mesh.measured is not None:
        return mesh.measured.permute_seconds(axes, num_bytes)
    slowest = min((mesh.exchange_links[axis] for axis in axes), key=lambda link: link.bandwidth)
    return message_seconds(slowest, 1, num_bytes)


def all_reduce(mesh: LogicalMesh, axes: Axes, num_bytes: Bytes) -> Bytes:
    """Seconds to sum an operand of ``num_bytes`` bytes per device over one axis or several.

    Over several ideal ones it is hierarchical: reduce-scatters axis by axis, then all-gathers
    backwards, in the order that is cheapest for the largest ``num_bytes``.
    """

    def alone(size: Bytes) -> Bytes:
        found = _given(mesh, "all-reduce", _tuple(axes), size)
        if found is not None:
            return found
        if isinstance(axes, int):
            return 2 * _ring(mesh.links[axes], mesh.sizes[axes], size)
        orders = permutations(axes)
        return min((_hierarchical(mesh, order, size) for order in orders), key=np.max)

    return _share(mesh, alone, num_bytes)


def _hierarchical(mesh: LogicalMesh, order: tuple[int, ...], num_bytes: Bytes) -> Bytes:
    seconds, part = 0 * num_bytes, num_bytes
    for axis in order:
        seconds = seconds + 2 * _ring(mesh.links[axis], mesh.sizes[axis], part)
        part = part / mesh.sizes[axis]
    return seconds


def _ring(link: Link, size: int, num_bytes: Bytes) -> Bytes:
    seconds = (size - 1) * link.latency + (size - 1) / size / link.bandwidth * num_bytes
    return (1 - link.overlap) * seconds
