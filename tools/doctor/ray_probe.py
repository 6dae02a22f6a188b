"""Prints the Ray cluster that Alpa would join as JSON, or the seconds that starting one takes.

`alpa doctor` runs it in a process of its own.
"""

from __future__ import annotations

import json
import logging
import os
import time

import ray

_STORE = 100_000_000
"""Bytes of the cluster's shared memory: little more than the least that Ray accepts."""


def main() -> None:
    """Runs the probe."""
    found = os.environ.get("RAY_ADDRESS") != "local" and _joined()
    if not found:
        begin = time.perf_counter()
        ray.init(
            address="local",
            num_cpus=1,
            include_dashboard=False,
            object_store_memory=_STORE,
            logging_level=logging.WARNING,
        )
        print(json.dumps({"seconds": time.perf_counter() - begin}), flush=True)
        return
    nodes = sum(node["Alive"] for node in ray.nodes())
    address = ray.get_runtime_context().gcs_address
    resources = {name: count for name, count in ray.cluster_resources().items() if name in _COUNTED}
    print(json.dumps({"address": address, "nodes": nodes, "resources": resources}), flush=True)


_COUNTED = ("CPU", "GPU", "TPU")


def _joined() -> bool:
    try:
        ray.init(address="auto", logging_level=logging.WARNING)
    except ConnectionError:
        return False
    return True


if __name__ == "__main__":
    main()
