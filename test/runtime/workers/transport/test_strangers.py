"""Strangers at a worker's listener: the workers connect and exchange messages all the same."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from alpa.runtime.workers.options import Transport as Name
from alpa.runtime.workers.transport.base import TransportError
from alpa.runtime.workers.transport.handshake import StrangerError, admit, introduce
from alpa.runtime.workers.transport.listener import family_of
from stress.strangers.attacks import ATTACKS, attacked, recording, target_of
from test.runtime.workers.transport.pairs import connect, connected, exchange, group, opened

OURS: tuple[Name, ...] = ("shared", "tcp")


@pytest.mark.parametrize("attack", ATTACKS)
@pytest.mark.parametrize("name", OURS)
def test_workers_connect_beside_strangers(name: Name, attack: str) -> None:
    """The attack begins before they connect, and goes on while they exchange messages."""
    of = group(seconds=60.0)
    both = opened(name, of)
    targets = [target_of(it.address[name]) for it in both]
    try:
        with attacked(ATTACKS[attack], targets, of):
            connect(both)
            exchange(*both)
    finally:
        for it in both:
            it.close()


@pytest.mark.parametrize("name", OURS)
def test_nobody_listens_once_the_workers_are_connected(name: Name) -> None:
    with connected(name) as both:
        for it in both:
            target = target_of(it.address[name])
            with (
                socket.socket(family_of(target)) as one,
                pytest.raises(OSError, match=r"refused|No such file"),
            ):
                one.connect(target)


def test_only_this_user_can_enter_the_folder_of_the_socket() -> None:
    both = opened("shared", group())
    folders = [Path(it.address["shared"]).parent for it in both]
    assert [folder.stat().st_mode & 0o777 for folder in folders] == [0o700, 0o700]
    for it in both:
        it.close()
    assert not any(folder.exists() for folder in folders)


@pytest.mark.parametrize("name", OURS)
def test_a_worker_of_another_group_is_refused(name: Name) -> None:
    """It does not tell the peer's secret, and neither gets the other's messages."""
    first, second = opened(name, group(seconds=1.0))
    (_, stranger) = opened(name, group(seconds=1.0))
    with pytest.raises(TransportError, match="does not know the secret"):
        stranger.connect([first.address, stranger.address])
    for it in (first, second, stranger):
        it.close()


def test_a_recorded_handshake_is_worth_nothing() -> None:
    of = group()
    recorded = recording(of)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(recorded)
        with pytest.raises(StrangerError, match="does not know the secret"):
            admit(ours, of)


def test_a_listener_cannot_be_made_to_answer_itself() -> None:
    """Its proof names its side: sent back to it, it is no proof of a caller's."""
    of = group()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(recording(of)[:52])  # what the caller says first
        theirs.settimeout(5)

        def reflect() -> None:
            answer = theirs.recv(1000)
            theirs.sendall(answer[32:])

        thread = threading.Thread(target=reflect)
        thread.start()
        with pytest.raises(StrangerError):
            admit(ours, of)
        thread.join()


def test_a_caller_finds_out_that_the_listener_is_a_stranger() -> None:
    of = group()
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(64))
        with pytest.raises(TransportError, match="mesh_1 on host 0 does not know the secret"):
            introduce(ours, of, 1, 0)


def test_a_worker_without_descriptors() -> None:
    """A flood takes all descriptors that are left to a worker; its peer connects all the same."""
    script = Path(__file__).with_name("few_descriptors.py")
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, check=False
    )
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["all messages arrived"]), done
