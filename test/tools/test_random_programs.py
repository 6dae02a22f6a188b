"""Random programs equal plain jax."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from alpa.tools.random_programs import __main__ as tool
from alpa.tools.random_programs.check import Outcome, check
from alpa.tools.random_programs.options import draw as draw_options
from alpa.tools.random_programs.program import draw
from alpa.tools.random_programs.workers import outcomes

# 58: a branch returns what it captures; 24: positions that are known, computed once more.
QUICK = (24, 58)
# Those that have failed: 11, 24: as above, 36: gradients of scanned layers come back,
# 56, 1915: scanned layers under jax.checkpoint, 1093: a depthwise convolution with one tap,
# 80, 105: the loss has a parameter as a factor, under what jax jits itself.
FAILED_ONCE = (11, 36, 56, 80, 105, 1093, 1915)


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
    assert {program.number for program in programs} == {"none", "factor", "uncertainty", "rate"}


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
