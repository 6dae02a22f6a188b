"""How fast two workers exchange tiles beside strangers."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from statistics import median
from typing import Literal

from alpa.runtime.workers.transport.base import Address, Group
from alpa.tools.bench_transport import Beside, time_tiles
from stress.strangers.attacks import ATTACKS, attacked, target_of

Name = Literal["shared", "tcp"]


def pace(name: Name, size: int, rounds: int, attack: str | None) -> float:
    """Seconds of the median way of a tile between two workers, one of which is in this process.

    Strangers, in a process of their own, begin before the workers connect, and go on until they
    have ended.

    Raises:
        TransportError: a tile does not arrive.
        RuntimeError: the strangers have ended too early.
    """

    @contextmanager
    def beside(group: Group, addresses: Sequence[Address]) -> Generator[None]:
        context = multiprocessing.get_context("spawn")
        told = [address[name] for address in addresses]
        ours, theirs = context.Pipe()
        strangers = context.Process(target=_attack, args=(attack, told, group, theirs), daemon=True)
        strangers.start()
        theirs.close()
        try:
            ours.recv()  # They have begun.
            yield
            if not strangers.is_alive():
                raise EOFError
        except EOFError:
            strangers.join()
            raise RuntimeError(f"the strangers have ended with {strangers.exitcode}") from None
        finally:
            strangers.terminate()
            strangers.join()

    given: dict[str, Beside] = {} if attack is None else {"beside": beside}
    (ways,) = time_tiles(name, [size], rounds, **given)
    return median(ways.seconds)


def _attack(attack: str, addresses: Sequence[str], group: Group, begun: Connection) -> None:
    """Attacks all addresses until this process is ended."""
    # A stranger's own work would be done on another machine, or by another user.
    os.nice(19)
    with attacked(ATTACKS[attack], [target_of(it) for it in addresses], group):
        begun.send(None)
        threading.Event().wait()
