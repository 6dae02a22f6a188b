"""How a random program takes its samples: as one tree or two, in which dimensions.

Inside the program, the batch is a dictionary of arrays whose first dimension holds the samples. Its
arguments are `state, batch, second, weights, flag, key`; absent ones are None.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The dimension of the samples by array name, 0 by default.

    `apart` are the arrays of the second argument. `said` means that the user names the arguments
    that hold samples. `weights` adds a table as long as the batch that holds no samples.
    """

    dims: Mapping[str, int] = field(default_factory=dict[str, int])
    apart: frozenset[str] = frozenset()
    said: bool = True
    weights: bool = False

    def __str__(self) -> str:
        notes = [f"{name} in dimension {dim}" for name, dim in sorted(self.dims.items()) if dim]
        notes += [f"{', '.join(sorted(self.apart))} apart"] if self.apart else []
        notes += [] if self.said else ["by evidence"]
        notes += ["beside a table as long as the batch"] if self.weights else []
        return ", ".join(notes) or "plain"

    @property
    def is_ambiguous(self) -> bool:
        """Whether other arrays look like samples, too."""
        return self.weights or any(self.dims.values())

    @property
    def is_sayable(self) -> bool:
        """Whether each argument has the samples of all its arrays in one dimension."""
        apart = {self.dims.get(name, 0) for name in self.apart}
        return len(apart) < 2 and len({d for n, d in self.dims.items() if n not in self.apart}) < 2

    @property
    def batch_argnums(self) -> dict[int, int] | None:
        """The `batch_argnums` of `alpa.parallelize`, if they are given."""
        if not self.said:
            return None
        dims = {1: {d for name, d in self.dims.items() if name not in self.apart} or {0}}
        if self.apart:
            dims[2] = {self.dims.get(name, 0) for name in self.apart}
        assert all(len(found) == 1 for found in dims.values()), "one dimension per argument"
        return {number: found.pop() for number, found in dims.items()}

    def packed(self, batch: Mapping[str, np.ndarray]) -> tuple[Any, Any]:
        """The first and the second argument with samples."""
        moved = {name: np.moveaxis(a, 0, self.dims.get(name, 0)) for name, a in batch.items()}
        first = {name: a for name, a in moved.items() if name not in self.apart}
        second = {name: a for name, a in moved.items() if name in self.apart}
        return first, second or None

    def function(self, inner: Callable[..., Any]) -> Callable[..., Any]:
        """The program with this layout; `inner` takes state, batch, weights, flag, key."""

        def step(state: Any, batch: Any, second: Any, weights: Any, flag: Any, key: Any) -> Any:
            joined = {**batch, **(second or {})}
            moved = {n: jnp.moveaxis(a, self.dims.get(n, 0), 0) for n, a in joined.items()}
            return inner(state, moved, weights, flag, key)

        return step


def draw(generator: np.random.Generator, names: frozenset[str]) -> Layout:
    """Draws a layout for arrays of these names; the first argument always holds the indices."""
    # Masks and bytes have the length after the samples, like all other arrays.
    if generator.random() < 0.55:
        return Layout()
    others = sorted(names - {"indices"})
    apart = frozenset(name for name in others if generator.random() < 0.5)
    said = bool(generator.random() < 0.5)
    first, second = (int(generator.random() < 0.35) for _ in range(2))
    dims = {name: second if name in apart else first for name in names}
    if not said:
        dims = {name: int(generator.random() < 0.3) for name in sorted(names)}
    # Masks and bytes have the length behind the samples as all others do.
    return Layout(dims=dims, apart=apart, said=said, weights=bool(generator.random() < 0.3))
