"""The proofs about the zoo's programs with several micro-batches."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa import passes
from alpa.dialects.attributes import micro_batches_of
from alpa.runtime.planning import PlanningError
from alpa.tools import zoo

PASS = "combine-micro-batches{num-micro-batches=4}"
EXACT = "combine-micro-batches{num-micro-batches=4 micro-batches=exact}"


@pytest.mark.parametrize(
    ("name", "samples"),
    [
        ("gpt-tiny", 1),
        ("gpt-tiny", 2),
        ("moe-tiny", 2),
        ("t5-tiny", 2),
        ("llama-tiny", 2),
        ("unet-tiny", 1),
    ],
)
def test_programs_are_proven_to_be_exact(name: str, samples: int) -> None:
    module = passes.run(zoo.get(name).lower(samples), PASS)
    assert micro_batches_of(module) == "exact if sums over samples are parts of means"


@pytest.mark.parametrize("name", ["wresnet-tiny", "gpt-tiny-dropout"])
def test_batch_norms_and_keys_are_independent(name: str) -> None:
    text = zoo.get(name).lower(2)
    assert micro_batches_of(passes.run(text, PASS)) == "independent"
    with pytest.raises(Exception, match="would not give what the whole batch gives"):
        passes.run(text, EXACT)


def test_experts_whose_capacity_spans_the_batch_are_refused() -> None:
    """The tokens of all samples fill the slots of an expert, in their order."""
    experts, capacity = 4, 8

    def loss_fn(params: Any, x: Any) -> Any:
        tokens = x.reshape(-1, x.shape[-1])
        gates = jax.nn.softmax(tokens @ params["gate"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        slot = (jnp.cumsum(chosen, axis=0) * chosen).sum(-1)
        kept = gates * chosen * (slot <= capacity)[:, None]
        return jnp.mean((jnp.einsum("te,tm,emh->th", kept, tokens, params["experts"])) ** 2)

    def step(params: Any, x: Any) -> Any:
        loss, grads = alpa.value_and_grad(loss_fn)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), loss

    draw = np.random.default_rng(0).normal
    params = {"gate": draw(size=(6, experts)), "experts": draw(size=(experts, 6, 5))}
    params = jax.tree.map(np.float32, params)
    x = draw(size=(8, 3, 6)).astype(np.float32)
    refused = (
        r"test_zoo_micro_batches.py:\d+:\d+: error: .* over .*samples.*plan with 1 micro-batch"
    )
    with pytest.raises(PlanningError, match=refused):
        alpa.parallelize(step, cluster="cpu:1x1", num_micro_batches=2)(params, x)
