"""Random training steps with random shardings of their own, in two stages, against plain JAX."""

from __future__ import annotations

import random
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import alpa
from alpa.runtime.comparison import compare

MESHES = [(2, 2), (2, 2, 1), (1, 2, 2), (4, 1), (2, 1, 2)]
WIDTH = 16
Params = list[tuple[Any, Any]]


class Author:
    """Writes a model of residual layers with two matrices each, the same one with and without
    shardings."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.sizes = self.random.choice(MESHES)
        self.names = ("a", "b", "c")[: len(self.sizes)]
        count = self.random.choice([2, 3])
        self.specs = [[self.spec(rank) for rank in (3, 2, 2, 3)] for _ in range(count)]
        self.by_shards = [self.random.random() < 0.4 for _ in range(count)]
        self.options: dict[str, Any] = {
            "num_micro_batches": self.random.choice([1, 2]),
            "schedule": self.random.choice(["1f1b", "gpipe"]),
            "remat": self.random.choice(["none", "auto", "layer"]),
        }

    def spec(self, rank: int) -> PartitionSpec | None:
        """A sharding with closed and open dimensions, or none."""
        if self.random.random() < 0.4:
            return None
        axes = self.random.sample(self.names, len(self.names))
        dims: list[Any] = []
        for _ in range(rank):
            count = self.random.choice([0, 0, 1, 1, 2])
            mine, axes = tuple(axes[:count]), axes[count:]
            dims.append(mine or self.random.choice([None, PartitionSpec.UNCONSTRAINED]))
        return PartitionSpec(*dims)

    @property
    def mesh(self) -> Mesh:
        devices = jax.devices()[: int(np.prod(self.sizes))]
        types = (AxisType.Auto,) * len(self.sizes)
        return jax.make_mesh(self.sizes, self.names, axis_types=types, devices=devices)

    def products(self, x: Any, up: Any, down: Any) -> Any:
        """By hand, with the columns of `up` on the devices of the second axis."""
        rows, columns = self.names[:2]

        def local(x: Any, up: Any, down: Any) -> Any:
            return jax.lax.psum(jnp.tanh(x @ up) @ down, columns)

        specs = PartitionSpec(rows), PartitionSpec(None, columns), PartitionSpec(columns)
        mapped = jax.shard_map(local, mesh=self.mesh, in_specs=specs, out_specs=specs[0])
        return mapped(x, up, down)

    def loss(self, params: Params, x: Any, *, own: bool) -> Any:
        def constrain(value: Any, spec: PartitionSpec | None) -> Any:
            if spec is None or not own:
                return value
            return jax.lax.with_sharding_constraint(value, NamedSharding(self.mesh, spec))

        for number, (up, down) in enumerate(params):
            if number:
                alpa.mark_layer_boundary()
            before, of_up, of_down, behind = self.specs[number]
            x, up, down = constrain(x, before), constrain(up, of_up), constrain(down, of_down)
            if own and self.by_shards[number]:
                made = self.products(x, up, down)
            else:
                made = jnp.tanh(x @ up) @ down
            x = constrain(x + made, behind)
        return jnp.mean(x**2)

    def step(self, params: Params, x: Any, *, own: bool) -> Any:
        loss, grads = alpa.value_and_grad(partial(self.loss, own=own))(params, x)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads), loss


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 40))]
)
def test_random_shardings(seed: int) -> None:
    author, numbers = Author(seed), np.random.default_rng(seed)
    shapes = [((WIDTH, 2 * WIDTH), (2 * WIDTH, WIDTH))] * len(author.specs)
    params, x = jax.tree.map(
        lambda shape: numbers.normal(size=shape).astype(np.float32) / 4,
        (shapes, (16, 8, WIDTH)),
        is_leaf=lambda it: isinstance(it[0], int),
    )
    ours = alpa.parallelize(
        partial(author.step, own=True), cluster="cpu:1x8", num_stages=2, **author.options
    )
    found = jax.tree.leaves(ours(params, x))
    expected = jax.tree.leaves(jax.jit(partial(author.step, own=False))(params, x))
    assert all(it.ok for it in compare([*map(np.asarray, found)], [*map(np.asarray, expected)]))
