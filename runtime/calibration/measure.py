"""Seconds of matrix products, memory traffic, kernels, collectives and transfers on jax's devices.

An op is timed in a chain: the same op k times, each on the result of the one before, in one
program on all devices at once. A short and a long chain differ only in the number of ops, so that
the difference of their times, over that of their lengths, is an op's time without what it takes to
start a program.

All numbers are random: on zeros, GPUs need less power and run faster. Weights keep the size of the
numbers, so that they stay ordinary ones in a long chain.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from alpa.passes.cost.device import Collective
from alpa.runtime.calibration.executor import call_samples, move_of

ALL, GROUP = "all", "group"
"""Axes of the mesh: the groups of devices, and the devices of a group."""

Body = Callable[[Any], Any]
"""From an array, or a tuple of them, to the like."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """The time of an op on each of the devices at once."""

    what: str
    """`matrix f32`, `convolution f32`, `elementwise`, `memory`, `launch`, `all-reduce 4`, `call 4`,
    `transfer`, `overlap`"""
    size: float
    """FLOPs of matrix products, convolutions and element-wise ops, arguments and results of calls,
    bytes of others"""
    seconds: float
    """the median of several runs"""
    spread: float
    """half the distance of the quartiles, over the median"""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    matrices: Sequence[int] = (32, 64, 128, 256, 512, 1024)
    """rows and columns"""
    images: Sequence[int] = (4, 8, 16, 32, 64)
    """rows and columns of images, for convolutions of 3x3"""
    channels: int = 32
    """of these images"""
    elements: Sequence[int] = tuple(2**n for n in range(10, 21, 2))
    """of arrays for element-wise ops"""
    dtypes: Sequence[str] = ("f32", "bf16", "f16")
    bytes: Sequence[int] = tuple(2**n for n in range(14, 27, 2))
    """of arrays that are read and written"""
    payloads: Sequence[int] = tuple(2**n for n in range(14, 25, 2))
    """of collectives and transfers: what one device holds of the full array"""
    arguments: Sequence[int] = (16, 64, 256)
    """that are donated to a call and returned"""
    runs: int = 7
    """of each program"""
    seconds: float = 0.05
    """that a long chain shall take, as long as it has at most `longest` ops"""
    longest: int = 32


_TRIPS = 8
_SMALL = 32
"""Rows and columns of the matrices in a batch."""
_ROW = 64
"""Elements that a norm or a softmax reads together."""
_ACTIVATION_OPS = 16
"""For each element that `_activation` reads."""
BYTES_PER_OP = 2 * 4 / _ACTIVATION_OPS
"""That element-wise samples read and write, in f32."""

_DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16, "f64": jnp.float64}


def measure(devices: Sequence[Any], sizes: Sizes) -> Iterator[Sample]:
    """Measures everything that these devices can show; what needs two is left out for one."""
    bench = Bench(devices, sizes)
    for dtype in sizes.dtypes:
        for rows in sizes.matrices:
            yield from bench.matrix(dtype, rows)
    yield bench.launch()
    for dtype in sizes.dtypes:
        for rows in sizes.images:
            yield bench.convolution(dtype, rows)
    for elements in sizes.elements:
        yield bench.elementwise(elements)
    for num_bytes in sizes.bytes:
        yield bench.memory(num_bytes)
    for what, size, seconds, spread in call_samples(devices, sizes.arguments, sizes.runs):
        yield Sample(what=what, size=size, seconds=seconds, spread=spread)
    for group in range(2, len(devices) + 1):
        if len(devices) % group == 0:
            for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all"):
                for num_bytes in sizes.payloads:
                    yield bench.collective(kind, group, num_bytes)
    if len(devices) > 1:
        for num_bytes in sizes.payloads:
            yield bench.transfer(num_bytes)
        yield bench.overlap()


@dataclass(frozen=True)
class Bench:
    """Makes the samples, each of a chain."""

    devices: Sequence[Any]
    sizes: Sizes

    def matrix(self, dtype: str, rows: int) -> Iterator[Sample]:
        """A square matrix product on each device; also a batch of smaller ones, as in attention."""
        what = f"matrix {dtype}"
        start = self._array((rows, rows), _DTYPES[dtype])
        found = self.chain(_multiply, (start, self._weights(dtype, rows, rows, rows)))
        yield Sample(what=what, size=2.0 * rows**3, seconds=found[0], spread=found[1])
        if _SMALL < rows <= 8 * _SMALL:
            batch = (rows // _SMALL) ** 3
            shape = (batch, _SMALL, _SMALL)
            start = self._array(shape, _DTYPES[dtype])
            found = self.chain(_multiply, (start, self._weights(dtype, _SMALL, *shape)))
            yield Sample(what=what, size=2.0 * rows**3, seconds=found[0], spread=found[1])

    def convolution(self, dtype: str, rows: int) -> Sample:
        """A convolution of 3x3 over 8 images on each device."""
        channels, images = self.sizes.channels, 8
        start = self._array((images, rows, rows, channels), _DTYPES[dtype])
        kernel = self._weights(dtype, 9 * channels, 3, 3, channels, channels)
        seconds, spread = self.chain(_convolve, (start, kernel))
        flops = 2.0 * images * rows**2 * channels * 9 * channels
        return Sample(what=f"convolution {dtype}", size=flops, seconds=seconds, spread=spread)

    def elementwise(self, elements: int) -> Sample:
        """Ops of a norm, a softmax and an activation function, which a compiler fuses."""
        start = self._array((max(elements // _ROW, 1), _ROW), jnp.float32)
        seconds, spread = self.chain(self._trips(_activation), start, weight=_TRIPS)
        size = float(_ACTIVATION_OPS * elements)
        return Sample(what="elementwise", size=size, seconds=seconds, spread=spread)

    def memory(self, num_bytes: int) -> Sample:
        """An array that each device reads, changes and writes."""
        start = self._array((num_bytes // 4,), jnp.float32)
        found = self.chain(self._trips(lambda y: y * 1.0001), start, weight=_TRIPS)
        return Sample(what="memory", size=2.0 * num_bytes, seconds=found[0], spread=found[1])

    def launch(self) -> Sample:
        """A kernel with next to nothing to do."""
        start = self._array((8, 8), jnp.float32)
        weights = self._weights("f32", 8, 8, 8)
        found = self.chain(_multiply, (start, weights), longest=256)
        return Sample(what="launch", size=2.0 * 8**3, seconds=found[0], spread=found[1])

    def collective(self, kind: Collective, group: int, num_bytes: int) -> Sample:
        """A collective in groups of neighbours, all groups at once."""
        elements = max(num_bytes // 4 // group, 1) * group
        held = elements // group if kind == "all-gather" else elements
        start = self._array((held,), jnp.float32)
        # An op of a chain needs an operand of the size of its result: an element of the gathered
        # array is added to the operand, and a scattered sum is repeated.
        bodies: dict[Collective, Body] = {
            "all-reduce": lambda x: lax.psum(x, GROUP),
            "all-to-all": lambda x: lax.all_to_all(x, GROUP, 0, 0, tiled=True),
            "all-gather": lambda x: x + lax.all_gather(x, GROUP, tiled=True)[0],
            "reduce-scatter": lambda x: jnp.tile(lax.psum_scatter(x, GROUP, tiled=True), group),
        }
        seconds, spread = self.chain(bodies[kind], start, group=group)
        if kind == "reduce-scatter":
            part = elements // group
            repeated, _ = self.chain(lambda x: jnp.tile(x[:part] * 1.0001, group), start)
            seconds = max(seconds - repeated, 0.1 * seconds)
        return Sample(what=f"{kind} {group}", size=4.0 * elements, seconds=seconds, spread=spread)

    def transfer(self, num_bytes: int) -> Sample:
        """An array that moves from half of the devices to the others."""
        seconds, spread = _timed(move_of(self.devices, num_bytes), 3 * self.sizes.runs)
        return Sample(what="transfer", size=float(num_bytes), seconds=seconds, spread=spread)

    def overlap(self) -> Sample:
        """The share of an all-reduce that a matrix product beside it hides, as `seconds`."""
        rows, group = self.sizes.matrices[-1], len(self.devices)
        matrix = self._array((rows, rows), jnp.float32)
        weights = self._weights("f32", rows, rows, rows)
        payload = self._array((self.sizes.payloads[-1] // 4,), jnp.float32)
        compute, _ = self.chain(_multiply, (matrix, weights))
        send, _ = self.chain(lambda x: lax.psum(x, GROUP), payload, group=group)

        together, spread = self.chain(
            lambda x: (*_multiply(x[:2]), lax.psum(x[2], GROUP)),
            (matrix, weights, payload),
            group=group,
        )
        share = min(max((compute + send - together) / send, 0.0), 0.95)
        return Sample(what="overlap", size=4.0 * payload.size, seconds=share, spread=spread)

    def _trips(self, body: Body) -> Body:
        """Some times the same, each on the result of the one before, which ops would fuse with."""
        if self.devices[0].platform == "cpu":
            # XLA fuses across barriers here.
            return lambda x: lax.fori_loop(0, _TRIPS, lambda _, y: body(y), x)

        def apart(x: Any) -> Any:
            for _ in range(_TRIPS):
                x = lax.optimization_barrier(body(x))
            return x

        return apart  # A trip of a loop would take 6 us more on a GPU.

    def _array(self, shape: tuple[int, ...], dtype: Any) -> jax.Array:
        """Random numbers of that shape on each device, along the first dimension."""
        whole = (shape[0] * len(self.devices), *shape[1:])
        draw = jax.jit(
            lambda: jax.random.normal(jax.random.key(0), whole, dtype),
            out_shardings=self._sharding(1),
        )
        return draw()

    def _weights(self, dtype: str, terms: int, *shape: int) -> jax.Array:
        """Random weights that keep the size of the numbers in sums of so many terms."""
        return self._array(shape, _DTYPES[dtype]) * terms**-0.5

    def _sharding(self, group: int) -> NamedSharding:
        grid = np.array(self.devices).reshape(-1, group)
        return NamedSharding(Mesh(grid, (ALL, GROUP)), P((ALL, GROUP)))

    def chain(
        self,
        body: Body,
        start: Any,
        *,
        group: int = 1,
        longest: int = 0,
        weight: int = 1,
    ) -> tuple[float, float]:
        """Seconds of an op on every device, and their spread; `body` has `weight` of them."""
        sharding = self._sharding(group)
        start = jax.device_put(start, sharding)
        longest = longest or self.sizes.longest

        def program(length: int) -> Callable[[], None]:
            def run(x: Any) -> Any:
                for _ in range(length):
                    x = body(x)
                return x

            mapped = jax.shard_map(
                run,
                mesh=sharding.mesh,
                in_specs=sharding.spec,
                out_specs=sharding.spec,
                check_vma=False,
            )
            compiled = jax.jit(mapped).lower(start).compile()
            return lambda: jax.block_until_ready(compiled(start))

        short = program(1)
        one, _ = _timed(short, 3)
        length = int(min(max(self.sizes.seconds / max(one, 1e-6), 5), longest))
        long = program(1 + length)
        differences: list[float] = []
        for _ in range(self.sizes.runs):
            # In turns, so that what else the machine does is shared.
            before, after = _timed(short, 1)[0], _timed(long, 1)[0]
            differences.append((after - before) / length)
        differences = [it / weight for it in differences]
        middle = max(median(differences), 1e-9)
        low, _, high = quantiles(differences, n=4)
        return middle, (high - low) / 2 / middle


def _multiply(x: Any) -> Any:
    """Activations times weights, and the same weights."""
    return x[0] @ x[1], x[1]


def _convolve(x: Any) -> Any:
    """Images convolved with a kernel, and the same kernel."""
    dims = ("NHWC", "HWIO", "NHWC")
    images, kernel = x
    y = lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=dims)
    return y, kernel


def _activation(x: jax.Array) -> jax.Array:
    """A norm, a softmax and tanh: 5 + 5 + 6 ops per element."""
    mean = x.mean(axis=-1, keepdims=True)
    centred = x - mean
    normal = centred * lax.rsqrt((centred * centred).mean(axis=-1, keepdims=True) + 1e-6)
    shares = jnp.exp(normal - normal.max(axis=-1, keepdims=True))
    shares = shares / shares.sum(axis=-1, keepdims=True)
    return shares * (1.0 + jnp.tanh(0.8 * (x + 0.04 * x)))


def _timed(run: Callable[[], None], runs: int) -> tuple[float, float]:
    """The median of some runs in seconds, and its spread; a run before them is not counted."""
    run()
    times: list[float] = []
    for _ in range(runs):
        begin = time.perf_counter()
        run()
        times.append(time.perf_counter() - begin)
    if runs < 2:
        return times[0], 0.0
    low, _, high = quantiles(times, n=4)
    return median(times), (high - low) / 2 / median(times)
