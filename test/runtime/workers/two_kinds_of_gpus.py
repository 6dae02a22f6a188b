"""Run by `test_gpus.py`: a Ray cluster whose nodes believe to have GPUs of two kinds."""

from __future__ import annotations

import json
import sys

import ray
from ray.cluster_utils import Cluster
from ray.util.placement_group import placement_group_table, remove_placement_group

from alpa.runtime import WorkerOptions
from alpa.runtime.workers.cluster import Post, reserve
from alpa.runtime.workers.errors import ClusterSizeError

GPUS = {"V100": 4, "A100": 2}


def posts(*hosts: tuple[str, int]) -> list[Post]:
    """A mesh on each host, of so many devices of a kind."""
    return [
        Post(
            rank=host,
            mesh=f"mesh_{host}",
            host=host,
            devices=tuple(range(count)),
            process=0,
            processes=1,
            core=0,
            kind=kind,
        )
        for host, (kind, count) in enumerate(hosts)
    ]


def kinds(*hosts: tuple[str, int]) -> list[str]:
    """The kinds of the nodes that the hosts get, or why they get none."""
    wanted = posts(*hosts)
    try:
        group, bundles = reserve(wanted, "gpu", WorkerOptions(timeout_seconds=30))
    except ClusterSizeError as error:
        return [str(error)]
    nodes = placement_group_table(group)["bundles_to_node_id"]
    remove_placement_group(group)
    kind_of = {
        node["NodeID"]: next(name for name in GPUS if f"accelerator_type:{name}" in resources)
        for node in ray.nodes()
        if "GPU" in (resources := node["Resources"])
    }
    return [kind_of[nodes[bundles[post.host]]] for post in wanted]


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "num_gpus": 0})
    for name, count in GPUS.items():
        resources = {f"accelerator_type:{name}": 1}
        cluster.add_node(num_cpus=4, num_gpus=count, resources=resources)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address)
    small, large = "V100-SXM2-16GB", "A100-SXM4-40GB"
    found = {
        "both": kinds((small, 2), (large, 2)),
        "turned": kinds((large, 2), (small, 4)),
        "too large": kinds((small, 2), (large, 4)),
        "unknown": kinds((small, 2), ("H100-SXM5-80GB", 2)),
        "alike": kinds((small, 2), ("V100-SXM2-32GB", 2)),
    }
    ray.shutdown()
    cluster.shutdown()
    sys.stdout.write(f"{json.dumps(found)}\n")


if __name__ == "__main__":
    main()
