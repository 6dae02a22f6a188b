from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_a_plan_lies_on_two_nodes_of_which_one_joins_later_and_is_lost() -> None:
    """In a process of its own, because this one has joined the cluster of the other tests."""
    script = Path(__file__).with_name("two_nodes.py")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, script],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    assert (
        "the plan needs 2 hosts with 2, 2 CPU; the nodes of the Ray cluster have 2 CPU"
        in (found["refused"])
    )
    assert found["nodes"] == 2
    assert found["loss"] == pytest.approx(found["expected"], rel=1e-4)
    assert re.match(r"mesh_[01] on host [01] has died .*alpa\.resume", found["lost"])
    assert found["loss_again"] == found["loss"]
