"""Chooses and opens the transport of a worker."""

from __future__ import annotations

import os
import queue
import socket
from pathlib import Path

from alpa.runtime.workers.options import Transport as Name
from alpa.runtime.workers.transport.base import Group, Transport
from alpa.runtime.workers.transport.host_memory import HostMemoryTransport, Inbox, Way
from alpa.runtime.workers.transport.jax_transfer import JaxTransfer
from alpa.runtime.workers.transport.shared_memory import SharedMemory
from alpa.runtime.workers.transport.tcp import Tcp


def open_transport(name: Name, group: Group) -> Transport:
    """Opens the transport of a worker. It listens, where it has to, until it is connected.

    Raises:
        ValueError: `shared` was requested for workers on several hosts.
        OSError: the worker cannot listen, or files of TLS cannot be read.
        jax.errors.JaxRuntimeError, NotImplementedError: `jax` was requested, but the platform does
            not have such transfers.
    """
    here = group.hosts[group.rank]
    if name == "jax":
        return JaxTransfer(group)
    if name == "shared" and len(set(group.hosts)) > 1:
        raise ValueError(
            'transport="shared" needs all workers on one host, and they are on '
            f'{len(set(group.hosts))}; take "auto", which sends by TCP between hosts'
        )
    way_to = {
        peer: "shared" if name != "tcp" and group.hosts[peer] == here else "tcp"
        for peer in group.others
    }
    inboxes: dict[int, Inbox] = {peer: queue.SimpleQueue() for peer in group.others}
    ways = dict[str, tuple[Way, list[int]]]()
    for way in sorted(set(way_to.values())):
        mine = {peer: box for peer, box in inboxes.items() if way_to[peer] == way}
        opened = SharedMemory(group, mine) if way == "shared" else Tcp(group, mine)
        ways[way] = opened, list(mine)
    return HostMemoryTransport(group, _path(name, group), inboxes, ways)


def _path(name: Name, group: Group) -> str:
    """The ways between any two workers of the group, in words that are the same in all of them."""
    over, hosts = ("TLS" if group.tls else "TCP"), set(group.hosts)
    if name == "tcp" or len(hosts) == len(group.hosts) > 1:
        return over
    return "shared memory" if len(hosts) == 1 else f"shared memory inside hosts and {over} between"


def host_identity() -> str:
    """A text that is equal in processes that can share memory and a folder.

    Containers of one host have file systems of their own, and users cannot enter each other's
    folders.
    """
    boot = Path("/proc/sys/kernel/random/boot_id")
    if boot.exists():
        files = os.readlink("/proc/self/ns/mnt")
        return f"{boot.read_text().strip()} {files} user {os.geteuid()}"
    return f"{socket.gethostname()} user {os.geteuid()}"
