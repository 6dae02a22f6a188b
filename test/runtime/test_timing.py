from __future__ import annotations

import numpy as np
import pytest

import alpa.passes
import alpa.runtime
from alpa.dialects import parse
from alpa.runtime.timing import TimedStep, in_turns

SUMS = """
func.func public @main(%s: tensor<4xf32> {alpa.role = "state", tf.aliasing_output = 0 : i32},
                       %x: tensor<8x4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
    -> (tensor<4xf32> {alpa.result = "state:0"}, tensor<4xf32> {alpa.result = "sum"}) {
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %sum = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0]
    : (tensor<8x4xf32>, tensor<f32>) -> tensor<4xf32>
  %new = stablehlo.add %s, %sum : tensor<4xf32>
  return %new, %sum : tensor<4xf32>, tensor<4xf32>
}
"""


@pytest.fixture(scope="module")
def executable() -> alpa.runtime.Executable:
    planned = alpa.passes.run(parse(SUMS), "alpa{cluster=cpu:1x2}")
    return alpa.runtime.load(planned)


def test_each_step_goes_on_from_the_one_before(executable: alpa.runtime.Executable) -> None:
    step = TimedStep(executable, [np.zeros(4, np.float32), np.ones((8, 4), np.float32)])
    seconds = in_turns({"sums": step}, runs=3, before=2)
    assert len(seconds["sums"]) == 3
    assert min(seconds["sums"]) > 0
    np.testing.assert_array_equal(step.arguments[0], np.full(4, 5 * 8))


def test_what_steps_only_read_is_placed_once(executable: alpa.runtime.Executable) -> None:
    step = TimedStep(executable, [np.zeros(4, np.float32), np.ones((8, 4), np.float32)])
    batch = step.arguments[1]
    step.run()
    assert step.arguments[1] is batch
    assert not isinstance(batch, np.ndarray)


class Logged(TimedStep):
    """Logs its name where others run."""

    def __init__(self, executable: alpa.runtime.Executable, name: str, log: list[str]) -> None:
        super().__init__(executable, [])
        self.name, self.log = name, log

    def run(self) -> float:
        self.log.append(self.name)
        return float(len(self.log))


def test_plans_run_in_turns(executable: alpa.runtime.Executable) -> None:
    log: list[str] = []
    steps = {name: Logged(executable, name, log) for name in "abc"}
    seconds = in_turns(steps, runs=4, before=1)
    rounds = ["".join(log[n : n + 3]) for n in range(0, len(log), 3)]
    assert rounds[0] == "abc"
    assert len(rounds) == 5
    assert all(sorted(one) == ["a", "b", "c"] for one in rounds)
    assert len(set(rounds[1:])) > 1  # not always after the same one
    assert [len(times) for times in seconds.values()] == [4, 4, 4]
    assert all(log[int(at) - 1] == name for name, times in seconds.items() for at in times)
