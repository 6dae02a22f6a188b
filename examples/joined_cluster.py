"""Training on an existing Ray cluster: the process joins it and runs its workers there.

    ray start --head --num-cpus=8   # once; `ray start --address=HOST:PORT` on each further host
    python examples/joined_cluster.py

Without a cluster, `ray.init(address="auto")` fails; without that line, Alpa starts its own cluster.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import ray

import alpa

WIDTH = 64


def loss_fn(params: Any, x: Any) -> Any:
    h = x
    for layer in params:
        h = h + jnp.tanh(h @ layer["in"]) @ layer["out"]
    return jnp.mean((h - jnp.roll(x, 1, axis=1)) ** 2)


# Two meshes of two CPU devices, which are virtual, each in an actor.
@alpa.parallelize(
    cluster="cpu:2x2",
    num_micro_batches=4,
    inter="equal-layers",
    mesh_shape="1x2",
    donate_argnums=0,
    executor="ray",
)
def train_step(params: Any, x: Any) -> Any:
    loss, grads = alpa.value_and_grad(loss_fn)(params, x)
    return jax.tree.map(lambda p, g: p - 0.3 * g, params, grads), loss


def new_params() -> Any:
    keys = jax.random.split(jax.random.key(0), 4)
    normal = jax.nn.initializers.lecun_normal()
    shapes = {"in": (WIDTH, 4 * WIDTH), "out": (4 * WIDTH, WIDTH)}
    return [{name: normal(key, shape) for name, shape in shapes.items()} for key in keys]


def main() -> None:
    ray.init(address="auto")
    x = np.random.default_rng(0).normal(size=(32, WIDTH)).astype(np.float32)
    params = alpa.create_state(new_params, train_step, x)
    for number in range(20):
        params, loss = train_step(params, x)
        print(f"step {number}: loss {float(loss):.4f}")
    print(params[3]["out"])


if __name__ == "__main__":
    main()
