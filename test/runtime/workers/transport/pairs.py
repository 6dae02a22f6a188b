"""Two workers in this process, which are connected with each other."""

from __future__ import annotations

import secrets
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import SingleDeviceSharding

from alpa.runtime.workers.options import Transport as Name
from alpa.runtime.workers.transport.base import Group, Transport
from alpa.runtime.workers.transport.opening import open_transport

NAMES = ("mesh_0 on host 0", "mesh_1 on host 0")


def group(seconds: float = 20.0, **others: Any) -> Group:
    """The first worker's group."""
    given: dict[str, Any] = {
        "rank": 0,
        "names": NAMES,
        "hosts": ("here", "here"),
        "owners": {0: 0, 1: 1, 2: 1},
        "ip": "127.0.0.1",
        "secret": secrets.token_bytes(32),
        "seconds": seconds,
    }
    return Group(**(given | others))


def opened(name: Name, of: Group) -> list[Transport]:
    """A transport for each of the workers."""
    return [open_transport(name, replace(of, rank=rank)) for rank in range(len(of.names))]


def connect(transports: Sequence[Transport]) -> None:
    """Connects workers with one another."""
    addresses = [it.address for it in transports]
    with ThreadPoolExecutor(len(transports)) as pool:
        list(pool.map(lambda it: it.connect(addresses), transports))


@contextmanager
def connected(name: Name, seconds: float = 20.0, **others: Any) -> Iterator[list[Transport]]:
    """Two connected workers."""
    both = opened(name, group(seconds, **others))
    try:
        connect(both)
        yield both
    finally:
        for it in both:
            it.close()


def shape_of(array: np.ndarray, device: int) -> jax.ShapeDtypeStruct:
    """What a receiver requests for an array on a device."""
    sharding = SingleDeviceSharding(jax.devices()[device])
    return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)


def exchange(first: Transport, second: Transport, messages: int = 20) -> None:
    """Sends messages in both directions, and checks what arrives."""
    for number in range(messages):
        first.send(1, [jnp.full(1 << 16, number, jnp.float32)])
        second.send(0, [jnp.full(3, -number, jnp.float32)])
        (got,) = second.receive(0, [shape_of(np.zeros(1 << 16, np.float32), 1)])
        assert (np.asarray(got) == number).all()
        (got,) = first.receive(1, [shape_of(np.zeros(3, np.float32), 0)])
        assert (np.asarray(got) == -number).all()
