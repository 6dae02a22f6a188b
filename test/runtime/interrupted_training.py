"""Run by `test_interrupts.py`, which interrupts it: trains, and says what is left each time."""

from __future__ import annotations

import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa
from alpa.runtime import WorkerOptions

X = np.random.default_rng(0).normal(size=(64, 16)).astype(np.float32)


def train_step(weights: Any, x: Any) -> Any:
    def loss_fn(weights: Any) -> Any:
        first, second = weights
        return jnp.mean(jnp.tanh(jnp.tanh(x @ first) @ second) ** 2)

    loss, grads = alpa.value_and_grad(loss_fn)(weights)
    return [w - 0.1 * g for w, g in zip(weights, grads, strict=True)], loss


def new_state() -> Any:
    return [jnp.eye(16), jnp.full((16, 16), 0.1)]


def say(word: str) -> None:
    sys.stdout.write(f"{word}\n")
    sys.stdout.flush()


def main(executor: Any, rounds: int) -> None:
    jax.config.update("jax_num_cpu_devices", 2)
    step = alpa.parallelize(
        train_step,
        cluster="cpu:1x2",
        num_micro_batches=16,
        donate_argnums=0,
        num_stages=2,
        executor=executor,
        # A cluster of its own: one that runs here may have no CPU left.
        workers=WorkerOptions(address="local", cache_directory=None, timeout_seconds=300),
    )
    with step:
        state, loss = new_state(), jnp.zeros(())
        for _ in range(rounds):
            try:
                say("ready")  # at first, to plan
                while True:
                    state, loss = step(state, X)
            except KeyboardInterrupt:
                pass
            try:
                state, loss = step(state, X)
                np.asarray(loss)
                say("usable")
            except RuntimeError as error:
                say(f"{type(error).__name__}: {error}")
                state = new_state()
        expected = new_state()
        state = new_state()
        for _ in range(3):
            state, loss = step(state, X)
            expected, expected_loss = jax.jit(train_step)(expected, X)
        np.testing.assert_allclose(loss, expected_loss, rtol=1e-5)
        say("equal")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
