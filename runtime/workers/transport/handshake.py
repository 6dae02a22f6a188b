"""How two workers prove to each other that they know their group's secret.

The caller names itself, the worker that it wants, and a stream, with a random number. The listener
answers with a random number of its own and a proof, an HMAC of all that was said. The caller
answers with its proof; then the listener confirms. Each proof covers a number that its receiver has
just chosen, so a recorded one is worth nothing, and names the side, so that no side can be made to
answer its own question. Whatever a stranger sends, the listener reads at most 84 bytes of it.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
import socket
import struct
from typing import Literal

from alpa.runtime.workers.transport.base import Group, TransportError

_MAGIC = b"alpa/1\r\n"
_HELLO = struct.Struct("!8sIII32s")
"""the magic, the caller's rank, the listener's rank, the stream, a random number"""
_RANDOM_BYTES = _PROOF_BYTES = 32
_CONFIRMED = b"\1"

Side = Literal["caller", "listener"]
Link = tuple[int, int]
"""A caller's rank, and the number of one of its streams."""


class StrangerError(ConnectionError):
    """Who connects does not belong to the group."""


def introduce(connection: socket.socket, group: Group, peer: int, stream: int) -> None:
    """Proves to a listener who calls it, and that it is the peer.

    Raises:
        OSError: the listener does not answer, or ends the connection.
        TransportError: the listener does not know the group's secret.
    """
    hello = _HELLO.pack(_MAGIC, group.rank, peer, stream, secrets.token_bytes(_RANDOM_BYTES))
    connection.sendall(hello)
    challenge = read(connection, _RANDOM_BYTES)
    if not _is_proof(read(connection, _PROOF_BYTES), group, "listener", hello, challenge):
        raise TransportError(f"who answers for {group.names[peer]} does not know the secret")
    connection.sendall(_proof(group, "caller", hello, challenge))
    read(connection, len(_CONFIRMED))


def admit(connection: socket.socket, group: Group) -> Link:
    """Returns who calls, who then waits for `confirm`.

    Raises:
        OSError: the caller is silent, or ends the connection.
        StrangerError: it does not belong to the group.
    """
    hello = bytes(read(connection, _HELLO.size))
    magic, caller, wanted, stream, _ = _HELLO.unpack(hello)
    if magic != _MAGIC or wanted != group.rank:
        raise StrangerError("it does not speak as a worker does")
    challenge = secrets.token_bytes(_RANDOM_BYTES)
    connection.sendall(challenge + _proof(group, "listener", hello, challenge))
    if not _is_proof(read(connection, _PROOF_BYTES), group, "caller", hello, challenge):
        raise StrangerError("it does not know the secret")
    return caller, stream


def confirm(connection: socket.socket) -> None:
    """Tells a caller that it was admitted. Raises OSError if it has gone."""
    connection.sendall(_CONFIRMED)


def _proof(group: Group, side: Side, hello: bytes, answer: bytes) -> bytes:
    return hmac.digest(group.secret, side.encode() + b"\0" + hello + answer, hashlib.sha256)


def _is_proof(
    proof: bytes, group: Group, side: Literal["caller", "listener"], *said: bytes
) -> bool:
    return hmac.compare_digest(proof, _proof(group, side, *said))


def read(connection: socket.socket, size: int) -> bytes:
    """Reads exactly so many bytes. Raises ConnectionError (an OSError) at the end of the stream."""
    data = bytearray(size)
    read_into(connection, memoryview(data))
    return bytes(data)


def read_into(connection: socket.socket, view: memoryview) -> None:
    """Fills a buffer. Raises ConnectionError (an OSError) at the end of the stream."""
    while view:
        count = connection.recv_into(view)
        if not count:
            raise ConnectionError("the connection has ended")
        view = view[count:]
