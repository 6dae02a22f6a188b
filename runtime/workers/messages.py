"""What the caller and the workers send to each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alpa.runtime.trace import WorkerSpans

ArrayId = tuple[int, int]
"""The identity of a worker's array: the number of the call that made it, and a position."""


@dataclass(frozen=True, kw_only=True)
class StepCall:
    """The inputs of a worker for one step.

    `program` is the program's number, `number` that of the call. `feeds` maps each argument of the
    worker's mesh, by its position in the planned @main, to the array that the worker holds, or to
    the number of an array that comes with the call. `free` are unreachable arrays; if the step
    reads one, it owns it. `traced` requests the spans of all instructions.
    """

    program: int
    number: int
    feeds: Mapping[int, ArrayId | int]
    free: Sequence[ArrayId]
    traced: bool = False


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """Seconds that a worker spent in a step; on accelerators `run` is the time to dispatch.

    `processor` is the time that its process used on the host's cores, `total` the elapsed time.
    """

    total: float
    processor: float
    run: float
    send: float
    receive: float
    spans: WorkerSpans | None = None


@dataclass(frozen=True, kw_only=True)
class Endpoint:
    """A worker before it has devices.

    `ip` is the address of its node, `host` a text that is equal in workers that can share memory,
    `port` a free port for the mesh's processes to meet at, `jaxlib` the version there. `gpus` are
    the names of the GPUs that Ray gave to it.
    """

    ip: str
    host: str
    port: int
    jaxlib: str
    gpus: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Started:
    """A worker with its devices. `platform` is their platform in JAX's lowering; `address` is where
    others reach its transport, which takes the way `transport`."""

    transport: str
    address: Mapping[str, str]
    platform: str


@dataclass(frozen=True, kw_only=True)
class Compilation:
    """The seconds of a program's compilation, and its executables for the mesh's other workers."""

    seconds: float
    executables: Mapping[str, bytes]
