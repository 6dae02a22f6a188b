"""Sends tiles through the memory of the hosts: shared inside a host, TCP between hosts.

A sender copies a tile once, into what it shares or sends. The receiver makes JAX's array of the
memory in which the bytes arrive, which a CPU device uses as it is.
"""

from __future__ import annotations

import queue
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np

from alpa.runtime.workers.transport.base import Address, Group, Transport, TransportError

ALIGNMENT = 64
"""Bytes; a CPU device of XLA uses arrays of numpy that begin at a multiple as they are."""

Parts = Sequence[np.ndarray]
"""The tiles of a message as bytes."""

Inbox = queue.SimpleQueue[Parts | None]
"""The messages of a peer in order; None if it has gone."""


class Way(ABC):
    """A way of messages from and to some of the peers. Puts what arrives into their inboxes."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the peers reach this worker until they are connected."""

    @abstractmethod
    def connect(self, addresses: Mapping[int, str]) -> None:
        """Connects with the peers. Raises TransportError if one cannot be reached."""

    @abstractmethod
    def send(self, peer: int, parts: Parts) -> None:
        """Sends a message, whose memory may change once this has returned.

        Raises:
            OSError: the peer has gone.
        """

    @abstractmethod
    def close(self) -> None: ...


class HostMemoryTransport(Transport):
    """A transport with a way to each peer; `ways` are opened for `inboxes`."""

    def __init__(
        self,
        group: Group,
        path: str,
        inboxes: Mapping[int, Inbox],
        ways: Mapping[str, tuple[Way, Sequence[int]]],
    ) -> None:
        super().__init__(group)
        self._path, self._inboxes, self._ways = path, inboxes, ways
        self._way_to = {peer: way for way, peers in ways.values() for peer in peers}

    @property
    def path(self) -> str:
        return self._path

    @property
    def address(self) -> Address:
        return {name: way.address for name, (way, _) in self._ways.items()}

    def connect(self, addresses: Sequence[Address]) -> None:
        for name, (way, peers) in self._ways.items():
            way.connect({peer: addresses[peer][name] for peer in peers})

    def send(self, peer: int, arrays: Sequence[jax.Array]) -> None:
        for array in arrays:
            array.copy_to_host_async()  # all at once; below, each is waited for
        try:
            self._way_to[peer].send(peer, [_bytes(array) for array in arrays])
        except OSError as error:
            name = self.group.names[peer]
            raise TransportError(f"{name} accepts no more tiles: {error}") from error

    def receive(self, peer: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        try:
            parts = self._inboxes[peer].get(timeout=self.group.seconds)
        except queue.Empty:
            raise self._late(peer, len(shapes)) from None
        if parts is None:
            raise TransportError(f"{self.group.names[peer]} has closed its connection")
        return [
            jax.device_put(part.view(shape.dtype).reshape(shape.shape), shape.sharding)
            for part, shape in zip(parts, shapes, strict=True)
        ]

    def close(self) -> None:
        for way, _ in self._ways.values():
            way.close()


def places(sizes: Sequence[int]) -> tuple[list[slice], int]:
    """Where the parts of a message of these bytes lie in aligned memory, and all its bytes."""
    found, begin = list[slice](), 0
    for size in sizes:
        found.append(slice(begin, begin + size))
        begin += -(-size // ALIGNMENT) * ALIGNMENT
    return found, begin


def _bytes(array: jax.Array) -> np.ndarray:
    flat: Any = np.ascontiguousarray(array).reshape(-1)
    return flat.view(np.uint8)
