from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from ray.cluster_utils import Cluster

EXAMPLES = Path(__file__).parents[2] / "examples"
NEEDS = {"equinox_mlp": "equinox", "keras_mlp": "keras", "torch_gpt": "torchax"}
QUICK = {"keras_mlp"}
"""Examples that run in the default tier: no other test uses their framework."""


def cases() -> list[Any]:
    paths = sorted(EXAMPLES.glob("*.py"))
    marks = {True: (), False: pytest.mark.slow}
    return [pytest.param(path, id=path.stem, marks=marks[path.stem in QUICK]) for path in paths]


@contextmanager
def running_cluster(*, needed: bool) -> Generator[dict[str, str]]:
    """The address of a Ray cluster that this process does not join, as an environment variable."""
    if not needed:
        yield {}
        return
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 8, "num_gpus": 0})
    try:
        yield {"RAY_ADDRESS": cluster.address}
    finally:
        cluster.shutdown()


@pytest.mark.parametrize("path", cases())
def test_an_example_learns(path: Path) -> None:
    # Not by an import: Keras looks for its backend then, which the example sets.
    if path.stem in NEEDS and find_spec(NEEDS[path.stem]) is None:
        pytest.skip(f"needs {NEEDS[path.stem]}")
    # The example requests its devices itself.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, path]
    with running_cluster(needed=path.stem == "joined_cluster") as address:
        done = subprocess.run(
            command, check=True, capture_output=True, text=True, env=environment | address
        )
    losses = [float(text) for text in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert losses[-1] < 0.7 * losses[0]
    assert "is planned again" not in done.stderr
