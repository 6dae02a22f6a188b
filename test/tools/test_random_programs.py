"""Random programs equal plain jax, and faults that are planted in their plans are found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from alpa.dialects import ir
from alpa.runtime.executable import Executable
from alpa.runtime.instructions import Add, Instruction, Move, Run, Script
from alpa.runtime.interpreter import Interpreter
from alpa.runtime.local import LocalExecutable
from alpa.runtime.placement import Placement
from alpa.runtime.tiles import Tiles
from alpa.tools.random_programs import __main__ as tool
from alpa.tools.random_programs.check import (
    Outcome,
    Reference,
    check,
    differences,
    load_fast,
    planned_step,
)
from alpa.tools.random_programs.options import draw as draw_options
from alpa.tools.random_programs.program import draw
from alpa.tools.random_programs.workers import outcomes

# 58: a branch returns what it captures; 24: positions that are known, computed once more.
QUICK = (24, 58)
# Those that have failed: 11, 24: as above, 36: gradients of scanned layers come back,
# 56: scanned layers under jax.checkpoint.
FAILED_ONCE = (11, 36, 56)


@pytest.mark.parametrize("seed", QUICK)
def test_programs_equal_plain_jax(seed: int) -> None:
    outcome = check(seed)
    assert (outcome.kind, outcome.reason) == ("passed", "")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*FAILED_ONCE, *range(100, 130)])
def test_more_programs_equal_plain_jax(seed: int) -> None:
    outcome = check(seed)
    assert outcome.kind != "failed", outcome.reason


def test_a_seed_says_all() -> None:
    assert str(draw(5)) == str(draw(5))
    assert draw_options(draw(5)) == draw_options(draw(5))
    assert len({str(draw(seed)) for seed in range(50)}) == 50
    first, second = draw(5).arguments(0), draw(5).arguments(0)
    assert jax.tree.all(jax.tree.map(np.array_equal, first, second))


def test_every_kind_of_op_is_drawn() -> None:
    programs = [draw(seed) for seed in range(300)]
    kinds = {
        "dot", "convolution", "reduction", "gather", "scatter", "scan", "cond", "skip",
        "shared parameters", "softmax", "norm", "element-wise", "integers"
    }  # fmt: skip
    for kind in kinds:
        # 20 of 2,000 are asked for
        assert sum(kind in program.kinds for program in programs) >= 10, kind
    assert {program.dtype for program in programs} == {"f32", "f64", "bf16", "f16", "mixed"}


def test_a_process_that_does_not_answer_is_a_failure_with_its_seed() -> None:
    (outcome,) = outcomes([3], jobs=1, timeout=0.01, minutes=None, widen=False)
    assert (outcome.seed, outcome.kind) == (3, "failed")
    assert outcome.reason == "no end within 0.01 s"


def test_the_table_counts_what_ran_and_what_was_refused() -> None:
    ran = Outcome(seed=1, kind="passed", ops=("dot",), meshes=2, micro_batches=4, dtype="f32")
    refused = Outcome(seed=2, kind="refused", reason="cannot cut 2 ops into 4 layers")
    text = "\n".join(tool.table([ran, refused], 60))
    assert "1 passed, 1 refused, 0 failed" in text
    assert "1 of the 1 that passed on two meshes or more with several micro-batches" in text
    assert "| cannot cut N ops into N layers | 1 |" in text


def test_a_run_goes_on_until_enough_programs_have_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcomes(seeds: range, **_: Any) -> Any:
        return [Outcome(seed=s, kind="refused" if s % 4 == 0 else "passed") for s in seeds]

    monkeypatch.setattr(tool, "outcomes", outcomes)
    assert tool.main(["--seed", "8", "--passed", "9"]) == 0
    text = capsys.readouterr().out
    # Of the first nine 8, 12 and 16 are refused.
    assert "seeds 8 to 19: 12 programs" in text
    assert "9 passed, 3 refused, 0 failed" in text


# Faults: each makes another script of a sound one, or carries tiles in another way.


class Faulty(LocalExecutable):
    """A sound executable's stages, run by another script or over other tiles."""

    def __init__(self, sound: LocalExecutable, script: Script, tiles: Tiles) -> None:
        placement = Placement(program=sound.program, devices=tuple(jax.devices()))
        super().__init__(placement, sound.stages)
        self._script = script
        self._interpreter = Interpreter(placement, script, sound.stages, tiles)


Fault = Callable[[Script], Script]


def with_instructions(script: Script, change: Callable[[Instruction], Instruction]) -> Script:
    return replace(script, instructions=tuple(map(change, script.instructions)))


def missing_average(script: Script) -> Script:
    return replace(script, outputs=tuple(replace(o, divisor=1) for o in script.outputs))


def dropped_sum(script: Script) -> Script:
    """The last micro-batch is not added."""
    last = script.program.num_micro_batches - 1
    kept = [i for i in script.instructions if not (isinstance(i, Add) and i.source[1] == last)]
    return replace(script, instructions=tuple(replace(i, free=()) for i in kept))


def fresh_accumulator(script: Script) -> Script:
    """Each micro-batch begins its gradients anew: only the last one's are left."""

    def change(i: Instruction) -> Instruction:
        if isinstance(i, Run) and i.accumulators:
            nowhere = tuple((value, -1) for value, _ in i.accumulators)
            return replace(i, accumulators=nowhere)
        return i

    return with_instructions(script, change)


def first_micro_batch_again(script: Script) -> Script:
    """Every forward and backward part reads the first micro-batch of the arguments."""
    batch = {a.value for a in script.program.arguments if a.attributes.role == "batch"}

    def change(i: Instruction) -> Instruction:
        if isinstance(i, Run):
            inputs = tuple((v, 0) if v in batch else (v, m) for v, m in i.inputs)
            i = replace(i, inputs=inputs)
        return replace(i, free=())

    return with_instructions(script, change)


def stale_transfer(script: Script) -> Script:
    """What crosses meshes is that of the micro-batch before."""

    def change(i: Instruction) -> Instruction:
        if isinstance(i, Move) and i.source[1]:
            i = replace(i, source=(i.source[0], i.source[1] - 1))
        return replace(i, free=())

    return with_instructions(script, change)


FAULTS = (missing_average, dropped_sum, fresh_accumulator, first_micro_batch_again, stale_transfer)


class ReversedTiles(Tiles):
    """What crosses meshes arrives in the wrong order."""

    def carry(self, array: Any, transfer: Any, *, copy: bool = False) -> Any:
        moved = super().carry(array, transfer, copy=copy)
        if moved is None or not moved.ndim or moved.dtype.kind != "f":
            return moved
        return jax.device_put(np.asarray(moved)[::-1].copy(), moved.sharding)


PLANTED = 0  # cpu:2x2, three meshes, several micro-batches


def test_planted_faults_are_found() -> None:
    seen: list[LocalExecutable] = []

    def load(module: ir.Module) -> Executable:
        seen.append(Faults(load_fast(module)))
        return seen[-1]

    class Faults(LocalExecutable):
        def __init__(self, sound: Any) -> None:
            placement = Placement(program=sound.program, devices=tuple(jax.devices()))
            super().__init__(placement, sound.stages)
            self.now: LocalExecutable = sound

        def __call__(self, *arguments: Any) -> Any:
            return self.now(*arguments)

    program = draw(PLANTED)
    planned, run = planned_step(program, draw_options(program), load)
    assert len(planned.meshes) > 1
    assert planned.num_micro_batches > 1
    (executable,) = seen
    reference = Reference.of(program)
    sound: Any = executable.now
    assert differences(program, run, reference) == []
    script, tiles = sound._script, Tiles(sound._placement)
    missed: list[str] = []
    for fault in FAULTS:
        executable.now = Faulty(sound, fault(script), tiles)
        missed += [] if differences(program, run, reference) else [fault.__name__]
    executable.now = Faulty(sound, script, ReversedTiles(sound._placement))
    missed += [] if differences(program, run, reference) else ["reversed tiles"]
    assert missed == []
