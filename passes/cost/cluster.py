"""The cluster that a program is planned for: hosts of equal devices, a fast link inside a host and
a slow one between hosts. Hosts of several kinds are a `MixedCluster`, whose kinds are clusters.

What plans for both takes an `AnyCluster`, and asks it for the cluster of a mesh (`of`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import reduce
from itertools import accumulate
from pathlib import Path

from alpa.passes.cost.cluster_file import read_cluster_file, read_hosts_file
from alpa.passes.cost.device import (
    MOST_DEVICES,
    ClusterError,
    Device,
    Link,
    Machine,
    Transfer,
    size_of,
    size_problem,
)
from alpa.passes.cost.equation import Equation
from alpa.passes.cost.presets import IDEAL, PRESETS

__all__ = ["AnyCluster", "Cluster", "ClusterError", "Device", "Link", "MixedCluster"]


@dataclass(frozen=True, kw_only=True)
class Cluster(Machine):
    """``hosts`` x ``devices_per_host`` equal devices.

    ``intra_host.bandwidth`` is per device and direction; ``inter_host.bandwidth`` is per host and
    direction, shared by the host's devices. Bytes, bytes/s, FLOP/s and seconds throughout.
    """

    hosts: int
    devices_per_host: int
    equation: Equation | None = None
    """the costs of shardings, if they are not those of roofline and links"""

    def __post_init__(self) -> None:
        for name in ("hosts", "devices_per_host"):
            if getattr(self, name) < 1:
                raise ClusterError(f"{name} must be at least 1, not {getattr(self, name)}")
        problem = size_problem(self.hosts, self.devices_per_host)
        if problem is not None:
            raise ClusterError(problem)

    @property
    def num_devices(self) -> int:
        return self.hosts * self.devices_per_host

    @property
    def for_bounds(self) -> Cluster:
        """The cluster with `Device.for_bounds`; itself if that is its device."""
        device = self.device.for_bounds
        return self if device is self.device else replace(self, device=device)

    @property
    def kinds(self) -> tuple[Cluster, ...]:
        """Of hosts: one."""
        return (self,)

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """The devices of each host."""
        return (self.devices_per_host,) * self.hosts

    def number_of(self, hosts: Sequence[int]) -> int:
        """The number of the kind that some hosts are of."""
        del hosts
        return 0

    def of(self, hosts: Sequence[int]) -> Cluster:
        """The hosts of the kind that some hosts are of."""
        del hosts
        return self

    def host_of(self, device: int) -> int:
        """The host of a device."""
        return device // self.devices_per_host

    def device_name(self, hosts: Sequence[int]) -> str:
        """As plans say it of a mesh (`MeshAssignment.device`): nothing, all are alike."""
        del hosts
        return ""

    def between(self, source: Sequence[int], target: Sequence[int]) -> Link:
        """The link from some hosts to others."""
        del source, target
        return self.inter_host

    @property
    def links_to_others(self) -> tuple[Link | None, ...]:
        """Of each kind of hosts, the slowest link to hosts of another one: there is none."""
        return (None,)

    @staticmethod
    def parse(text: str) -> Cluster:
        """As `parse_cluster`; raises ``ClusterError`` for hosts of several kinds, too."""
        found = parse_cluster(text)
        if isinstance(found, MixedCluster):
            names = ", ".join(kind.device.name for kind in found.kinds)
            raise ClusterError(
                f"cluster {text!r} has hosts of several kinds ({names}), and this is for hosts of "
                "one kind: name one of them"
            )
        return found


@dataclass(frozen=True)
class MixedCluster:
    """Hosts of several kinds, numbered kind by kind. Devices are numbered host by host."""

    kinds: tuple[Cluster, ...]
    """of different devices, links or hosts"""
    other_link: Link | None = None
    """between hosts of different kinds; None: the slower one of what both have to hosts of their
    own kind"""

    @property
    def hosts(self) -> int:
        """All of them."""
        return len(self.host_sizes)

    @property
    def host_sizes(self) -> tuple[int, ...]:
        """The devices of each host."""
        return tuple(size for kind in self.kinds for size in kind.host_sizes)

    @property
    def num_devices(self) -> int:
        """Of all hosts."""
        return sum(self.host_sizes)

    def number_of(self, hosts: Sequence[int]) -> int:
        """The number of the kind that some hosts are of."""
        ends = accumulate(kind.hosts for kind in self.kinds)
        return next(number for number, end in enumerate(ends) if hosts[0] < end)

    def of(self, hosts: Sequence[int]) -> Cluster:
        """The hosts of the kind that some hosts are of."""
        return self.kinds[self.number_of(hosts)]

    def host_of(self, device: int) -> int:
        """The host of a device."""
        return next(host for host, end in enumerate(accumulate(self.host_sizes)) if device < end)

    def device_name(self, hosts: Sequence[int]) -> str:
        """Of some hosts of one kind, as plans say it of a mesh (`MeshAssignment.device`)."""
        return self.of(hosts).device.name

    def between(self, source: Sequence[int], target: Sequence[int]) -> Link:
        """The link from some hosts, which are of one kind, to others."""
        one, other = self.of(source), self.of(target)
        return one.inter_host if one is other else self._link_of(one, other)

    @property
    def links_to_others(self) -> tuple[Link | None, ...]:
        """Of each kind of hosts, the slowest link to hosts of another one."""
        return tuple(
            reduce(_slower, (self._link_of(one, other) for other in self.kinds if other is not one))
            for one in self.kinds
        )

    def _link_of(self, one: Cluster, other: Cluster) -> Link:
        """The link between hosts of two kinds."""
        return self.other_link or _slower(one.inter_host, other.inter_host)


AnyCluster = Cluster | MixedCluster


def _slower(one: Link, other: Link) -> Link:
    """A link that is as slow as the slower of two, without what was measured of collectives."""
    ways = one.between_meshes, other.between_meshes
    return Link(
        bandwidth=min(one.bandwidth, other.bandwidth),
        latency=max(one.latency, other.latency),
        transfer=Transfer(
            bandwidth=min(way.bandwidth for way in ways), latency=max(way.latency for way in ways)
        ),
    )


def parse_cluster(text: str) -> AnyCluster:
    """The cluster that ``text`` names: ``preset:HOSTSxDEVICES`` or the path of a TOML file.

    Whatever ends in ``.toml``, contains a path separator or is an existing file is read as a file.
    ``,ideal`` behind a preset takes the data sheet's figures (``presets``). At the end,
    ``,hosts=3`` takes so many of the hosts, and ``,memory=14GiB`` replaces the memory of a device.
    Several of these, with ``+`` between them, are hosts of several kinds, and so is a file with
    ``[[hosts]]``.
    Raises ``ClusterError`` for an unknown preset, a bad shape or size, and for whatever is wrong in
    a file, there with its line.
    """
    if Path(text).is_file() or "+" not in text:
        return _of_one_name(text)
    parts = text.split("+")
    if not all(map(str.strip, parts)):
        raise ClusterError(
            f"cluster {text!r} has + without a kind of hosts on each side; write it as in "
            "v100-16gb:2x8+a100-40gb:2x8"
        )
    return _mixed([kind for part in parts for kind in _of_one_name(part).kinds])


def _mixed(
    clusters: Sequence[Cluster], other_link: Link | None = None, place: str = ""
) -> AnyCluster:
    """Hosts of all these; those that only differ in their number are of one kind."""
    devices = sum(one.num_devices for one in clusters)
    if devices > MOST_DEVICES:
        raise ClusterError(
            f"all hosts have {devices:,} devices; Alpa plans for {MOST_DEVICES:,} at most", place
        )
    kinds: list[Cluster] = []
    for one in clusters:
        like = next((k for k, it in enumerate(kinds) if replace(it, hosts=one.hosts) == one), None)
        if like is None:
            kinds.append(one)
        else:
            kinds[like] = replace(one, hosts=kinds[like].hosts + one.hosts)
    return kinds[0] if len(kinds) == 1 else MixedCluster(tuple(kinds), other_link)


def _of_one_name(text: str) -> AnyCluster:
    """The cluster of a preset or a file."""
    path = text.partition(",memory=")[0].partition(",hosts=")[0]
    listed = read_hosts_file(path) if _is_path(path) else None
    if listed is None:
        return _equal_hosts(text)
    if path != text:
        raise ClusterError(
            f"{path} lists hosts of its own: change them there, not by ,hosts= or ,memory="
        )
    groups, other_link = listed
    return _mixed([_group(path, *group) for group in groups], other_link, f"{path}:1")


def _is_path(name: str) -> bool:
    return name.endswith(".toml") or "/" in name or "\\" in name or Path(name).is_file()


def _equal_hosts(text: str) -> Cluster:
    """The cluster of a preset or of a file that lists no hosts."""
    text, comma, memory = text.partition(",memory=")
    text, some, left = text.partition(",hosts=")
    hosts, devices_per_host, machine = read_cluster_file(text) if _is_path(text) else _preset(text)
    if some:
        hosts = _some(hosts, left)
    device = machine.device
    if comma:
        try:
            device = replace(device, memory=size_of(memory))
        except ValueError as error:
            raise ClusterError(f"memory {error}") from error
    return Cluster(
        hosts=hosts,
        devices_per_host=devices_per_host,
        device=device,
        intra_host=machine.intra_host,
        inter_host=machine.inter_host,
    )


def _group(path: str, place: str, hosts: int, devices_per_host: int, device: str) -> Cluster:
    """The hosts of an entry of a file: a preset's, or those of another file beside it."""
    is_file = device.endswith(".toml")
    try:
        found = _equal_hosts(str(Path(path).parent / device) if is_file else _with_shape(device))
        return replace(found, hosts=hosts, devices_per_host=devices_per_host)
    except ClusterError as error:
        raise ClusterError(f"device: {error.message}", error.place or place) from error


def _with_shape(device: str) -> str:
    """A preset without a shape, and perhaps with `,ideal` behind it, as a cluster of one device."""
    name, comma, rest = device.partition(",")
    return f"{name}:1x1{comma}{rest}"


def with_hosts(text: str, hosts: int) -> str:
    """The text of a cluster with so many of its hosts."""
    text, comma, memory = text.partition(",memory=")
    return f"{text.partition(',hosts=')[0]},hosts={hosts}{comma}{memory}"


def _some(hosts: int, left: str) -> int:
    """So many of the hosts."""
    if not re.fullmatch(r"\s*\d+\s*", left) or not 1 <= int(left) <= hosts:
        there = "there is 1 host" if hosts == 1 else f"there are {hosts} hosts"
        raise ClusterError(f"hosts={left}: {there}; write how many of them to take")
    return int(left)


def _preset(text: str) -> tuple[int, int, Machine]:
    """Hosts, devices per host and the machine of ``preset:HOSTSxDEVICES``."""
    name, _, shape = text.partition(":")
    shape, ideal, _ = shape.partition(",ideal")
    machine = (IDEAL if ideal else PRESETS).get(name.strip().lower())
    if machine is None:
        near = get_close_matches(name.strip().lower(), PRESETS, n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        raise ClusterError(
            f"unknown cluster {name!r}: {hint}Presets are {', '.join(PRESETS)}, each with a "
            "shape such as h100:4x8 (hosts x devices per host); or give the path of a TOML file"
        )
    match = re.fullmatch(r"\s*(\d+)\s*x\s*(\d+)\s*", shape)
    if not match or int(match[1]) < 1 or int(match[2]) < 1:
        problem = f"{shape!r} is not a shape" if shape else "the shape is missing"
        raise ClusterError(
            f"cluster {text!r}: {problem}; write hosts x devices per host, as in {name}:4x8"
        )
    return int(match[1]), int(match[2]), machine
