"""Decides which of its host's GPUs each worker uses."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, MutableMapping, Sequence

from alpa.runtime.workers.cluster import Post
from alpa.runtime.workers.options import WorkerOptions


def check_shares(posts: Sequence[Post], options: WorkerOptions) -> None:
    """Raises ValueError if workers with several devices should share GPUs."""
    large = next((post for post in posts if len(post.devices) > 1), None)
    if options.workers_per_gpu > 1 and large is not None:
        raise ValueError(
            f"gpu_share={options.gpu_share:g} lets {options.workers_per_gpu} workers share a GPU, "
            f"but {large.name} has {len(large.devices)} devices; plan for meshes of one device "
            '(mesh_shape="1"), or leave gpu_share at 1'
        )


def gpus_of(posts: Sequence[Post], given: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """The GPUs of each worker, in the order of its mesh's devices.

    Ray gives the workers of a host any of its GPUs, in the order in which they start. They swap
    them, so that the plan's devices of a host are its GPUs in the order of their numbers: a plan
    for devices 0 to 3 and 4 to 7 keeps neighbours together.

    Args:
        posts: all workers.
        given: the names of the GPUs that Ray gave to each; with `gpu_share`, a name occurs once for
            each worker that shares the GPU.
    """
    of_host: dict[int, list[str]] = defaultdict(list)
    devices: dict[int, list[int]] = defaultdict(list)
    for post, names in zip(posts, given, strict=True):
        of_host[post.host] += names
        devices[post.host] += post.devices
    name_of: dict[int, str] = {}
    for host, numbers in devices.items():
        names = sorted(of_host[host], key=_by_number)
        name_of.update(zip(sorted(numbers), names, strict=True))
    return [tuple(name_of[device] for device in post.devices) for post in posts]


def _by_number(name: str) -> tuple[bool, int, str]:
    """The order of GPUs, which are numbers or, on some clusters, the drivers' identifiers."""
    return (not name.isdecimal(), int(name) if name.isdecimal() else 0, name)


def show_gpus(names: Sequence[str], environment: MutableMapping[str, str]) -> None:
    """Sets the variable that names a process's GPUs to the driver, before JAX starts there."""
    environment[_variable(environment)] = ",".join(names)


def visible_gpus(environment: Mapping[str, str]) -> str:
    """The variable and its value, for messages."""
    variable = _variable(environment)
    return f"{variable}={environment.get(variable, '')}"


def _variable(environment: Mapping[str, str]) -> str:
    """The variable that Ray sets, by vendor."""
    amd = "HIP_VISIBLE_DEVICES"
    return amd if amd in environment else "CUDA_VISIBLE_DEVICES"
