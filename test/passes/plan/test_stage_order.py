"""The stages of a planned program."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

import alpa.passes
from alpa.dialects.attributes import Part
from alpa.dialects.plan import Plan
from alpa.passes.plan.data import DeviceMesh, Fragment, Program, Value
from alpa.passes.plan.reader import read_planned
from alpa.passes.plan.stage_order import schedule_of_stages, stages_of


def test_a_second_part_that_its_update_delays_is_of_its_stage(small_cluster: Any) -> None:
    """Merged with the update, it comes behind the backward of the stage before."""

    def loss(weights: list[jax.Array], x: jax.Array, y: jax.Array) -> tuple[jax.Array, jax.Array]:
        # A stage without parameters, so that its mesh updates those of one stage.
        h = jnp.fft.fft(x @ weights[0]).real
        h = jnp.fft.irfft(jnp.fft.rfft(h @ weights[1]), n=16)
        return jnp.mean((h - y) ** 2), h

    def step(
        weights: list[jax.Array], x: jax.Array, y: jax.Array
    ) -> tuple[list[jax.Array], jax.Array]:
        gradients, h = jax.grad(loss, has_aux=True)(weights, x, y)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], h

    weights = [jax.ShapeDtypeStruct((16, 16), jnp.float32)] * 2
    x = jax.ShapeDtypeStruct((8, 16), jnp.float32)
    text = jax.jit(step, donate_argnums=0).lower(weights, x, x).as_text()
    cluster = small_cluster(hosts=2, devices=2, flops=1e6, memory_bandwidth=1e7, bandwidth=1e11)
    options = f"cluster={cluster} schedule=v-min num-layers=4 num-stages=4"
    module = alpa.passes.run(text, f"alpa{{{options}}},merge-fragments")
    program = read_planned(module)
    stages = stages_of(program)
    assert [{f.stage for fs in stage.values() for f in fs} for stage in stages] == [
        {0},
        {1},
        {2},
        {3},
    ]
    assert [f.half for f in stages[2]["backward"]] == ["input", "weight"]
    assert schedule_of_stages(program, stages).num_stages == 4


def test_a_stage_that_reads_nothing_of_the_one_before_may_stand_in_front_of_it() -> None:
    def run(stage: int, part: Part, reads: list[int], made: int) -> Fragment:
        mesh = f"mesh_{min(stage, 3 - stage)}"
        return Fragment(
            name=f"{stage}.{part}",
            mesh=mesh,
            part=part,
            inputs=tuple(reads),
            outputs=(made,),
            stage=stage,
        )

    steps = (
        run(0, "forward", [], 0),
        run(1, "forward", [], 1),
        run(3, "forward", [0], 2),
        run(2, "forward", [1], 3),
        run(2, "backward", [3], 4),
        run(3, "backward", [2], 5),
        run(1, "backward", [4], 6),
        run(0, "backward", [5], 7),
    )
    program = Program(
        values=tuple(Value(mesh=it.mesh, shape=(2,), dtype="f32") for it in steps),
        arguments=(),
        results=(),
        steps=steps,
        meshes=tuple(
            DeviceMesh(name=f"mesh_{n}", hosts=(n,), devices=(n,), axes=()) for n in range(2)
        ),
        plan=Plan(num_micro_batches=1, schedule="zb-v"),
    )
    stages = stages_of(program)
    found = [[f.name for kind in ("forward", "backward") for f in it[kind]] for it in stages]
    assert found == [[f"{n}.forward", f"{n}.backward"] for n in range(4)]
    assert schedule_of_stages(program, stages).num_stages == 4
