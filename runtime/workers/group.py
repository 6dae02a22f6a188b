"""The workers of one plan: started together, and stopped together when one of them fails."""

from __future__ import annotations

import logging
import os
import re
import time
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from itertools import count
from typing import Any

import ray
from jaxlib import version
from ray.exceptions import RayError
from ray.util.placement_group import PlacementGroup, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from alpa.runtime.instructions import Script
from alpa.runtime.pjrt import CompilerOptions
from alpa.runtime.workers.cluster import (
    Post,
    actor_resources,
    check_processes,
    join,
    reserve,
)
from alpa.runtime.workers.errors import WorkerError
from alpa.runtime.workers.options import Platform, WorkerOptions
from alpa.runtime.workers.worker import ArrayId, Started, Worker

_log = logging.getLogger(__name__)


class Call:
    """A call to several workers, which may still be under way."""

    def __init__(self, group: WorkerGroup, posts: Sequence[Post], refs: Sequence[Any]) -> None:
        self._group = group
        self._waiting = dict(zip(refs, posts, strict=True))
        self._refs = list(refs)
        self._values: dict[Any, Any] = {}

    def is_done(self) -> bool:
        ready, _ = ray.wait(list(self._waiting), num_returns=len(self._waiting) or 1, timeout=0)
        return len(ready) == len(self._waiting)

    def wait(self) -> list[Any]:
        """What each worker answers.

        Raises:
            WorkerError: one has failed, or they take longer than `timeout_seconds`.
        """
        self._group.check_alive()
        deadline = time.monotonic() + self._group.options.timeout_seconds
        while self._waiting:
            left = max(0.0, deadline - time.monotonic())
            done, _ = ray.wait(list(self._waiting), num_returns=1, timeout=left)
            if not done:
                late = ", ".join(post.name for post in self._waiting.values())
                raise self._group.fail(
                    f"{late}: no answer for {self._group.options.timeout_seconds:g} s; it hangs, "
                    "or needs a larger timeout_seconds"
                )
            (ref,) = done
            post = self._waiting[ref]
            try:
                self._values[ref] = ray.get(ref)
            except RayError as error:
                raise self._group.fail(f"{post.name}: {error}") from error
            del self._waiting[ref]
        return [self._values[ref] for ref in self._refs]


class WorkerGroup:
    """Connected actors on the posts of a program, which run it and others on the same meshes.

    Raises:
        ClusterSizeError: Ray has not what the plan needs.
        WorkerError: a worker could not start.
    """

    def __init__(self, posts: Sequence[Post], options: WorkerOptions) -> None:
        self.options = options
        self._failure: str | None = None
        self.garbage: dict[str, deque[ArrayId]] = {post.mesh: deque() for post in posts}
        """what nobody can ask for any more, for the next call to tell"""
        self._posts = tuple(posts)
        self._programs = 0
        self._numbers = count(1)
        platform = join(self._posts, options)
        check_processes(self._posts, platform)
        placement, bundles = reserve(self._posts, platform, options.timeout_seconds)
        self._actors: list[Any] = []
        self._stop = weakref.finalize(self, _stop, self._actors, placement)
        self._start(platform, placement, bundles)
        self.lowering_platform = self._connect()
        """what the workers' devices are to jax's lowering"""

    def can_run(self, posts: Sequence[Post]) -> bool:
        """Whether the workers live and are those that a program needs."""
        return self._failure is None and self._posts == tuple(posts)

    def load(
        self,
        script: Script,
        modules: Mapping[str, bytes],
        compiler_options: CompilerOptions | None,
    ) -> int:
        """Compiles a program; its number among those that the workers have.

        Raises:
            WorkerError: a worker could not compile it.
        """
        number, self._programs = self._programs, self._programs + 1
        loads: list[tuple[Any, ...]] = []
        for post in self._posts:
            mine = {f.module or f.name for f in script.program.fragments if f.mesh == post.mesh}
            own = {name: modules[name] for name in mine}
            loads.append((number, script, own, compiler_options))
        self._each("load", loads)
        return number

    def next_number(self) -> int:
        """A number for a call that makes arrays."""
        return next(self._numbers)

    def call(self, mesh: str, method: str, *arguments: Any) -> Call:
        """Calls a method of a mesh's workers."""
        self.check_alive()
        posts = [post for post in self._posts if post.mesh == mesh]
        refs = [getattr(self._actors[post.rank], method).remote(*arguments) for post in posts]
        return Call(self, posts, refs)

    def collect(self, mesh: str) -> list[ArrayId]:
        """The mesh's garbage, which the caller passes on."""
        garbage = self.garbage[mesh]
        return [garbage.popleft() for _ in range(len(garbage))]

    def check_alive(self) -> None:
        """Raises WorkerError if the workers are stopped."""
        if self._failure is not None:
            raise WorkerError(self._failure)

    def fail(self, reason: str) -> WorkerError:
        """Stops all workers: a mesh fails as a whole, and the others wait for it in vain."""
        self.close(f"the workers of this plan were stopped, load it again: {reason}")
        return WorkerError(reason)

    def close(self, reason: str = "the executable is closed; load the plan again") -> None:
        """Stops all workers and gives their places back."""
        self._failure = self._failure or reason
        self._stop()

    def _start(
        self, platform: Platform, placement: PlacementGroup, bundles: Mapping[int, int]
    ) -> None:
        remote: Any = ray.remote  # its types know no options of actors
        level = logging.getLogger("alpa").getEffectiveLevel()
        actor = remote(concurrency_groups={"io": 1})(Worker)
        for post in self._posts:
            strategy = PlacementGroupSchedulingStrategy(
                placement_group=placement,
                placement_group_bundle_index=bundles[post.host],
            )
            self._actors.append(
                actor.options(
                    scheduling_strategy=strategy,
                    runtime_env={"env_vars": _environment(post, platform, self.options)},
                    **actor_resources(post, platform),
                ).remote(post, platform, self.options, level)
            )

    def _connect(self) -> str:
        """Lets the workers meet; the name of their platform."""
        endpoints = self._each("endpoint", [() for _ in self._posts])
        for post, (_, found) in zip(self._posts, endpoints, strict=True):
            if found != version.__version__:
                raise self.fail(
                    f"{post.name} has jaxlib {found}, and this process {version.__version__}; "
                    "install the same everywhere"
                )
        names = [post.name for post in self._posts]
        owners = {device: post.rank for post in self._posts for device in post.devices}
        meeting = {
            post.mesh: address
            for post, (address, _) in zip(self._posts, endpoints, strict=True)
            if post.process == 0
        }
        starts: list[Started] = self._each(
            "start", [(meeting[post.mesh], names, owners) for post in self._posts]
        )
        kinds = " and ".join(sorted({start.transport for start in starts}))
        _log.info("tiles travel by %s", kinds)
        if len({start.transport for start in starts}) > 1:
            raise self.fail(f"the workers have different transports: {kinds}; set transport=")
        addresses = [start.address for start in starts]
        self._each("connect", [(addresses,) for _ in self._posts])
        return starts[0].platform

    def _each(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Calls every worker with its own arguments, and waits."""
        refs = [
            getattr(actor, method).remote(*them)
            for actor, them in zip(self._actors, arguments, strict=True)
        ]
        return Call(self, self._posts, refs).wait()


def _environment(post: Post, platform: Platform, options: WorkerOptions) -> dict[str, str]:
    """A worker's variables; XLA's flags are this process's, but for its number of devices."""
    flags = re.sub(
        r"--xla_force_host_platform_device_count=\d+", "", os.environ.get("XLA_FLAGS", "")
    )
    environment = {"XLA_FLAGS": flags.strip()}
    if platform == "cpu":
        # XLA's CPU buffers come from malloc, which gives large ones back to the system at each
        # free: their pages are then cleared anew in each run of a fragment, up to a tenth of its
        # time. 32 MiB is the most that glibc takes.
        environment |= {
            "MALLOC_MMAP_THRESHOLD_": str(32 << 20),
            "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
        }
    if options.pin_cores and len(post.devices) > 1:
        # XLA makes as many threads as there are cores to run on, and with fewer threads than
        # devices their collectives wait for ever (jaxlib 0.10.2). One device needs no more: more
        # threads than cores double the time of its matrix products.
        environment["NPROC"] = str(max(16, 2 * len(post.devices)))
    return environment | dict(options.environment)


def _stop(actors: Sequence[Any], placement: PlacementGroup) -> None:
    if not ray.is_initialized():
        return
    for actor in actors:
        ray.kill(actor)
    remove_placement_group(placement)
