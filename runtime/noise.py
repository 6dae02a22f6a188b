"""Measures noise: the distance between runs of a reference that differ only by rounding."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from alpa.dialects import ir, separate
from alpa.passes.pipelines.clock import Clock
from alpa.runtime.comparison import Comparison, Tensor, difference, distance
from alpa.runtime.dtypes import is_exact
from alpa.runtime.reassociation import reassociate
from alpa.runtime.reference import unplanned

SEEDS = (0, 1, 2, 3)
"""The seeds of a comparison's perturbations. `comparison.FACTOR` depends on their number."""

Run = Callable[[Sequence[Any]], Sequence[Any]]
"""A program, from its arguments to its results."""


@dataclass(frozen=True, kw_only=True)
class Reference:
    """A program on one device whose results a plan must match."""

    description: str
    run: Run
    module: ir.Module
    """the module that it runs, for a version with its sums in another order"""
    step: Callable[[Run], Run] = lambda run: run
    """makes a run of the program from a run of the module, if the program runs it several times"""

    def reassociated(self) -> Run | None:
        """The program with its sums in another order, or None if it has no sums."""
        module = separate(self.module.operation)
        return self.step(unplanned(module)) if reassociate(module) else None


@dataclass(frozen=True, kw_only=True)
class Output:
    """The properties of one result."""

    label: str
    type: str
    state: int | None = None
    """the number of the argument whose new value it is"""
    is_narrow: bool = False
    """whether 16-bit floats contribute to it"""


def compare_with_noise(
    results: Sequence[Any],
    arguments: Sequence[Any],
    reference: Reference,
    outputs: Sequence[Output],
    clock: Clock,
) -> Comparison:
    """Compares results with those of a reference for the same arguments, and measures the noise.

    Raises:
        ValueError: the results differ from the reference's in number or shape.
    """
    with clock.phase("one device"):
        expected = _arrays(reference.run(arguments))
    found = _arrays(results)
    if len(found) != len(expected):
        raise ValueError(f"the plan has {len(found)} results, its reference {len(expected)}")
    by_perturbing: dict[int, float] = {}
    for seed in SEEDS:
        with clock.phase("one device, perturbed"):
            moved = perturbed(arguments, seed)
            others = _arrays(reference.run(moved))
        for n, far in enumerate(_distances(others, moved, expected, arguments, outputs)):
            by_perturbing[n] = max(by_perturbing.get(n, 0.0), far)
    with clock.phase("one device, sums reordered"):
        run = reference.reassociated()
        others = None if run is None else _arrays(run(arguments))
    by_order: Mapping[int, float] = {}
    if others is not None:
        by_order = dict(enumerate(_distances(others, arguments, expected, arguments, outputs)))
    tensors: list[Tensor] = []
    for n, (a, b, output) in enumerate(zip(found, expected, outputs, strict=True)):
        old = None if output.is_narrow or output.state is None else arguments[output.state]
        narrow = "bfloat16" if output.is_narrow else None
        row = difference(a, b, index=n, dtype=narrow, old=old)
        tensors.append(
            Tensor(
                label=output.label,
                type=output.type,
                difference=row.error,
                bound=row.bound,
                perturbed=by_perturbing.get(n),
                reassociated=by_order.get(n),
                is_finite=_is_finite(b),
            )
        )
    return Comparison(reference=reference.description, tensors=tuple(tensors))


def _distances(
    others: Sequence[np.ndarray],
    their_arguments: Sequence[Any],
    expected: Sequence[np.ndarray],
    arguments: Sequence[Any],
    outputs: Sequence[Output],
) -> list[float]:
    """The distances of another run of the reference; for new states, of their changes."""
    found: list[float] = []
    for a, b, output in zip(others, expected, outputs, strict=True):
        if output.is_narrow or output.state is None:
            found.append(distance(a, b))
        else:
            found.append(distance(a, b, their_arguments[output.state], arguments[output.state]))
    return found


def _arrays(results: Sequence[Any]) -> list[np.ndarray]:
    return [np.asarray(array) for array in results]


def _is_finite(array: np.ndarray) -> bool:
    if is_exact(array.dtype):
        return True
    wide = array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)
    return bool(np.isfinite(wide).all())


def perturbed(arrays: Sequence[Any], seed: int) -> list[np.ndarray]:
    """Moves each floating element of arrays by one unit in the last place, up or down at random.

    Zeros, infinities, NaNs and arrays of other types stay unchanged.
    """
    generator = np.random.default_rng([seed, 0x51])
    return [_moved(np.asarray(array), generator) for array in arrays]


def _moved(array: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    if array.dtype.kind == "c":
        parts = np.real(array), np.imag(array)
        real, imaginary = (_moved(part, generator) for part in parts)
        return (real + 1j * imaginary).astype(array.dtype)
    if not jnp.issubdtype(array.dtype, jnp.floating):
        return array
    # As integers, floats of one sign are ordered by magnitude.
    bits = np.dtype(f"u{array.dtype.itemsize}")
    step = generator.choice(np.array([1, -1], f"i{array.dtype.itemsize}"), array.shape)
    neighbour = (np.ascontiguousarray(array).view(bits) + step.view(bits)).view(array.dtype)
    neighbour = neighbour.reshape(array.shape)
    with np.errstate(invalid="ignore"):  # the neighbours of infinity
        keep = ~np.isfinite(array) | (array == 0) | ~np.isfinite(neighbour)
    return np.where(keep, array, neighbour)
