"""Options of the workers of a plan."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from alpa.passes.base import check_kind
from alpa.passes.cost.presets import USABLE_MEMORY
from alpa.runtime.option_checks import check_count, check_literal, check_seconds

Platform = Literal["cpu", "gpu", "tpu"]
Transport = Literal["auto", "shared", "tcp", "jax"]
_FORMER = {"device": "jax", "sockets": "tcp"}
"""names that transports had, with those that they have"""


@dataclass(frozen=True, kw_only=True)
class TlsFiles:
    """Files for TLS between hosts, in PEM, under the same names on each host.

    Attributes:
        certificate: of the host or of the cluster, signed by the authority.
        key: the certificate's private key, without a password.
        authority: the certificate of who signs those of the cluster's hosts, and no others.
    """

    certificate: str | Path
    key: str | Path
    authority: str | Path

    def __post_init__(self) -> None:
        """Raises TypeError if one is no path."""
        for name in ("certificate", "key", "authority"):
            check_kind(name, getattr(self, name), str, Path)


@dataclass(frozen=True, kw_only=True)
class WorkerOptions:
    """Options of `load` for `executor="ray"`.

    All waiting in the workers and for them has one of the two timeouts. Reading and writing in this
    process takes as long as its file system.

    Attributes:
        address: the Ray cluster, as `ray.init` takes it; by default the connected one, else
            one that runs on this host, else a new one in this process.
        platform: by default `gpu` or `tpu` if Ray has such resources, else `cpu`.
        transport: how tiles travel between workers. `shared` is memory that workers of one host
            share, `tcp` is TCP with authentication, and `auto` takes `shared` inside a host and
            `tcp` between hosts. `jax` is `jax.experimental.transfer`, which any connection from
            outside can stop: for trusted networks only.
        tls: encrypts `tcp` by these files; None for no encryption.
        cache_directory: the folder of compiled executables on each host; None disables the cache.
        timeout_seconds: how long a worker waits for another, to connect and for tiles, and how long
            the caller waits for workers: for resources, their start, compilation, and a step.
        checkpoint_timeout_seconds: how long the caller waits for the workers to write or read a
            checkpoint, or to check all of a state.
        steps_ahead: steps that may be running before a call waits for the oldest.
        gpu_share: the share of a GPU that each device of the plan is, 1 or 1/n: with 0.5, two
            workers share a GPU, to try a plan of two meshes on one GPU. Each mesh must then have
            one device, because a process cannot see a GPU twice.
        memory_fraction: the share of a GPU's memory that JAX's pools of all workers on it may have.
            The default is what presets plan with; the CUDA context and NCCL's buffers need the
            rest.
        preallocate: whether the pool takes all of it at the start, as JAX does by default. Without
            that it grows, which fragments it, but leaves room for other programs.
        keep_caller_off_gpus: whether this process keeps to the CPU if the workers have GPUs or
            TPUs. JAX would otherwise take 75 % of each GPU of the host for the first array that
            this process makes, and the workers would find no memory. If JAX has not started here,
            it gets `jax_platforms="cpu"`; if it has started on an accelerator, an error says so.
        environment: variables of the workers' environment; they replace Alpa's own.
        pin_cores: whether each worker keeps to its own CPU cores, as many as it has devices.
    """

    address: str | None = None
    platform: Platform | None = None
    transport: Transport = "auto"
    tls: TlsFiles | None = None
    cache_directory: str | None = "~/.cache/alpa"
    timeout_seconds: float = 600.0
    checkpoint_timeout_seconds: float = 3600.0
    steps_ahead: int = 2
    gpu_share: float = 1.0
    memory_fraction: float = USABLE_MEMORY
    preallocate: bool = True
    keep_caller_off_gpus: bool = True
    environment: Mapping[str, str] = field(default_factory=dict[str, str])
    pin_cores: bool = False

    def __post_init__(self) -> None:
        """Raises TypeError or ValueError if an option is invalid."""
        check_kind("address", self.address, str, type(None))
        if self.platform is not None:
            check_literal("platform", self.platform, Platform)
        if self.transport in _FORMER:
            raise ValueError(
                f"transport {self.transport!r} is called {_FORMER[self.transport]!r} now; the "
                'default, "auto", needs neither'
            )
        check_literal("transport", self.transport, Transport)
        check_kind("tls", self.tls, TlsFiles, type(None))
        if self.tls and self.transport in ("shared", "jax"):
            raise ValueError(f"tls is for TCP between hosts; transport {self.transport!r} has none")
        check_kind("cache_directory", self.cache_directory, str, Path, type(None))
        check_seconds("timeout_seconds", self.timeout_seconds)
        check_seconds("checkpoint_timeout_seconds", self.checkpoint_timeout_seconds)
        check_count("steps_ahead", self.steps_ahead, 1)
        check_kind("gpu_share", self.gpu_share, int, float)
        if not 0 < self.gpu_share <= 1 or abs(self.workers_per_gpu * self.gpu_share - 1) > 0.02:
            raise ValueError(
                f"gpu_share is {self.gpu_share}; expected 1 or a part such as 0.5, 0.33 or 0.25, a "
                "whole number of which makes a GPU"
            )
        check_kind("memory_fraction", self.memory_fraction, int, float)
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(
                f"memory_fraction must be greater than 0 and at most 1, not {self.memory_fraction}"
            )
        check_kind("preallocate", self.preallocate, bool)
        check_kind("keep_caller_off_gpus", self.keep_caller_off_gpus, bool)
        check_kind("environment", self.environment, Mapping)
        for name, value in self.environment.items():
            check_kind("a name in environment", name, str)
            check_kind(f"environment[{name!r}]", value, str)
        check_kind("pin_cores", self.pin_cores, bool)

    @property
    def workers_per_gpu(self) -> int:
        """How many devices of the plan share a GPU."""
        return round(1 / self.gpu_share)

    @property
    def cache_path(self) -> Path | None:
        """The folder of compiled stages; None if they are not cached."""
        return None if self.cache_directory is None else Path(self.cache_directory).expanduser()
