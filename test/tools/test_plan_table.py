"""`plan_table`: the whole text of a small plan, and the parts that an incomplete plan lacks."""

from __future__ import annotations

from pathlib import Path

import pytest

from alpa import passes
from alpa.dialects import parse
from alpa.dialects.checks import CheckError
from alpa.passes.plan.table import plan_table
from alpa.tools.plan_table import main

# y = (x w0) w1, with an update that keeps a moment m0 of w0; one mesh for each weight.
PLANNED = """\
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x16xf32>, sharding=<@mesh_0, [{"axis0"}, {}]>>
!w0 = !mpmd.mesh_tensor<"mesh_0", tensor<16x32xf32>, sharding=<@mesh_0, [{}, {"axis1"}]>>
!m0 = !mpmd.mesh_tensor<"mesh_0", tensor<16x32xf32>, sharding=<@mesh_0, [{"axis0", "axis1"}, {}]>>
!h0 = !mpmd.mesh_tensor<"mesh_0", tensor<8x32xf32>, sharding=<@mesh_0, [{"axis0"}, {"axis1"}]>>
!w1 = !mpmd.mesh_tensor<"mesh_1", tensor<32x16xf32>, sharding=<@mesh_1, [{}, {}]>>
!h1 = !mpmd.mesh_tensor<"mesh_1", tensor<8x32xf32>, sharding=<@mesh_1, [{"axis0"}, {}]>>
!y = !mpmd.mesh_tensor<"mesh_1", tensor<8x16xf32>, sharding=<@mesh_1, [{"axis0"}, {}]>>
module {
  func.func public @main(
      %w0: !w0 {alpa.input = 0 : i64, alpa.role = "state", tf.aliasing_output = 0 : i32},
      %m0: !m0 {alpa.input = 1 : i64, alpa.role = "state", tf.aliasing_output = 1 : i32},
      %w1: !w1 {alpa.input = 2 : i64, alpa.role = "state", tf.aliasing_output = 2 : i32},
      %x: !x {alpa.input = 3 : i64, alpa.role = "batch", alpa.batch_dim = 0 : i64})
      -> (!w0 {alpa.result = "state:0"}, !m0 {alpa.result = "state:1"},
          !w1 {alpa.result = "state:2"}, !y {alpa.result = "concat:0"})
      attributes {
        topology = #mpmd.topology<<"mesh_0" : <["axis0"=2, "axis1"=2]>>,
                                  <"mesh_1" : <["axis0"=4]>>>,
        alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>,
                        devices = array<i64: 0, 1, 2, 3>, logical_shape = array<i64: 2, 2>},
                       {name = "mesh_1", hosts = array<i64: 1>,
                        devices = array<i64: 4, 5, 6, 7>, logical_shape = array<i64: 4>}],
        alpa.plan = {num_micro_batches = 8 : i64, schedule = "1f1b",
                     predicted_step_seconds = 2.4e-3 : f64, cluster = "cpu:2x4",
                     predicted_peak_bytes = array<i64: 1073741824, 1024>}} {
    %h = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0), "layer_1"(0)], stage=0> (%w0, %x)
        {alpa.part = "forward", alpa.seconds = 3.0e-5 : f64}
        (%a: tensor<16x32xf32>, %b: tensor<8x16xf32>) {
      %0 = stablehlo.dot_general %b, %a, contracting_dims = [1] x [0]
        : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32>
      mpmd.return %0 : tensor<8x32xf32>
    } : (!w0, !x) -> !h0
    %h1 = mpmd.transfer
      {alpa.reshard = {method = "send_recv", slow_bytes = 1024 : i64, fast_bytes = 512 : i64}}
      %h : (!h0) -> !h1
    %y = mpmd.fragment<mesh="mesh_1", origin=["layer_2"(0)], stage=1> (%w1, %h1)
        {alpa.part = "forward", alpa.seconds = 6.0e-5 : f64}
        (%a: tensor<32x16xf32>, %b: tensor<8x32xf32>) {
      %0 = stablehlo.dot_general %b, %a, contracting_dims = [1] x [0]
        : (tensor<8x32xf32>, tensor<32x16xf32>) -> tensor<8x16xf32>
      mpmd.return %0 : tensor<8x16xf32>
    } : (!w1, !h1) -> !y
    %g:2 = mpmd.fragment<mesh="mesh_1", origin=["layer_2"(1)], stage=1> (%w1, %h1, %y)
        {alpa.part = "backward", alpa.seconds = 1.2e-4 : f64}
        (%a: tensor<32x16xf32>, %b: tensor<8x32xf32>, %c: tensor<8x16xf32>) {
      %0 = stablehlo.dot_general %b, %c, contracting_dims = [0] x [0]
        : (tensor<8x32xf32>, tensor<8x16xf32>) -> tensor<32x16xf32>
      %1 = stablehlo.dot_general %c, %a, contracting_dims = [1] x [1]
        : (tensor<8x16xf32>, tensor<32x16xf32>) -> tensor<8x32xf32>
      mpmd.return %0, %1 : tensor<32x16xf32>, tensor<8x32xf32>
    } : (!w1, !h1, !y) -> (!w1, !h1)
    %d = mpmd.transfer
      {alpa.reshard = {method = "send_recv", slow_bytes = 1024 : i64, fast_bytes = 0 : i64}}
      %g#1 : (!h1) -> !h0
    %g0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%x, %d)
        {alpa.part = "backward", alpa.seconds = 6.0e-5 : f64}
        (%b: tensor<8x16xf32>, %c: tensor<8x32xf32>) {
      %0 = stablehlo.dot_general %b, %c, contracting_dims = [0] x [0]
        : (tensor<8x16xf32>, tensor<8x32xf32>) -> tensor<16x32xf32>
      mpmd.return %0 : tensor<16x32xf32>
    } : (!x, !h0) -> !w0
    %n0:2 = mpmd.fragment<mesh="mesh_0", origin=["update_0"(0)], stage=0> (%w0, %m0, %g0)
        {alpa.part = "update", alpa.seconds = 1.0e-5 : f64}
        (%a: tensor<16x32xf32>, %m: tensor<16x32xf32>, %b: tensor<16x32xf32>) {
      %0 = stablehlo.add %m, %b : tensor<16x32xf32>
      %1 = stablehlo.subtract %a, %0 : tensor<16x32xf32>
      mpmd.return %1, %0 : tensor<16x32xf32>, tensor<16x32xf32>
    } : (!w0, !m0, !w0) -> (!w0, !m0)
    %n1 = mpmd.fragment<mesh="mesh_1", origin=["update_2"(0)], stage=1> (%w1, %g#0)
        {alpa.part = "update", alpa.seconds = 1.0e-5 : f64}
        (%a: tensor<32x16xf32>, %b: tensor<32x16xf32>) {
      %0 = stablehlo.subtract %a, %b : tensor<32x16xf32>
      mpmd.return %0 : tensor<32x16xf32>
    } : (!w1, !w1) -> !w1
    return %n0#0, %n0#1, %n1, %y : !w0, !m0, !w1, !y
  }
}
"""
TABLE = """\
plan for cpu:2x4 (2 hosts x 4 CPU): 2 stages, 8 micro-batches, 1f1b, predicted step 2.4 ms
micro-batches: not checked

stage    mesh  hosts  devices  shape  layers  forward  backward  update    state   peak  memory
    0  mesh_0      0      0-3    2x2     0-1    30 us     60 us   10 us  1.5 KiB  1 GiB    6.2%
    1  mesh_1      1      4-7      4       2    60 us    120 us   10 us    2 KiB  1 KiB   <0.1%
(seconds per micro-batch, of the update per step; bytes per device; peak as a share of 16 GiB)
stage 0: batch on axis0, hidden on axis1
         a device holds 1/2 of the parameters and 1/4 of the optimizer's state
stage 1: batch on axis0
         a device holds all the parameters

what limits it
  stage 1 is the slowest: 180 us of 270 us per micro-batch, 67% where 50% would be even
  pipeline bubble: (S-1)/(S-1+B) = 11% with S=2 stages, B=8 micro-batches (auto finds the best B)
  step 2.4 ms = 60% slowest stage (8 x 180 us) + 3.8% fill and drain + 36% transfers and update
  memory: stage 0 is the fullest; 15 GiB of 16 GiB per device stay free (94%)
  stage 1 holds 2 KiB of state per device, more than its predicted peak, which assumes an even split

inside       sent  collectives  combined  priced as  of these
stage 0  31.5 KiB           35        35         35  all-gather 27, all-reduce 8
stage 1    33 KiB           24        24         24  all-gather 16, all-reduce 8
(per step and device; combined: what the compiler makes of them)

crosses  per          values  bytes  between hosts  inside hosts  methods
0 -> 1   micro-batch       1  1 KiB          1 KiB         512 B  send_recv 1
1 -> 0   micro-batch       1  1 KiB          1 KiB           0 B  send_recv 1

strategy
  stage 0 (axis0=2, axis1=2)
    batch: 1 tensor, 512 B
      batch on axis0: 1 of 1, 512 B
    parameters: 1 tensor, 2 KiB
      dim 1 on axis1: 1 of 1, 2 KiB
    state that only the update reads: 1 tensor, 2 KiB
      dim 0 on axis0+axis1: 1 of 1, 2 KiB
  stage 1 (axis0=4)
    parameters: 1 tensor, 2 KiB
      replicated: 1 of 1, 2 KiB
    activations that the backward part reads: 2 tensors, 1.5 KiB
      dim 0 on axis0: 2 of 2, 1.5 KiB

roles
  state, parameters: 2 arguments (0,2)
  state, read by the update only: 1 argument (1)
  batch: 1 argument (3)
  new state: 3 results (0-2)
  concat:0: 1 result (3)
"""


def test_the_whole_table() -> None:
    assert plan_table(parse(PLANNED)) == TABLE


def test_rematerialised_layers_are_named() -> None:
    backward = '{alpa.part = "backward", alpa.seconds = 1.2e-4 : f64}'
    marked = backward.replace("}", ", alpa.remat = array<i64: 2>}")
    assert PLANNED.count(backward) == 1
    table = plan_table(parse(PLANNED.replace(backward, marked)))
    assert "\nstage 1: remat: layers 2\n" in table
    assert "stage 0: remat" not in table


def test_equal_strategies_stand_together() -> None:
    table = plan_table(parse(PIPELINED))
    assert table.count("(axis0=2)") == 1
    assert "  stages 0-1 (axis0=2)\n" in table


def test_balanced_stages_have_no_slowest() -> None:
    even = PLANNED.replace("3.0e-5", "6.0e-5").replace("1.2e-4", "6.0e-5")
    assert "  the stages are balanced: each takes 120 us per micro-batch\n" in plan_table(
        parse(even)
    )


def test_one_micro_batch_gains_nothing() -> None:
    text = PLANNED.replace("num_micro_batches = 8", "num_micro_batches = 1")
    table = plan_table(parse(text))
    assert "with S=2 stages; one micro-batch: stages take turns" in table


@pytest.mark.parametrize(
    ("said", "line"),
    [
        ("exact", "exact (proven)"),
        (
            "exact if sums over samples are parts of means",
            "exact if sums over samples are parts of means (proven)",
        ),
        ("independent", "independent (as asked)"),
        (None, "not checked"),
    ],
)
def test_what_is_proven_of_micro_batches(said: str | None, line: str) -> None:
    attributes = f'module attributes {{alpa.micro_batches = "{said}"}} {{' if said else "module {"
    table = plan_table(parse(PLANNED.replace("module {", attributes)))
    assert f"\nmicro-batches: {line}\n" in table


def test_memory_is_unknown_where_the_cluster_is() -> None:
    table = plan_table(parse(PLANNED.replace("cpu:2x4", "elsewhere.toml")))
    assert table.startswith("plan for elsewhere.toml: 2 stages")
    assert "memory" not in table


def test_before_the_shardings_are_chosen() -> None:
    pipeline = (
        "simplify-trivial-ops,layer-cluster{num-layers=1},stage-mesh-partition{cluster=cpu:1x2}"
    )
    table = plan_table(passes.run(PROGRAM, pipeline))
    assert "one stage: no pipeline, so no bubble" in table
    assert "    parameters: 1 tensor, 1 KiB\n      not sharded yet: 1 of 1, 1 KiB\n" in table
    assert "crosses" not in table


def test_small_tensors_are_left_out_of_the_peak() -> None:
    table = plan_table(passes.run(PROGRAM, "alpa{cluster=cpu:1x1}"))
    assert (
        "  stage 0 holds 1 KiB of state per device, more than its predicted peak, which leaves out "
        "tensors below 4 KiB\n"
    ) in table


def test_two_stages_of_one_mesh_are_no_pipeline() -> None:
    product = "stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]"
    again = product.replace("%x", "%0")
    types = "(tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>"
    program = f"""
        func.func @main(%w: tensor<16x16xf32> {{alpa.role = "constant"}},
                        %x: tensor<8x16xf32> {{alpa.role = "batch", alpa.batch_dim = 0 : i64}})
            -> (tensor<8x16xf32> {{alpa.result = "concat:0"}}) {{
          %0 = {product} : {types}
          %1 = {again} : {types}
          return %1 : tensor<8x16xf32>
        }}"""
    pipeline = "alpa{cluster=cpu:1x1 schedule=zb-v num-layers=2 num-micro-batches=2}"
    table = plan_table(passes.run(program, pipeline))
    assert "2 stages on 1 mesh" in table
    assert "  one mesh: no pipeline, so no bubble\n" in table


def test_a_program_that_is_not_planned() -> None:
    with pytest.raises(CheckError, match="it is not planned yet"):
        plan_table(parse(PROGRAM))


PROGRAM = """\
func.func public @main(
    %w: tensor<16x16xf32> {alpa.role = "state", tf.aliasing_output = 0 : i32},
    %x: tensor<8x16xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<16x16xf32> {alpa.result = "state:0"}) {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
  %1 = stablehlo.dot_general %x, %0, contracting_dims = [0] x [0]
    : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
  %2 = stablehlo.subtract %w, %1 : tensor<16x16xf32>
  return %2 : tensor<16x16xf32>
}
"""
# Two equal stages without a backward part.
PIPELINED = """\
!a = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{"axis0"}]>>
!b = !mpmd.mesh_tensor<"mesh_1", tensor<8xf32>, sharding=<@mesh_1, [{"axis0"}]>>
module {
  func.func public @main(%x: !a {alpa.role = "batch", alpa.batch_dim = 0 : i64},
                         %y: !b {alpa.role = "batch", alpa.batch_dim = 0 : i64})
      -> (!b {alpa.result = "concat:0"}) attributes {
        topology = #mpmd.topology<<"mesh_0" : <["axis0"=2]>>, <"mesh_1" : <["axis0"=2]>>>,
        alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1>,
                        logical_shape = array<i64: 2>},
                       {name = "mesh_1", hosts = array<i64: 0>, devices = array<i64: 2, 3>,
                        logical_shape = array<i64: 2>}]} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)], stage=0> (%x)
        {alpa.part = "forward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!a) -> !a
    %1 = mpmd.transfer %0 : (!a) -> !b
    %2 = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(0)], stage=1> (%1, %y)
        {alpa.part = "forward"} (%a: tensor<8xf32>, %b: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!b, !b) -> !b
    return %2 : !b
  }
}
"""


def test_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "planned.mlir"
    path.write_text(PLANNED)
    assert main([str(path)]) == 0
    assert capsys.readouterr().out == TABLE


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "{path}: error: No such file or directory"),
        ("func.func @main(", "{path}:1:16: error: expected"),
        (PROGRAM, "{path}:1:1: error: the function has no mpmd.topology: it is not planned yet"),
        (PLANNED.replace('"1f1b"', '"zigzag"'), "{path}:8:1: error: "),
        (
            PLANNED.replace('"backward"', '"sideways"'),
            '{path}:43:12: error: alpa.part is "sideways"',
        ),
    ],
)
def test_command_line_errors(
    text: str | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "planned.mlir"
    if text is not None:
        path.write_text(text)
    assert main([str(path)]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(message.format(path=path))
