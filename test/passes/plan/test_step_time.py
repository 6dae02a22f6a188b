"""The predicted step: the schedule of the final plan, and its distance from the stage DP's T."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import alpa.passes
from alpa.dialects import ir, main_function
from alpa.dialects.attributes import Argument, Part
from alpa.dialects.plan import Plan, read_solver_reports
from alpa.passes.cost.cluster import Cluster
from alpa.passes.plan.data import (
    DeviceMesh,
    Fragment,
    Program,
    ProgramArgument,
    Transfer,
    Value,
)
from alpa.passes.plan.reader import read_planned
from alpa.passes.plan.step_time import seconds_in_turns, step_seconds
from alpa.tools import zoo


def mlp() -> str:
    def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss_of(params: list[jax.Array]) -> jax.Array:
            h = x
            for w in params:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        loss, grads = jax.value_and_grad(loss_of)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], loss

    params = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4
    text = jax.jit(step, donate_argnums=0).lower(params, jnp.ones((64, 256))).as_text()
    return text.replace(
        "tensor<f32> {jax.result_info", 'tensor<f32> {alpa.result = "mean", jax.result_info'
    )


def plan(text: str, cluster: str, options: str) -> tuple[float, ir.Module]:
    """T of the stage DP, and the final plan."""
    module = alpa.passes.run(
        text,
        "simplify-trivial-ops,layer-cluster{num-layers=4},"
        f"stage-mesh-partition{{cluster={cluster} {options}}}",
    )
    found = Plan.read(main_function(module))
    assert found is not None
    rest = "place-gradient-reductions,ilp-shard-annotate,insert-cross-mesh-reshard"
    return found.predicted_step_seconds, alpa.passes.run(module, rest)


def test_calls_of_modules_and_of_the_step_take_time(tmp_path: Path) -> None:
    """One stage of three modules: each takes its call, and so does the step."""
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    _, without = plan(mlp(), str(file), "num-stages=1")
    call = "call = { start = 1.0, per_argument = 0.01, per_shard = 0.001 }\n[intra_host]"
    file.write_text(CLUSTER.replace("[intra_host]", call))
    estimate, module = plan(mlp(), str(file), "num-stages=1")
    program = read_planned(module)
    values = sum(len(f.inputs) + len(f.outputs) for f in program.fragments)
    step_values = len(program.arguments) + len(program.results)
    calls = len(program.fragments) + 0.014 * values
    assert len(program.fragments) == 3
    assert step_seconds(program) == pytest.approx(step_seconds(read_planned(without)) + calls)
    whole = step_seconds(program) + 1 + 0.014 * step_values
    assert predicted(module) == pytest.approx(whole)
    # The search counts values between its layers, too.
    assert step_seconds(program) <= estimate <= 1.2 * step_seconds(program)


CLUSTER = """
hosts = 1
devices_per_host = 4
[device]
name = "X"
memory = "16GiB"
peak_flops = { f32 = 1e12 }
memory_bandwidth = 1e11
[intra_host]
bandwidth = 1e10
latency = 1e-6
[inter_host]
bandwidth = 1e10
latency = 1e-6
"""


def predicted(module: ir.Module) -> float:
    found = Plan.read(main_function(module))
    assert found is not None
    return found.predicted_step_seconds


def test_one_stage_takes_what_its_sharding_problem_costs() -> None:
    _, module = plan(mlp(), "cpu:1x4", "num-stages=1 num-micro-batches=3")
    (report,) = read_solver_reports(main_function(module))
    # The objective also has the small price of an argument's memory.
    assert predicted(module) == pytest.approx(report.objective, rel=1e-2)
    assert predicted(module) < report.objective


def test_hidden_transfers_count_in_the_objective_and_in_the_plan(tmp_path: Path) -> None:
    """Transfers take a third of the step, and a tenth of them is not hidden."""
    file, found = tmp_path / "cluster.toml", list[tuple[float, float]]()
    slow = CLUSTER.replace("f32 = 1e12", "f32 = 1e11").replace(
        "latency = 1e-6", "latency = 1e-6\ntransfer = { bandwidth = 4e8, latency = 0 }"
    )
    for text in (slow, slow.replace("latency = 1e-6", "latency = 1e-6\ntransfer_overlap = 0.9")):
        file.write_text(text)
        options = "num-stages=2 num-micro-batches=32 schedule=gpipe"
        objective, module = plan(mlp(), str(file), options)
        found.append((objective, predicted(module)))
        assert {it.overlap for it in read_planned(module).transfers} == {0.9 * (len(found) - 1)}
    (plain, plain_step), (hidden, hidden_step) = found
    assert plain == pytest.approx(plain_step, rel=0.1)
    assert hidden == pytest.approx(hidden_step, rel=0.1)
    assert hidden_step < 0.8 * plain_step


def test_1f1b_keeps_too_few_micro_batches_to_hide_transfers(tmp_path: Path) -> None:
    """The objective counts all of them, and is at most 1 / S of them too high."""
    file, found = tmp_path / "cluster.toml", list[tuple[float, float]]()
    slow = CLUSTER.replace("f32 = 1e12", "f32 = 1e11")
    for share in ("0", "0.9"):
        more = f"\ntransfer = {{ bandwidth = 4e8, latency = 0 }}\ntransfer_overlap = {share}"
        file.write_text(slow.replace("latency = 1e-6", "latency = 1e-6" + more))
        options = "num-stages=2 num-micro-batches=32 schedule=1f1b"
        objective, module = plan(mlp(), str(file), options)
        found.append((objective, predicted(module)))
    (plain, plain_step), (hidden, hidden_step) = found
    assert plain == hidden == pytest.approx(plain_step, rel=0.02)
    assert hidden_step < plain_step < 1.25 * hidden_step


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b"])
def test_the_objective_is_near_the_final_plan(schedule: str) -> None:
    options = f"num-stages=2 num-micro-batches=8 schedule={schedule}"
    objective, module = plan(mlp(), "cpu:1x4", options)
    assert objective == pytest.approx(predicted(module), rel=0.05)
    assert predicted(module) == step_seconds(read_planned(module))


@pytest.mark.slow
def test_the_objective_is_near_the_final_plan_of_gpt() -> None:
    text = zoo.get("gpt-350m").lower(8)
    objective, module = plan(text, "v100-16gb:2x2,ideal", "num-micro-batches=16 schedule=1f1b")
    assert objective == pytest.approx(predicted(module), rel=0.05)


def update_chain() -> Program:
    """Two meshes, one micro-batch; the first's update waits for the second's."""
    names = ("mesh_0", "mesh_1")
    where = ["mesh_0", "mesh_0", "mesh_1", "mesh_1", "mesh_1", "mesh_0", "mesh_0"]

    def run(mesh: int, part: Part, read: int, made: int, seconds: float) -> Fragment:
        return Fragment(
            name=f"{mesh}.{part}",
            mesh=names[mesh],
            part=part,
            inputs=(read,),
            outputs=(made,),
            seconds=seconds,
        )

    return Program(
        values=tuple(Value(mesh=mesh, shape=(2,), dtype="f32") for mesh in where),
        arguments=(ProgramArgument(value=0, number=0, attributes=Argument(role="batch")),),
        results=(),
        steps=(
            run(0, "forward", 0, 1, 10.0),
            Transfer(source=1, target=2, seconds=1.0),
            run(1, "forward", 2, 3, 20.0),
            run(1, "update", 3, 4, 5.0),
            Transfer(source=4, target=5, seconds=2.0),
            run(0, "update", 5, 6, 7.0),
        ),
        meshes=tuple(DeviceMesh(name=n, hosts=(0,), devices=(0,), axes=()) for n in names),
        plan=Plan(num_micro_batches=1),
    )


def test_updates_wait_for_one_another() -> None:
    assert step_seconds(update_chain()) == 10 + 1 + 20 + 5 + 2 + 7
    three = replace(update_chain(), plan=Plan(num_micro_batches=3))
    assert step_seconds(three) == 10 + 3 * (1 + 20) + 5 + 2 + 7


def test_what_computation_hides_of_a_transfer() -> None:
    """The first micro-batch waits for all of it. Later ones arrive while the mesh computes."""
    first, transfer, *others = update_chain().steps
    assert isinstance(transfer, Transfer)
    hidden = replace(transfer, overlap=0.75)
    program = replace(update_chain(), steps=(first, hidden, *others))
    assert step_seconds(program) == step_seconds(update_chain())
    three = replace(program, plan=Plan(num_micro_batches=3))
    assert step_seconds(three) == 10 + (1 + 20) + 2 * (0.25 + 20) + 5 + 2 + 7
    # If it takes longer than the work of a micro-batch, its link is the bottleneck.
    slow = replace(hidden, seconds=80.0)
    slower = replace(three, steps=(first, slow, *others))
    assert step_seconds(slower) == 10 + 3 * 60 + (20 + 20) + 5 + 2 + 7


def test_meshes_that_take_turns() -> None:
    cluster = Cluster.parse("cpu:1x2")
    assert seconds_in_turns(update_chain(), cluster) == step_seconds(update_chain())
    three = replace(update_chain(), plan=Plan(num_micro_batches=3))
    # The first mesh's forwards run beside the second's only where both work at the same time.
    assert seconds_in_turns(three, cluster) == 3 * (10 + 1 + 20) + 5 + 2 + 7


def test_a_mesh_is_faster_while_the_others_wait() -> None:
    ideal = Cluster.parse("cpu:1x2")
    device = replace(ideal.device, alone=((1.0, 0.5), (2.0, 1.0)))
    # Transfers of 1 and 2 s are no computation of the mesh.
    found = seconds_in_turns(update_chain(), replace(ideal, device=device))
    assert found == (10 + 20 + 5 + 7) / 2 + 1 + 2
