"""Random programs equal plain JAX."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from stress.random_programs import __main__ as tool
from stress.random_programs.check import Outcome, RefusedError, check
from stress.random_programs.draw import draw, draw_base
from stress.random_programs.options import draw as draw_options
from stress.random_programs.program import RandomProgram
from stress.random_programs.truth import Truth
from stress.random_programs.workers import Worker, outcomes

# 31: scatters into the state, 83: a computation that returns what it is given, accumulated in f32.
QUICK = (31, 83)
# 0: the largest output, whose remedy is one micro-batch.
REFUSED = (0,)
# Seeds that failed once: 5, 22: complex constants, 6: a key that is only split, 12: a mixed one
# among gradients, 27: zeros that a loop begins with, 41: a root of a cross-entropy, 46: Cholesky.
# Their blocks: 11, 36: gradients of scanned layers are returned, 56, 1915: scanned layers under
# jax.checkpoint, 1093: a depthwise convolution with one tap, 700016, 700037: results of one
# op that is rematerialised, 80, 105: a factor of the loss.
FAILED_ONCE = (
    *(5, 6, 11, 12, 22, 27, 36, 41, 46, 56, 66, 80, 105, 127, 144, 145, 162, 242, 262, 364, 1031),
    *(1093, 1915, 700016, 700037),
)


@pytest.mark.parametrize("seed", QUICK)
def test_programs_equal_plain_jax(seed: int) -> None:
    outcome = check(seed)
    assert (outcome.kind, outcome.reason) == ("passed", "")


@pytest.mark.parametrize("seed", REFUSED)
def test_programs_that_mix_samples_are_refused_and_the_remedy_works(seed: int) -> None:
    assert draw(seed).truth == Truth.MIXED
    outcome = check(seed)
    assert (outcome.kind, outcome.remedy) == ("refused as expected", "1 micro-batch")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [*FAILED_ONCE, *range(100, 130)])
def test_more_programs_are_what_is_true_of_them(seed: int) -> None:
    outcome = check(seed)
    assert outcome.kind in ("passed", "refused as expected", "too small to cut"), outcome.reason


def test_one_micro_batch_and_independent_ones_are_exact() -> None:
    programs = [draw(seed) for seed in range(200)]
    mixed = [program for program in programs if program.truth == Truth.MIXED]
    # 500 of 2,000 are asked for.
    assert len(mixed) >= 50
    for program in mixed:
        assert program.micro_batches > 1
        assert program.like(micro_batches=1, mode="exact").truth == Truth.EXACT
        other = program.like(micro_batches=program.micro_batches, mode="independent")
        # With one sample, a number that is made of the size may be unknown.
        assert other.truth <= (Truth.NOISE if program.micro_batch > 1 else Truth.EITHER)


def test_features_leave_the_blocks_of_a_seed_alone() -> None:
    for seed in range(20):
        program, base = draw(seed), draw_base(seed)
        assert list(map(str, program.blocks)) == list(map(str, base.blocks))
        assert program.optimizer == base.optimizer


def of_noise() -> RandomProgram:
    """A training step that draws numbers for its samples, and nothing else at random."""
    found = (draw(seed) for seed in range(1000))
    return next(p for p in found if p.truth == Truth.NOISE and p.dtype == "f32" and p.training)


@pytest.mark.slow
def test_the_reference_draws_what_the_micro_batches_draw() -> None:
    program = of_noise()
    arguments = program.arguments(0)
    plain, reference = program.function()(*arguments), program.reference()(*arguments)
    assert not np.allclose(plain[1], reference[1], rtol=1e-6)
    whole = program.like(micro_batches=1, mode="exact")
    assert np.allclose(plain[1], whole.reference()(*arguments)[1], rtol=1e-6)


def test_a_refusal_has_a_place_and_a_remedy() -> None:
    sentence = "step.py:3:4: error: sort sorts the samples; plan with 1 micro-batch"
    assert RefusedError(sentence).is_documented
    assert not RefusedError("sort sorts the samples; plan with 1 micro-batch").is_documented
    assert not RefusedError("step.py:3:4: error: incompatible shapes").is_documented
    assert RefusedError("step.py:3:4: error: cannot cut 2 forward ops into 4 layers").is_of_size


def test_a_seed_determines_everything() -> None:
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
    assert (outcome.seed, outcome.kind) == (3, "traceback")
    assert outcome.reason == "no end within 0.01 s"


def test_a_process_that_has_died_before_its_seed_was_read_is_closed() -> None:
    worker = Worker(60, widen=False)
    process = worker.start()
    assert process.stdin is not None
    process.kill()
    process.wait()
    process.stdin.write("3\n")  # stays in the buffer
    worker.close()
    assert process.stdin.closed


def test_the_table_counts_what_ran_and_what_was_refused() -> None:
    ran = Outcome(seed=1, kind="passed", ops=("dot",), meshes=2, micro_batches=4, dtype="f32")
    refused = Outcome(seed=2, kind="refused as expected", reason="sorts 8 samples", truth="mixed")
    text = "\n".join(tool.table([ran, refused], 60))
    assert "1 passed, 1 refused as expected, 0 refused without need, 0 wrong, 0 traceback" in text
    assert "1 of the 1 that passed on two meshes or more with several micro-batches" in text
    assert "| refused as expected | mixed 1 |" in text
    assert "| sorts N samples | 1 |" in text


@pytest.mark.parametrize(
    ("kinds", "status"),
    [
        (["passed"] * 49 + ["refused without need"], 0),
        (["passed"] * 48 + ["refused without need"] * 2, 1),
        (["passed", "wrong"], 1),
        (["passed", "traceback"], 1),
        (["refused as expected", "too small to cut"], 0),
    ],
)
def test_the_exit_status(kinds: list[Any], status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [Outcome(seed=seed, kind=kind) for seed, kind in enumerate(kinds)]
    monkeypatch.setattr(tool, "outcomes", lambda *_, **__: found)
    assert tool.main(["--count", str(len(found))]) == status


def test_a_run_goes_on_until_enough_programs_have_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def outcomes(seeds: range, **_: Any) -> Any:
        return [
            Outcome(seed=s, kind="refused as expected" if s % 4 == 0 else "passed") for s in seeds
        ]

    monkeypatch.setattr(tool, "outcomes", outcomes)
    assert tool.main(["--seed", "8", "--passed", "9"]) == 0
    text = capsys.readouterr().out
    # Of the first nine, 8, 12 and 16 are rejected.
    assert "seeds 8 to 19: 12 programs" in text
    assert "9 passed, 3 refused as expected, 0 refused without need" in text
