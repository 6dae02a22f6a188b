"""Planned training steps of the zoo compute what plain jax computes, on two meshes of four."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from alpa import passes, runtime
from alpa.dialects import parse
from alpa.runtime.reference import compare, run_single_device
from alpa.tools import zoo
from test_e2e_reference import float64_text, looped_step

FAMILIES = ["gpt", "moe", "wresnet", "t5", "unet"]
PIPELINE = "alpa{{cluster=cpu:2x4 num-layers=4 num-stages=2 num-micro-batches={}}}"
MICRO_BATCH = 4


def run_planned(program, state, batch, num_micro_batches):
    module = passes.run(program.lower(MICRO_BATCH), PIPELINE.format(num_micro_batches))
    executable = runtime.load(module, executor="local")
    results = executable(*(np.asarray(leaf) for leaf in jax.tree.leaves((state, batch))))
    return [np.asarray(result) for result in results]


def check(program, num_micro_batches):
    state = program.init_state(0)
    batch = program.random_batch(1, MICRO_BATCH * num_micro_batches)
    expected = looped_step(program, state, batch, num_micro_batches)
    results = run_planned(program, state, batch, num_micro_batches)
    wrong = [row for row in compare(results, expected) if not row.ok]
    assert not wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_sgd_with_four_micro_batches(family):
    check(zoo.get(f"{family}-tiny", optimizer="sgd"), 4)
