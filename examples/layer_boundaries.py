"""A user's own layers: `alpa.mark_layer_boundary` marks where a pipeline may be cut.

    python examples/layer_boundaries.py

Without markers, Alpa clusters the ops of the model. With them, stages begin only at markers.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import alpa

jax.config.update("jax_num_cpu_devices", 4)  # Before JAX creates its devices.

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
    # Stages of equally many layers on meshes of two devices: a manual plan.
    step = alpa.parallelize(
        train_step, cluster="cpu:2x2", num_micro_batches=4, inter="equal-layers", mesh_shape="2x1"
    )
    plain = jax.jit(train_step)  # JAX ignores the markers.
    step.plan(params, batch)
    ours, theirs = params, params
    for number in range(5):
        ours, loss = step(ours, batch)
        theirs, expected = plain(theirs, batch)
        print(f"step {number}: loss {float(loss):.6f}, of plain JAX {float(expected):.6f}")


if __name__ == "__main__":
    main()
