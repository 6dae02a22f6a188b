"""Sends tiles from one worker to another: from device to device, or through host memory.

Each ordered pair of workers is a queue of messages. A sender does not wait for its receiver. A
receiver waits until its deadline, and its error names the sender.

A worker listens at one address: that of its node, or of the loopback if all workers are on one
node. A connection needs the worker's secret, which Ray passes to the other workers.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import secrets
import socket
import struct
import threading
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, get_args

import jax
import numpy as np
from jax.experimental import transfer

from alpa.runtime.workers import options

_log = logging.getLogger(__name__)
_POLL_SECONDS = 1e-4
_CHUNK_BYTES = 16 << 20
"""The server's buffers are 24 such chunks, which stay pinned on GPUs. By default they are 6 GiB per
worker. On CPU, a message of 64 MiB took 72 ms with this size, and 132 ms with the default."""


class TransportError(RuntimeError):
    """A message from another worker has not arrived."""


class Transport(ABC):
    """A worker's links to the others (`tiles.Links`).

    `names` are the workers' names, and `owners` the workers of the cluster's devices; `seconds` is
    the longest wait for a message.
    """

    def __init__(
        self, rank: int, names: Sequence[str], owners: Mapping[int, int], seconds: float
    ) -> None:
        self.rank, self.owners = rank, owners
        self._names, self._seconds = names, seconds

    @property
    @abstractmethod
    def path(self) -> str:
        """The way of a tile between two workers, in words."""

    @property
    @abstractmethod
    def address(self) -> str:
        """Where the others reach this worker."""

    @abstractmethod
    def connect(self, addresses: Sequence[str]) -> None:
        """Sets the addresses of the workers, all of which are known to live."""

    @abstractmethod
    def send(self, peer: int, arrays: Sequence[jax.Array]) -> None: ...

    @abstractmethod
    def receive(self, peer: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]: ...

    def _late(self, peer: int, count: int) -> TransportError:
        return TransportError(
            f"{self._names[self.rank]} has waited {self._seconds:g} s for {count} tiles from "
            f"{self._names[peer]}; it hangs, or needs a larger timeout_seconds"
        )


class DeviceTransport(Transport):
    """From device to device by `jax.experimental.transfer`.

    On GPUs it stages tiles in pinned host memory and sends them over TCP, also inside a host: JAX
    does not let processes share the memory of a GPU. Tiles inside a process need no transport.

    The receiver pulls an array that the sender offers under a number. The number follows from the
    sender's secret, the receiver's own number and the message's number. All receivers pull from the
    same server; other clients do not know a number that it answers.
    """

    def __init__(self, ip: str, *args: Any) -> None:
        super().__init__(*args)
        self._secret = secrets.token_hex(16)
        devices = jax.local_devices()
        self._platform = devices[0].platform
        # One stream: two workers with different numbers of them crash (jaxlib 0.10.2), and on one
        # host more were not faster.
        self._server = transfer.start_transfer_server(
            devices[0].client, f"{ip}:0", [f"{ip}:0"], transfer_size=_CHUNK_BYTES
        )
        self._connections: dict[int, Any] = {}
        self._addresses: Sequence[str] = ()
        self._sent: dict[int, int] = defaultdict(int)
        self._received: dict[int, int] = defaultdict(int)

    @property
    def path(self) -> str:
        pinned = "" if self._platform == "cpu" else "pinned host memory and "
        return f"jax.experimental.transfer, through {pinned}TCP"

    @property
    def address(self) -> str:
        """Host and port, and a secret that determines the numbers of messages."""
        return f"{self._server.address()} {self._secret}"

    def connect(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    def send(self, peer: int, arrays: Sequence[jax.Array]) -> None:
        number = _number(self._secret, peer, self._sent[peer])
        self._server.await_pull(number, list(arrays))
        self._sent[peer] += 1

    def receive(self, peer: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        address, secret = self._addresses[peer].split()
        if peer not in self._connections:
            self._connections[peer] = self._server.connect(address)
        number = _number(secret, self.rank, self._received[peer])
        self._received[peer] += 1
        arrays = self._connections[peer].pull(number, list(shapes))
        # A pull has no deadline of its own.
        deadline = time.monotonic() + self._seconds
        while not all(array.is_ready() for array in arrays):
            if time.monotonic() > deadline:
                raise self._late(peer, len(shapes))
            time.sleep(_POLL_SECONDS)
        return arrays


def _number(secret: str, receiver: int, message: int) -> int:
    """A number of 63 bits, as the server requires."""
    digest = hashlib.sha256(f"{secret} {receiver} {message}".encode()).digest()
    return int.from_bytes(digest[:8]) >> 1


class SocketTransport(Transport):
    """Through host memory and TCP, for platforms without transfers between devices.

    One thread per sender receives its messages, so that no sender waits for a busy receiver.
    """

    def __init__(self, ip: str, *args: Any) -> None:
        super().__init__(*args)
        self._secret = secrets.token_hex(16)
        self._listener = socket.create_server((ip, 0))
        self._inboxes: dict[int, queue.SimpleQueue[list[bytearray] | None]] = {
            peer: queue.SimpleQueue() for peer in range(len(self._names))
        }
        self._outgoing: dict[int, socket.socket] = {}
        self._addresses: Sequence[str] = ()
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def path(self) -> str:
        return "sockets, through host memory and TCP"

    @property
    def address(self) -> str:
        """Host, port, and a secret that each connection must present."""
        ip, port = self._listener.getsockname()[:2]
        return f"{ip} {port} {self._secret}"

    def connect(self, addresses: Sequence[str]) -> None:
        self._addresses = addresses

    def send(self, peer: int, arrays: Sequence[jax.Array]) -> None:
        for array in arrays:
            array.copy_to_host_async()  # all at once; below, each is waited for
        parts = [_bytes(array) for array in arrays]
        sizes = [len(part) for part in parts]
        try:
            if peer not in self._outgoing:
                self._outgoing[peer] = self._connected(peer)
            connection = self._outgoing[peer]
            connection.sendall(struct.pack(f"!I{len(sizes)}Q", len(sizes), *sizes))
            for part in parts:
                connection.sendall(part)
        except OSError as error:
            raise TransportError(f"{self._names[peer]} accepts no more tiles: {error}") from error

    def receive(self, peer: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        try:
            message = self._inboxes[peer].get(timeout=self._seconds)
        except queue.Empty:
            raise self._late(peer, len(shapes)) from None
        if message is None:
            raise TransportError(f"{self._names[peer]} has closed its connection")
        return [
            jax.device_put(np.frombuffer(part, shape.dtype).reshape(shape.shape), shape.sharding)
            for part, shape in zip(message, shapes, strict=True)
        ]

    def _connected(self, peer: int) -> socket.socket:
        """A connection to a worker that knows the sender."""
        ip, port, secret = self._addresses[peer].split()
        connection = socket.create_connection((ip, int(port)), timeout=self._seconds)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(struct.pack("!32sI", secret.encode(), self.rank))
        return connection

    def _accept(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            threading.Thread(target=self._receive_from, args=(connection,), daemon=True).start()

    def _receive_from(self, connection: socket.socket) -> None:
        with connection:
            # A silent client would keep the thread and the connection.
            connection.settimeout(self._seconds)
            try:
                secret, peer = struct.unpack("!32sI", _read(connection, struct.calcsize("!32sI")))
            except OSError:
                return
            if not secrets.compare_digest(secret, self._secret.encode()):
                return
            # From here the receiver waits, with its own deadline: the next tiles may take long.
            connection.settimeout(None)
            inbox = self._inboxes[peer]
            try:
                while True:
                    (count,) = struct.unpack("!I", _read(connection, 4))
                    sizes = struct.unpack(f"!{count}Q", _read(connection, 8 * count))
                    inbox.put([_read(connection, size) for size in sizes])
            except OSError:
                inbox.put(None)


def _bytes(array: jax.Array) -> memoryview:
    flat: Any = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    return memoryview(flat)


def _read(connection: socket.socket, size: int) -> bytearray:
    """Reads exactly so many bytes; ConnectionError (an OSError) at the end of the stream."""
    data = bytearray(size)
    view = memoryview(data)
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the connection has ended")
        view = view[count:]
    return data


def open_transport(
    name: options.Transport,
    ip: str,
    rank: int,
    names: Sequence[str],
    owners: Mapping[int, int],
    seconds: float,
) -> tuple[Transport, str]:
    """Opens the transport of a worker; `auto` is `device` if the platform has it.

    Returns also the reason for the choice, in words.

    Raises:
        ValueError: there is no such transport.
        jax.errors.JaxRuntimeError: `device` was requested, but the platform does not have it.
    """
    if name not in get_args(options.Transport):
        raise ValueError(
            f"no transport {name!r}: there are {', '.join(get_args(options.Transport))}"
        )
    reason = f"transport={name}"
    if name != "sockets":
        try:
            return DeviceTransport(ip, rank, names, owners, seconds), reason
        except (jax.errors.JaxRuntimeError, NotImplementedError) as error:
            if name == "device":
                raise
            reason = f"the platform has no transfers between devices of several processes: {error}"
            _log.warning("%s sends tiles through host memory: %s", names[rank], reason)
    return SocketTransport(ip, rank, names, owners, seconds), reason
