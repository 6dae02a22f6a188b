"""Training on hosts of two kinds: plans use both where that helps, and equal plain JAX."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa import passes
from alpa.dialects import ir, main_function
from alpa.dialects.plan import MeshAssignment, Plan, read_meshes
from alpa.passes.cost.cluster import parse_cluster
from alpa.passes.plan.report import PlanReport
from alpa.passes.plan.table import plan_table
from alpa.runtime import WorkerOptions
from alpa.runtime.parallelized import Parallelized
from alpa.runtime.planning import PlanningError
from alpa.runtime.reference import compare

LAYERS, WIDTH, BATCH = 8, 64, 512
BATCHES = 16
RATE = 0.1


Kind = Callable[..., Path]
"""Writes the file of hosts of a kind, from its name, FLOP/s, and what `small_cluster` takes."""


@pytest.fixture
def kind(small_cluster: Callable[..., Path]) -> Kind:
    def write(name: str, flops: float, **more: Any) -> Path:
        fast = {"memory_bandwidth": 1e12, "bandwidth": 1e11}
        return small_cluster(name=name, flops=flops, **{"devices": 2, **fast, **more})

    return write


def loss_fn(weights: Any, x: jax.Array) -> jax.Array:
    for number, weight in enumerate(weights):
        if number:
            alpa.mark_layer_boundary()
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def train_step(weights: Any, x: jax.Array) -> Any:
    loss, grads = alpa.value_and_grad(loss_fn)(weights, x)
    return jax.tree.map(lambda w, g: w - RATE * g, weights, grads), loss


def plain_step(weights: Any, x: jax.Array) -> Any:
    loss, grads = jax.value_and_grad(loss_fn)(weights, x)
    return jax.tree.map(lambda w, g: w - RATE * g, weights, grads), loss


def arguments(width: int = WIDTH) -> tuple[Any, np.ndarray]:
    draw = np.random.default_rng(0).normal
    weights = [draw(size=(width, width)).astype(np.float32) / width**0.5 for _ in range(LAYERS)]
    return weights, draw(size=(BATCH, width)).astype(np.float32)


def step_on(cluster: str, executor: str = "local", **options: Any) -> Parallelized[..., Any]:
    return alpa.parallelize(
        train_step,
        cluster=cluster,
        executor=executor,
        num_micro_batches=BATCHES,
        batch_argnums=1,
        workers=WorkerOptions(cache_directory=None, timeout_seconds=300),
        **options,
    )


def planned(cluster: str, options: str = "") -> ir.Module:
    arrays = jax.tree.map(lambda it: jax.ShapeDtypeStruct(it.shape, it.dtype), arguments())
    text = jax.jit(plain_step, donate_argnums=0).lower(*arrays).as_text(debug_info=True)
    return passes.run(
        text,
        f"alpa{{cluster={cluster} num-micro-batches={BATCHES} micro-batches=independent "
        f"num-layers={LAYERS} {options}}}",
    )


def layers_of(module: ir.Module) -> list[tuple[MeshAssignment, int]]:
    """The meshes and how many layers each has."""
    report = PlanReport.of(module)
    return [(mesh, len(it.layers)) for mesh, it in zip(report.meshes, report.stages, strict=True)]


def seconds(module: ir.Module) -> float:
    plan = Plan.read(main_function(module))
    assert plan is not None
    return plan.predicted_step_seconds


@pytest.mark.parametrize("executor", ["local", pytest.param("ray", marks=pytest.mark.slow)])
@pytest.mark.usefixtures("ray_cluster")
def test_steps_equal_plain_jax(kind: Kind, executor: str) -> None:
    cluster = f"{kind('slow', 1e9)}+{kind('fast', 3e9)}"
    weights, x = arguments()
    expected, expected_loss = jax.jit(plain_step)(weights, x)
    step = step_on(cluster, executor)
    found, loss = step(weights, x)
    rows = compare(
        [np.asarray(it) for it in [*jax.tree.leaves(found), loss]],
        [np.asarray(it) for it in [*jax.tree.leaves(expected), expected_loss]],
    )
    assert [row for row in rows if not row.ok] == []
    assert {mesh.device for mesh in step.plan(weights, x).meshes} == {"slow", "fast"}


def test_faster_devices_get_more_layers(kind: Kind) -> None:
    slow, fast = kind("slow", 1e9), kind("fast", 3e9)
    found = layers_of(planned(f"{slow}+{fast}"))
    layers = {name: sum(n for mesh, n in found if mesh.device == name) for name in ("slow", "fast")}
    assert layers == {"slow": 2, "fast": 6}
    for mesh, _ in found:
        cluster = parse_cluster(f"{slow}+{fast}")
        assert cluster.of(mesh.hosts).device.name == mesh.device


def test_both_kinds_are_better_than_one_and_than_all_as_the_slower(
    kind: Kind,
) -> None:
    slow, fast = kind("slow", 1e9), kind("fast", 3e9)
    whole = seconds(planned(f"{slow}+{fast}"))
    assert whole < 0.9 * seconds(planned(str(fast)))
    assert whole < 0.9 * seconds(planned(str(slow)))
    assert whole < 0.9 * seconds(planned(str(kind("slower", 1e9, hosts=2))))


def test_a_kind_that_does_not_help_is_left_idle(kind: Kind) -> None:
    slow, fast = kind("slow", 1e6), kind("fast", 3e9)
    module = planned(f"{slow}+{fast}")
    assert seconds(module) == pytest.approx(seconds(planned(str(fast))), rel=1e-9)
    assert "left idle: 1 host (0)" in plan_table(module)


def test_one_kind_named_twice_is_one_kind(kind: Kind) -> None:
    fast = kind("fast", 3e9)
    twice = planned(f"{fast}+{fast}")
    once = planned(str(kind("fast", 3e9, hosts=2)))
    assert seconds(twice) == seconds(once)
    meshes = [read_meshes(main_function(it)) for it in (twice, once)]
    assert meshes[0] == meshes[1]
    assert all(mesh.device == "" for mesh in meshes[0])


@pytest.mark.parametrize("sizes", [*product([3, 6], [3, 6])])
def test_hosts_of_3_and_of_6_devices(kind: Kind, sizes: tuple[int, int]) -> None:
    cluster = "+".join(
        str(kind(name, flops, devices=size))
        for name, flops, size in zip(("slow", "fast"), (1e9, 2e9), sizes, strict=True)
    )
    found = layers_of(planned(cluster))
    used = [device for mesh, _ in found for device in mesh.devices]
    assert sorted(used) == [*range(sum(sizes))]
    for mesh, _ in found:
        inside = range(sizes[0]) if mesh.device == "slow" else range(sizes[0], sum(sizes))
        assert {*mesh.devices} <= {*inside}


def test_memory_is_that_of_each_kind(kind: Kind) -> None:
    # As fast as the others, with which they share the layers evenly if they have the memory.
    slow, fast = kind("slow", 1e9, memory="400KiB"), kind("fast", 1e9)
    module = planned(f"{slow}+{fast}")
    report = PlanReport.of(module)
    peaks = {"slow": 0, "fast": 0}
    for mesh, stage in zip(report.meshes, report.stages, strict=True):
        assert stage.peak_bytes is not None
        peaks[mesh.device] = max(peaks[mesh.device], stage.peak_bytes)
    assert 0 < peaks["slow"] <= 400 * 2**10 < peaks["fast"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("equal-layers=true", "equal-layers is for equal stages, and the cluster has hosts of"),
        ("meshes=0-3:4", "holds '0-3:4'; a mesh is on hosts of one kind"),
        ("mesh-shape=8", "mesh-shape 8 has 8 devices; equal submeshes of 1x2, 1x2 have 1, 2"),
        ("num-stages=5", "cannot make 5 stages of 8 layer(s) on 4 device(s)"),
    ],
)
def test_what_mixed_clusters_refuse(kind: Kind, options: str, message: str) -> None:
    cluster = f"{kind('slow', 1e9)}+{kind('fast', 3e9)}"
    with pytest.raises(ir.MLIRError, match=re.escape(message)):
        planned(cluster, options)


def test_elastic_training_is_for_one_kind(kind: Kind) -> None:
    cluster = f"{kind('slow', 1e9)}+{kind('fast', 3e9)}"
    with pytest.raises((ValueError, PlanningError), match="hosts of several kinds"):
        step_on(cluster, "ray", elastic=True)
