"""Options of the workers of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from alpa.passes.cost.presets import USABLE_MEMORY
from alpa.runtime.option_checks import check_count, check_kind, check_literal, check_seconds

Platform = Literal["cpu", "gpu", "tpu"]
Transport = Literal["auto", "device", "sockets"]


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options of `load` for `executor="ray"`.

    All waiting in the workers and for them has one of the two timeouts. Reading and writing in this
    process takes as long as its file system.

    Attributes:
        address: the Ray cluster, as `ray.init` takes it; by default the connected one, else
            one that runs on this host, else a new one in this process.
        platform: by default `gpu` or `tpu` if Ray has such resources, else `cpu`.
        transport: how tiles travel between meshes; `auto` is `device`
            (`jax.experimental.transfer`) if the platform has it, else `sockets`.
        cache_directory: the folder of compiled executables on each host; None disables the cache.
        timeout_seconds: how long a worker waits for another, to connect and for tiles, and how long
            the caller waits for workers: for resources, their start, compilation, and a step.
        checkpoint_timeout_seconds: how long the caller waits for the workers to write or read a
            checkpoint, or to check all of a state.
        steps_ahead: steps that may be running before a call waits for the oldest.
        memory_fraction: the share of a GPU's memory that JAX's pool in a worker may have. The
            default is what presets plan with; the CUDA context and NCCL's buffers need the rest.
        preallocate: whether the pool takes all of it at the start, as JAX does by default. Without
            that it grows, which fragments it, but leaves room for other programs.
        environment: variables of the workers' environment; they replace Alpa's own.
        pin_cores: whether each worker keeps to its own CPU cores, as many as it has devices.
    """

    address: str | None = None
    platform: Platform | None = None
    transport: Transport = "auto"
    cache_directory: str | None = "~/.cache/alpa"
    timeout_seconds: float = 600.0
    checkpoint_timeout_seconds: float = 3600.0
    steps_ahead: int = 2
    memory_fraction: float = USABLE_MEMORY
    preallocate: bool = True
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    pin_cores: bool = False

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError if an option is invalid."""
        check_kind("address", self.address, str, type(None))
        if self.platform is not None:
            check_literal("platform", self.platform, Platform)
        check_literal("transport", self.transport, Transport)
        check_kind("cache_directory", self.cache_directory, str, Path, type(None))
        check_seconds("timeout_seconds", self.timeout_seconds)
        check_seconds("checkpoint_timeout_seconds", self.checkpoint_timeout_seconds)
        check_count("steps_ahead", self.steps_ahead, 1)
        check_kind("memory_fraction", self.memory_fraction, int, float)
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(
                f"memory_fraction must be greater than 0 and at most 1, not {self.memory_fraction}"
            )
        check_kind("preallocate", self.preallocate, bool)
        check_kind("environment", self.environment, Mapping)
        for name, value in self.environment.items():
            check_kind("a name in environment", name, str)
            check_kind(f"environment[{name!r}]", value, str)
        check_kind("pin_cores", self.pin_cores, bool)

    @property
    def cache_path(self) -> Path | None:
        """The folder of compiled stages; None if they are not cached."""
        return None if self.cache_directory is None else Path(self.cache_directory).expanduser()
