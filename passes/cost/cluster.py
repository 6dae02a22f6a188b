"""The cluster that a program is planned for: hosts of equal devices, a fast link inside a host and
a slow one between hosts."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from difflib import get_close_matches
from pathlib import Path

from alpa.passes.cost.cluster_file import read_cluster_file
from alpa.passes.cost.device import (
    ClusterError,
    Device,
    Link,
    Machine,
    size_of,
    size_problem,
)
from alpa.passes.cost.equation import Equation
from alpa.passes.cost.presets import IDEAL, PRESETS

__all__ = ["Cluster", "ClusterError", "Device", "Link"]


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

    @staticmethod
    def parse(text: str) -> Cluster:
        """The cluster that ``text`` names: ``preset:HOSTSxDEVICES`` or the path of a TOML file.

        Whatever ends in ``.toml``, contains a path separator or is an existing file is read as a
        file. ``,ideal`` behind a preset takes the data sheet's figures (``presets``). At the end,
        ``,hosts=3`` takes so many of the hosts, and ``,memory=14GiB`` replaces the memory of a
        device. Raises ``ClusterError`` for an unknown preset, a bad shape or size, and for whatever
        is wrong in a file, there with its line.
        """
        text, comma, memory = text.partition(",memory=")
        text, some, left = text.partition(",hosts=")
        if text.endswith(".toml") or "/" in text or "\\" in text or Path(text).is_file():
            hosts, devices_per_host, machine = read_cluster_file(text)
        else:
            hosts, devices_per_host, machine = _preset(text)
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


def with_hosts(text: str, hosts: int) -> str:
    """The text of a cluster with so many of its hosts."""
    text, comma, memory = text.partition(",memory=")
    return f"{text.partition(',hosts=')[0]},hosts={hosts}{comma}{memory}"


def _some(hosts: int, left: str) -> int:
    """So many of the hosts."""
    if not re.fullmatch(r"\s*\d+\s*", left) or not 1 <= int(left) <= hosts:
        raise ClusterError(f"hosts={left}: there are {hosts} hosts; write how many of them to take")
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
        problem = f"{shape!r} is no shape" if shape else "the shape is missing"
        raise ClusterError(
            f"cluster {text!r}: {problem}; write hosts x devices per host, as in {name}:4x8"
        )
    return int(match[1]), int(match[2]), machine
