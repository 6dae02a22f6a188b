"""Training goes on where hosts are lost: a new plan for those that live.

`alpa.parallelize(..., elastic=True)` asks `alpa.resume` for it. The global batch and the steps of
the optimizer stay what they are. Where the plan would not fit, micro-batches get smaller, if that
computes the same (`runtime/prepared.py`).
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from alpa.passes.cost.cluster import Cluster, with_hosts
from alpa.runtime.parallelized import Parallelized
from alpa.runtime.target import Target, ray_cluster
from alpa.runtime.workers.errors import ClusterSizeError, WorkerError
from alpa.runtime.workers.options import WorkerOptions

_logger = logging.getLogger("alpa")

T = TypeVar("T")

_NOTICED = 30.0
"""Seconds until Ray surely knows that a node is lost: its workers' end is known sooner."""
_TICK = 0.5  # seconds


def on_living_hosts(step: Parallelized[..., Any], make: Callable[[], T]) -> T:
    """Calls `make` once an elastic step is planned for the hosts that live.

    If one of them is lost meanwhile, the step is planned for the others, and `make` called again.

    Raises:
        ClusterSizeError: no host is left.
        WorkerError: a worker has failed, though its host lives.
    """
    target = step.target
    if not target.elastic:
        return make()
    while True:
        take_hosts(step.__name__, target, living_hosts(target))
        nodes = ray_cluster().living_nodes()
        try:
            return make()
        except (ClusterSizeError, WorkerError):
            deadline = time.monotonic() + _NOTICED
            while nodes <= ray_cluster().living_nodes():
                if time.monotonic() > deadline:
                    raise
                time.sleep(_TICK)


def living_hosts(target: Target) -> int:
    """How many of the named hosts live. Raises ClusterSizeError if none does."""
    named = Cluster.parse(target.named.cluster)
    options = target.workers or WorkerOptions()
    return ray_cluster().living_hosts(named.hosts, named.devices_per_host, options)


def take_hosts(name: str, target: Target, hosts: int) -> None:
    """Has the functions of a family planned for so many of the named hosts."""
    named, family = target.named.cluster, target.family
    whole = Cluster.parse(named).hosts
    cluster = named if hosts == whole else with_hosts(named, hosts)
    if cluster == family.cluster:
        return
    _logger.warning("%d of %d hosts live: %s is planned for %s", hosts, whole, name, cluster)
    family.cluster = cluster
    for executable in family.executables:
        executable.close()  # Its arrays are on other meshes than those of the new plan.
