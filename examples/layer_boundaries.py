"""A user's own layers: `alpa.mark_layer_boundary` says where a pipeline may be cut.

    python examples/layer_boundaries.py

Without marks Alpa clusters the ops of the model by itself. With them, stages begin at marks only.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa

jax.config.update("jax_num_cpu_devices", 4)  # Before jax makes its devices.

WIDTH, LAYERS = 64, 4


def loss_fn(params: Any, batch: Any) -> Any:
    x = batch["x"]
    for number, layer in enumerate(params):
        if number:
            alpa.mark_layer_boundary()
        x = x + jnp.tanh(x @ layer["in"]) @ layer["out"]
    return jnp.mean((x - batch["y"]) ** 2)


def train_step(params: Any, batch: Any) -> Any:
    loss, grads = alpa.value_and_grad(loss_fn)(params, batch)
    return jax.tree.map(lambda p, g: p - 0.5 * g, params, grads), loss


def main() -> None:
    generator = np.random.default_rng(0)

    def normal(*shape: int) -> np.ndarray:
        return (generator.normal(size=shape) * shape[0] ** -0.5).astype(np.float32)

    layers = range(LAYERS)
    params = [{"in": normal(WIDTH, 4 * WIDTH), "out": normal(4 * WIDTH, WIDTH)} for _ in layers]
    batch = {"x": normal(32, WIDTH), "y": normal(32, WIDTH)}
    # Stages of equally many layers on meshes of two devices: a plan by hand.
    step = alpa.parallelize(
        train_step, cluster="cpu:2x2", num_micro_batches=4, inter="equal-layers", mesh_shape="2x1"
    )
    plain = jax.jit(train_step)  # The marks mean nothing to jax.
    step.plan(params, batch)
    ours, theirs = params, params
    for number in range(5):
        ours, loss = step(ours, batch)
        theirs, expected = plain(theirs, batch)
        print(f"step {number}: loss {float(loss):.6f}, of plain jax {float(expected):.6f}")


if __name__ == "__main__":
    main()
