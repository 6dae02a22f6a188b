"""The planner with `remat=auto`: never slower than with every layer or none rematerialised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa import passes
from alpa.dialects import ir, main_function, parse
from alpa.dialects.plan import Plan
from alpa.passes.alpa import Alpa
from alpa.passes.base import Pass, Remark
from alpa.passes.stage_mesh_partition import StageMeshPartition
from alpa.tools import zoo
from alpa.tools.programs import lowered

NOISE = 0.02
"""The gap of `ilp-shard-annotate`."""

Cluster = Callable[..., Path]


@pytest.fixture(scope="module")
def program() -> str:
    """Four layers that are narrow at their ends and wide between."""

    def loss(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for wide, narrow in params:
            x = x + jnp.sin(jnp.tanh(x @ wide)) @ narrow
        return jnp.mean(x**2)

    def step(params: list[tuple[jax.Array, jax.Array]], x: jax.Array):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shapes = [(jnp.zeros((16, 256)), jnp.zeros((256, 16)))] * 4
    text = jax.jit(step, donate_argnums=0).lower(shapes, jnp.zeros((256, 16))).as_text()
    return text.replace(
        "tensor<f32> {jax.result_info", 'tensor<f32> {alpa.result = "mean", jax.result_info'
    )


def planned(text: str, cluster: Cluster, memory: int, remat: str) -> Plan | None:
    """The plan for devices of so many KiB, if there is one."""
    file = cluster(f"{memory}KiB")
    options = f"cluster={file} num-layers=4 num-micro-batches=4 schedule=1f1b processes=0"
    try:
        module = passes.run(text, f"alpa{{{options} remat={remat}}}")
    except ir.MLIRError:
        return None
    return Plan.read(main_function(module))


def check_auto_is_best(text: str, cluster: Cluster, memory: int) -> Plan | None:
    plans = {remat: planned(text, cluster, memory, remat) for remat in ("auto", "layer", "none")}
    others = [p.predicted_step_seconds for r in ("layer", "none") if (p := plans[r]) is not None]
    auto = plans["auto"]
    if auto is None:
        assert not others
        return None
    assert max(auto.predicted_peak_bytes) <= memory * 1024
    assert auto.predicted_step_seconds <= min(others, default=np.inf) * (1 + NOISE)
    return auto


@pytest.mark.parametrize("memory", [pytest.param(437, marks=pytest.mark.slow), 825])
def test_auto_is_no_slower_than_layer_and_none(
    program: str, small_cluster: Cluster, memory: int
) -> None:
    check_auto_is_best(program, small_cluster, memory)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(40))
def test_auto_is_no_slower_at_any_memory(program: str, small_cluster: Cluster, seed: int) -> None:
    memory = int(np.random.default_rng(seed).integers(280, 1600))
    check_auto_is_best(program, small_cluster, memory)


@pytest.mark.parametrize(
    ("memory", "cuts"),
    [(825, {"auto"}), pytest.param(437, {"auto", "layer"}, marks=pytest.mark.slow)],
)
def test_all_layers_are_rematerialised_only_if_estimates_are_too_high(
    program: str, small_cluster: Cluster, memory: int, cuts: set[str]
) -> None:
    """The finished step of 825 KiB takes 0.4 % less than its estimate, that of 437 KiB 4 %."""
    found: set[str] = set()

    def run(step: Pass, module: ir.Module, remark: Remark) -> None:
        if isinstance(step, StageMeshPartition):
            found.add(step.remat)
        step.run(module, remark)

    options = {
        "cluster": str(small_cluster(f"{memory}KiB")),
        "num-layers": "4",
        "num-micro-batches": "4",
        "schedule": "1f1b",
        "processes": "0",
    }
    module = parse(program)
    with module.context, ir.Location.unknown():
        Alpa.from_options(options).drive(module, lambda *_: None, run)
    assert found == cuts


@pytest.mark.slow
def test_stages_whose_estimates_are_too_high_are_found(
    program: str, small_cluster: Cluster
) -> None:
    """By its estimate, the fast stage holds more than there is, at most 3 %; its shardings fit."""
    plan = check_auto_is_best(program, small_cluster, 455)
    assert plan is not None
    layers = passes.run(program, "simplify-trivial-ops,layer-cluster{num-layers=4}")
    cut = f"cluster={small_cluster('455KiB')} num-micro-batches=4 schedule=1f1b processes=0"
    within = Plan.read(main_function(passes.run(layers, f"stage-mesh-partition{{{cut}}}")))
    assert within is not None
    assert plan.estimated_step_seconds < 0.6 * within.estimated_step_seconds
    assert plan.predicted_step_seconds < 0.6 * within.estimated_step_seconds


@pytest.mark.slow
def test_auto_is_no_slower_for_a_model_that_fills_its_gpus() -> None:
    text = str(lowered(zoo.get("gpt-2.6b"), 8))
    options = "cluster=v100-16gb:1x8 num-micro-batches=128 schedule=1f1b"
    seconds: dict[str, float] = {}
    for remat in ("auto", "layer"):
        plan = Plan.read(main_function(passes.run(text, f"alpa{{{options} remat={remat}}}")))
        assert plan is not None
        seconds[remat] = plan.predicted_step_seconds
    assert seconds["auto"] <= seconds["layer"] * (1 + NOISE)
    assert seconds["auto"] < 52  # 53.4 s where stages must fit by their estimates
