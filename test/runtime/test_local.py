from __future__ import annotations

import weakref
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import alpa.passes
import alpa.runtime
from alpa.dialects import parse
from alpa.passes.export_stages import ExportStages
from alpa.passes.plan.instructions import Move, write_script
from alpa.runtime.interpreter import Interpreter
from alpa.runtime.placement import move
from alpa.runtime.script_checks import verify

# Two linear layers with one weight, which lives on meshes of different shapes. `r` is a running
# mean that the forward part carries. `dv` is a gradient that the backward of layer 0 also reads per
# micro-batch. The loss flows from a forward part into an update.
TIED = """
#w = #sdy.sharding<@mesh_0, [{}, {"axis1"}]>
!w0 = !mpmd.mesh_tensor<"mesh_0", tensor<16x16xf32>, sharding=<@mesh_0, [{}, {"axis1"}]>>
!w1 = !mpmd.mesh_tensor<"mesh_1", tensor<16x16xf32>, sharding=<@mesh_1, [{}, {"axis0"}]>>
!v0 = !mpmd.mesh_tensor<"mesh_0", tensor<16xf32>>
!v1 = !mpmd.mesh_tensor<"mesh_1", tensor<16xf32>, sharding=<@mesh_1, [{}]>>
!x0 = !mpmd.mesh_tensor<"mesh_0", tensor<8x16xf32>, sharding=<@mesh_0, [{"axis0", "axis1"}, {}]>>
!h0 = !mpmd.mesh_tensor<"mesh_0", tensor<8x16xf32>, sharding=<@mesh_0, [{"axis0"}, {"axis1"}]>>
!h1 = !mpmd.mesh_tensor<"mesh_1", tensor<8x16xf32>, sharding=<@mesh_1, [{"axis0"}, {}]>>
!y1 = !mpmd.mesh_tensor<"mesh_1", tensor<16x8xf32>, sharding=<@mesh_1, [{}, {"axis0"}]>>
!s1 = !mpmd.mesh_tensor<"mesh_1", tensor<f32>>
!n1 = !mpmd.mesh_tensor<"mesh_1", tensor<i32>>
module {
  sdy.mesh @mesh_0 = <["axis0"=2, "axis1"=2]>
  sdy.mesh @mesh_1 = <["axis0"=4]>
  func.func public @main(
      %w0: !w0 {alpa.input = 0 : i64, alpa.role = "state" DONATE},
      %w1: !w1 {alpa.input = 0 : i64, alpa.role = "state" DONATE},
      %v: !v1 {alpa.input = 1 : i64, alpa.role = "state" DONATE},
      %r: !v0 {alpa.input = 2 : i64, alpa.role = "state" DONATE},
      %x: !x0 {alpa.input = 3 : i64, alpa.role = "batch", alpa.batch_dim = 0 : i64},
      %y: !y1 {alpa.input = 4 : i64, alpa.role = "batch", alpa.batch_dim = 1 : i64})
      -> (!w0 {alpa.output = 0 : i64, alpa.result = "state:0"},
          !w1 {alpa.output = 0 : i64, alpa.result = "state:0"},
          !v1 {alpa.output = 1 : i64, alpa.result = "state:1"},
          !v0 {alpa.output = 2 : i64, alpa.result = "state:2"},
          !s1 {alpa.output = 3 : i64, alpa.result = "mean"},
          !n1 {alpa.output = 4 : i64, alpa.result = "sum"},
          !h1 {alpa.output = 5 : i64, alpa.result = "concat:0"},
          !s1 {alpa.output = 6 : i64, alpa.result = "last"},
          !v1 {alpa.output = 7 : i64, alpa.result = "mean"})
      attributes {
        topology = #mpmd.topology<<"mesh_0" : <["axis0"=2, "axis1"=2]>>,
                                  <"mesh_1" : <["axis0"=4]>>>,
        alpa.meshes = [
          {name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0, 1, 2, 3>,
           logical_shape = array<i64: 2, 2>},
          {name = "mesh_1", hosts = array<i64: 0>, devices = array<i64: 4, 5, 6, 7>,
           logical_shape = array<i64: 4>}],
        alpa.plan = {num_micro_batches = BATCHES : i64, schedule = "gpipe",
                     predicted_step_seconds = 1.0e-3 : f64,
                     predicted_peak_bytes = array<i64: 1, 1>}} {
    %h, %r2 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)], stage=0> (%w0, %r, %x)
        {alpa.part = "forward"}
        (%a: tensor<16x16xf32>, %b: tensor<16xf32>, %c: tensor<8x16xf32>) {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %decay = stablehlo.constant dense<0.5> : tensor<16xf32>
      %0 = stablehlo.dot_general %c, %a, contracting_dims = [1] x [0]
        {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0"}, {"axis1"}]>]>}
        : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
      %1 = stablehlo.broadcast_in_dim %b, dims = [1]
        {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0"}, {"axis1"}]>]>}
        : (tensor<16xf32>) -> tensor<8x16xf32>
      %2 = stablehlo.subtract %0, %1
        {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0"}, {"axis1"}]>]>}
        : tensor<8x16xf32>
      %3 = stablehlo.reduce(%0 init: %zero) applies stablehlo.add across dimensions = [0]
        : (tensor<8x16xf32>, tensor<f32>) -> tensor<16xf32>
      %4 = stablehlo.add %b, %3 : tensor<16xf32>
      %5 = stablehlo.multiply %4, %decay
        {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis1"}]>]>} : tensor<16xf32>
      mpmd.return %2, %5 : tensor<8x16xf32>, tensor<16xf32>
    } : (!w0, !v0, !x0) -> (!h0, !v0)
    %h1 = mpmd.transfer %h : (!h0) -> !h1
    %p, %loss, %n = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(0)], stage=1> (%w1, %v, %h1, %y)
        {alpa.part = "forward"}
        (%a: tensor<16x16xf32>, %b: tensor<16xf32>, %c: tensor<8x16xf32>, %d: tensor<16x8xf32>) {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %eight = stablehlo.constant dense<8> : tensor<i32>
      %0 = stablehlo.dot_general %c, %a, contracting_dims = [1] x [0]
        {sdy.sharding = #sdy.sharding_per_value<[<@mesh_1, [{"axis0"}, {}]>]>}
        : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
      %1 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<16xf32>) -> tensor<8x16xf32>
      %2 = stablehlo.multiply %0, %1 : tensor<8x16xf32>
      %3 = stablehlo.transpose %d, dims = [1, 0] : (tensor<16x8xf32>) -> tensor<8x16xf32>
      %4 = stablehlo.subtract %2, %3 : tensor<8x16xf32>
      %5 = stablehlo.multiply %4, %4 : tensor<8x16xf32>
      %6 = stablehlo.reduce(%5 init: %zero) applies stablehlo.add across dimensions = [0, 1]
        : (tensor<8x16xf32>, tensor<f32>) -> tensor<f32>
      mpmd.return %0, %6, %eight : tensor<8x16xf32>, tensor<f32>, tensor<i32>
    } : (!w1, !v1, !h1, !y1) -> (!h1, !s1, !n1)
    %dw1, %dh1, %dv = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(1)], stage=1>
        (%w1, %v, %h1, %p, %y) {alpa.part = "backward"}
        (%a: tensor<16x16xf32>, %b: tensor<16xf32>, %c: tensor<8x16xf32>, %e: tensor<8x16xf32>,
         %d: tensor<16x8xf32>) {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %1 = stablehlo.broadcast_in_dim %b, dims = [1] : (tensor<16xf32>) -> tensor<8x16xf32>
      %2 = stablehlo.multiply %e, %1 : tensor<8x16xf32>
      %3 = stablehlo.transpose %d, dims = [1, 0] : (tensor<16x8xf32>) -> tensor<8x16xf32>
      %4 = stablehlo.subtract %2, %3 : tensor<8x16xf32>
      %5 = stablehlo.multiply %4, %e : tensor<8x16xf32>
      %6 = stablehlo.reduce(%5 init: %zero) applies stablehlo.add across dimensions = [0]
        {sdy.sharding = #sdy.sharding_per_value<[<@mesh_1, [{}]>]>}
        : (tensor<8x16xf32>, tensor<f32>) -> tensor<16xf32>
      %7 = stablehlo.multiply %4, %1 : tensor<8x16xf32>
      %8 = stablehlo.dot_general %c, %7, contracting_dims = [0] x [0]
        : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
      %9 = stablehlo.dot_general %7, %a, contracting_dims = [1] x [1]
        : (tensor<8x16xf32>, tensor<16x16xf32>) -> tensor<8x16xf32>
      mpmd.return %8, %9, %6 : tensor<16x16xf32>, tensor<8x16xf32>, tensor<16xf32>
    } : (!w1, !v1, !h1, !h1, !y1) -> (!w1, !h1, !v1)
    %dh = mpmd.transfer %dh1 : (!h1) -> !h0
    %dv0 = mpmd.transfer %dv : (!v1) -> !v0
    %dw0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(1)], stage=0> (%x, %r, %dh, %dv0)
        {alpa.part = "backward"}
        (%a: tensor<8x16xf32>, %b: tensor<16xf32>, %c: tensor<8x16xf32>, %d: tensor<16xf32>) {
      %0 = stablehlo.add %b, %d : tensor<16xf32>
      %1 = stablehlo.broadcast_in_dim %0, dims = [1] : (tensor<16xf32>) -> tensor<8x16xf32>
      %2 = stablehlo.multiply %c, %1 : tensor<8x16xf32>
      %3 = stablehlo.dot_general %a, %2, contracting_dims = [0] x [0]
        : (tensor<8x16xf32>, tensor<8x16xf32>) -> tensor<16x16xf32>
      mpmd.return %3 : tensor<16x16xf32>
    } : (!x0, !v0, !h0, !v0) -> !w0
    %g1 = mpmd.transfer %dw1 : (!w1) -> !w0
    %w2 = mpmd.fragment<mesh="mesh_0", origin=["update_0"(0)], stage=0> (%w0, %dw0, %g1)
        {alpa.part = "update"}
        (%a: tensor<16x16xf32>, %b: tensor<16x16xf32>, %c: tensor<16x16xf32>) {
      %rate = stablehlo.constant dense<1.0e-3> : tensor<16x16xf32>
      %0 = stablehlo.add %b, %c : tensor<16x16xf32>
      %1 = stablehlo.multiply %0, %rate : tensor<16x16xf32>
      %2 = stablehlo.subtract %a, %1
        {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{}, {"axis1"}]>]>} : tensor<16x16xf32>
      mpmd.return %2 : tensor<16x16xf32>
    } : (!w0, !w0, !w0) -> !w0
    %w3 = mpmd.transfer %w2 : (!w0) -> !w1
    %v2 = mpmd.fragment<mesh="mesh_1", origin=["update_1"(0)], stage=1> (%v, %dv, %loss)
        {alpa.part = "update"} (%a: tensor<16xf32>, %b: tensor<16xf32>, %c: tensor<f32>) {
      %rate = stablehlo.constant dense<1.0e-3> : tensor<16xf32>
      %0 = stablehlo.broadcast_in_dim %c, dims = [] : (tensor<f32>) -> tensor<16xf32>
      %1 = stablehlo.add %b, %0 : tensor<16xf32>
      %2 = stablehlo.multiply %1, %rate : tensor<16xf32>
      %3 = stablehlo.subtract %a, %2 : tensor<16xf32>
      mpmd.return %3 : tensor<16xf32>
    } : (!v1, !v1, !s1) -> !v1
    return %w2, %w3, %v2, %r2, %loss, %n, %p, %loss, %dv
      : !w0, !w1, !v1, !v0, !s1, !n1, !h1, !s1, !v1
  }
}
"""


def tied(batches: int, *, donate: bool = False) -> str:
    return TIED.replace("BATCHES", str(batches)).replace(
        "DONATE", ", jax.buffer_donor = true" if donate else ""
    )


def tied_reference(w, v, r, x, y, *, batches: int, average: bool = True):
    gw, gv = 0, 0
    losses, predictions = [], []
    for xb, yb in zip(np.split(x, batches), np.split(y, batches, axis=1), strict=True):
        z = xb @ w
        h = z - r
        p = h @ w
        e = p * v - yb.T
        losses.append(np.sum(e * e))
        predictions.append(p)
        dv = np.sum(e * p, axis=0)
        gw = gw + h.T @ (e * v) + xb.T @ ((e * v) @ w.T * (r + dv))
        gv = gv + dv
        r = 0.5 * (r + z.sum(axis=0))
    scale = 1 / batches if average else 1
    w, v = w - 1e-3 * gw * scale, v - 1e-3 * (gv * scale + np.mean(losses))
    count = np.int32(8 * batches)
    results = (w, v, r, np.mean(losses), count, np.concatenate(predictions), losses[-1])
    return (*results, gv / batches)


def tied_arguments(batches: int) -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    shapes = (16, 16), (16,), (16,), (8 * batches, 16), (16, 8 * batches)
    return [generator.normal(size=shape).astype(np.float32) * 0.5 for shape in shapes]


def assert_close(results, reference) -> None:
    for result, expected in zip(results, reference, strict=True):
        bound = 1e-4 * np.max(np.abs(expected))
        assert np.max(np.abs(np.asarray(result) - expected)) <= bound


@pytest.mark.parametrize("batches", [1, 4])
@pytest.mark.parametrize("donate", [False, True])
def test_steps_of_training_on_two_meshes(batches: int, donate: bool) -> None:
    step = alpa.runtime.load(tied(batches, donate=donate))
    given = tied_arguments(batches)
    expected = tied_reference(*given, batches=batches)
    results = step(*given)
    assert_close(results, expected)
    for _ in range(2):
        results = step(*results[:3], *given[3:])
        expected = tied_reference(*expected[:3], *given[3:], batches=batches)
        assert_close(results, expected)
    assert_close(given, tied_arguments(batches))


def test_gradients_are_added_up_where_the_loss_is_a_sum() -> None:
    module = parse(tied(4))
    ExportStages(loss_reduction="sum").run(module, lambda location, text: None)
    given = tied_arguments(4)
    results = alpa.runtime.load(str(module))(*given)
    assert_close(results, tied_reference(*given, batches=4, average=False))


def test_gradients_of_complex_parameters_are_averaged() -> None:
    text = """
      func.func public @main(
          %w: tensor<4x4xcomplex<f32>> {alpa.role = "state"},
          %x: tensor<8x4xcomplex<f32>> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
          -> (tensor<4x4xcomplex<f32>> {alpa.result = "state:0"}) {
        %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
          : (tensor<8x4xcomplex<f32>>, tensor<4x4xcomplex<f32>>) -> tensor<8x4xcomplex<f32>>
        %t = stablehlo.tanh %y : tensor<8x4xcomplex<f32>>
        %g = stablehlo.dot_general %x, %t, contracting_dims = [0] x [0]
          : (tensor<8x4xcomplex<f32>>, tensor<8x4xcomplex<f32>>) -> tensor<4x4xcomplex<f32>>
        %n = stablehlo.subtract %w, %g : tensor<4x4xcomplex<f32>>
        return %n : tensor<4x4xcomplex<f32>>
      }"""
    planned = alpa.passes.run(text, "alpa{cluster=cpu:1x4 num-layers=1 num-micro-batches=2}")
    parts = np.random.default_rng(0).normal(size=(2, 20, 4)) / 4
    w, *halves = np.split((parts[0] + 1j * parts[1]).astype(np.complex64), [4, 12])
    (result,) = alpa.runtime.load(planned)(w, np.concatenate(halves))
    gradients = [x.T @ np.tanh(x @ w) for x in halves]
    assert_close([result], [w - np.mean(gradients, axis=0)])


def test_an_array_is_given_away_only_where_the_program_donates_it() -> None:
    given = tied_arguments(1)
    for donate in (False, True):
        step = alpa.runtime.load(tied(1, donate=donate))
        first = step(*given)
        step(*first[:3], *given[3:])
        assert [array.is_deleted() for array in first[:2]] == [donate, donate]


def test_a_copy_shares_no_buffer_with_what_it_is_of() -> None:
    def buffers(array: jax.Array) -> set[int]:
        return {shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards}

    devices = np.array(jax.devices())
    two, four = (Mesh(devices[:count], ("axis0",)) for count in (2, 4))
    whole, split = NamedSharding(two, PartitionSpec()), NamedSharding(two, PartitionSpec("axis0"))
    alone, more = jnp.ones(16), NamedSharding(four, PartitionSpec())
    replicas = jax.device_put(alone, whole)
    moves = [(alone, whole), (replicas, whole), (replicas, split), (replicas, more), (alone, split)]
    for array, sharding in moves:
        moved = move(array, sharding, copy=True)
        assert moved.sharding == sharding
        assert not buffers(moved) & buffers(array)
    numbers = np.ones(1 << 16, np.float32)
    moved = move(numbers, whole, copy=True)
    numbers[:] = 5
    assert np.all(np.asarray(moved) == 1)


def test_copies_of_a_returned_state_live_as_long_as_it() -> None:
    step = alpa.runtime.load(tied(1, donate=True))
    results = step(*tied_arguments(1))
    shardings = [step._placement.shardings[a.value] for a in step.program.arguments]
    copy = step._copies.find(results[0], shardings[1])
    assert copy.sharding.device_set == set(jax.devices()[4:])
    np.testing.assert_array_equal(copy, results[0])
    assert step._copies.find(results[0], shardings[0]) is results[0]
    freed = [weakref.ref(array) for array in (*results, copy)]
    del results, copy
    assert not any(reference() for reference in freed)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "zb-h1"])
def test_nothing_but_results_is_left_after_a_step(
    schedule: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = alpa.runtime.load(tied(4).replace('"gpipe"', f'"{schedule}"'))
    run, left = Interpreter.run, set()

    def watched(self, store, instructions) -> None:
        run(self, store, instructions)
        left.update(store)

    monkeypatch.setattr(Interpreter, "run", watched)
    given = tied_arguments(4)
    assert_close(step(*given), tied_reference(*given, batches=4))
    # new w on both meshes, new v, and its gradient, the loss and the count as totals; the running
    # mean; four predictions and the last loss
    assert sorted(key[1] for key in left if key[1] is not None) == [0, 1, 2, 3, 3, 3]
    assert sum(key[1] is None for key in left) == 6
    verify(write_script(step.program))


def test_values_that_move_once_per_micro_batch_or_once_per_step(moves: str) -> None:
    generator = np.random.default_rng(1)
    c, p, k, x = (generator.normal(size=n).astype(np.float32) for n in (4, 4, 4, 12))
    step = alpa.runtime.load(moves)
    for _ in range(2):
        results = step(c, p, k, x)
        parts, hidden, new = np.split(x, 3), [], np.asarray(c)
        for part in parts:
            hidden.append(new * part + k)
            new = new + hidden[-1]
        squares = sum(part**2 for part in parts)
        expected = [new, p + squares, sum(hidden), x, sum(parts) / 3]
        assert_close([*results[:5], *results[6:]], [*expected, k, hidden[-1], squares])
        # bf16 is accumulated in f32, micro-batch by micro-batch, and rounded once. With these
        # numbers a sum in bf16 differs.
        assert results[5].dtype == jnp.bfloat16
        halves = [part.astype(jnp.bfloat16).astype(np.float32) for part in parts]
        np.testing.assert_array_equal(results[5], sum(halves).astype(jnp.bfloat16))
        c, p = results[:2]
    moved = [i for i in write_script(step.program).instructions if isinstance(i, Move)]
    # k; h three times; c twice, between the micro-batches; s once
    assert len(moved) == 1 + 3 + 2 + 1


WHILE = """
!x = !mpmd.mesh_tensor<"mesh_0", tensor<8x8xf32>, sharding=<@mesh_0, [{"a"}, {"b"}]>>
module {
  sdy.mesh @mesh_0 = <["a"=2, "b"=2]>
  func.func public @main(%x: !x) -> !x attributes {
      topology = #mpmd.topology<<"mesh_0" : <["a"=2, "b"=2]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 3, 2, 1, 0>,
                      logical_shape = array<i64: 2, 2>}]} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)]> (%x) {alpa.part = "forward"}
        (%a: tensor<8x8xf32>) {
      %i = stablehlo.constant dense<0> : tensor<i32>
      %1:2 = stablehlo.while(%k = %i, %s = %a) : tensor<i32>, tensor<8x8xf32>
        attributes {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, []>,
                                                            <@mesh_0, [{"a"}, {"b"}]>]>}
        cond {
          %n = stablehlo.constant dense<3> : tensor<i32>
          %p = stablehlo.compare LT, %k, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %p : tensor<i1>
        } do {
          %one = stablehlo.constant dense<1> : tensor<i32>
          %k1 = stablehlo.add %k, %one : tensor<i32>
          %d = stablehlo.dot_general %s, %a, contracting_dims = [1] x [0]
            {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {"b"}]>]>}
            : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
          %t = stablehlo.tanh %d
            {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"a"}, {"b"}]>]>} : tensor<8x8xf32>
          stablehlo.return %k1, %t : tensor<i32>, tensor<8x8xf32>
        }
      mpmd.return %1#1 : tensor<8x8xf32>
    } : (!x) -> !x
    return %0 : !x
  }
}
"""


def test_a_loop_inside_a_fragment_on_devices_in_reverse() -> None:
    x = np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32)
    step = alpa.runtime.load(WHILE)
    (result,) = step(x)
    expected = x
    for _ in range(3):
        expected = np.tanh(expected @ x)
    assert_close([result], [expected])
    corner = next(s for s in result.addressable_shards if s.device == jax.devices()[3])
    np.testing.assert_array_equal(corner.data, result[:4, :4])


ONE_DEVICE = """
!x = !mpmd.mesh_tensor<"mesh_0", tensor<TYPE>, sharding=<@mesh_0, [{"axis0"}]>>
module {
  sdy.mesh @mesh_0 = <["axis0"=1]>
  func.func public @main(%x: !x) -> (!x, !x) attributes {
      topology = #mpmd.topology<<"mesh_0" : <["axis0"=1]>>>,
      alpa.meshes = [{name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0>,
                      logical_shape = array<i64: 1>}]} {
    %0 = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)]> (%x) {alpa.part = "forward"}
        (%a: tensor<TYPE>) {
      %1 = stablehlo.add %a, %a
        {sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, [{"axis0"}]>]>} : tensor<TYPE>
      mpmd.return %1 : tensor<TYPE>
    } : (!x) -> !x
    return %0, %0 : !x, !x
  }
}
"""


@pytest.mark.parametrize(
    ("element", "dtype"),
    [("i64", np.int64), ("f64", np.float64), ("bf16", jnp.bfloat16), ("ui8", np.uint8)],
)
def test_dtypes_on_a_mesh_of_one_device(element: str, dtype) -> None:
    x = np.arange(6).astype(dtype)
    first, second = alpa.runtime.load(ONE_DEVICE.replace("TYPE", f"6x{element}"))(x)
    assert first.dtype == dtype
    np.testing.assert_array_equal(np.asarray(first), x + x)
    first.delete()
    np.testing.assert_array_equal(np.asarray(second), x + x)


def test_wrong_arguments() -> None:
    step = alpa.runtime.load(tied(4))
    given = tied_arguments(4)
    with pytest.raises(TypeError, match="takes 5 arguments, 4 were given"):
        step(*given[:4])
    with pytest.raises(
        ValueError, match=r"argument 3 is float32\[8, 16\]; .*4 micro-batches of 8 in dimension 0"
    ):
        step(*given[:3], given[3][:8], given[4])
    with pytest.raises(ValueError, match=r"argument 1 is float64\[16\]; expected float32\[16\]"):
        step(given[0], given[1].astype(np.float64), *given[2:])


def test_too_few_devices() -> None:
    with pytest.raises(ValueError, match=r"needs 8 devices, and 4 are there.*device_count=8"):
        alpa.runtime.load(tied(1), devices=jax.devices()[:4])


def test_devices_of_two_kinds() -> None:
    kinds = ["H100"] * 4 + ["A100"] * 4
    devices: list[Any] = [SimpleNamespace(id=i, device_kind=kind) for i, kind in enumerate(kinds)]
    with pytest.raises(ValueError, match="for equal devices, these are A100 and H100; pass"):
        alpa.runtime.load(tied(1), devices=devices)


def test_not_planned() -> None:
    text = "func.func @main(%x: tensor<f32>) -> tensor<f32> { return %x : tensor<f32> }"
    with pytest.raises(alpa.runtime.LoadError, match="not planned"):
        alpa.runtime.load(text)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('{name = "mesh_0"', "{name = 2 : i64", r"name of alpa\.meshes is 2 : i64; expected a str"),
        ("hosts = array<i64: 0>, ", "", r"there is no hosts of alpa\.meshes; expected array<i64"),
        ("alpa.meshes = [", "alpa.meshes = 1 : i64, was = [", r"alpa\.meshes is 1 : i64; expected"),
        ("num_micro_batches = 3 : i64", 'num_micro_batches = "3"', r"micro_batches .* is \"3\""),
        ("num_micro_batches = 3", "num_micro_batches = 4294967296", r"it takes 1 to 65,536"),
        ('schedule = "gpipe"', 'schedule = "none"', r'schedule is "none"; expected one of gpipe'),
        ('alpa.role = "batch"', "alpa.role = 1 : i64", r"alpa\.role is 1 : i64; expected a string"),
        (
            "alpa.batch_dim = 0 : i64",
            'alpa.batch_dim = "0"',
            r'alpa\.batch_dim is "0"; expected an',
        ),
        (
            'alpa.part = "update"',
            "alpa.part = 1 : i64",
            r"alpa\.part is 1 : i64; expected a string",
        ),
        (
            'alpa.part = "update"',
            'alpa.part = "update", alpa.module = @m, alpa.accumulators = array<i64: 7>',
            r"alpa\.accumulators is \[7\]; the fragment has 1 results",
        ),
        (
            'schedule = "gpipe"',
            'schedule = "gpipe", more = array<i0: 0>',
            r"cast unknown element type DenseArrayAttr",
        ),
        (
            "alpa.input = 3 : i64",
            "alpa.input = 3 : i64, my.more = array<i0: 0>",
            r"cast unknown element type DenseArrayAttr",
        ),
        ("alpa.input = 3 : i64", "alpa.input = -1 : i64", r"argument 4 has the number -1 in the"),
        (
            "alpa.input = 3 : i64",
            "alpa.input = 3 : i64, alpa.slice = array<i64: 0, 1, 9>",
            r"argument 4 of shape \[4\] cannot be rows 1 to 9 of dimension 0",
        ),
        (
            "alpa.input = 3 : i64",
            "alpa.input = 3 : i64, alpa.slice = array<i64: 7, 0, 4>",
            r"argument 4 of shape \[4\] cannot be rows 0 to 4 of dimension 7",
        ),
        (
            'alpa.part = "update"',
            'alpa.part = "update", alpa.module = @m, alpa.donated = 1 : i64',
            r"alpa\.donated is 1 : i64; expected array<i64",
        ),
    ],
)
def test_a_plan_with_an_attribute_that_cannot_be(
    moves: str, old: str, new: str, message: str
) -> None:
    assert old in moves
    with pytest.raises(alpa.runtime.LoadError, match=rf"^-:\d+:\d+: .*{message}"):
        alpa.runtime.load(moves.replace(old, new, 1))


def test_an_exported_module_without_its_stages() -> None:
    text = tied(1).replace("{alpa.part", "{alpa.module = @gone, alpa.part")
    with pytest.raises(alpa.runtime.LoadError, match="no module @gone; run export-stages"):
        alpa.runtime.load(text)


def test_sources_and_the_given_module_stays_unchanged(tmp_path) -> None:
    path = tmp_path / "planned.mlir"
    path.write_text(tied(1))
    module = parse(tied(1))
    before = str(module)
    given = tied_arguments(1)
    for source in (path, str(path), module):
        assert_close(alpa.runtime.load(source)(*given), tied_reference(*given, batches=1))
    assert str(module) == before


def test_complex_numbers() -> None:
    """Constants without a Python class in jaxlib's bindings, and sums that begin with one."""

    def spectrum(w: Any, x: Any) -> Any:
        y = jnp.fft.fft(jnp.tanh(x @ w)) * (2 + 1j)
        return jnp.sum(y * jnp.conj(y)).real, jnp.sum(y, axis=0)

    generator = np.random.default_rng(0)
    given = [generator.normal(size=size).astype(np.float32) for size in ((16, 16), (8, 16))]
    module = jax.jit(spectrum).lower(*given).as_text()
    planned = alpa.passes.run(module, "alpa{cluster=cpu:1x4 num-layers=2 num-stages=2}")
    results = alpa.runtime.load(planned)(*given)
    for result, expected in zip(results, spectrum(*given), strict=True):
        assert np.max(np.abs(result - expected)) <= 1e-4 * np.max(np.abs(expected))
