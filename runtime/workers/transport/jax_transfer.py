"""Sends tiles by `jax.experimental.transfer`, for trusted networks only.

JAX's server reads what anyone sends before it knows who it is: a connection that stays silent stops
all transfers, and 64 zero bytes end the process.
"""

from __future__ import annotations

import hashlib
import secrets
import time
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental import transfer

from alpa.runtime.workers.transport.base import Address, Group, Transport

_POLL_SECONDS = 1e-4
_CHUNK_BYTES = 16 << 20
"""The server's buffers are 24 such chunks, which stay pinned on GPUs. By default they are 6 GiB per
worker. On CPU, a message of 64 MiB took 72 ms with this size, and 132 ms with the default."""


class JaxTransfer(Transport):
    """From device to device by `jax.experimental.transfer`.

    On GPUs it stages tiles in pinned host memory and sends them over TCP, also inside a host: JAX
    does not let processes share the memory of a GPU.

    The receiver pulls an array that the sender offers under a number. The number follows from the
    sender's secret, the receiver's own number and the message's number. All receivers pull from the
    same server; other clients do not know a number that it answers.
    """

    def __init__(self, group: Group) -> None:
        """Listens at the worker's address.

        Raises:
            jax.errors.JaxRuntimeError, NotImplementedError: the platform has no such transfers.
        """
        super().__init__(group)
        self._secret = secrets.token_hex(16)
        devices = jax.local_devices()
        self._platform = devices[0].platform
        # One stream: two workers with different numbers of them crash (jaxlib 0.10.2), and on one
        # host more were not faster.
        self._server = transfer.start_transfer_server(
            devices[0].client, f"{group.ip}:0", [f"{group.ip}:0"], transfer_size=_CHUNK_BYTES
        )
        self._connections: dict[int, Any] = {}
        self._addresses: Sequence[Address] = ()
        self._sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)

    @property
    def path(self) -> str:
        pinned = "" if self._platform == "cpu" else "pinned host memory and "
        return f"jax.experimental.transfer, through {pinned}TCP"

    @property
    def address(self) -> Address:
        """Host and port, and a secret that determines the numbers of messages."""
        return {"jax": f"{self._server.address()} {self._secret}"}

    def connect(self, addresses: Sequence[Address]) -> None:
        self._addresses = addresses

    def send(self, peer: int, arrays: Sequence[jax.Array]) -> None:
        number = _number(self._secret, peer, self._sent[peer])
        self._server.await_pull(number, list(arrays))
        self._sent[peer] += 1

    def receive(self, peer: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        address, secret = self._addresses[peer]["jax"].split()
        if peer not in self._connections:
            self._connections[peer] = self._server.connect(address)
        number = _number(secret, self.rank, self._received[peer])
        self._received[peer] += 1
        arrays = self._connections[peer].pull(number, list(shapes))
        # A pull has no deadline of its own.
        deadline = time.monotonic() + self.group.seconds
        while not all(array.is_ready() for array in arrays):
            if time.monotonic() > deadline:
                raise self._late(peer, len(shapes))
            time.sleep(_POLL_SECONDS)
        return arrays

    def close(self) -> None:
        """JAX ends them with the last reference to the server."""


def _number(secret: str, receiver: int, message: int) -> int:
    """A number of 63 bits, as the server requires."""
    digest = hashlib.sha256(f"{secret} {receiver} {message}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1
