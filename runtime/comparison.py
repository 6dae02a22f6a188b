"""Defines when results are equal, and reports comparisons.

A tensor equals its reference if `max|a-b| <= 1e-4 max|ref|`, or 2e-2 if 16-bit floats contribute to
it. Integers and booleans must be identical. A new state is compared by its change, minus its own
rounding: a step changes a parameter only a little, and a lost gradient would be small beside the
parameter itself.

A tensor that is not equal is a fault or noise. A parallel sum adds in another order, so its last
bits differ, and an ill-conditioned program amplifies them. The reference itself measures how much,
on one device: it runs with arguments moved by one unit in the last place, and with its sums in
another order. A difference of at most `FACTOR` times the largest of these distances is noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from alpa.runtime.dtypes import is_exact

FACTOR = 10
"""The largest ratio of a difference to the measured noise that counts as noise.

The difference and the five distances that measure noise have distributions of about the same width,
but with long tails: Adam divides by gradients near zero, and a few elements decide the maximum of a
tensor. Of 436 tensors of correct plans that exceeded their bound, 97 % had a ratio below 1.8, and
the largest ratio was 4.2 (docs/figures.md). The factor is about twice that. Faults below 10 times
the noise are not detected in this precision.
"""
SHOWN = 10
"""The number of tensors in a report."""

Verdict = Literal["equal", "noise", "differs", "not finite"]

_BOUND = 1e-4
_BOUNDS = {"bfloat16": 2e-2, "float16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The difference of one tensor from its reference, max|a-b|, and its bound."""

    index: int
    error: float
    bound: float
    ok: bool


def compare(
    results: Sequence[Any], reference: Sequence[Any], dtype: str | None = None
) -> list[Difference]:
    """Compares results with references: max|a-b| <= 1e-4 max|ref| in f32, 2e-2 in bf16 and f16.

    Integers and booleans must be identical. Each reference's dtype decides the bound unless
    `dtype`, a numpy name, is given.

    Raises:
        ValueError: a result and its reference have different shapes.
    """
    pairs = enumerate(zip(results, reference, strict=True))
    return [difference(result, expected, index=i, dtype=dtype) for i, (result, expected) in pairs]


def difference(
    result: Any,
    expected: Any,
    *,
    index: int = 0,
    dtype: str | None = None,
    old: Any = None,
    relative: float | None = None,
) -> Difference:
    """Compares one result with its reference.

    Args:
        result, expected: arrays of one shape.
        index: the number of the result.
        dtype: the numpy name of the type that decides the bound; by default that of `expected`.
        old: for a new state, the old array; the changes from it are compared.
        relative: the bound as a share of max|ref|, instead of the type's bound.

    Raises:
        ValueError: the shapes differ.
    """
    a, b = np.asarray(result), np.asarray(expected)
    if a.shape != b.shape:
        raise ValueError(f"result {index} has shape {a.shape}, its reference {b.shape}")
    error = distance(a, b, old, old)
    if is_exact(b.dtype):
        bound = 0.0
    else:
        relative = _BOUNDS.get(dtype or b.dtype.name, _BOUND) if relative is None else relative
        rounding = 0.0 if old is None else float(jnp.finfo(b.dtype).eps) * _largest(_wide(b))
        bound = relative * _largest(_change(b, old)) + rounding
    return Difference(index=index, error=error, bound=bound, ok=error <= bound)


def distance(a: Any, b: Any, old_a: Any = None, old_b: Any = None) -> float:
    """max|a-b|, or that of the changes from old arrays; infinite if one holds NaN."""
    a, b = _change(a, old_a), _change(b, old_b)
    with np.errstate(invalid="ignore"):
        found = _largest(np.where(a == b, 0, a - b))
    return float("inf") if np.isnan(found) else found


def _change(array: Any, old: Any) -> np.ndarray:
    array = np.asarray(array)
    if old is None or is_exact(array.dtype):
        return _wide(array)
    return _wide(array) - _wide(np.asarray(old))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _largest(array: np.ndarray) -> float:
    return float(np.max(np.abs(array), initial=0))


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One result of a plan and its reference; for a new state, its change.

    `perturbed` and `reassociated` are the distances of other runs of the reference: with arguments
    moved by one unit in the last place, and with sums in another order. They are None without such
    a run.
    """

    label: str
    type: str
    difference: float
    bound: float
    perturbed: float | None = None
    reassociated: float | None = None
    is_finite: bool = True
    """whether the reference holds neither NaN nor infinity"""

    @property
    def noise(self) -> float:
        """The largest distance of another run of the reference from it."""
        return max(self.perturbed or 0.0, self.reassociated or 0.0)

    @property
    def verdict(self) -> Verdict:
        """Whether the difference is within the bound, and if not, how it is classified."""
        if self.difference <= self.bound:
            return "equal" if self.is_finite else "not finite"
        if not self.is_finite:
            return "not finite"
        return "noise" if self.difference <= FACTOR * self.noise else "differs"

    @property
    def share(self) -> float:
        """The difference as a share of its bound."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.bound if self.bound else float("inf")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results of a plan and of a reference. `str` is a table of the worst tensors."""

    reference: str
    """what the plan is compared with, in words"""
    tensors: tuple[Tensor, ...]

    def of(self, verdict: Verdict) -> tuple[Tensor, ...]:
        """The tensors with a verdict."""
        return tuple(tensor for tensor in self.tensors if tensor.verdict == verdict)

    @property
    def is_fault(self) -> bool:
        """Whether a tensor differs by more than noise, or the reference is not finite."""
        return bool(self.of("differs") or self.of("not finite"))

    @property
    def is_noise(self) -> bool:
        """Whether some tensors differ, and none by more than noise."""
        return not self.is_fault and bool(self.of("noise"))

    def worst(self, count: int = SHOWN) -> list[Tensor]:
        """Faults first, then noise, then equal tensors, each sorted by share of the bound."""
        order: dict[Verdict, int] = {"not finite": 0, "differs": 1, "noise": 2, "equal": 3}
        ranked = sorted(self.tensors, key=lambda t: (order[t.verdict], -t.share))
        return ranked[:count]

    def table(self, count: int = SHOWN) -> str:
        """The worst tensors, with the noise beside each difference."""
        worst = self.worst(count)
        width = max([len(tensor.label) for tensor in worst], default=0)
        kinds = max([len(tensor.type) for tensor in worst], default=0)
        header = (
            f"{'result':{width}}  {'type':{kinds}}  {'max|a-b|':>9}  {'bound':>9}  "
            f"{'perturbed':>9}  {'reordered':>9}"
        )
        rows = [
            f"{t.label:{width}}  {t.type:{kinds}}  {t.difference:9.2e}  {t.bound:9.2e}  "
            f"{_number(t.perturbed)}  {_number(t.reassociated)}  {t.verdict}"
            for t in worst
        ]
        left = len(self.tensors) - len(worst)
        more = [f"({left} more, none of them worse)"] if left else []
        return "\n".join([header, *rows, *more] if worst else more)

    def summary(self) -> str:
        """The verdict in words."""
        equal = self.of("equal")
        lines = [f"{len(equal)} of {len(self.tensors)} results are equal to {self.reference}"]
        if noise := self.of("noise"):
            lines.append(
                f"warning: {len(noise)} differ by no more than {FACTOR} times what rounding alone "
                "changes in the reference: the program is ill-conditioned for these arguments, and "
                "a smaller fault would not be detected; compare in 64 bits or with other arguments"
            )
        if wrong := self.of("differs"):
            lines.append(
                f"FAULT: {len(wrong)} differ by more than {FACTOR} times what rounding alone "
                f"changes in the reference, such as {wrong[0].label}"
            )
        if infinite := self.of("not finite"):
            names = ", ".join(tensor.label for tensor in infinite[:3])
            lines.append(
                f"FAULT: {len(infinite)} hold NaN or infinity in the reference, too ({names}), so "
                "they cannot be compared; use other arguments"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.table()}\n{self.summary()}"


def _number(value: float | None) -> str:
    return f"{'-':>9}" if value is None else f"{value:9.2e}"
