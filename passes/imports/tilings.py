"""GSPMD's shardings of arrays, as XLA prints them, over one mesh."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from alpa.dialects.sharding import AxisRef, Mesh, Sharding

_TILED = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\]"
    r"(?:<=\[(?P<iota>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?|(?P<ids>[\d,]+))"
    r"(?P<replicas> last_tile_dim_replicate)?(?: metadata=.*)?\}"
)
_REPLICATED = re.compile(r"\{replicated(?: metadata=.*)?\}")


@dataclass(frozen=True)
class Digit:
    """A part of a device's number: `number // stride % size`."""

    size: int
    stride: int


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """How an array is cut: for each dimension the digits that number its parts, major first.

    A replicated array has no dimensions here: none is cut.
    """

    dims: tuple[tuple[Digit, ...], ...] = ()
    num_devices: int | None = None
    """None: all there are"""

    @classmethod
    def parse(cls, text: str) -> Tiling:
        """Reads `{replicated}`, `{devices=[4,1,2]<=[2,4]T(1,0) last_tile_dim_replicate}` or
        `{devices=[2,2]0,2,1,3}`.

        Raises:
            ValueError: it is another kind of sharding, or the parts of a dimension are on devices
                whose numbers no mesh has.
        """
        if _REPLICATED.fullmatch(text):
            return cls()
        found = _TILED.fullmatch(text)
        if found is None:
            raise ValueError(f"{text} does not cut an array into tiles")
        tiles = _numbers(found["tiles"])
        if found["ids"]:
            ids = np.array(_numbers(found["ids"]))
        else:
            iota = _numbers(found["iota"])
            order = _numbers(found["order"]) if found["order"] else list(range(len(iota)))
            ids = np.arange(prod(iota)).reshape(iota).transpose(order)
        if ids.size != prod(tiles):
            raise ValueError(f"{text} has {ids.size} devices for {prod(tiles)} tiles")
        dims = _digits(ids.reshape(tiles))
        if dims is None:
            raise ValueError(f"the devices of {text} are in an order that no mesh has")
        return cls(dims=dims[: -1 if found["replicas"] else None], num_devices=ids.size)


def mesh_of(tilings: Iterable[Tiling], num_devices: int) -> Mesh:
    """The mesh with the fewest axes over which arrays can be cut by all tilings.

    Raises:
        ValueError: there is none.
    """
    digits = [digit for it in tilings for dim in it.dims for digit in dim]
    strides = {end for it in digits for end in (it.stride, it.stride * it.size)}
    cuts = sorted({1, num_devices, *strides}, reverse=True)
    if any(larger % smaller for larger, smaller in pairwise(cuts)):
        sizes = ", ".join(map(str, cuts[::-1]))
        raise ValueError(f"no mesh has axes that end after {sizes} devices")
    sizes = [larger // smaller for larger, smaller in pairwise(cuts)]
    return Mesh(tuple((f"axis{i}", size) for i, size in enumerate(sizes)))


def sharding_over(tiling: Tiling, rank: int, name: str, mesh: Mesh) -> Sharding:
    """The sharding of an array of that rank over a mesh of `mesh_of`, of that name."""
    strides = np.cumprod([1, *mesh.sizes[:0:-1]])[::-1].tolist()
    axes = list(zip(mesh.axes, strides, strict=True))

    def on(digit: Digit) -> list[AxisRef]:
        end = digit.stride * digit.size
        return [AxisRef(axis) for (axis, _), stride in axes if digit.stride <= stride < end]

    dims = tiling.dims or ((),) * rank
    return Sharding(name, tuple(tuple(ref for it in dim for ref in on(it)) for dim in dims))


def _numbers(text: str) -> list[int]:
    return [int(it) for it in text.split(",")]


def _digits(ids: np.ndarray) -> tuple[tuple[Digit, ...], ...] | None:
    """The digits of each dimension; None if the numbers are no sum of such."""
    found: list[tuple[Digit, ...]] = []
    total = np.zeros((1,) * ids.ndim, int)
    for axis in range(ids.ndim):
        line = ids[tuple(slice(None) if a == axis else 0 for a in range(ids.ndim))]
        digits = _digits_of(line.tolist())
        if digits is None:
            return None
        values = np.zeros(1, int)
        for it in digits:
            values = (values[:, None] + it.stride * np.arange(it.size)).reshape(-1)
        total = total + values.reshape([-1 if a == axis else 1 for a in range(ids.ndim)])
        found.append(tuple(digits))
    is_sum = np.array_equal(total, ids) and np.array_equal(np.sort(ids.ravel()), range(ids.size))
    return tuple(found) if is_sum else None


def _digits_of(line: Sequence[int]) -> list[Digit] | None:
    """The fewest digits, major first, that may number the parts of a dimension."""
    found: list[Digit] = []
    run = 1
    while run < len(line):
        firsts = line[::run]
        stride, size = firsts[1], 1
        while size < len(firsts) and firsts[size] == size * stride:
            size += 1
        while len(firsts) % size:
            size -= 1
        if size == 1 or stride < 1:
            return None
        found.append(Digit(size=size, stride=stride))
        run *= size
    return found[::-1]
