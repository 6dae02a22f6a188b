"""Training and evaluation share a state: dropout and batch statistics in one, not in the other.

python examples/evaluation.py
"""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training import train_state

import alpa

jax.config.update("jax_num_cpu_devices", 4)  # Before JAX creates its devices.


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x: Any, train: bool) -> Any:
        for _ in range(3):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(64, use_bias=False)(x))
            x = nn.Dropout(0.1, deterministic=not train)(nn.relu(x))
        return nn.Dense(4)(x)


class TrainState(train_state.TrainState):
    batch_stats: Any
    key: Any


# Batch norm mixes the samples of a batch, so each micro-batch must be a batch of its own.
@alpa.parallelize(
    cluster="cpu:2x2", num_micro_batches=2, micro_batches="independent", donate_argnums=0
)
def train_step(state: TrainState, batch: Any) -> Any:
    # Each micro-batch draws from its own key; the key that is returned advances once.
    key, dropout = jax.random.split(state.key)

    def loss_fn(params: Any) -> Any:
        variables = {"params": params, "batch_stats": state.batch_stats}
        logits, new = state.apply_fn(
            variables, batch["x"], True, rngs={"dropout": dropout}, mutable=["batch_stats"]
        )
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
        return losses.mean(), new["batch_stats"]

    (loss, stats), grads = alpa.value_and_grad(loss_fn, has_aux=True)(state.params)
    return state.apply_gradients(grads=grads, batch_stats=stats, key=key), loss


@alpa.parallelize(like=train_step, batch_argnums=1)
def evaluate(state: TrainState, batch: Any) -> Any:
    variables = {"params": state.params, "batch_stats": state.batch_stats}
    logits = state.apply_fn(variables, batch["x"], False)
    return {"right": jnp.sum(jnp.argmax(logits, -1) == batch["label"]), "logits": logits}


def new_state() -> TrainState:
    variables = Classifier().init(jax.random.key(0), jnp.zeros((1, 8)), train=False)
    return TrainState.create(
        apply_fn=Classifier().apply, tx=optax.adam(1e-2), key=jax.random.key(1), **variables
    )


def random_batch(seed: int, samples: int) -> dict[str, np.ndarray]:
    x = np.random.default_rng(seed).normal(size=(samples, 8)).astype(np.float32)
    return {"x": x, "label": np.argmax(x[:, :4], axis=1)}


def main() -> None:
    test = random_batch(1000, 128)
    state = alpa.create_state(new_state, train_step, random_batch(0, 64))
    for number in range(20):
        state, loss = train_step(state, random_batch(number, 64))
        if number % 5 == 4:
            right = int(evaluate(state, test)["right"])
            print(f"step {number}: loss {float(loss):.4f}, {right} of 128 right")


if __name__ == "__main__":
    main()
