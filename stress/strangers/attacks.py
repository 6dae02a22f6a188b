"""What a stranger does to a worker's listener. Each attack goes on until it is told to stop."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from alpa.runtime.workers.transport.base import Group
from alpa.runtime.workers.transport.handshake import admit, confirm, introduce
from alpa.runtime.workers.transport.listener import family_of

Target = str | tuple[str, int]
"""The path of a Unix socket, or an IP address and a port."""

Attack = Callable[[Target, Group, threading.Event], None]
"""Attacks a target, who belongs to a group, until an event."""

_PAUSE_SECONDS, _BETWEEN_SECONDS = 0.05, 0.001


def target_of(address: str) -> Target:
    """The target of an address that a way of messages has told."""
    ip, _, port = address.partition(" ")
    return (ip, int(port)) if port else address


def _connection(target: Target) -> socket.socket:
    connection = socket.socket(family_of(target))
    connection.settimeout(1.0)
    connection.connect(target)
    return connection


def _hold(count: int, begin: Callable[[socket.socket], object]) -> Attack:
    """Holds so many connections open, each begun in some way, and replaces those that end."""

    def attack(target: Target, _: Group, stop: threading.Event) -> None:
        held = list[socket.socket]()
        while not stop.is_set():
            with suppress(OSError):
                connection = _connection(target)
                held.append(connection)
                begin(connection)
            while len(held) > count:
                held.pop(0).close()
            stop.wait(_BETWEEN_SECONDS)
        for connection in held:
            connection.close()

    return attack


def _sends(data: bytes) -> Attack:
    return _hold(20, lambda it: it.sendall(data))


def _slowly(target: Target, _: Group, stop: threading.Event) -> None:
    """Sends a byte now and then, as a worker would begin."""
    while not stop.is_set():
        with suppress(OSError), _connection(target) as connection:
            for byte in b"alpa/1\r\n" + bytes(1000):
                connection.sendall(bytes([byte]))
                if stop.wait(_PAUSE_SECONDS):
                    return
        stop.wait(_PAUSE_SECONDS)


def _replay(target: Target, group: Group, stop: threading.Event) -> None:
    """Says what a peer has said to another listener that knows the same secret."""
    recorded = recording(group)
    while not stop.is_set():
        with suppress(OSError), _connection(target) as connection:
            connection.sendall(recorded)
            connection.recv(1000)
            connection.recv(1000)
        stop.wait(_PAUSE_SECONDS)


def recording(group: Group) -> bytes:
    """All that the second worker says in a handshake with the first one."""
    ours, theirs = socket.socketpair()
    said = bytearray()

    class Recorded(socket.socket):
        def sendall(self, data: bytes, flags: int = 0) -> None:  # pyright: ignore
            said.extend(data)
            super().sendall(data, flags)

    caller = Recorded(fileno=ours.detach())
    listener = threading.Thread(target=_admit_once, args=(theirs, group))
    listener.start()
    introduce(caller, replace(group, rank=1), 0, 0)
    listener.join()
    caller.close()
    theirs.close()
    return bytes(said)


def _admit_once(connection: socket.socket, group: Group) -> None:
    assert admit(connection, group) == (1, 0)
    confirm(connection)


def _wrong_secret(target: Target, group: Group, stop: threading.Event) -> None:
    wrong = replace(group, rank=1, secret=bytes(32))
    while not stop.is_set():
        with suppress(OSError, RuntimeError), _connection(target) as connection:
            introduce(connection, wrong, 0, 0)
        stop.wait(_PAUSE_SECONDS)


ATTACKS: dict[str, Attack] = {
    "idle": _hold(20, lambda _: None),
    "half-open": _hold(20, lambda it: it.shutdown(socket.SHUT_WR)),
    "garbage": _sends(bytes(i * 37 % 251 for i in range(4096))),
    "http": _sends(b"GET / HTTP/1.1\r\nHost: alpa\r\n\r\n"),
    "zeros": _sends(bytes(4096)),
    "flood": _hold(200, lambda _: None),
    "slow": _slowly,
    "replay": _replay,
    "wrong secret": _wrong_secret,
}


@contextmanager
def attacked(attack: Attack, targets: Sequence[Target], group: Group) -> Generator[None]:
    """Attacks targets, each in a thread, until the block ends."""
    stop = threading.Event()
    threads = [
        threading.Thread(target=attack, args=(target, group, stop), daemon=True)
        for target in targets
    ]
    for thread in threads:
        thread.start()
    time.sleep(4 * _PAUSE_SECONDS)
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()
