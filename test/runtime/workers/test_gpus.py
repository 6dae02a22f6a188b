"""Which GPUs workers get, and that the caller keeps off them. No GPU is needed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import pytest

from alpa.runtime.workers.caller import check_caller, keep_caller_off
from alpa.runtime.workers.cluster import Post, accelerators
from alpa.runtime.workers.gpus import check_shares, gpus_of, show_gpus, visible_gpus
from alpa.runtime.workers.options import WorkerOptions


def post(host: int, *devices: int) -> Post:
    return Post(
        rank=0, mesh="mesh_0", host=host, devices=devices, process=0, processes=1, core=0
    )  # fmt: skip


def test_the_devices_of_a_host_are_its_gpus_in_order() -> None:
    posts = [post(0, 4, 5), post(0, 0, 1, 2, 3), post(1, 8)]
    given = [["0", "10"], ["11", "2", "3", "9"], ["7"]]
    assert gpus_of(posts, given) == [("10", "11"), ("0", "2", "3", "9"), ("7",)]
    # Identifiers of the driver; and two workers that share a GPU.
    assert gpus_of([post(0, 1), post(0, 0)], [["GPU-a"], ["GPU-b"]]) == [("GPU-b",), ("GPU-a",)]
    assert gpus_of([post(0, 0), post(0, 1)], [["5"], ["5"]]) == [("5",), ("5",)]


def test_the_variable_is_the_vendors() -> None:
    environment = {"HIP_VISIBLE_DEVICES": "0,1"}
    show_gpus(["1"], environment)
    assert environment == {"HIP_VISIBLE_DEVICES": "1"}
    environment = {}
    show_gpus(["1", "2"], environment)
    assert visible_gpus(environment) == "CUDA_VISIBLE_DEVICES=1,2"


@pytest.mark.parametrize("share", [0, -1, 0.4, 2, float("nan")])
def test_a_share_of_a_gpu_is_a_part_of_it(share: float) -> None:
    with pytest.raises(ValueError, match=r"gpu_share is .*; expected 1 or a part such as 0\.5"):
        WorkerOptions(gpu_share=share)


@pytest.mark.parametrize(("share", "workers"), [(1, 1), (0.5, 2), (0.33, 3), (0.25, 4)])
def test_workers_per_gpu(share: float, workers: int) -> None:
    assert WorkerOptions(gpu_share=share).workers_per_gpu == workers


def test_a_mesh_of_several_devices_shares_no_gpu() -> None:
    check_shares([post(0, 0, 1)], WorkerOptions())
    check_shares([post(0, 0)], WorkerOptions(gpu_share=0.5))
    with pytest.raises(ValueError, match=r"2 workers share a GPU, but mesh_0 on host 0 has 2 dev"):
        check_shares([post(0, 0, 1)], WorkerOptions(gpu_share=0.5))


def test_a_caller_on_a_gpu_is_told_so() -> None:
    check_caller(jax.devices())
    gpu: Any = SimpleNamespace(platform="gpu", device_kind="NVIDIA H100")
    with pytest.raises(ValueError, match=r'on 2 GPU\(s\) \(NVIDIA H100\).*"jax_platforms", "cpu"'):
        check_caller([gpu, gpu])


def test_a_caller_whose_workers_are_on_cpu_is_left_alone() -> None:
    code = (
        "import jax\n"
        "from alpa.runtime.workers.caller import keep_caller_off\n"
        "from alpa.runtime.workers.options import WorkerOptions\n"
        "seen = []\n"
        "for platform, keep in (('cpu', True), ('gpu', False), ('gpu', True)):\n"
        "    keep_caller_off(platform, WorkerOptions(keep_caller_off_gpus=keep))\n"
        "    seen.append(jax.config.jax_platforms)\n"
        "print(seen)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=_environment()
    )
    assert done.stdout == "[None, None, 'cpu']\n"
    # JAX has started here, on CPU.
    keep_caller_off("gpu", WorkerOptions())


@pytest.mark.slow
def test_workers_on_a_cluster_with_gpus() -> None:
    """Ray gives out GPUs without having any; the workers then find none."""
    found = _found_by("fake_gpus.py")
    whole = found["whole"]
    assert sorted(name for it in whole for name in it["gpus"]) == ["0", "1", "2", "3"]
    assert [it["own"] for it in whole] == [["0"], ["2", "3"], ["1"]]
    for it in whole:
        assert it["CUDA_VISIBLE_DEVICES"] == ",".join(it["gpus"])
        assert (it["XLA_CLIENT_MEM_FRACTION"], it["JAX_PLATFORMS"]) == ("0.9", "")
    first, second = found["shared"]
    assert first["own"] == second["own"] == first["gpus"]
    assert first["XLA_CLIENT_MEM_FRACTION"] == second["XLA_CLIENT_MEM_FRACTION"] == "0.45"
    assert found["too many"].startswith(
        "the plan needs 1 host with 5 GPU; the nodes of the Ray cluster have 4 GPU"
    )
    assert re.search(
        r"mesh_(\d) on host 0 needs 1 gpu devices, but jax finds 1 of cpu there "
        r"\(CUDA_VISIBLE_DEVICES=\1\)",
        found["no GPUs"],
    )
    # Tracing the step has not started JAX before Alpa knew where the workers are.
    assert found["caller"] == "cpu"


def test_reserved_accelerators_are_no_kinds_of_their_own() -> None:
    reserved = "accelerator_type:A100_group_0_5a722366e3767b6915f8f3d3923501000000"
    names = [reserved, reserved.replace("_0_", "_"), "CPU", "accelerator_type:V100"]
    assert accelerators([*names, "accelerator_type:A100"]) == ["A100", "V100"]


@pytest.mark.slow
def test_hosts_of_two_kinds_are_on_nodes_of_theirs() -> None:
    found = _found_by("two_kinds_of_gpus.py")
    assert found["both"] == ["V100", "A100"]
    assert found["turned"] == ["A100", "V100"]
    (message,) = found["too large"]
    assert message.startswith(
        "the plan needs 1 host with 2 V100 and 1 host with 4 A100; the nodes of the Ray cluster "
        "have 4 V100 and 2 A100; join more"
    )
    (message,) = found["unknown"]
    assert message == (
        "the plan has hosts with H100-SXM5-80GB; the nodes of the Ray cluster have A100, V100; "
        """start Ray on such nodes with `--resources='{"accelerator_type:H100-SXM5-80GB": 1}'`"""
    )
    (message,) = found["alike"]
    assert "with V100-SXM2-16GB and with V100-SXM2-32GB, and Ray calls both V100; start" in message


def _found_by(script: str) -> dict[str, Any]:
    """What a script beside this file prints, in a process of its own."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script)],
        capture_output=True,
        text=True,
        timeout=300,
        env=_environment(),
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def _environment() -> dict[str, str]:
    """That of a user, without the choices of the tests."""
    left_out = ("JAX_PLATFORMS", "XLA_FLAGS", "RAY_ADDRESS", "CUDA_VISIBLE_DEVICES")
    kept = {name: value for name, value in os.environ.items() if name not in left_out}
    return {**kept, "OMP_NUM_THREADS": "1"}
