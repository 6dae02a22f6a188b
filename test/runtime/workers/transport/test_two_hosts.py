"""Workers in two network namespaces, which only a virtual cable connects, and strangers in both."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import IO

import pytest

from stress.strangers.attacks import ATTACKS

HERE = Path(__file__)
IPS = ("10.213.7.1", "10.213.7.2")


def ip(text: str) -> None:
    subprocess.run(["ip", *text.split()], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def namespaces() -> Iterator[tuple[str, str]]:
    """Two namespaces with an address each."""
    names = (f"alpa{os.getpid()}a", f"alpa{os.getpid()}b")
    try:
        ip(f"netns add {names[0]}")
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"network namespaces need the command ip and root's privileges: {error}")
    with ExitStack() as stack:
        stack.callback(ip, f"netns del {names[0]}")
        ip(f"netns add {names[1]}")
        stack.callback(ip, f"netns del {names[1]}")
        ip(f"link add {names[0]} netns {names[0]} type veth peer name {names[1]} netns {names[1]}")
        for name, address in zip(names, IPS, strict=True):
            ip(f"-n {name} address add {address}/24 dev {name}")
            ip(f"-n {name} link set {name} up")
            ip(f"-n {name} link set lo up")
        yield names


def start(namespace: str, script: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        ["ip", "netns", "exec", namespace, sys.executable, HERE.with_name(script), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def stream(given: IO[str] | None) -> IO[str]:
    assert given is not None
    return given


def test_workers_on_two_hosts(namespaces: tuple[str, str]) -> None:
    """Each is attacked in all ways at once from the other's host, and they exchange messages."""
    secret = secrets.token_hex(32)
    with ExitStack() as stack:
        workers = [
            stack.enter_context(start(namespace, "far_worker.py", str(rank), address, secret))
            for rank, (namespace, address) in enumerate(zip(namespaces, IPS, strict=True))
        ]
        addresses = [stream(worker.stdout).readline() for worker in workers]
        for address, other in zip(addresses, reversed(namespaces), strict=True):
            (target,) = json.loads(address).values()
            stranger = stack.enter_context(start(other, "stranger.py", target, *ATTACKS))
            stack.callback(stranger.kill)
            assert stream(stranger.stdout).readline() == "attacking\n"
        for worker in workers:
            stream(worker.stdin).write(json.dumps(addresses) + "\n")
            stream(worker.stdin).flush()
        for worker in workers:
            assert stream(worker.stdout).readline() == "all messages arrived\n"
            assert worker.wait(60) == 0
