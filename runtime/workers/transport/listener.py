"""Waits for the connections of a worker's peers, and then listens no longer.

A stranger can connect until then. It costs a thread and a descriptor for at most some seconds, and
there are never more than a few of them: a newcomer displaces the oldest. A peer needs milliseconds,
and tries again if it was displaced.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

from alpa.runtime.workers.transport.base import Group, TransportError
from alpa.runtime.workers.transport.handshake import Link, admit, confirm, introduce

_log = logging.getLogger(__name__)
_HANDSHAKE_SECONDS = 10.0
_MOST_UNKNOWN = 32
"""connections at a time whose other side is not known yet"""
_POLL_SECONDS = 0.05
_PAUSE_SECONDS = 0.05
_CREDENTIALS = struct.Struct("iII")
"""Linux' `struct ucred`: process, user, group"""
_FOR_A_WHILE = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.ECONNABORTED}
"""errors of accept that pass: no descriptor or memory is left, or the other side has given up"""


class Listener:
    """Accepts the expected links at a server, each once.

    `arrived` gets the peer, the number of its stream and the connection, in a thread of its own.
    """

    def __init__(
        self,
        server: socket.socket,
        group: Group,
        expected: Iterable[Link],
        arrived: Callable[[int, int, socket.socket], None],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self._server, self._group, self._arrived, self._tls = server, group, arrived, tls
        self._missing, self._arriving = set(expected), set[Link]()
        self._unknown: dict[socket.socket, float] = {}
        """connections, oldest first, with the time at which they are ended"""
        self._lock = threading.Lock()
        self._ended = threading.Event()
        server.settimeout(_POLL_SECONDS)
        threading.Thread(target=self._accept, daemon=True).start()

    def wait(self) -> None:
        """Waits until all links have arrived, and no one listens.

        Raises:
            TransportError: some have not arrived in time.
        """
        group = self._group
        self._ended.wait(group.seconds)
        with self._lock:
            late = sorted({peer for peer, _ in self._missing})
        if late:
            self.close()
            raise TransportError(
                f"{group.name} has waited {group.seconds:g} s for "
                f"{', '.join(group.names[peer] for peer in late)} to connect; a firewall may be "
                "between them, or they need a larger timeout_seconds"
            )

    def close(self) -> None:
        """Stops to listen; the links that have arrived stay."""
        with self._lock:
            self._missing.clear()
        self._ended.wait()

    def _accept(self) -> None:
        try:
            while self._is_waiting():
                try:
                    connection, _ = self._server.accept()
                except TimeoutError:
                    self._end_some(_MOST_UNKNOWN)
                except OSError as error:
                    if error.errno not in _FOR_A_WHILE:
                        raise
                    _log.debug("%s cannot accept connections now: %s", self._group.name, error)
                    self._end_some(most=0)
                    time.sleep(_PAUSE_SECONDS)
                else:
                    self._begin(connection)
                    self._end_some(_MOST_UNKNOWN)
        finally:
            self._server.close()
            with self._lock:
                for connection in self._unknown:
                    end_connection(connection)
            self._ended.set()

    def _is_waiting(self) -> bool:
        with self._lock:
            return bool(self._missing)

    def _begin(self, connection: socket.socket) -> None:
        """Lets a thread find out who has connected."""
        try:
            connection.settimeout(_HANDSHAKE_SECONDS)
            if not _is_same_user(connection):
                raise ConnectionError("another user has connected")
            if self._tls:
                connection = self._tls.wrap_socket(
                    connection, server_side=True, do_handshake_on_connect=False
                )
        except OSError as error:
            self._refuse(connection, error)
            return
        with self._lock:
            self._unknown[connection] = time.monotonic() + _HANDSHAKE_SECONDS
        threading.Thread(target=self._greet, args=(connection,), daemon=True).start()

    def _end_some(self, most: int) -> None:
        """Ends connections that take too long, whatever they send, and the oldest of too many."""
        now = time.monotonic()
        with self._lock:
            over = len(self._unknown) - most
            for number, (connection, deadline) in enumerate(self._unknown.items()):
                if number < over or deadline < now:
                    end_connection(connection)

    def _greet(self, connection: socket.socket) -> None:
        link: Link | None = None
        try:
            if isinstance(connection, ssl.SSLSocket):
                connection.do_handshake()
            caller = admit(connection, self._group)
            with self._lock:
                if caller not in self._missing - self._arriving:
                    raise ConnectionError(f"{caller} is connected already, or not expected")
                link = caller
                self._arriving.add(link)
                # From here on it is known, and neither displaced nor ended.
                del self._unknown[connection]
            confirm(connection)
            self._arrived(*link, connection)
            with self._lock:
                self._missing.discard(link)
        except OSError as error:
            with self._lock:
                self._unknown.pop(connection, None)
                if link:
                    self._arriving.discard(link)
            self._refuse(connection, error)

    def _refuse(self, connection: socket.socket, error: OSError) -> None:
        _log.debug("%s has ended a connection: %s", self._group.name, error)
        connection.close()


def call(
    address: str | tuple[str, int],
    group: Group,
    peer: int,
    stream: int,
    tls: ssl.SSLContext | None = None,
) -> socket.socket:
    """Connects with a peer's listener; tries again if strangers have displaced it there.

    Args:
        address: the path of a Unix socket, or an IP address and a port.

    Raises:
        TransportError: it cannot be reached in time, or does not belong to the group.
    """
    deadline = time.monotonic() + group.seconds
    while True:
        connection: socket.socket | None = None
        try:
            connection = socket.socket(family_of(address))
            connection.settimeout(min(_HANDSHAKE_SECONDS, group.seconds))
            connection.connect(address)
            if tls:
                connection = tls.wrap_socket(connection)
            introduce(connection, group, peer, stream)
            connection.settimeout(group.seconds)
            return connection
        except (OSError, TransportError) as error:
            if connection is not None:
                connection.close()
            is_final = isinstance(error, TransportError | ssl.SSLCertVerificationError)
            if is_final or time.monotonic() > deadline:
                raise TransportError(
                    f"{group.name} cannot reach {group.names[peer]}: {error}"
                ) from error
            time.sleep(_PAUSE_SECONDS)


def family_of(address: str | tuple[str, int]) -> socket.AddressFamily:
    """The family of sockets for an address."""
    if isinstance(address, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def _is_same_user(connection: socket.socket) -> bool:
    """Whether a process of this user is at the other end of a Unix socket, if the system tells."""
    if connection.family != socket.AF_UNIX or not hasattr(socket, "SO_PEERCRED"):
        return True
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(credentials)
    return user == os.geteuid()


def end_connection(connection: socket.socket) -> None:
    """Ends a connection for the thread that reads from it, which then closes it."""
    with suppress(OSError):  # its other side has gone, or its thread has closed it
        # The method of SSLSocket would make it a socket without TLS first.
        socket.socket.shutdown(connection, socket.SHUT_RDWR)
