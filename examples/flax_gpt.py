"""A small GPT in Flax, trained with AdamW on two meshes of virtual CPU devices.

    python examples/flax_gpt.py

The step also works with `jax.jit`; only the decorator `alpa.parallelize` is specific to Alpa.
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import alpa

jax.config.update("jax_num_cpu_devices", 4)  # Before JAX creates its devices.

VOCABULARY, LENGTH, WIDTH = 256, 32, 64


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x: Any) -> Any:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
        return x + nn.Dense(WIDTH)(nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x))))


class GPT(nn.Module):
    @nn.compact
    def __call__(self, tokens: Any) -> Any:
        embed = nn.Embed(VOCABULARY, WIDTH)
        x = embed(tokens) + nn.Embed(LENGTH, WIDTH)(jnp.arange(tokens.shape[1]))
        for _ in range(4):
            x = Layer()(x)
        return embed.attend(nn.LayerNorm()(x))


@alpa.parallelize(cluster="cpu:2x2", num_micro_batches=2, donate_argnums=0)
def train_step(state: TrainState, tokens: Any) -> tuple[TrainState, Any]:
    def loss_fn(params: Any) -> Any:
        logits = state.apply_fn({"params": params}, tokens[:, :-1])
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:])
        return losses.mean()

    loss, grads = alpa.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def new_state() -> TrainState:
    params = GPT().init(jax.random.key(0), jnp.zeros((1, LENGTH), jnp.int32))["params"]
    schedule = optax.warmup_cosine_decay_schedule(0.0, 3e-3, 5, 100)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    return TrainState.create(apply_fn=GPT().apply, params=params, tx=optimizer)


def main() -> None:
    # Sequences that count upwards from a random number.
    starts = np.random.default_rng(0).integers(VOCABULARY, size=(8, 1))
    tokens = ((starts + np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)
    # Every array of the state is created on the mesh that the plan assigns.
    state = alpa.create_state(new_state, train_step, tokens)
    train_step.plan(state, tokens)
    for number in range(10):
        state, loss = train_step(state, tokens)
        print(f"step {number}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
