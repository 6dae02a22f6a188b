"""What merged fragments take, and when they run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from alpa import passes
from alpa.dialects import body, ir, main_function, mpmd
from alpa.dialects.attributes import SECONDS, read_float
from alpa.passes.plan.instructions import Run, write_script
from alpa.passes.plan.reader import read_planned
from alpa.tools import zoo

PROGRAM = zoo.get("gpt-tiny", optimizer="sgd", num_layers=2)
TWO_STAGES = "cluster=cpu:1x2 num-layers=2 num-stages=2 num-micro-batches=4"

BOTH_MULTIPLY = """
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  func.func public @main(%x: !x) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>,
                      logical_shape = array<i64: 2>}],
      alpa.plan = {cluster = "CLUSTER", num_micro_batches = 1 : i64, schedule = "gpipe",
                   predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x)
        {alpa.part = "forward", alpa.seconds = 10.0 : f64} (%a: tensor<8x8xf32>) {
      %2 = stablehlo.dot %a, %a : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
      mpmd.return %2 : tensor<8x8xf32>
    } : (!x) -> !x
    %1 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)]> (%0, %x)
        {alpa.part = "backward", alpa.seconds = 10.0 : f64}
        (%a: tensor<8x8xf32>, %b: tensor<8x8xf32>) {
      %2 = stablehlo.dot %b, %b : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
      %3 = stablehlo.dot %2, %a : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
      mpmd.return %3 : tensor<8x8xf32>
    } : (!x, !x) -> !x
    return %1 : !x
  }
}
"""


def fragments(module: ir.Module) -> list[mpmd.FragmentOp]:
    found = body(main_function(module)).operations
    return [op for op in found if isinstance(op, mpmd.FragmentOp)]


def test_calls_that_are_saved_take_no_time(small_cluster: Callable[..., Path]) -> None:
    start, per_argument, per_shard = 1e-3, 1e-4, 1e-5
    # Ops take no time, so that those that are computed once save none.
    path = small_cluster(devices=2, flops=1e30, memory_bandwidth=1e30)
    path.write_text(
        f"{path.read_text()}\n[device.call]\nstart = {start}\nper_argument = {per_argument}\n"
        f"per_shard = {per_shard}\n"
    )
    options = f"cluster={path} num-layers=1 num-stages=1 num-micro-batches=1"
    planned = passes.run(PROGRAM.lower(2), f"alpa{{{options}}}")
    merged = passes.run(str(planned), "merge-fragments")
    calls, seconds = list[float](), list[float]()
    for module in (planned, merged):
        found = fragments(module)
        crossing = sum(len(it.operands) + len(it.results) for it in found)
        calls.append(len(found) * start + crossing * (per_argument + 2 * per_shard))
        seconds.append(sum(read_float(it, SECONDS) or 0.0 for it in found))
    assert (len(fragments(planned)), len(fragments(merged))) == (3, 1)
    assert calls[1] < calls[0]
    assert seconds[0] - seconds[1] == pytest.approx(calls[0] - calls[1])


def test_what_both_parts_compute_takes_its_time_once(small_cluster: Callable[..., Path]) -> None:
    flops, devices = 1e3, 2
    cluster = small_cluster(devices=devices, flops=flops)
    (merged,) = fragments(
        passes.run(BOTH_MULTIPLY.replace("CLUSTER", str(cluster)), "merge-fragments")
    )
    saved = 8 * 8 * (8 + 7) / flops / devices
    assert read_float(merged, SECONDS) == pytest.approx(20 - saved)


def test_the_last_stage_does_not_wait_for_all_micro_batches() -> None:
    planned = passes.run(PROGRAM.lower(1), f"alpa{{{TWO_STAGES} schedule=gpipe}}")
    program = read_planned(passes.run(str(planned), "merge-fragments"))
    runs = [
        (it.fragment.mesh, it.fragment.part)
        for it in write_script(program).instructions
        if isinstance(it, Run) and it.fragment.part != "update"
    ]
    forward, backward, merged = (
        ("mesh_0", "forward"),
        ("mesh_0", "backward"),
        ("mesh_1", "backward"),
    )
    assert [it for it in runs if it[0] == "mesh_0"] == 4 * [forward] + 4 * [backward]
    assert runs.count(merged) == 4
    # The last stage starts while the first one runs its forwards.
    last_forward = len(runs) - 1 - runs[::-1].index(forward)
    assert runs.index(merged) < last_forward
