"""An Equinox model without changes: its activation function is a leaf of the model.

pip install equinox
python examples/equinox_mlp.py
"""

from __future__ import annotations

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import alpa

jax.config.update("jax_num_cpu_devices", 4)  # Before JAX creates its devices.

optimizer = optax.adam(1e-2)


def loss_fn(model: Any, x: Any, y: Any) -> Any:
    return jnp.mean((jax.vmap(model)(x) - y) ** 2)


@alpa.parallelize(cluster="cpu:1x4", num_micro_batches=2)
def train_step(model: Any, opt_state: Any, x: Any, y: Any) -> Any:
    loss, grads = eqx.filter_value_and_grad(loss_fn)(model, x, y)
    updates, opt_state = optimizer.update(grads, opt_state)
    return eqx.apply_updates(model, updates), opt_state, loss


def main() -> None:
    model = eqx.nn.MLP(2, 1, width_size=64, depth=2, key=jax.random.key(0))
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    x = np.random.default_rng(0).normal(size=(64, 2)).astype(np.float32)
    y = np.sin(x[:, :1]) * x[:, 1:]
    for number in range(20):
        model, opt_state, loss = train_step(model, opt_state, x, y)
        print(f"step {number}: loss {float(loss):.4f}")


if __name__ == "__main__":
    main()
