"""One mesh's part of a step, as a worker runs it, with a neighbour that is late."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

import alpa.runtime
from alpa.passes.plan.instructions import write_script
from alpa.runtime.interpreter import Interpreter, Store
from alpa.runtime.placement import Placement
from alpa.runtime.tiles import Tiles

# mesh_0 counts up a counter; mesh_1 has a copy of it.
COUNTER = """
!n0 = !mpmd.mesh_tensor<"mesh_0", tensor<4xf32>>
!n1 = !mpmd.mesh_tensor<"mesh_1", tensor<4xf32>>
module {
  sdy.mesh @mesh_0 = <["a"=1]>
  sdy.mesh @mesh_1 = <["a"=1]>
  func.func public @main(
      %n0: !n0 {alpa.input = 0 : i64, alpa.role = "state", tf.aliasing_output = 0 : i32},
      %n1: !n1 {alpa.input = 0 : i64, alpa.role = "state", tf.aliasing_output = 1 : i32})
      -> (!n0 {alpa.output = 0 : i64, alpa.result = "state:0"},
          !n1 {alpa.output = 0 : i64, alpa.result = "state:0"})
      attributes {
        topology = #mpmd.topology<<"mesh_0" : <["a"=1]>>, <"mesh_1" : <["a"=1]>>>,
        alpa.meshes = [
          {name = "mesh_0", hosts = array<i64: 0>, devices = array<i64: 0>,
           logical_shape = array<i64: 1>},
          {name = "mesh_1", hosts = array<i64: 0>, devices = array<i64: 1>,
           logical_shape = array<i64: 1>}],
        alpa.plan = {num_micro_batches = 1 : i64, schedule = "gpipe",
                     predicted_step_seconds = 1.0e-3 : f64,
                     predicted_peak_bytes = array<i64: 1, 1>}} {
    %new = mpmd.fragment<mesh="mesh_0", origin=["update_0"(0)]> (%n0) {alpa.part = "update"}
        (%a: tensor<4xf32>) {
      %one = stablehlo.constant dense<1.0> : tensor<4xf32>
      %0 = stablehlo.add %a, %one : tensor<4xf32>
      mpmd.return %0 : tensor<4xf32>
    } : (!n0) -> !n0
    %copy = mpmd.transfer %new : (!n0) -> !n1
    return %new, %copy : !n0, !n1
  }
}
"""


class LateNeighbour:
    """Receives its messages only after all steps."""

    rank = 0

    def __init__(self) -> None:
        self.owners = {0: 0, 1: 1}
        self.waiting: list[jax.Array] = []

    def send(self, peer: int, arrays: Sequence[jax.Array]) -> None:
        assert peer == 1
        self.waiting += arrays

    def receive(self, peer: int, shapes: Sequence[jax.ShapeDtypeStruct]) -> list[jax.Array]:
        raise AssertionError(f"mesh_0 waits for {len(shapes)} tiles of {peer}")


def test_a_result_under_way_is_not_overwritten_by_the_next_step() -> None:
    loaded = alpa.runtime.load(COUNTER)
    script, neighbour = write_script(loaded.program), LateNeighbour()
    placement = Placement(program=loaded.program, devices=(jax.devices()[0],), mesh="mesh_0")
    tiles = Tiles(placement, neighbour)
    interpreter = Interpreter(placement, script, loaded.stages, tiles)
    counter = np.zeros(4, np.float32)
    for _ in range(3):
        store: Store = {}
        interpreter.feed(store, loaded.program.arguments[0], counter)
        interpreter.run(store, script.on("mesh_0"))
        (counter,) = interpreter.results(store).values()
    assert [int(array[0]) for array in neighbour.waiting] == [1, 2, 3]
