"""Finds a place on a Ray cluster for every host of a plan.

Each host of the plan is one bundle of a placement group, and each worker on it takes its share: the
meshes of one host are on one node. Hosts with accelerators are on nodes of their own; if the plan
has several kinds of them, on nodes with the accelerator that Ray calls so. CPU devices are virtual,
so several hosts may share a node there, whatever kind they stand for.
"""

from __future__ import annotations

import logging
import math
import os
import re
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import ray
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from alpa.passes.plan.data import Program
from alpa.runtime.interrupts import held_back
from alpa.runtime.planning import Capabilities
from alpa.runtime.progress import Show, quiet
from alpa.runtime.workers.caller import keep_caller_off
from alpa.runtime.workers.errors import ClusterSizeError
from alpa.runtime.workers.options import Platform, WorkerOptions
from alpa.runtime.workers.waiting import Waiting

_log = logging.getLogger(__name__)

_TICK = 1.0  # seconds
_PROGRAMS = 4  # programs on separate meshes that fit on a Ray cluster started here
_ACCELERATOR = "accelerator_type:"  # begins the names of Ray's resources that are kinds of them
_RESERVED = re.compile(r"_group_(\d+_)?[0-9a-f]+$")  # ends the names of what others have reserved
_ANY = 0.001  # of such a resource: no more than being there is asked for


@dataclass(frozen=True, kw_only=True)
class Post:
    """The part of one worker: one host's part of a mesh.

    `devices` are numbers in the cluster; on hosts of several kinds, `kind` is the name of these
    devices. `process` is its number among the `processes` of the mesh,
    `rank` its number among all workers; `core` counts the devices of the workers before it.
    """

    rank: int
    mesh: str
    host: int
    devices: tuple[int, ...]
    process: int
    processes: int
    core: int
    kind: str = ""

    @property
    def name(self) -> str:
        return f"{self.mesh} on host {self.host}"


@dataclass(frozen=True, kw_only=True)
class _Need:
    """What a host of a plan takes of a node."""

    count: int
    accelerator: str = ""
    """as Ray calls it; empty: any"""


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
                    kind=mesh.device,
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
    amd = any(name.startswith("AMD") for name in accelerators(ray.cluster_resources()))
    return "rocm" if amd else "cuda"


def _joined(needed: int, options: WorkerOptions) -> Platform:
    if not ray.is_initialized():
        # A start of Ray that is cut in two crashes the process at the next one.
        with warnings.catch_warnings(), held_back():
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


def capabilities(needed: int, options: WorkerOptions) -> Capabilities:
    """What workers can run of a plan for so many devices; joins the Ray cluster."""
    return _capabilities(_joined(needed, options))


def _capabilities(platform: Platform) -> Capabilities:
    # In jax 0.10.2, collectives between CPU processes deadlock inside Ray.
    if platform == "cpu" and jax.__version_info__ < (0, 12):
        need = f"CPU devices need jax 0.12 for a mesh over several hosts, this is {jax.__version__}"
        return Capabilities(meshes_over_hosts=False, reason=need)
    return Capabilities()


def check_processes(posts: Sequence[Post], platform: Platform) -> None:
    """Raises ValueError if JAX cannot run a mesh over several processes."""
    several = next((post for post in posts if post.processes > 1), None)
    possible = _capabilities(platform)
    if several is not None and not possible.meshes_over_hosts:
        raise ValueError(
            f"{several.mesh} spans {several.processes} hosts; {possible.reason}; update jax, or "
            "plan for hosts with more devices"
        )


def reserve(
    posts: Sequence[Post], platform: Platform, options: WorkerOptions, show: Show = quiet
) -> tuple[PlacementGroup, dict[int, int]]:
    """Returns a placement group with a bundle for each host, and the bundles' numbers by host.

    `show` hears what is waited for.

    Raises:
        ClusterSizeError: Ray has too few nodes or devices, none of a kind, or they are in use for
            all of `timeout_seconds`.
    """
    seconds, kind = options.timeout_seconds, platform.upper()
    hosts = sorted({post.host for post in posts})
    devices = [sum(len(post.devices) for post in posts if post.host == host) for host in hosts]
    if platform == "gpu":
        devices = [math.ceil(count / options.workers_per_gpu) for count in devices]
    names = {post.host: post.kind for post in posts}
    types = {} if kind == "CPU" else _accelerators_of({name for name in names.values() if name})
    needs = [
        _Need(count=count, accelerator=types.get(names[host], ""))
        for host, count in zip(hosts, devices, strict=True)
    ]
    _check_size(kind, needs)
    bundles: list[dict[str, float]] = []
    for host, need in zip(hosts, needs, strict=True):
        bundle = {kind: float(need.count)}
        if kind != "CPU":
            bundle["CPU"] = float(sum(post.host == host for post in posts))
        if need.accelerator:
            bundle[f"{_ACCELERATOR}{need.accelerator}"] = _ANY
        bundles.append(bundle)
    group = placement_group(bundles, strategy="SPREAD" if kind == "CPU" else "STRICT_SPREAD")
    try:
        _wait_for(group, kind, needs, Waiting(seconds, show))
    except (ClusterSizeError, KeyboardInterrupt):
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
    _check_size(kind, [_Need(count=each)])
    room = [int(have // each) for have in _room(kind)]
    # Hosts with accelerators are on nodes of their own.
    return min(hosts, sum(room if kind == "CPU" else map(bool, room)))


def living_nodes() -> frozenset[str]:
    """The identities of Ray's living nodes."""
    return frozenset(node["NodeID"] for node in ray.nodes() if node["Alive"])


def _wait_for(group: PlacementGroup, kind: str, needs: Sequence[_Need], waiting: Waiting) -> None:
    """Waits until a placement group has its nodes. Raises as `reserve`."""
    while not group.wait(min(_TICK, waiting.left)):
        _check_size(kind, needs)  # A node may be lost meanwhile.
        waiting.say(f"{_hosts_text(kind, needs)} of Ray, which others use")
        if not waiting.left:
            free, all_of_it = (
                resources.get(kind, 0)
                for resources in (ray.available_resources(), ray.cluster_resources())
            )
            raise ClusterSizeError(
                f"the plan needs {_hosts_text(kind, needs)}; Ray has them, and {free:g} {kind} of "
                f"{all_of_it:g} are free after {waiting.seconds:g} s; stop other programs on the "
                "cluster, or plan for fewer devices (functions that share a state share workers "
                "if their plans have the same meshes)"
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


def accelerators(resources: Iterable[str]) -> list[str]:
    """The kinds of accelerators among the names of Ray's resources, as Ray calls them."""
    names = (name for name in sorted(resources) if name.startswith(_ACCELERATOR))
    return [name.removeprefix(_ACCELERATOR) for name in names if not _RESERVED.search(name)]


def _accelerators_of(devices: Iterable[str]) -> dict[str, str]:
    """What Ray calls some devices, such as A100 for an A100-SXM4-40GB.

    Raises ClusterSizeError for a device that no node has, and for two that Ray calls alike.
    """
    there = accelerators(ray.cluster_resources())
    found: dict[str, str] = {}
    for device in sorted(devices):
        fitting = [name for name in there if name == device or _is_called(device, name)]
        if not fitting:
            raise ClusterSizeError(
                f"the plan has hosts with {device}; the nodes of the Ray cluster have "
                f"{', '.join(there) or 'no accelerators with a name'}; {_naming(device)}"
            )
        name = device if device in fitting else max(fitting, key=len)
        like = next((other for other, known in found.items() if known == name), None)
        if like is not None:
            raise ClusterSizeError(
                f"the plan has hosts with {like} and with {device}, and Ray calls both {name}; "
                f"{_naming(device)}"
            )
        found[device] = name
    return found


def _is_called(device: str, name: str) -> bool:
    """Whether a device is of a kind: each part of the kind's name begins a word of the device's."""
    words = re.split(r"[\s-]+", device)
    return all(any(word.startswith(part) for word in words) for part in name.split("-"))


def _naming(device: str) -> str:
    resources = f'{{"{_ACCELERATOR}{device}": 1}}'
    return f"start Ray on such nodes with `--resources='{resources}'`"


def _check_size(kind: str, needs: Sequence[_Need]) -> None:
    """Raises ClusterSizeError unless the nodes have room for the plan's hosts."""
    if kind == "CPU":  # several hosts per node: the largest first, each where most is free
        left = _room(kind) or [0.0]  # No node may be alive.
        for need in sorted(needs, key=lambda need: need.count, reverse=True):
            left.sort(reverse=True)
            left[0] -= need.count
        fits = min(left) >= 0
    else:
        fits = all(
            _fit([need.count for need in needs if need.accelerator == name], _room(kind, name))
            for name in {need.accelerator for need in needs}
        )
    if fits:
        return
    names = dict.fromkeys(need.accelerator for need in needs)
    offered = " and ".join(
        f"{', '.join(f'{have:g}' for have in _room(kind, name)) or 'no'} {name or kind}"
        for name in names
    )
    more = (
        "CPU devices are virtual, so `ray start --num-cpus=N` may offer more than there are cores"
        if kind == "CPU"
        else "join more nodes to it with `ray start --address=...`"
    )
    raise ClusterSizeError(
        f"the plan needs {_hosts_text(kind, needs)}; the nodes of the Ray cluster have {offered}; "
        f"{more}, or plan for a cluster of that size"
    )


def _fit(counts: Sequence[int], room: Sequence[float]) -> bool:
    """Whether each count has a node of its own."""
    wanted = sorted(counts, reverse=True)
    return len(room) >= len(wanted) and all(
        have >= count for have, count in zip(room, wanted, strict=False)
    )


def _room(kind: str, accelerator: str = "") -> list[float]:
    """What the living nodes with an accelerator have, the largest first."""
    offers = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    nodes = (
        it.get(kind, 0) for it in offers if not accelerator or f"{_ACCELERATOR}{accelerator}" in it
    )
    return sorted(nodes, reverse=True)


def _hosts_text(kind: str, needs: Sequence[_Need]) -> str:
    def text(name: str) -> str:
        counts = [str(need.count) for need in needs if need.accelerator == name]
        hosts = f"{len(counts)} host{'s' * (len(counts) > 1)}"
        return f"{hosts} with {', '.join(counts)} {name or kind}"

    return " and ".join(map(text, dict.fromkeys(need.accelerator for need in needs)))
