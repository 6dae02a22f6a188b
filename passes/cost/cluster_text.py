"""A cluster of equal hosts as the text of a cluster file (`cluster_file.py` reads it)."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.cluster_file import LEAST_MEMORY
from alpa.passes.cost.device import Cost, Curve, Device, Link, Points

Figure = Callable[[float], str]


def cluster_text(cluster: Cluster, *, figure: Figure = repr, comment: str = "") -> str:
    """The text of a cluster file, of which `parse_cluster` makes an equal cluster.

    Args:
        cluster: hosts of one kind.
        figure: writes a number; by default with all digits.
        comment: stands before the link between hosts.

    Raises:
        ValueError: the cluster has an equation, which is an option of a pass and not in files.
    """
    if cluster.equation is not None:
        raise ValueError("a cluster file has no equation; use costs=tapas of ilp-shard-annotate")
    lines = [f"hosts = {cluster.hosts}", f"devices_per_host = {cluster.devices_per_host}", ""]
    lines += _device(cluster.device, figure)
    lines += ["", *_link("intra_host", cluster.intra_host, figure), ""]
    lines += [f"# {comment}"] if comment else []
    lines += _link("inter_host", cluster.inter_host, figure)
    return "\n".join(lines) + "\n"


def table_text(figures: Mapping[str, float], figure: Figure) -> str:
    """An inline table of figures."""
    entries = (f"{_key(name)} = {figure(value)}" for name, value in figures.items())
    return f"{{ {', '.join(entries)} }}"


def _device(device: Device, figure: Figure) -> list[str]:
    # A number that small would need its unit.
    memory = device.memory if device.memory >= LEAST_MEMORY else f'"{device.memory}B"'
    lines = [
        "[device]",
        f"name = {json.dumps(device.name, ensure_ascii=False)}",
        f"memory = {memory}",
        f"peak_flops = {table_text(device.peak_flops, figure)}",
        f"memory_bandwidth = {figure(device.memory_bandwidth)}",
        f"launch = {figure(device.launch)}",
    ]
    if any(device.call):
        lines.append(f"call = {table_text(device.call._asdict(), figure)}")
    if device.step is not None:
        lines.append(f"step = {table_text(device.step._asdict(), figure)}")
    if device.alone:
        lines.append(f"alone = {_points(device.alone, figure)}  # devices, share of seconds")
    efficiency = device.efficiency
    if efficiency is not None:
        lines += ["", "[device.efficiency]"]
        lines.append(f"matrix = {_points_by_type(efficiency.matrix, figure)}")
        lines.append(f"memory = {_points(efficiency.memory, figure)}")
        if efficiency.convolution:
            lines.append(f"convolution = {_points_by_type(efficiency.convolution, figure)}")
        if efficiency.elementwise:
            lines.append(f"elementwise = {_points(efficiency.elementwise, figure)}")
    return lines


def _link(name: str, link: Link, figure: Figure) -> list[str]:
    lines = [
        f"[{name}]",
        f"bandwidth = {figure(link.bandwidth)}",
        f"latency = {figure(link.latency)}",
    ]
    if link.transfer is not None:
        lines.append(f"transfer = {table_text(link.transfer._asdict(), figure)}")
    if link.overlap:
        lines.append(f"overlap = {figure(link.overlap)}")
    if link.transfer_overlap:
        lines.append(f"transfer_overlap = {figure(link.transfer_overlap)}")
    if link.collectives:
        lines += ["", f"[{name}.collectives]"]
    for kind, sizes in link.collectives.items():
        lines += [f"{kind}.{size} = {_cost(cost, figure)}" for size, cost in sizes.items()]
    return lines


_LEAST_SECONDS = 1e-15
"""For a byte: a file has the bandwidth, which is finite."""


def _cost(cost: Cost | Curve, figure: Figure) -> str:
    if isinstance(cost, Curve):
        return f"{_points(cost.points, figure)}  # bytes and seconds"
    beta = 1 / max(cost.per_byte, _LEAST_SECONDS)
    return table_text({"alpha": cost.start, "beta": beta}, figure)


def _points_by_type(points: Mapping[str, Points], figure: Figure) -> str:
    entries = (f"{_key(name)} = {_points(it, figure)}" for name, it in points.items())
    return f"{{ {', '.join(entries)} }}"


def _points(points: Points, figure: Figure) -> str:
    return f"[{', '.join(f'[{size!r}, {figure(value)}]' for size, value in points)}]"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[\w-]+", name, re.ASCII) else json.dumps(name, ensure_ascii=False)
