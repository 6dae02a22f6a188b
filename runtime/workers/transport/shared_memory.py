"""Messages through memory that two workers of one host share.

A sender has segments of memory for each peer (`segments`). It copies a message into a free one, and
tells the peer over a Unix socket which one it is. The peer's arrays lie in the segment.

The socket lies in a folder that only this user can enter, and both are gone once the peers are
connected. No port is opened.
"""

from __future__ import annotations

import os
import socket
import struct
import tempfile
import threading
from collections.abc import Mapping
from pathlib import Path

from alpa.runtime.workers.transport.base import Group
from alpa.runtime.workers.transport.handshake import read
from alpa.runtime.workers.transport.host_memory import Inbox, Parts, Way, places
from alpa.runtime.workers.transport.listener import Listener, call, end_connection
from alpa.runtime.workers.transport.segments import Pool, Segment

_HEAD = struct.Struct("!QQI")
"""a segment's number, its bytes, and the number of parts of a message; if there are no parts, the
segment is given up. A segment's first message brings its descriptor."""
_LONGEST_PATH = 100
"""of a Unix socket, in bytes; the system's limit is a little higher"""


class SharedMemory(Way):
    """The way of messages between this worker and those of its host."""

    def __init__(self, group: Group, inboxes: Mapping[int, Inbox]) -> None:
        self._group, self._inboxes = group, inboxes
        self._folder = tempfile.TemporaryDirectory(prefix="alpa-")
        path = Path(self._folder.name) / "socket"
        if len(os.fsencode(path)) > _LONGEST_PATH:
            raise OSError(
                f"{path} is too long for the name of a Unix socket ({_LONGEST_PATH} bytes); set "
                "TMPDIR to a shorter one"
            )
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(path))
        server.listen()
        self._path = str(path)
        self._incoming: list[socket.socket] = []
        self._outgoing: dict[int, _Sender] = {}
        expected = [(peer, 0) for peer in inboxes]
        self._listener = Listener(server, group, expected, self._arrived)

    @property
    def address(self) -> str:
        return self._path

    def connect(self, addresses: Mapping[int, str]) -> None:
        for peer, address in addresses.items():
            self._outgoing[peer] = _Sender(call(address, self._group, peer, 0))
        self._listener.wait()
        self._folder.cleanup()

    def send(self, peer: int, parts: Parts) -> None:
        self._outgoing[peer].send(parts)

    def close(self) -> None:
        self._listener.close()
        self._folder.cleanup()
        for sender in self._outgoing.values():
            sender.connection.close()
        for connection in self._incoming:
            end_connection(connection)

    def _arrived(self, peer: int, _: int, connection: socket.socket) -> None:
        connection.settimeout(None)
        self._incoming.append(connection)
        arguments = (connection, self._inboxes[peer])
        threading.Thread(target=_receive, args=arguments, daemon=True).start()


class _Sender:
    """Sends messages to one peer."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._pool = Pool()

    def send(self, parts: Parts) -> None:
        sizes = [part.nbytes for part in parts]
        slices, size = places(sizes)
        number, segment, file, given_up = self._pool.take(size)
        try:
            to = segment.use()
            for place, part in zip(slices, parts, strict=True):
                to[place] = part
            for other in given_up:
                self.connection.sendall(_HEAD.pack(other, 0, 0))
            head = _HEAD.pack(number, segment.size, len(parts))
            if file is None:
                self.connection.sendall(head)
            else:
                socket.send_fds(self.connection, [head], [file])
            self.connection.sendall(struct.pack(f"!{len(sizes)}Q", *sizes))
        finally:
            if file is not None:
                os.close(file)


def _receive(connection: socket.socket, inbox: Inbox) -> None:
    """Puts a peer's messages into its inbox, until it has gone."""
    segments: dict[int, Segment] = {}
    with connection:
        try:
            while True:
                head, file = _read_head(connection)
                number, size, count = _HEAD.unpack(head)
                if not count:
                    del segments[number]
                    continue
                if file is not None:
                    segments[number] = Segment(file, size)
                    os.close(file)
                sizes = struct.unpack(f"!{count}Q", read(connection, 8 * count))
                message = segments[number].message()
                inbox.put([message[place] for place in places(sizes)[0]])
                del message  # Only the parts keep the segment.
        except OSError:
            inbox.put(None)


def _read_head(connection: socket.socket) -> tuple[bytes, int | None]:
    """The head of a message, and the descriptor that came with it."""
    head, files, _, _ = socket.recv_fds(connection, _HEAD.size, 1)
    if not head:
        raise ConnectionError("the connection has ended")
    head += read(connection, _HEAD.size - len(head))
    return head, files[0] if files else None
