"""A worker's links to the others, and what it knows of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import jax

from alpa.runtime.workers.options import TlsFiles


class TransportError(RuntimeError):
    """A message from another worker has not arrived, or cannot be sent to it."""


@dataclass(frozen=True, kw_only=True)
class Group:
    """The workers of a plan, as one of them sees them.

    Attributes:
        rank: this worker's number.
        names: the workers' names.
        hosts: where each worker is; workers with equal text can share memory.
        owners: the worker of each device of the cluster.
        ip: where this worker may listen: at its node's address, or at the loopback if all workers
            are on one node.
        secret: what only these workers and their caller know.
        seconds: the longest wait for another worker.
        tls: the files for encryption between hosts; None for none.
    """

    rank: int
    names: Sequence[str]
    hosts: Sequence[str]
    owners: Mapping[int, int]
    ip: str
    secret: bytes = field(repr=False)
    seconds: float
    tls: TlsFiles | None = None

    @property
    def name(self) -> str:
        return self.names[self.rank]

    @property
    def others(self) -> list[int]:
        return [peer for peer in range(len(self.names)) if peer != self.rank]


Address = Mapping[str, str]
"""Where a worker's transport is reached, for each way of messages that it has."""


class Transport(ABC):
    """A worker's links to the others (`tiles.Links`).

    Each ordered pair of workers is a queue of messages. A sender does not wait for its receiver. A
    receiver waits until its deadline, and its error names the sender. One thread uses a transport.
    """

    def __init__(self, group: Group) -> None:
        self.group = group
        self.rank, self.owners = group.rank, group.owners

    @property
    @abstractmethod
    def path(self) -> str:
        """The ways of tiles between two workers of the group, in words."""

    @property
    @abstractmethod
    def address(self) -> Address: ...

    @abstractmethod
    def connect(self, addresses: Sequence[Address]) -> None:
        """Connects this worker with the others; all of them do so at the same time.

        Raises:
            TransportError: one of them cannot be reached.
        """

    @abstractmethod
    def send(self, peer: int, arrays: Sequence[jax.Array]) -> None:
        """Sends a message, arrays that each are on one device.

        Raises:
            TransportError: the peer has gone.
        """

    @abstractmethod
    def receive(self, peer: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        """Waits for the peer's next message; its arrays have the shapes' types and devices.

        Raises:
            TransportError: it has not arrived, or the peer has gone.
        """

    @abstractmethod
    def close(self) -> None:
        """Ends the links."""

    def _late(self, peer: int, count: int) -> TransportError:
        group = self.group
        return TransportError(
            f"{group.name} has waited {group.seconds:g} s for {count} tiles from "
            f"{group.names[peer]}; it hangs, or needs a larger timeout_seconds"
        )
