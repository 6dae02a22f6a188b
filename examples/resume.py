"""A training that can be stopped at any time, and started again with the same command.

    python examples/resume.py checkpoints        # stop it with Ctrl-C, or kill it
    python examples/resume.py checkpoints        # continues from the last checkpoint

With `executor="ray"` a worker may die, too: the loop then continues in the same process.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa
from alpa.runtime import WorkerError

jax.config.update("jax_num_cpu_devices", 4)  # Before JAX creates its devices.

STEPS, SAVE_EVERY, WIDTH = 30, 10, 32


def init() -> dict[str, Any]:
    keys = jax.random.split(jax.random.key(0), 2)
    params = [0.3 * jax.random.normal(key, (WIDTH, WIDTH)) for key in keys]
    return {"params": params, "velocity": [jnp.zeros((WIDTH, WIDTH))] * 2}


def loss_fn(params: Any, batch: Any) -> Any:
    return jnp.mean((jnp.tanh(batch["x"] @ params[0]) @ params[1] - batch["y"]) ** 2)


@alpa.parallelize(cluster="cpu:1x4", num_micro_batches=2, donate_argnums=0, check_finite=True)
def train_step(state: Any, batch: Any) -> Any:
    loss, grads = alpa.value_and_grad(loss_fn)(state["params"], batch)
    velocity = [0.9 * v + g for v, g in zip(state["velocity"], grads, strict=True)]
    params = [p - 0.5 * v for p, v in zip(state["params"], velocity, strict=True)]
    return {"params": params, "velocity": velocity}, loss


def batch_of(step: int) -> dict[str, np.ndarray]:
    """Returns the same batch for the same step in each run."""
    x = np.random.default_rng(step).normal(size=(16, WIDTH)).astype(np.float32)
    return {"x": x, "y": np.roll(x, 1, axis=1)}


def train(directory: Path) -> None:
    step, state = alpa.resume(directory, init, train_step, batch_of(0))
    while step < STEPS:
        state, loss = train_step(state, batch_of(step))
        print(f"step {step}: loss {float(loss):.4f}")
        step += 1
        if step % SAVE_EVERY == 0:
            print(f"saved {alpa.save(directory, step, state, keep=2)}")


def main() -> None:
    directory = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp())
    for _ in range(3):
        try:
            return train(directory)
        except WorkerError as error:
            print(f"continuing from step {alpa.latest_step(directory) or 0}: {error}")
    raise SystemExit("workers have failed three times; read their errors above")


if __name__ == "__main__":
    main()
