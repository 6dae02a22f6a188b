"""The memory of a step over time: its peak, its end, and what its parts are."""

from __future__ import annotations

import pytest

from alpa.dialects import ir
from alpa.passes.plan.memory_over_time import KINDS, MeshMemory, memory_over_time
from alpa.passes.plan.predicted_memory import predicted_memory
from alpa.passes.plan.step_time import step_seconds
from alpa.runtime.ahead_of_time.verification import predicted_peaks
from alpa.runtime.exported import Exported, exported

WEIGHT = 64 * 64 * 4


@pytest.fixture(scope="module")
def stages(two_stages: ir.Module) -> Exported:
    return exported(two_stages)


@pytest.fixture(scope="module")
def memory(stages: Exported) -> list[MeshMemory]:
    return memory_over_time(stages.program, predicted_memory(stages.module))


def test_the_peak_is_what_verify_predicts(stages: Exported, memory: list[MeshMemory]) -> None:
    assert {one.mesh: one.peak for one in memory} == predicted_peaks(stages)


def test_time_runs_to_the_end_of_the_step(stages: Exported, memory: list[MeshMemory]) -> None:
    for one in memory:
        assert list(one.seconds) == sorted(one.seconds)
        assert one.seconds[0] == 0.0
    assert max(one.seconds[-1] for one in memory) == step_seconds(stages.program)


def test_states_stay(memory: list[MeshMemory]) -> None:
    first, second = memory
    assert set(first.bytes["parameters"]) == {WEIGHT}
    assert set(first.bytes["optimizer state"]) == {WEIGHT}
    assert set(second.bytes["parameters"]) == {WEIGHT}
    assert set(second.bytes["optimizer state"]) == {0}


def test_what_a_step_makes_is_freed(memory: list[MeshMemory]) -> None:
    for one in memory:
        assert max(one.bytes["gradients"]) >= WEIGHT
        for kind in ("gradients", "activations", "inputs", "temporaries"):
            assert one.bytes[kind][-1] == 0
        assert one.totals[one.fullest] == one.peak == sum(one.bytes[k][one.fullest] for k in KINDS)
