"""Random numbers of a random program, as the plan draws them and as plain JAX does.

Numbers for samples are drawn in each micro-batch from the key folded with its number. At the whole
batch, plain JAX draws the same numbers if it joins those of the folded keys. All numbers are drawn
in types of at most 32 bits, so that a run in 64 bits draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

KINDS = ("bits", "normal", "uniform", "gumbel")
WAYS = ("given", "split", "folded")
"""How a program derives the key that it draws from."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """`keys` are those of the parts of the batch, `shared` is the key of all samples."""

    keys: Sequence[Any]
    shared: Any
    kind: str = "bits"
    way: str = "given"

    def of_samples(self, number: int, shape: Sequence[int]) -> Any:
        """f32 numbers of size about 1; `shape` begins with the number of samples."""
        rows = shape[0] // len(self.keys)
        parts = [self._draw(self._derived(key, number), (rows, *shape[1:])) for key in self.keys]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def shared_by_samples(self, number: int, shape: Sequence[int]) -> Any:
        """f32 numbers of size about 1; `shape` has no dimension of samples."""
        return self._draw(self._derived(self.shared, number), tuple(shape))

    def keep(self, shape: Sequence[int]) -> Any:
        """The elements that dropout keeps, drawn from the given keys."""
        rows = shape[0] // len(self.keys)
        # Bits, not `bernoulli`, which draws other numbers in 64 bits.
        parts = [jax.random.bits(key, (rows, *shape[1:]), jnp.uint8) < 192 for key in self.keys]
        return parts[0] if len(parts) == 1 else jnp.concatenate(parts)

    def permutation(self, samples: int) -> Any:
        """A permutation of the samples, which mixes them; needs a single part as its reference."""
        return jax.random.permutation(self.keys[0], samples)

    def next(self) -> Any:
        """The key that the step returns."""
        return jax.random.split(self.shared)[0]

    def _derived(self, key: Any, number: int) -> Any:
        if self.way == "split":
            return jax.random.split(key, number + 2)[number + 1]
        return jax.random.fold_in(key, number) if self.way == "folded" else key

    def _draw(self, key: Any, shape: tuple[int, ...]) -> Any:
        return _DRAWS[self.kind](key, shape)


_DRAWS: dict[str, Callable[[Any, tuple[int, ...]], Any]] = {
    "bits": lambda key, shape: jax.random.bits(key, shape, jnp.uint8).astype(jnp.float32) / 64 - 2,
    "normal": lambda key, shape: jax.random.normal(key, shape, jnp.float32),
    "uniform": lambda key, shape: jax.random.uniform(
        key, shape, jnp.float32, jnp.float32(-1), jnp.float32(1)
    ),
    "gumbel": lambda key, shape: jax.random.gumbel(key, shape, jnp.float32),
}
