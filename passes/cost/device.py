"""An accelerator and its links: the figures that the rest of the cost model is computed from."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from itertools import accumulate
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np


class ClusterError(ValueError):
    """A cluster description that cannot be used; the message says where and what to write.

    ``place`` is ``file:line`` or ``file:line:column``, empty for what stands in no file.
    """

    def __init__(self, message: str, place: str = "") -> None:
        super().__init__(f"{place}: {message}" if place else message)
        self.message, self.place = message, place


MOST_DEVICES = 4096
"""The search looks at every size of a mesh at every place: 512 hosts take it minutes."""

Collective = Literal["all-gather", "reduce-scatter", "all-reduce", "all-to-all"]


Share = TypeVar("Share", float, np.ndarray)

Points = tuple[tuple[float, float], ...]
"""Sizes, rising, and a figure at each: the share of another one that is reached, or seconds."""


class Cost(NamedTuple):
    """A collective in the alpha-beta model: ``b`` bytes take ``start + per_byte * b`` s.

    ``b`` is what one device holds of the full array (``collectives``).
    """

    start: float
    per_byte: float

    def seconds(self, num_bytes: Share) -> Share:
        """Seconds of a collective of that many bytes."""
        return self.start + self.per_byte * num_bytes

    @property
    def line(self) -> Cost:
        """The cost itself."""
        return self


class Curve(NamedTuple):
    """A collective as it was measured: bytes, and seconds at each.

    Seconds are linear in the bytes between two points. Fewer bytes take as long as the fewest, more
    bytes have the bandwidth of the most.
    """

    points: Points

    def seconds(self, num_bytes: Share) -> Share:
        """Seconds of a collective of that many bytes."""
        sizes, times = zip(*self.points, strict=True)
        beyond = times[-1] * np.maximum(num_bytes / sizes[-1], 1.0)
        found: Any = np.where(num_bytes > sizes[-1], beyond, np.interp(num_bytes, sizes, times))
        return found

    @property
    def line(self) -> Cost:
        """The start of few bytes, and the bandwidth of many."""
        return Cost(self.points[0][1], self.points[-1][1] / self.points[-1][0])


Collectives = Mapping[Collective, Mapping[int, Cost | Curve]]


class Call(NamedTuple):
    """Calling a module on a mesh, beside its computation; a step is one more call."""

    start: float = 0.0
    """seconds"""
    per_argument: float = 0.0
    """seconds for each argument and result"""
    per_shard: float = 0.0
    """seconds for each of their shards on the devices of a host"""

    def seconds(self, arguments: Share, devices: int) -> Share:
        """Seconds of a call with so many arguments and results, on so many devices of a host."""
        return self.start + (self.per_argument + devices * self.per_shard) * arguments


class Transfer(NamedTuple):
    """What transfers between meshes reach on a link."""

    bandwidth: float
    """bytes/s, in one direction"""
    latency: float
    """seconds for the start of one message"""


@dataclass(frozen=True, kw_only=True)
class Link:
    """A link in the alpha-beta model: moving ``b`` bytes takes ``latency + b / bandwidth`` s."""

    bandwidth: float
    """bytes/s, in one direction"""
    latency: float
    """seconds for the start of one message"""
    overlap: float = 0.0
    """the share of a collective's seconds that computation hides"""
    transfer_overlap: float = 0.0
    """the share of a transfer's seconds in which the receiving mesh can compute, before it takes
    what has arrived"""
    collectives: Collectives = field(
        default_factory=dict[Collective, Mapping[int, Cost]], hash=False
    )
    """what was measured: inside a host by the number of devices; between hosts by the number of
    hosts, of groups of all their devices"""
    transfer: Transfer | None = None
    """what transfers between meshes reach; None if they reach what the link does"""

    @property
    def between_meshes(self) -> Transfer:
        """The link as transfers between meshes find it."""
        return self.transfer or Transfer(bandwidth=self.bandwidth, latency=self.latency)


Kind = Literal["matrix", "convolution", "elementwise"]
"""Work by the shares of the peak that it reaches; work of another kind has those of ``matrix``."""


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The shares of a device's figures that programs reach, by the size of the work.

    Between two points a share is linear in the logarithm of the size; beyond them it is the last.
    """

    matrix: Mapping[str, Points] = field(hash=False)
    """FLOPs of an op and shares of the peak, by element type; types that are not listed have those
    of ``f32``"""
    memory: Points
    """bytes that an op moves and shares of the memory bandwidth"""
    convolution: Mapping[str, Points] = field(default_factory=dict[str, Points], hash=False)
    """as ``matrix``, of convolutions; without any, they have the shares of matrix products"""
    elementwise: Points = ()
    """FLOPs of an element-wise op or a reduction, one per element, and shares of the peak; without
    any, they have the shares of matrix products"""

    @cached_property
    def rising(self) -> Efficiency:
        """The smallest shares that never fall as work grows, and are nowhere less than these."""

        def risen(points: Points) -> Points:
            most = accumulate((share for _, share in points), max)
            return tuple((size, share) for (size, _), share in zip(points, most, strict=True))

        rising = Efficiency(
            matrix={dtype: risen(points) for dtype, points in self.matrix.items()},
            memory=risen(self.memory),
            convolution={dtype: risen(points) for dtype, points in self.convolution.items()},
            elementwise=risen(self.elementwise),
        )
        return self if rising == self else rising

    def compute(self, kind: Kind, dtype: str) -> Points:
        """The shares of the peak that a kind of work reaches in an element type."""
        if kind == "elementwise" and self.elementwise:
            return self.elementwise
        by_type = self.convolution if kind == "convolution" and self.convolution else self.matrix
        return by_type.get(dtype, by_type["f32"])


@dataclass(frozen=True, kw_only=True)
class Device:
    """One accelerator, as a roofline: peak FLOP/s by element type, and memory bandwidth."""

    name: str
    memory: int
    """bytes"""
    peak_flops: Mapping[str, float] = field(hash=False)
    """FLOP/s by MLIR element type (``f32``, ``bf16``, ``f8E4M3FN`` …); ``f32`` is always there"""
    memory_bandwidth: float
    """bytes/s"""
    efficiency: Efficiency | None = None
    """None for an ideal device: it reaches its figures, and each op reads its operands from memory
    and writes its results"""
    launch: float = 0.0
    """seconds to start a kernel"""
    call: Call = field(default_factory=Call)
    step: Call | None = None
    """calling a step, beside its modules; None if it takes what a module's call does"""
    alone: Points = ()
    """devices of a host that work while its others wait, and the share of the seconds that they
    take then; without any, 1: devices share nothing"""

    @property
    def step_call(self) -> Call:
        """Calling a step, beside its modules."""
        return self.call if self.step is None else self.step

    def share_alone(self, devices: int) -> float:
        """The share of the seconds that so many devices of a host take while its others wait."""
        return float(_share_at(self.alone, devices)) if self.alone else 1.0

    @property
    def for_bounds(self) -> Device:
        """This device, or one with larger shares, on which half of some work takes at least half as
        long: an even split of its seconds bounds those of all parts of the work on this device."""
        if self.efficiency is None or self.efficiency.rising is self.efficiency:
            return self
        return replace(self, efficiency=self.efficiency.rising)

    def peak(self, dtype: str) -> float:
        """FLOP/s for an MLIR element type.

        A type that ``peak_flops`` does not list takes the first of these figures that it does:

        * ``bf16``: f16, f32; ``f16``: bf16, f32; any ``f8…``, ``f6…``, ``f4…``: f8, bf16, f16, f32
        * ``f64``: half of f32
        * ``complex<T>``: that of T (FLOPs of complex ops are counted as real ones)
        * integers, ``i1`` and everything else: f32
        """
        peaks = self.peak_flops
        if dtype in peaks:
            return peaks[dtype]
        if dtype.startswith("complex<"):
            return self.peak(dtype[len("complex<") : -1])
        if dtype == "f64":
            return peaks["f32"] / 2
        if dtype in ("bf16", "f16"):
            substitutes = ("bf16", "f16")
        elif dtype.startswith(("f8", "f6", "f4")):
            substitutes = ("f8", "bf16", "f16")
        else:
            substitutes = ()
        return next((peaks[name] for name in substitutes if name in peaks), peaks["f32"])

    def seconds(
        self,
        flops: float,
        num_bytes: float,
        dtype: str,
        share: Share = 1.0,
        kind: Kind = "matrix",
        *,
        byte_share: Share | None = None,
    ) -> Share:
        """Roofline time of a share of local work: ``max(flops / peak, bytes / memory_bandwidth)``,
        each at its efficiency. The share of the bytes is another one if ``byte_share`` says so."""
        of_bytes = share if byte_share is None else byte_share
        compute = flops * share / self.peak(dtype)
        memory = num_bytes * of_bytes / self.memory_bandwidth
        if self.efficiency is not None:
            compute /= _share_at(self.efficiency.compute(kind, dtype), flops * share)
            memory /= _share_at(self.efficiency.memory, num_bytes * of_bytes)
        larger: Any = np.maximum(compute, memory)
        return larger


def _share_at(points: Points, size: float | np.ndarray) -> Any:
    """The share at a size, or at each size of an array."""
    return np.interp(np.log(np.maximum(size, 1.0)), *_curve(points))


@cache
def _curve(points: Points) -> tuple[np.ndarray, np.ndarray]:
    """Logarithms of sizes, and shares."""
    sizes, shares = zip(*points, strict=True)
    return np.log(sizes), np.array(shares)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A device with its links; a number of hosts and of devices per host makes it a cluster."""

    device: Device
    intra_host: Link
    inter_host: Link


SIZE_UNITS = {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "B": 1,
}


def size_of(text: str) -> int:
    """Bytes of a positive size such as 16GiB; raises ``ValueError`` for other text."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d*)?)\s*([A-Za-z]+)\s*", text)
    if not match or match[2] not in SIZE_UNITS or float(match[1]) <= 0:
        units = ", ".join(SIZE_UNITS)
        raise ValueError(f"must be a size such as 16GiB, not {text!r}; units: {units}")
    return int(float(match[1]) * SIZE_UNITS[match[2]])


def size_text(num_bytes: float) -> str:
    """Bytes as people read them: 16 GiB, 9.25 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 999.5:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"


def seconds_text(seconds: float) -> str:
    """Seconds as people read them: 2.4 ms."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= 0.9995 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us" if seconds else "0"


def size_problem(hosts: int, devices_per_host: int) -> str | None:
    """What is wrong with the size of a cluster, in words; None if nothing is."""
    devices = hosts * devices_per_host
    if devices <= MOST_DEVICES:
        return None
    return (
        f"{hosts:,} hosts x {devices_per_host:,} devices are {devices:,}; Alpa plans for "
        f"{MOST_DEVICES:,} at most"
    )
