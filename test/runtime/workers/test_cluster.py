"""The responsibilities of workers, and the resources that they request from Ray."""

from __future__ import annotations

from typing import Any

import pytest

from alpa.dialects import parse
from alpa.passes.plan.reader import read_planned
from alpa.runtime.workers import cluster
from alpa.runtime.workers.cluster import actor_resources, posts_of
from alpa.runtime.workers.errors import ClusterSizeError
from alpa.runtime.workers.group import worker_environment
from alpa.runtime.workers.options import Platform, WorkerOptions


def test_a_worker_for_each_host_of_each_mesh(moves: str) -> None:
    ends = "devices = array<i64: 1, 2>"
    text = moves.replace(f"hosts = array<i64: 0>, {ends}", f"hosts = array<i64: 0, 3>, {ends}")
    posts = posts_of(read_planned(parse(text)))
    assert [post.name for post in posts] == [
        "mesh_0 on host 0",
        "mesh_1 on host 0",
        "mesh_1 on host 3",
    ]
    assert [post.devices for post in posts] == [(0,), (1,), (2,)]
    assert [(post.process, post.processes) for post in posts] == [(0, 1), (0, 2), (1, 2)]
    assert [post.core for post in posts] == [0, 1, 2]


@pytest.mark.parametrize(
    ("platform", "asked"),
    [
        ("cpu", {"num_cpus": 2}),
        ("gpu", {"num_cpus": 1, "num_gpus": 2}),
        ("tpu", {"num_cpus": 1, "resources": {"TPU": 2}}),
    ],
)
def test_a_worker_asks_for_its_devices(
    moves: str, platform: Platform, asked: dict[str, object]
) -> None:
    _, post = posts_of(read_planned(parse(moves)))
    assert actor_resources(post, platform, WorkerOptions()) == asked


def test_a_gpu_worker_has_a_share_of_the_memory(moves: str) -> None:
    post, _ = posts_of(read_planned(parse(moves)))
    found = worker_environment(post, "gpu", WorkerOptions())
    assert found["XLA_CLIENT_MEM_FRACTION"] == "0.9"
    assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    # Neither the caller's platform nor a share under the older name is handed down.
    assert found["JAX_PLATFORMS"] == found["XLA_PYTHON_CLIENT_MEM_FRACTION"] == ""
    options = WorkerOptions(memory_fraction=0.4, preallocate=False, environment={"A": "b"})
    found = worker_environment(post, "gpu", options)
    assert found["XLA_CLIENT_MEM_FRACTION"] == "0.4"
    assert found["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"
    assert found["A"] == "b"
    assert found["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"
    assert "XLA_CLIENT_MEM_FRACTION" not in worker_environment(post, "cpu", options)


@pytest.mark.parametrize("share", [0, -0.5, 1.5])
def test_a_share_of_memory_is_between_0_and_1(share: float) -> None:
    with pytest.raises(ValueError, match="memory_fraction must be greater than 0 and at most 1"):
        WorkerOptions(memory_fraction=share)


def test_no_cache() -> None:
    assert WorkerOptions(cache_directory=None).cache_path is None


@pytest.mark.parametrize(
    ("platform", "accelerator", "name"),
    [
        ("cpu", "none", "cpu"),
        ("tpu", "TPU-V4", "tpu"),
        ("gpu", "H100", "cuda"),
        ("gpu", "AMD-Instinct-MI300X-OAM", "rocm"),
    ],
)
def test_programs_are_lowered_for_the_workers(
    platform: Platform, accelerator: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    resources = {"CPU": 8.0, f"accelerator_type:{accelerator}": 1.0}
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: True)
    monkeypatch.setattr(cluster.ray, "cluster_resources", lambda: resources)
    assert cluster.lowering_platform(1, WorkerOptions(platform=platform)) == name


@pytest.mark.parametrize("kind", ["cpu", "gpu"])
@pytest.mark.parametrize("nodes", [[], [{"Alive": False, "Resources": {"CPU": 8, "GPU": 8}}]])
def test_no_node_is_alive(
    kind: Platform, nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cluster, "_joined", lambda *_: kind)
    monkeypatch.setattr(cluster.ray, "nodes", lambda: nodes)
    message = (
        f"needs 1 host with 4 {kind.upper()}; the nodes of the Ray cluster have no {kind.upper()}"
    )
    with pytest.raises(ClusterSizeError, match=message):
        cluster.living_hosts(2, 4, WorkerOptions())
