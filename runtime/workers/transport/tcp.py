"""Messages over TCP, in several streams for each peer.

A large message is cut into as many shares as there are streams, which travel at the same time. The
receiver has one thread per stream, so that no sender waits for a busy receiver. With files for TLS,
connections are encrypted, and both sides show certificates of the same authority.
"""

from __future__ import annotations

import os
import socket
import ssl
import struct
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from typing import NamedTuple

from alpa.runtime.workers.options import TlsFiles
from alpa.runtime.workers.transport.base import Group
from alpa.runtime.workers.transport.handshake import read, read_into
from alpa.runtime.workers.transport.host_memory import Inbox, Parts, Way, places
from alpa.runtime.workers.transport.listener import Listener, call, end_connection, family_of
from alpa.runtime.workers.transport.segments import Pool

_HEAD = struct.Struct("!QI")
"""a message's number, and the number of its parts"""
_STREAMS, _MOST_STREAMS = 4, 256
"""of a worker to each peer, and to all of them"""
_SPLIT_BYTES = 1 << 20
"""A message of fewer bytes travels in one stream."""
_JOINED_BYTES = 1 << 16
"""A message of fewer bytes is sent at once with its head."""


class Tcp(Way):
    """The way of messages between this worker and those of other hosts."""

    def __init__(self, group: Group, inboxes: Mapping[int, Inbox]) -> None:
        self._group = group
        self._streams = max(1, min(_STREAMS, _MOST_STREAMS // len(group.names)))
        server = socket.create_server((group.ip, 0), family=family_of((group.ip, 0)))
        ip, port, *_ = server.getsockname()
        self._address = f"{ip} {port}"
        self._assemblies = {peer: Assembly(self._streams, box) for peer, box in inboxes.items()}
        self._incoming: list[socket.socket] = []
        self._outgoing: dict[int, _Sender] = {}
        self._tls = _contexts(group.tls)
        expected = [(peer, stream) for peer in inboxes for stream in range(self._streams)]
        self._listener = Listener(server, group, expected, self._arrived, self._tls.listener)

    @property
    def address(self) -> str:
        """IP address and port."""
        return self._address

    def connect(self, addresses: Mapping[int, str]) -> None:
        for peer, address in addresses.items():
            ip, port = address.split()
            self._outgoing[peer] = _Sender(
                [
                    _tuned(call((ip, int(port)), self._group, peer, stream, self._tls.caller))
                    for stream in range(self._streams)
                ]
            )
        self._listener.wait()

    def send(self, peer: int, parts: Parts) -> None:
        self._outgoing[peer].send(parts)

    def close(self) -> None:
        self._listener.close()
        for sender in self._outgoing.values():
            sender.close()
        for connection in self._incoming:
            end_connection(connection)

    def _arrived(self, peer: int, stream: int, connection: socket.socket) -> None:
        # The next message may take long: its receiver waits, with its own deadline.
        _tuned(connection).settimeout(None)
        self._incoming.append(connection)
        arguments = (connection, stream, self._assemblies[peer])
        threading.Thread(target=_receive, args=arguments, daemon=True).start()


class _Sender:
    """Sends messages to one peer."""

    def __init__(self, streams: Sequence[socket.socket]) -> None:
        self._streams = streams
        self._numbers = count()
        self._pool = ThreadPoolExecutor(len(streams))

    def send(self, parts: Parts) -> None:
        sizes = [part.nbytes for part in parts]
        head = _HEAD.pack(next(self._numbers), len(parts)) + struct.pack(f"!{len(parts)}Q", *sizes)
        if sum(sizes) < _JOINED_BYTES:
            self._streams[0].sendall(b"".join([head, *(part.data for part in parts)]))
            return

        def send(stream: socket.socket, share: Sequence[_Range]) -> None:
            stream.sendall(head)
            for part, begin, end in share:
                stream.sendall(parts[part].data[begin:end])

        list(self._pool.map(send, self._streams, shares(sizes, len(self._streams))))

    def close(self) -> None:
        self._pool.shutdown()
        for stream in self._streams:
            stream.close()


class _Range(NamedTuple):
    """Bytes of a message that one stream carries: of one part, from `begin` to `end`."""

    part: int
    begin: int
    end: int


def shares(sizes: Sequence[int], streams: int) -> list[list[_Range]]:
    """What each stream carries of a message with parts of these bytes.

    A small message travels in the first stream, and there are no shares for the others.
    """
    total = sum(sizes)
    if total < _SPLIT_BYTES:
        streams = 1
    cuts = [total * stream // streams for stream in range(streams + 1)]
    found: list[list[_Range]] = [[] for _ in range(streams)]
    offset = 0
    for part, size in enumerate(sizes):
        for share, begin, end in zip(found, cuts, cuts[1:], strict=False):
            begin, end = max(begin - offset, 0), min(end - offset, size)
            if begin < end:
                share.append(_Range(part, begin, end))
        offset += size
    return found


class Assembly:
    """Joins the shares of a peer's messages, and puts the messages into its inbox in order."""

    def __init__(self, streams: int, inbox: Inbox) -> None:
        self._streams, self._inbox = streams, inbox
        self._lock = threading.Lock()
        self._pool = Pool()
        self._open: dict[int, tuple[Parts, list[list[_Range]], set[int]]] = {}
        """by number: the parts, the shares, and the streams that are still missing"""
        self._next = 0
        self._ended = set[int]()
        """streams"""

    def share(self, number: int, sizes: Sequence[int], stream: int) -> list[memoryview]:
        """The memory for a stream's share of a message."""
        with self._lock:
            if number not in self._open:
                cut = shares(sizes, self._streams)
                self._open[number] = self._empty(sizes), cut, set(range(len(cut)))
            parts, cut, _ = self._open[number]
        return [parts[it.part].data[it.begin : it.end] for it in cut[stream]]

    def has(self, number: int, stream: int) -> None:
        """Takes note that a stream's share is complete."""
        with self._lock:
            self._open[number][2].discard(stream)
            self._deliver()

    def end(self, stream: int) -> None:
        """Takes note that a stream has ended."""
        with self._lock:
            self._ended.add(stream)
            self._deliver()

    def _empty(self, sizes: Sequence[int]) -> Parts:
        """Memory for the parts of a message; new memory would cost the time of clearing it."""
        slices, size = places(sizes)
        _, segment, file, _ = self._pool.take(size)
        if file is not None:
            os.close(file)
        segment.use()
        message = segment.message()
        return [message[place] for place in slices]

    def _deliver(self) -> None:
        while self._next in self._open and not self._open[self._next][2]:
            self._inbox.put(self._open.pop(self._next)[0])
            self._next += 1
        # Each message begins in the first stream.
        missing = self._open[self._next][2] if self._next in self._open else {0}
        if missing & self._ended:
            self._inbox.put(None)


def _receive(connection: socket.socket, stream: int, assembly: Assembly) -> None:
    """Receives the shares of one stream, until the peer has gone."""
    with connection:
        try:
            while True:
                number, parts = _HEAD.unpack(read(connection, _HEAD.size))
                sizes = struct.unpack(f"!{parts}Q", read(connection, 8 * parts))
                for view in assembly.share(number, sizes, stream):
                    read_into(connection, view)
                assembly.has(number, stream)
        except OSError:
            assembly.end(stream)


def _tuned(connection: socket.socket) -> socket.socket:
    # Linux sizes the buffers of a connection itself, up to megabytes, unless they are set.
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    return connection


class _Contexts(NamedTuple):
    """The two sides of TLS; None without it."""

    listener: ssl.SSLContext | None
    caller: ssl.SSLContext | None


def _contexts(files: TlsFiles | None) -> _Contexts:
    """Both sides show a certificate of the group's authority.

    Names are not compared: a certificate may be the cluster's, and the handshake tells which worker
    has connected.

    Raises:
        OSError: a file cannot be read, or is no certificate.
    """
    if files is None:
        return _Contexts(None, None)

    def context(protocol: int) -> ssl.SSLContext:
        made = ssl.SSLContext(protocol)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.check_hostname = False
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_cert_chain(files.certificate, files.key)
        made.load_verify_locations(files.authority)
        return made

    return _Contexts(context(ssl.PROTOCOL_TLS_SERVER), context(ssl.PROTOCOL_TLS_CLIENT))
