"""Plain jax references for the zoo: whole batches, micro-batch loops, and float64."""

from __future__ import annotations

import re
import struct
from typing import Any

import jax
import numpy as np
import optax

from alpa.tools.zoo.program import TrainingProgram, TrainState

Batch = dict[str, Any]


def looped_step(
    program: TrainingProgram, state: TrainState, batch: Batch, num_micro_batches: int
) -> list[np.ndarray]:
    """One step of plain jax that loops over the micro-batches, model state carried along.

    For a program whose forward pass writes no state this is one step at the full batch.
    """
    micro_batches = [
        {name: np.split(np.asarray(value), num_micro_batches)[m] for name, value in batch.items()}
        for m in range(num_micro_batches)
    ]
    value_and_grad = jax.jit(jax.value_and_grad(program.loss, has_aux=True))
    losses: list[Any] = []
    gradients: list[Any] = []
    model_state = state.model_state
    for micro_batch in micro_batches:
        (loss, model_state), grads = value_and_grad(state.params, model_state, micro_batch)
        losses.append(loss)
        gradients.append(grads)
    mean = jax.tree.map(lambda *g: sum(g) / num_micro_batches, *gradients)

    @jax.jit
    def update(grads: Any, state: TrainState) -> tuple[Any, Any]:
        updates, opt_state = program.optimizer.update(grads, state.opt_state, state.params)
        return optax.apply_updates(state.params, updates), opt_state

    params, opt_state = update(mean, state)
    new = TrainState(params, opt_state, model_state)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((new, sum(losses) / num_micro_batches))]


def float64_text(text: str) -> str:
    """A module's text in float64: types, and constants written as bit patterns."""

    def widen(match: re.Match[str]) -> str:
        (value,) = struct.unpack(">f", bytes.fromhex(match[1]))
        return "0x" + struct.pack(">d", value).hex().upper()

    text = re.sub(r"0x([0-9A-Fa-f]{8})(?=>? : tensor<[^>]*f32>|>)", widen, text)
    return re.sub(r"\bf32\b|(?<=x)f32\b", "f64", text)
