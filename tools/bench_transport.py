"""Measures how fast tiles travel between two workers on this host.

    python -m alpa.tools.bench_transport --transport shared --transport tcp

Two processes with one CPU device each send a tile to and fro. The time of one way is half of a
round, from an array on one device to an array on the other. The median and the fastest round are
shown, because other work on the machine only makes rounds longer.
"""

from __future__ import annotations

import argparse
import multiprocessing
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from statistics import median
from typing import get_args

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from alpa.runtime.workers.options import Transport as Name
from alpa.runtime.workers.transport.base import Address, Group, Transport
from alpa.runtime.workers.transport.opening import host_identity, open_transport
from alpa.tools.arguments import count
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row

_SIZES = (4, 1 << 16, 1 << 20, 64 << 20)
_SECONDS = 60.0

Beside = Callable[[Group, Sequence[Address]], AbstractContextManager[object]]
"""What goes on from before two workers connect until they have ended, given their addresses."""


@dataclass(frozen=True, kw_only=True)
class Ways:
    """Seconds of one way of a tile of so many bytes, of several rounds."""

    size: int
    seconds: Sequence[float]

    def row(self) -> list[str]:
        typical, best = median(self.seconds), min(self.seconds)
        return [
            f"{self.size:,}",
            f"{1e6 * typical:.0f}",
            f"{1e6 * best:.0f}",
            f"{self.size / typical / 1e9:.2f}",
            f"{self.size / best / 1e9:.2f}",
        ]


def time_tiles(
    name: Name,
    sizes: Sequence[int],
    rounds: int,
    beside: Beside = lambda _, __: nullcontext(),
) -> list[Ways]:
    """Sends tiles of some sizes, in bytes, between this process and a new one.

    Raises:
        TransportError: a tile does not arrive.
    """
    group = Group(
        rank=0,
        names=("this worker", "the other worker"),
        hosts=(host_identity(),) * 2,
        owners={0: 0, 1: 1},
        ip="127.0.0.1",
        secret=secrets.token_bytes(32),
        seconds=_SECONDS,
    )
    # Not by fork: JAX has threads.
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    other = context.Process(
        target=_answer, args=(name, replace(group, rank=1), theirs, sizes, rounds), daemon=True
    )
    other.start()
    transport = open_transport(name, group)
    addresses = [transport.address, ours.recv()]
    try:
        with beside(group, addresses):
            ours.send(addresses)
            transport.connect(addresses)
            return [_time(transport, size, rounds) for size in sizes]
    finally:
        other.terminate()
        other.join()
        transport.close()


def _tile(size: int) -> tuple[jax.Array, jax.ShapeDtypeStruct]:
    """A tile on this process's device, and what it is received as."""
    sharding = SingleDeviceSharding(jax.local_devices()[0])
    tile = jax.device_put(np.zeros(size // 4, np.float32), sharding)
    return tile, jax.ShapeDtypeStruct(tile.shape, tile.dtype, sharding=sharding)


def _time(transport: Transport, size: int, rounds: int) -> Ways:
    tile, shape = _tile(size)
    seconds = list[float]()
    for number in range(rounds + 1):
        begin = time.perf_counter()
        transport.send(1, [tile])
        jax.block_until_ready(transport.receive(1, [shape]))
        if number:  # the first round makes memory and connections
            seconds.append((time.perf_counter() - begin) / 2)
    return Ways(size=size, seconds=seconds)


def _answer(name: Name, group: Group, pipe: Connection, sizes: Sequence[int], rounds: int) -> None:
    """The other process: sends back each tile."""
    jax.config.update("jax_platforms", "cpu")
    transport = open_transport(name, group)
    pipe.send(transport.address)
    transport.connect(pipe.recv())
    for size in sizes:
        _, shape = _tile(size)
        for _ in range(rounds + 1):
            transport.send(0, transport.receive(0, [shape]))
    pipe.recv()  # until this process is ended: JAX's server must live as long as the other reads


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench_transport", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--transport", choices=get_args(Name), action="append", help="by default shared, tcp, jax"
    )
    parser.add_argument("--rounds", type=count, default=50)
    given = parser.parse_args(argv)
    jax.config.update("jax_platforms", "cpu")
    columns = ["transport", "bytes", "us, median", "us, best", "GB/s, median", "GB/s, best"]
    print(markdown_header(columns))
    names: list[Name] = given.transport or ["shared", "tcp", "jax"]
    for name in names:
        for ways in time_tiles(name, _SIZES, given.rounds):
            print(markdown_row([name, *ways.row()]), flush=True)


if __name__ == "__main__":
    sys.exit(until_interrupted("bench_transport", main))
