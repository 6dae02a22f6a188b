"""The workers of one plan: started together, and stopped together if one of them fails."""

from __future__ import annotations

import logging
import secrets
import weakref
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal

import jax
import ray
from jaxlib import version
from ray.exceptions import RayError, RayTaskError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from alpa.passes.plan.instructions import Script
from alpa.runtime.checkpoints.errors import CheckpointError
from alpa.runtime.compile_cache import xla_flags
from alpa.runtime.pjrt import CompilerOptions
from alpa.runtime.process_usage import ProcessUsage
from alpa.runtime.progress import Show, quiet
from alpa.runtime.workers.cluster import (
    Post,
    actor_resources,
    check_processes,
    join,
    reserve,
)
from alpa.runtime.workers.errors import WorkerError
from alpa.runtime.workers.gpus import check_shares, gpus_of
from alpa.runtime.workers.mesh_processes import compile_waves, shares_executables
from alpa.runtime.workers.messages import ArrayId, Compilation, Endpoint, Started
from alpa.runtime.workers.options import Platform, WorkerOptions
from alpa.runtime.workers.transport.base import Group, TransportError
from alpa.runtime.workers.waiting import Waiting
from alpa.runtime.workers.worker import Worker

_log = logging.getLogger(__name__)

# The error of a worker whose tiles do not arrive, perhaps because another worker has died.
_PERHAPS_A_PEER = (TransportError, jax.errors.JaxRuntimeError)
_LOOPBACK = "127.0.0.1"
_SECRET_BYTES = 32
_GRACE_SECONDS = 5.0  # in which Ray notices that a process has ended
_DOING = {
    "endpoint": "while it started",
    "start": "while it started",
    "connect": "while it started",
    "load": "while it compiled",
    "step": "in a step",
    "create": "while it made a state",
    "shard_shapes": "while it wrote a checkpoint",
    "write": "while it wrote a checkpoint",
    "copy": "while it copied a state for a checkpoint",
    "write_copies": "while it wrote a checkpoint",
    "restore": "while it read a checkpoint",
    "are_finite": "while it checked for NaN",
}


Timeout = Literal["timeout_seconds", "checkpoint_timeout_seconds"]
"""The option of `WorkerOptions` that limits the seconds of a call."""


class Call:
    """A call to several workers, which may still be running."""

    def __init__(
        self, group: WorkerGroup, method: str, posts: Sequence[Post], refs: Sequence[Any]
    ) -> None:
        self._group, self._method = group, method
        self._waiting = dict(zip(refs, posts, strict=True))
        self._refs = list(refs)
        self._values: dict[Any, Any] = {}

    def is_done(self) -> bool:
        ready, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting) or 1, timeout=0)
        return len(ready) == len(self._waiting)

    def wait(self, timeout: Timeout = "timeout_seconds", show: Show | None = None) -> list[Any]:
        """Returns the answer of each worker, within the seconds of an option.

        `show` hears which workers are waited for; if that takes long, the log says so, too.

        Raises:
            WorkerError: a worker of the plan has died or failed, or takes longer. All workers are
                then stopped.
            CheckpointError: a checkpoint cannot be written or read. The workers survive.
        """
        group = self._group
        group.check_alive()
        seconds: float = getattr(group.options, timeout)
        waiting = Waiting(seconds, show)
        while self._waiting:
            total = len(self._refs)
            ready = total - len(self._waiting)
            waiting.say(_workers(self._waiting.values(), self._method), ready, total)
            # These may wait for tiles of a dead worker that this call does not include.
            some = [*self._waiting, *group.watches]
            left = waiting.left
            done, _ = ray.wait(some, num_returns=1, timeout=waiting.tick)
            if not done and waiting.left:
                continue
            if not done:
                late = ", ".join(post.name for post in self._waiting.values())
                raise group.fail(
                    f"{late}: no answer {_doing(self._method)} for {seconds:g} s; it hangs, or "
                    f"needs a larger {timeout}"
                )
            (ref,) = done
            if ref in group.watches:
                raise group.died(ref, self._method)
            post = self._waiting[ref]
            try:
                self._values[ref] = ray.get(ref, timeout=max(left, _GRACE_SECONDS))
                del self._waiting[ref]  # Not before: an interrupt may come in between.
            except RayTaskError as error:
                if isinstance(error.cause, CheckpointError):
                    raise CheckpointError(f"{post.name}: {error.cause}") from error
                if isinstance(error.cause, _PERHAPS_A_PEER):
                    ended, _ = ray.wait(list(group.watches), num_returns=1, timeout=_GRACE_SECONDS)
                    if ended:
                        raise group.died(ended[0], self._method) from error
                raise group.fail(f"{post.name}: {error}") from error
            except RayError as error:
                raise group.died(group.watch_of(post), self._method) from error
        return [self._values[ref] for ref in self._refs]


def wait_for(calls: Iterable[Call], timeout: Timeout) -> None:
    """Waits until all calls have ended, then raises the error of the first that failed."""
    failure: CheckpointError | None = None
    for call in calls:
        try:
            call.wait(timeout)
        except CheckpointError as error:
            failure = failure or error
    if failure is not None:
        raise failure


class WorkerGroup:
    """Connected actors on the posts of a program, which run it and others on the same meshes.

    Raises:
        ClusterSizeError: Ray has fewer nodes or devices than the plan needs.
        WorkerError: a worker could not start.
    """

    def __init__(self, posts: Sequence[Post], options: WorkerOptions, show: Show = quiet) -> None:
        self.options = options
        self._show: Show | None = show
        """hears for which workers all of them wait; None while the group runs steps"""
        self._failure: str | None = None
        self.garbage: dict[str, deque[ArrayId]] = {post.mesh: deque() for post in posts}
        """unreachable arrays, reported to the workers with the next call"""
        self._posts = tuple(posts)
        self._programs = 0
        self._numbers = count(1)
        platform = join(self._posts, options)
        check_processes(self._posts, platform)
        if platform == "gpu":
            check_shares(self._posts, options)
        self._platform: Platform = platform
        placement, bundles = reserve(self._posts, platform, options, show)
        self._actors: list[Any] = []
        self.watches: dict[Any, Post] = {}
        """calls that return only when the worker of a post has died"""
        self._stop = weakref.finalize(self, _stop, self._actors, placement)
        try:
            self._start(platform, placement, bundles)
            self.lowering_platform = self._connect()
            """the workers' platform in JAX's lowering"""
        except KeyboardInterrupt:  # A traceback may keep the group for long.
            self._stop()
            raise
        self._show = None

    def can_run(self, posts: Sequence[Post]) -> bool:
        """Whether the workers live and match the posts of a program."""
        return not self.is_stopped and self._posts == tuple(posts)

    def load(
        self,
        script: Script,
        modules: Mapping[str, bytes],
        compiler_options: CompilerOptions | None,
        folders: tuple[Path, ...],
        show: Show = quiet,
    ) -> int:
        """Compiles a program; returns its number among the workers' programs.

        Executables that one of the folders has, on the worker's host, are read instead.

        Raises:
            WorkerError: a worker could not compile it.
        """
        number, self._programs = self._programs, self._programs + 1
        first, later = compile_waves(self._posts, self._platform)

        def load(posts: Sequence[Post], found: Mapping[str, Any]) -> list[Compilation]:
            calls: list[tuple[Any, ...]] = []
            for post in posts:
                mine = {f.module or f.name for f in script.program.fragments if f.mesh == post.mesh}
                own = {name: modules[name] for name in mine}
                calls.append((number, script, own, compiler_options, folders, found.get(post.mesh)))
            return self._each("load", calls, posts, show)

        compiled = load(first, {})
        if later:
            meshes = [post.mesh for post in first]
            load(later, {m: it.executables for m, it in zip(meshes, compiled, strict=True)})
        return number

    def compile_creation(self, mesh: str, *arguments: Any) -> bytes | None:
        """The executable of `Worker.compile_creation`, if a mesh's first worker compiles for it."""
        first = next(post for post in self._posts if post.mesh == mesh)
        if not shares_executables(first, self._platform):
            return None
        ref = self._actors[first.rank].compile_creation.remote(*arguments)
        (executable,) = Call(self, "create", [first], [ref]).wait()
        return executable

    def next_number(self) -> int:
        """A number for a call that makes arrays."""
        return next(self._numbers)

    def call(self, mesh: str, method: str, *arguments: Any) -> Call:
        """Calls a method of a mesh's workers."""
        self.check_alive()
        posts = [post for post in self._posts if post.mesh == mesh]
        refs = [getattr(self._actors[post.rank], method).remote(*arguments) for post in posts]
        return Call(self, method, posts, refs)

    def usage(self) -> dict[str, ProcessUsage]:
        """The resources of each worker's process; does not wait for steps."""
        usages = self._each("usage", [() for _ in self._posts])
        return {post.name: it for post, it in zip(self._posts, usages, strict=True)}

    def collect(self, mesh: str) -> list[ArrayId]:
        """Takes the mesh's unreachable arrays, which the caller passes on."""
        garbage = self.garbage[mesh]
        return [garbage.popleft() for _ in range(len(garbage))]

    def check_alive(self) -> None:
        """Raises WorkerError if the workers are stopped."""
        if self._failure is not None:
            raise WorkerError(self._failure)

    @property
    def is_stopped(self) -> bool:
        """Whether the workers have failed, or were closed."""
        return self._failure is not None

    def watch_of(self, post: Post) -> Any:
        """The call that returns when a worker has died."""
        return next(ref for ref, it in self.watches.items() if it == post)

    def died(self, watch: Any, method: str) -> WorkerError:
        """The error for a worker that died during a call to it or to another worker."""
        post = self.watches[watch]
        try:
            ray.get(watch, timeout=_GRACE_SECONDS)
        except RayError as error:
            *_, why = str(error).strip().splitlines()
        else:
            why = "Ray gives no reason"
        return self.fail(
            f"{post.name} has died {_doing(method)}. The arrays of all workers of the plan are "
            "lost with it; restore the state from a checkpoint (alpa.resume) or create it again "
            f"(alpa.create_state), which starts new workers. Ray says: {why}"
        )

    def fail(self, reason: str) -> WorkerError:
        """Stops all workers: a mesh fails as a whole, and the others would wait for it."""
        self.close(f"the workers of this plan were stopped, load it again: {reason}")
        return WorkerError(reason)

    def wait_until_ended(self) -> None:
        """Waits for some seconds until workers that were stopped have ended."""
        watches = list(self.watches)
        if ray.is_initialized():
            ray.wait(watches, num_returns=len(watches), timeout=_GRACE_SECONDS)

    def close(self, reason: str) -> None:
        """Stops all workers and releases their resources; later calls raise WorkerError."""
        self._failure = self._failure or reason
        self._stop()

    def _start(
        self, platform: Platform, placement: PlacementGroup, bundles: Mapping[int, int]
    ) -> None:
        remote: Any = ray.remote  # its type has no options of actors
        level = logging.getLogger("alpa").getEffectiveLevel()
        actor = remote(concurrency_groups={"io": 1, "save": 1, "watch": 1})(Worker)
        for post in self._posts:
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=placement,
                placement_group_bundle_index=bundles[post.host],
            )
            self._actors.append(
                actor.options(
                    scheduling_strategy=strategy,
                    runtime_env={"env_vars": worker_environment(post, platform, self.options)},
                    # Otherwise Ray's head keeps a record of every call, up to a hundred thousand.
                    enable_task_events=False,
                    **actor_resources(post, platform, self.options),
                ).remote(post, platform, self.options, level)
            )
            self.watches[self._actors[-1].watch.remote()] = post

    def _connect(self) -> str:
        """Connects the workers with one another; returns the name of their platform."""
        endpoints: list[Endpoint] = self._each("endpoint", [() for _ in self._posts])
        for post, it in zip(self._posts, endpoints, strict=True):
            if it.jaxlib != version.__version__:
                raise self.fail(
                    f"{post.name} has jaxlib {it.jaxlib}, but this process has "
                    f"{version.__version__}; install the same version everywhere"
                )
        # If all workers are on one node, none must be reachable from outside it.
        together = len({it.ip for it in endpoints}) == 1
        ips = [_LOOPBACK if together else it.ip for it in endpoints]
        meeting = {
            post.mesh: f"{ip}:{it.port}"
            for post, ip, it in zip(self._posts, ips, endpoints, strict=True)
            if post.process == 0
        }
        gpus: list[tuple[str, ...]] = [() for _ in self._posts]
        if self._platform == "gpu":
            gpus = gpus_of(self._posts, [it.gpus for it in endpoints])
            for post, names_here in zip(self._posts, gpus, strict=True):
                _log.info("%s has GPU %s of its node", post.name, ", ".join(names_here))
        secret = secrets.token_bytes(_SECRET_BYTES)
        groups = [
            Group(
                rank=post.rank,
                names=[it.name for it in self._posts],
                hosts=[it.host for it in endpoints],
                owners={device: it.rank for it in self._posts for device in it.devices},
                ip=ip,
                secret=secret,
                seconds=self.options.timeout_seconds,
                tls=self.options.tls,
            )
            for post, ip in zip(self._posts, ips, strict=True)
        ]
        starts: list[Started] = self._each(
            "start",
            [
                (meeting[post.mesh], group, here)
                for post, group, here in zip(self._posts, groups, gpus, strict=True)
            ],
        )
        self.transport = f"{starts[0].transport} (transport={self.options.transport})"
        _log.info("tiles travel by %s", self.transport)
        addresses = [start.address for start in starts]
        self._each("connect", [(addresses,) for _ in self._posts])
        return starts[0].platform

    def _each(
        self,
        method: str,
        arguments: Sequence[tuple[Any, ...]],
        posts: Sequence[Post] | None = None,
        show: Show | None = None,
    ) -> list[Any]:
        """Calls the workers of all posts, or of some, each with its own arguments, and waits."""
        posts = self._posts if posts is None else posts
        refs = [
            getattr(self._actors[post.rank], method).remote(*them)
            for post, them in zip(posts, arguments, strict=True)
        ]
        return Call(self, method, posts, refs).wait(show=show or self._show)


def _workers(posts: Iterable[Post], method: str) -> str:
    names, to = [post.name for post in posts], "compile" if method == "load" else "start"
    return f"{len(names)} worker{'s' * (len(names) > 1)} to {to}: {', '.join(names)}"


def _doing(method: str) -> str:
    return _DOING.get(method, f"during a call of {method}")


def worker_environment(post: Post, platform: Platform, options: WorkerOptions) -> dict[str, str]:
    """A worker's variables; XLA's flags are this process's, except for the number of devices."""
    environment = {"XLA_FLAGS": xla_flags()}
    if platform == "cpu":
        # XLA's CPU buffers come from malloc, which returns large ones to the system at each free.
        # Each run of a fragment would then clear their pages again, up to a tenth of its time.
        # 32 MiB is the most that glibc accepts.
        environment |= {
            "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
            "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
            # One heap for all threads. Each checkpoint makes new threads, and glibc would give them
            # more and more heaps, up to eight per core. Each heap keeps its peak size, so memory
            # would grow for hours without a leak.
            "MALLOC_ARENA_MAX": "1",
        }
    if platform == "gpu":
        environment |= {
            # A cluster that was started by a process on CPU would hand its choice down.
            "JAX_PLATFORMS": "",
            # The numbers of the driver's tools and of Ray; CUDA's own order is by speed.
            "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
            "XLA_CLIENT_MEM_FRACTION": f"{options.memory_fraction / options.workers_per_gpu:g}",
            # The older name; JAX refuses both together.
            "XLA_PYTHON_CLIENT_MEM_FRACTION": "",
            "XLA_PYTHON_CLIENT_PREALLOCATE": str(options.preallocate).lower(),
        }
    if options.pin_cores and len(post.devices) > 1:
        # XLA makes as many threads as there are cores, and with fewer threads than devices their
        # collectives deadlock (jaxlib 0.10.2). One device needs no more: more threads than cores
        # double the time of its matrix products.
        environment["NPROC"] = str(max(16, 2 * len(post.devices)))
    return environment | dict(options.environment)


def _stop(actors: Sequence[Any], placement: PlacementGroup) -> None:
    if not ray.is_initialized():
        return
    for actor in actors:
        ray.kill(actor)
    remove_placement_group(placement)
