from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.runtime import WorkerOptions
from alpa.runtime.elastic import living_hosts, take_hosts
from alpa.runtime.planning import PlanningError


@pytest.mark.slow
def test_a_host_of_three_is_lost_and_another_one_comes(tmp_path: Path) -> None:
    """In a process of its own, because this one may have joined the cluster of other tests."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    environment.pop("RAY_ADDRESS", None)
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("three_nodes.py"), tmp_path],
        check=True,
        capture_output=True,
        text=True,
        timeout=600,
        env=environment,
    )
    found = json.loads(done.stdout.splitlines()[-1])
    np.testing.assert_allclose(found["losses"], found["expected"], rtol=1e-5)
    assert found["losses"][-1] < found["losses"][0]
    whole, less = "cpu:3x2", "cpu:3x2,hosts=2"
    assert list(dict.fromkeys(found["clusters"])) == [whole, less]
    assert (found["clusters"][0], found["clusters"][-1]) == (whole, whole)
    devices = {whole: 6, less: 4}
    assert found["devices"] == [devices[cluster] for cluster in found["clusters"]]
    assert f"2 of 3 hosts live: train_step is planned for {less}" in found["said"]
    assert f"3 of 3 hosts live: train_step is planned for {whole}" in found["said"]


def train_step(weights: Any, x: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        return jnp.mean(jnp.tanh(x @ weights) ** 2)

    loss, grads = alpa.value_and_grad(loss_fn)(weights)
    return weights - 0.1 * grads, loss


ARGUMENTS = (
    jax.ShapeDtypeStruct((16, 16), jnp.float32),
    jax.ShapeDtypeStruct((4096, 16), jnp.float32),
)


def elastic(cluster: str, **options: Any) -> Any:
    workers = WorkerOptions(cache_directory=None)
    return alpa.parallelize(
        train_step, cluster=cluster, executor="ray", workers=workers, elastic=True, **options
    )


@pytest.mark.usefixtures("ray_cluster")
class TestOnOneNode:
    """Of 16 CPUs: hosts of CPU devices may share it."""

    @pytest.mark.parametrize(
        ("cluster", "hosts"), [("cpu:3x4", 3), ("cpu:5x4", 4), ("cpu:2x9", 1), ("cpu:1x16", 1)]
    )
    def test_living_hosts(self, cluster: str, hosts: int) -> None:
        assert living_hosts(elastic(cluster).target) == hosts

    def test_no_host_lives(self) -> None:
        with pytest.raises(alpa.runtime.ClusterSizeError, match="needs 1 host with 17 CPU; the no"):
            living_hosts(elastic("cpu:2x17").target)

    def test_functions_like_it_follow(self) -> None:
        step = elastic("cpu:3x1")
        other = alpa.parallelize(train_step, like=step)
        take_hosts("train_step", step.target, 2)
        assert other.target.settings.cluster == "cpu:3x1,hosts=2"
        assert step.plan(*ARGUMENTS).cluster == "cpu:3x1,hosts=2"
        take_hosts("train_step", step.target, 3)
        assert step.plan(*ARGUMENTS).cluster == "cpu:3x1"

    def test_known_plans_are_kept(self) -> None:
        step = elastic("cpu:2x1")
        first = step.prepare(*ARGUMENTS)
        take_hosts("train_step", step.target, 1)
        assert step.prepare(*ARGUMENTS) is not first
        take_hosts("train_step", step.target, 2)
        assert step.prepare(*ARGUMENTS) is first

    def test_micro_batches_get_smaller_where_they_do_not_fit(
        self, caplog: pytest.LogCaptureFixture
    ) -> None:
        step = elastic("cpu:2x2,memory=500KiB", num_micro_batches=1, batch_argnums=1)
        assert step.plan(*ARGUMENTS).num_micro_batches == 1
        take_hosts("train_step", step.target, 1)
        assert step.plan(*ARGUMENTS).num_micro_batches > 1
        assert "micro-batches for cpu:2x2,hosts=1,memory=500KiB, not 1: larger" in caplog.text

    def test_what_does_not_fit_is_refused_with_its_bytes(self) -> None:
        step = elastic("cpu:4x1,memory=200KiB", num_micro_batches=1, batch_argnums=1)
        take_hosts("train_step", step.target, 1)
        message = r"no number of micro-batches can be planned \(tried 2, 4.* KiB.* CPU has 200 KiB"
        with pytest.raises(PlanningError, match=message):
            step.plan(*ARGUMENTS)

    def test_micro_batches_that_compute_something_else_stay(self) -> None:
        step = elastic(
            "cpu:2x2,memory=500KiB",
            num_micro_batches=1,
            batch_argnums=1,
            micro_batches="independent",
        )
        take_hosts("train_step", step.target, 1)
        with pytest.raises(PlanningError, match="layer_0 alone holds at least 512 KiB on each"):
            step.plan(*ARGUMENTS)


def test_it_needs_ray() -> None:
    for options in ({}, {"executor": "ray", "plan": "plan.mlir"}):
        with pytest.raises(ValueError, match="elastic=True plans again for the hosts of a Ray clu"):
            alpa.parallelize(train_step, cluster="cpu:2x1", elastic=True, **options)


def test_functions_like_it_take_it() -> None:
    step = elastic("cpu:2x1")
    assert alpa.parallelize(train_step, like=step).target.elastic
    with pytest.raises(ValueError, match="remove elastic="):
        alpa.parallelize(train_step, like=step, elastic=True)
