from __future__ import annotations

import pytest

from alpa.dialects import ir, make_context, parse
from alpa.dialects.mpmd_types import Origin
from alpa.passes.analysis.graph import element_bytes
from alpa.passes.base import PassError
from alpa.passes.plan.data import Fragment, Program, Value
from alpa.passes.plan.reader import origin_name, read_planned

# A loss on mesh_1, one weight on mesh_0. `%g` is a gradient that the update reads on mesh_1 and
# that a second backward fragment reads on mesh_0.
TEXT = """
!w = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>, sharding=<@mesh_0, [{"a"}]>>
!h = !mpmd.mesh_tensor<"mesh_1", tensor<8xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=2]>
  func.func public @main(
      %w: !w {alpa.input = 1 : i64, alpa.role = "state", jax.buffer_donor = true},
      %x: !w {alpa.input = 0 : i64, alpa.role = "batch", alpa.batch_dim = 0 : i64},
      %k: !w)
      -> (!h {alpa.result = "last", alpa.output = 1 : i64},
          !w {alpa.result = "state:1", alpa.output = 0 : i64}) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2]>>, <"mesh_1" : <["a"=1]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 1, 2>,
                      logical_shape = array<i64: 2>},
                     {name = "mesh_1", hosts = array<i64: 0>, devices = array<i64: 0>,
                      logical_shape = array<i64: 1>}],
      alpa.plan = {num_micro_batches = 2 : i64, schedule = "1f1b",
                   predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64>}} {
    %f = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)], stage=0> (%w, %x, %k)
        {alpa.part = "forward"} (%a: tensor<8xf32>, %b: tensor<8xf32>, %c: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w, !w, !w) -> !w
    %h = mpmd.transfer
      {alpa.reshard = {method = "send_recv", slow_bytes = 0 : i64, fast_bytes = 64 : i64}}
      %f : (!w) -> !h
    %g = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(1)], stage=1> (%h)
        {alpa.part = "backward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!h) -> !h
    %g0 = mpmd.transfer %g : (!h) -> !w
    %d = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%g0)
        {alpa.part = "backward"} (%a: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w) -> !w
    %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"(0)], stage=0> (%w, %g0, %d)
        {alpa.part = "update"} (%a: tensor<8xf32>, %b: tensor<8xf32>, %c: tensor<8xf32>) {
      mpmd.return %a : tensor<8xf32>
    } : (!w, !w, !w) -> !w
    return %h, %n : !h, !w
  }
}
"""
W, X, K, F, H, G, G0, D, N = range(9)


def program(batches: int = 2) -> Program:
    text = TEXT.replace("num_micro_batches = 2", f"num_micro_batches = {batches}")
    return read_planned(parse(text))


def test_it_outlives_the_module() -> None:
    it = program()
    assert [a.number for a in it.arguments] == [1, 0, 2]
    assert [(r.value, r.number) for r in it.results] == [(H, 1), (N, 0)]
    assert [m.devices for m in it.meshes] == [(1, 2), (0,)]
    assert [t.method for t in it.transfers] == ["send_recv", None]
    forward = it.fragments[0]
    assert forward == Fragment(
        name="mesh_0.layer_0.forward",
        mesh="mesh_0",
        part="forward",
        inputs=(W, X, K),
        outputs=(F,),
        origins=(Origin("layer_0", 0),),
        stage=0,
    )
    assert it.values[H].shape == (8,)
    assert it.values[H].dtype == "f32"
    assert it.values[W].sharding is not None
    assert it.values[W].sharding.axis_names == (("a",),)
    assert it.plan.schedule == "1f1b"


def test_what_micro_batches_make_of_values() -> None:
    it = program()
    assert it.parts[F] == it.parts[H] == "forward"
    assert it.parts[G] == it.parts[G0] == it.parts[D] == "backward"
    assert it.parts[K] is None
    assert it.varying == {X, F, H, G, G0, D}
    assert it.gradients == {G, D}
    assert it.totals == {G, G0, D}
    assert it.micro_used == {X, F, H, G, G0}
    assert not it.carries


@pytest.mark.parametrize(
    "dtype", ["i1", "ui4", "i8", "f8E4M3FN", "bf16", "f16", "i32", "f64", "complex<f32>"]
)
def test_bytes_of_an_element_are_those_of_its_type(dtype: str) -> None:
    with make_context():
        expected = element_bytes(ir.Type.parse(dtype))
    assert Value(mesh="mesh_0", shape=(3,), dtype=dtype).bytes == 3 * expected


WIDE = """
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8xf32>>
!n = !mpmd.mesh_tensor<"mesh_0", tensor<8xbf16>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  func.func public @main(%w: !n {alpa.role = "state"},
      %x: !n {alpa.role = "batch", alpa.batch_dim = 0 : i64})
      -> (!n {alpa.result = "mean"}, !n {alpa.result = "sum"}, !n {alpa.result = "state:0"})
      attributes {topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>>,
        alpa.plan = {num_micro_batches = 2 : i64, schedule = "gpipe",
          predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0>}} {
    %l:3 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"]> (%x) {alpa.part = "forward"}
        (%a: tensor<8xbf16>) {
      %0 = stablehlo.tanh %a : tensor<8xbf16>
      %1 = stablehlo.convert %0 : (tensor<8xbf16>) -> tensor<8xf32>
      %2 = sdy.sharding_constraint %1 <@mesh_0, [{}]> : tensor<8xf32>
      %3 = stablehlo.sine %a : tensor<8xbf16>
      mpmd.return %0, %2, %3 : tensor<8xbf16>, tensor<8xf32>, tensor<8xbf16>
    } : (!n) -> (!n, !x, !n)
    %n = mpmd.fragment<mesh="mesh_0", origin=["update_0"]> (%w, %l#1) {alpa.part = "update"}
        (%a: tensor<8xbf16>, %b: tensor<8xf32>) {
      mpmd.return %a : tensor<8xbf16>
    } : (!n, !x) -> !n
    return %l#0, %l#2, %n : !n, !n, !n
  }
}
"""


def test_a_result_is_taken_from_the_total_of_its_wide_copy() -> None:
    it = read_planned(parse(WIDE))
    loss, copy, other = it.fragments[0].outputs
    assert it.fragments[0].wide == ((copy, loss),)
    assert it.losses == {copy: "mean"}
    assert it.totals == {copy}
    assert it.returned_totals == {loss: copy}
    assert it.micro_used == {it.arguments[1].value, other}
    # bf16 in the program, f32 while the executor adds it up.
    assert (it.local_bytes(other), it.local_sum_bytes(other)) == (16, 32)
    same = read_planned(
        parse(WIDE.replace("alpa.plan = {", 'alpa.plan = {accumulate_dtype = "same", '))
    )
    assert same.local_sum_bytes(other) == 16


@pytest.mark.parametrize(("old", "new"), [("xf32", "xf16"), ("return %l#0", "return %l#2")])
def test_a_value_that_is_not_a_wide_copy_of_a_result_varies(old: str, new: str) -> None:
    with pytest.raises(PassError, match="differs between the 2 micro-batches"):
        read_planned(parse(WIDE.replace(old, new)))


def test_one_micro_batch_has_no_totals() -> None:
    assert program(1).totals == frozenset()


def test_forward_state_is_carried() -> None:
    text = TEXT.replace("return %h, %n", "return %h, %f")
    with pytest.raises(PassError, match="operand 0 of this update fragment, a 8xf32, an argument"):
        read_planned(parse(text))
    text = text.replace("(%w, %g0, %d)", "(%k, %g0, %d)")
    assert read_planned(parse(text)).carries == {W: F}
    assert W in read_planned(parse(text)).varying


@pytest.mark.parametrize(
    ("names", "merged"),
    [
        (["layer_3"], "layer_3"),
        (["layer_2", "layer_3", "layer_4"], "layer_2_4"),
        (["layer_1", "layer_3"], "layer_1_layer_3"),
        (["update_0", "update_0", "update_1", "update_global"], "update_0_1_update_global"),
        ([], "inferred"),
    ],
)
def test_names_of_merged_layers(names: list[str], merged: str) -> None:
    assert origin_name(tuple(Origin(name) for name in names)) == merged


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("alpa.output = 1", "alpa.output = 2", r"are \[0, 2\]: one is missing"),
        ("num_micro_batches = 2", "num_micro_batches = 0", "num_micro_batches = 0"),
        ('"last"', '"concat:1"', 'result 0 of rank 1 has alpa.result = "concat:1"'),
        ('"last"', '"first"', 'alpa.result is "first"'),
        ('{name = "mesh_1"', '{name = "mesh_2"', "alpa.meshes names mesh_2"),
        ("1f1b", "zigzag", 'schedule is "zigzag"'),
        ('"forward"', '"sideways"', 'alpa.part is "sideways"; expected one of forward, backward'),
        ('{alpa.part = "forward"}', "", "the fragment needs alpa.part"),
        (
            "%h = mpmd.transfer",
            "%z = stablehlo.constant dense<0.0> : tensor<f32>\n    %h = mpmd.transfer",
            "a planned @main holds fragments and transfers, not stablehlo.constant",
        ),
    ],
)
def test_errors(old: str, new: str, message: str) -> None:
    with pytest.raises(PassError, match=message):
        read_planned(parse(TEXT.replace(old, new)))
