"""Finds a place on a Ray cluster for every host of a plan.

Each host of the plan is one bundle of a placement group, and each worker on it takes its share: the
meshes of one host are on one node. Hosts with accelerators are on nodes of their own. CPU devices
are virtual, so several hosts may share a node there.
"""

from __future__ import annotations

import logging
import math
import os
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from alpa.passes.plan.data import Program
from alpa.runtime.workers.caller import keep_caller_off
from alpa.runtime.workers.errors import ClusterSizeError
from alpa.runtime.workers.options import Platform, WorkerOptions

_log = logging.getLogger(__name__)

_TICK = 1.0  # seconds
_PROGRAMS = 4  # programs on separate meshes that fit on a Ray cluster started here


@dataclass(frozen=True, kw_only=True)
class Post:
    """The part of one worker: one host's part of a mesh.

    `devices` are numbers in the cluster. `process` is its number among the `processes` of the mesh,
    `rank` its number among all workers; `core` counts the devices of the workers before it.
    """

    rank: int
    mesh: str
    host: int
    devices: tuple[int, ...]
    process: int
    processes: int
    core: int

    @property
    def name(self) -> str:
        return f"{self.mesh} on host {self.host}"


def posts_of(program: Program) -> tuple[Post, ...]:
    """Returns a post for each host of each mesh; a mesh over several hosts has them in order."""
    posts: list[Post] = []
    for mesh in program.meshes:
        each = len(mesh.devices) // len(mesh.hosts)
        for process, host in enumerate(mesh.hosts):
            posts.append(
                Post(
                    rank=len(posts),
                    mesh=mesh.name,
                    host=host,
                    devices=mesh.devices[process * each : (process + 1) * each],
                    process=process,
                    processes=len(mesh.hosts),
                    core=sum(len(post.devices) for post in posts),
                )
            )
    return tuple(posts)


def join(posts: Sequence[Post], options: WorkerOptions) -> Platform:
    """Connects to Ray, or starts it, and returns the platform of the workers."""
    return _joined(sum(len(post.devices) for post in posts), options)


def lowering_platform(needed: int, options: WorkerOptions) -> str:
    """The platform in JAX's lowering of the workers for a plan of so many devices.

    For JAX `gpu` is `cuda` or `rocm`; Ray names the kind of its accelerators among its resources.
    """
    platform = _joined(needed, options)
    if platform != "gpu":
        return platform
    amd = any(name.startswith("accelerator_type:AMD") for name in ray.cluster_resources())
    return "rocm" if amd else "cuda"


def _joined(needed: int, options: WorkerOptions) -> Platform:
    if not ray.is_initialized():
        with warnings.catch_warnings():
            # Ray forks to start its own program, which needs no thread of JAX.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            _connect(needed, options.address)
    platform = options.platform
    if platform is None:
        total = ray.cluster_resources()
        platform = "gpu" if "GPU" in total else "tpu" if "TPU" in total else "cpu"
        count = total.get(platform.upper(), 0)
        _log.info("workers run on %s, of which Ray has %g", platform, count)
    keep_caller_off(platform, options)
    return platform


def _connect(needed: int, address: str | None) -> None:
    if address is not None:
        ray.init(address=address, logging_level=logging.WARNING)
        return
    try:
        ray.init(address="auto", logging_level=logging.WARNING)
    except ConnectionError:
        # CPU devices are virtual: one host may have more of them than cores, and needs room for
        # programs on other meshes.
        _log.info("no Ray cluster is running here: starting one in this process")
        ray.init(
            address="local",
            num_cpus=max(_PROGRAMS * needed, os.cpu_count() or 1),
            include_dashboard=False,
            logging_level=logging.WARNING,
        )


def check_processes(posts: Sequence[Post], platform: Platform) -> None:
    """Raises ValueError if JAX cannot run a mesh over several processes."""
    several = next((post for post in posts if post.processes > 1), None)
    # In jax 0.10.2, collectives between CPU processes deadlock inside Ray.
    if several is not None and platform == "cpu" and jax.__version_info__ < (0, 12):
        raise ValueError(
            f"{several.mesh} spans {several.processes} hosts; CPU devices need jax 0.12 for that, "
            f"this is {jax.__version__}; update jax, or plan for hosts with more devices"
        )


def reserve(
    posts: Sequence[Post], platform: Platform, options: WorkerOptions
) -> tuple[PlacementGroup, dict[int, int]]:
    """Returns a placement group with a bundle for each host, and the bundles' numbers by host.

    Raises:
        ClusterSizeError: Ray has too few nodes or devices, or they are in use for all of
            `timeout_seconds`.
    """
    seconds, kind = options.timeout_seconds, platform.upper()
    hosts = sorted({post.host for post in posts})
    devices = [sum(len(post.devices) for post in posts if post.host == host) for host in hosts]
    if platform == "gpu":
        devices = [math.ceil(count / options.workers_per_gpu) for count in devices]
    _check_size(kind, devices)
    workers = [sum(post.host == host for post in posts) for host in hosts]
    bundles: list[dict[str, float]] = [
        {kind: float(count)} if kind == "CPU" else {kind: float(count), "CPU": float(number)}
        for count, number in zip(devices, workers, strict=True)
    ]
    group = placement_group(bundles, strategy="SPREAD" if kind == "CPU" else "STRICT_SPREAD")
    try:
        _wait_for(group, kind, devices, seconds)
    except ClusterSizeError:
        remove_placement_group(group)
        raise
    return group, {host: number for number, host in enumerate(hosts)}


def living_hosts(hosts: int, devices_per_host: int, options: WorkerOptions) -> int:
    """For how many of a cluster's hosts the living nodes of Ray have room, whoever uses it now.

    Raises ClusterSizeError if they have room for none.
    """
    kind = _joined(hosts * devices_per_host, options).upper()
    share = options.workers_per_gpu if kind == "GPU" else 1
    each = math.ceil(devices_per_host / share)
    _check_size(kind, [each])
    room = [int(have // each) for have in _room(kind)]
    # Hosts with accelerators are on nodes of their own.
    return min(hosts, sum(room if kind == "CPU" else map(bool, room)))


def living_nodes() -> frozenset[str]:
    """The identities of Ray's living nodes."""
    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def _wait_for(group: PlacementGroup, kind: str, devices: Sequence[int], seconds: float) -> None:
    """Waits until a placement group has its nodes. Raises as `reserve`."""
    deadline = time.monotonic() + seconds
    while not group.wait(min(_TICK, max(0.0, deadline - time.monotonic()))):
        _check_size(kind, devices)  # A node may be lost meanwhile.
        if time.monotonic() >= deadline:
            free = ray.available_resources().get(kind, 0)
            raise ClusterSizeError(
                f"the plan needs {_hosts_text(kind, devices)}; Ray has them, and {free:g} {kind} "
                f"of {ray.cluster_resources().get(kind, 0):g} are free after {seconds:g} s; stop "
                "other programs on the cluster, or plan for fewer devices (functions that share a "
                "state share workers if their plans have the same meshes)"
            )


def actor_resources(post: Post, platform: Platform, options: WorkerOptions) -> dict[str, Any]:
    """The resources that an actor requests from Ray."""
    count = len(post.devices)
    if platform == "cpu":
        return {"num_cpus": count}
    if platform == "gpu":
        shared = options.workers_per_gpu > 1
        return {"num_cpus": 1, "num_gpus": options.gpu_share if shared else count}
    return {"num_cpus": 1, "resources": {"TPU": count}}


def _check_size(kind: str, devices: Sequence[int]) -> None:
    """Raises ClusterSizeError unless the nodes have room for the plan's hosts."""
    room = _room(kind)
    if kind == "CPU":  # several hosts per node: the largest first, each where most is free
        left = list(room)
        for count in sorted(devices, reverse=True):
            left.sort(reverse=True)
            left[0] -= count
        fits = min(left) >= 0
    else:
        wanted = sorted(devices, reverse=True)
        fits = len(room) >= len(wanted) and all(
            have >= count for have, count in zip(room, wanted, strict=False)
        )
    if fits:
        return
    offered = ", ".join(f"{have:g}" for have in room) or "none"
    more = (
        "CPU devices are virtual, so `ray start --num-cpus=N` may offer more than there are cores"
        if kind == "CPU"
        else "join more nodes to it with `ray start --address=...`"
    )
    raise ClusterSizeError(
        f"the plan needs {_hosts_text(kind, devices)}; the nodes of the Ray cluster have {offered} "
        f"{kind}; {more}, or plan for a cluster of that size"
    )


def _room(kind: str) -> list[float]:
    """What the living nodes have, the largest first."""
    nodes = (node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"])
    return sorted(nodes, reverse=True)


def _hosts_text(kind: str, devices: Sequence[int]) -> str:
    counts = ", ".join(f"{count}" for count in devices)
    return f"{len(devices)} host{'s' * (len(devices) > 1)} with {counts} {kind}"
