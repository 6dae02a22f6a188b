"""The overhead of calling the modules of fragments."""

from __future__ import annotations

from alpa.dialects import mpmd
from alpa.dialects.attributes import read_part
from alpa.passes.cost.cluster import Cluster


def call_arguments(fragment: mpmd.FragmentOp, num_micro_batches: int) -> int:
    """The number of arguments and results of a fragment's module.

    With several micro-batches, a backward module also takes the sums of the gradients that it
    returns: each result counts twice.
    """
    sums = read_part(fragment) == "backward" and num_micro_batches > 1
    return len(fragment.operands) + len(fragment.results) * (1 + sums)


def call_seconds(
    fragment: mpmd.FragmentOp, num_micro_batches: int, cluster: Cluster, num_devices: int
) -> float:
    """Seconds of one call of a fragment's module on a mesh of so many devices."""
    arguments = float(call_arguments(fragment, num_micro_batches))
    return cluster.device.call.seconds(arguments, min(num_devices, cluster.devices_per_host))
