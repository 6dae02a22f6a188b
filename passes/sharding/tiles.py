"""Which bytes go where when a tensor moves between two meshes (Alpa, section 6).

A tile is what one device holds. A *piece* is the overlap of a source and a destination tile.
Each destination device gets each of its pieces once: from a device of its own host if one holds
it or has received it, over the fast links, else over the slow links between hosts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import prod

Box = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class TiledMesh:
    """A tensor's tiles on a mesh.

    `devices` are numbers in the cluster, row-major over `sizes`; `dims[d]` are the indices of
    the mesh axes that shard dimension d, major first.
    """

    devices: tuple[int, ...]
    devices_per_host: int
    sizes: tuple[int, ...]
    dims: tuple[tuple[int, ...], ...]

    def tiles(self, shape: tuple[int, ...]) -> dict[int, Box]:
        """The half-open box of each device. Where a dimension does not divide evenly, tiles are
        of equal size but for the last ones, as XLA pads."""
        boxes: dict[int, Box] = {}
        for device, coordinates in zip(
            self.devices, product(*(range(size) for size in self.sizes)), strict=True
        ):
            box: list[tuple[int, int]] = []
            for length, axes in zip(shape, self.dims, strict=True):
                index = 0
                for axis in axes:
                    index = index * self.sizes[axis] + coordinates[axis]
                step = -(-length // prod(self.sizes[axis] for axis in axes))
                box.append((min(length, index * step), min(length, (index + 1) * step)))
            boxes[device] = tuple(box)
        return boxes

    def host(self, device: int) -> int:
        return device // self.devices_per_host

    @property
    def has_replicas(self) -> bool:
        used = {axis for axes in self.dims for axis in axes}
        return any(size > 1 and axis not in used for axis, size in enumerate(self.sizes))


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """Bytes over links between hosts and over links inside hosts."""

    slow_bytes: int
    fast_bytes: int


def traffic(source: TiledMesh, target: TiledMesh, shape: tuple[int, ...], itemsize: int) -> Traffic:
    """The bytes that the devices of `target` receive; no piece enters a host twice."""
    pieces: dict[Box, set[int]] = {}
    for device, box in source.tiles(shape).items():
        pieces.setdefault(box, set()).add(source.host(device))
    slow = fast = 0
    arrived: set[tuple[int, Box]] = set()
    for device, box in sorted(target.tiles(shape).items()):
        host = target.host(device)
        for held, hosts in pieces.items():
            piece = _overlap(held, box)
            size = prod(stop - start for start, stop in piece) * itemsize
            if size == 0:
                continue
            if host in hosts or (host, piece) in arrived:
                fast += size
            else:
                slow += size
            arrived.add((host, piece))
    return Traffic(slow_bytes=slow, fast_bytes=fast)


def _overlap(one: Box, other: Box) -> Box:
    return tuple(
        (max(a, c), max(max(a, c), min(b, d))) for (a, b), (c, d) in zip(one, other, strict=True)
    )
