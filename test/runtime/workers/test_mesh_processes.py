"""Processes of one mesh: they take all their devices, and one compiles for all."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from alpa.runtime.workers.cluster import Post
from alpa.runtime.workers.mesh_processes import compile_waves, shares_executables
from alpa.runtime.workers.options import Platform


def test_two_processes_under_slurm(tmp_path: Path) -> None:
    """Ray was started by `srun`, as one task per host; the mesh has two devices on each."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
    slurm = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "8",
        "SLURM_STEP_NUM_TASKS": "8",
        "SLURM_PROCID": "5",
        "SLURM_LOCALID": "5",
    }
    environment = {**os.environ, **slurm, "XLA_FLAGS": ""}
    script, file = Path(__file__).with_name("two_processes.py"), tmp_path / "executable"
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(rank), address, file],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=environment,
        )
        for rank in (0, 1)
    ]
    answers = [process.communicate(timeout=200) for process in processes]
    for process, (output, errors) in zip(processes, answers, strict=True):
        assert process.returncode == 0, errors
        found = json.loads(output.splitlines()[-1])  # after lines of Gloo
        assert found == {"devices": 4, "local": 2, "visible": "all", "total": 28.0}


@pytest.mark.parametrize(("platform", "later"), [("gpu", [2, 3]), ("tpu", [2, 3]), ("cpu", [])])
def test_one_process_compiles_for_a_mesh_of_accelerators(
    platform: Platform, later: list[int]
) -> None:
    alone = Post(rank=0, mesh="a", host=0, devices=(0,), process=0, processes=1, core=0)
    three = [
        Post(rank=1 + i, mesh="b", host=i, devices=(1 + i,), process=i, processes=3, core=1 + i)
        for i in range(3)
    ]
    posts = [alone, *three]
    assert [shares_executables(post, "gpu") for post in posts] == [False, True, True, True]
    first, others = compile_waves(posts, platform)
    assert [post.rank for post in others] == later
    assert [post.rank for post in first] == [rank for rank in range(4) if rank not in later]
