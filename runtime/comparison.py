"""The definition of equal, and the report of a comparison.

A tensor is equal to its reference if `max|a-b| <= 1e-4 max|ref|`, or 2e-2 where 16-bit floats go
into it; integers and booleans are exact. A new state is compared by its change, its own rounding
apart: a step changes a parameter by little, and a lost gradient would hide behind its size.

A tensor that is not equal is either a fault or noise. A parallel sum adds in another order, so its
last bits differ, and an ill-conditioned program makes much of them. How much, the reference itself
tells on one device: run with arguments that are moved by one unit in the last place, and run with
its sums in another order. A difference of at most `FACTOR` times the largest of these distances is
noise.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

FACTOR = 10
"""How many times the measured noise a difference may be.

The difference and the five distances that measure the noise are draws from distributions of about
one width, but with long tails: Adam divides by gradients near zero, and a few elements decide the
maximum of a tensor. Of 436 tensors of correct plans that were over their bound, 97 % had a ratio
below 1.8, and the largest was 4.2 (docs/figures.md). The factor is twice that. A fault below 10
times the noise cannot be seen in this precision.
"""
SHOWN = 10
"""Tensors that a report shows."""

Verdict = Literal["equal", "noise", "differs", "not finite"]

_BOUND = 1e-4
_BOUNDS = {"bfloat16": 2e-2, "float16": 2e-2}


@dataclass(frozen=True, kw_only=True)
class Difference:
    """One tensor against its reference: max|a-b| and the most that it may be."""

    index: int
    error: float
    bound: float
    ok: bool


def compare(
    results: Sequence[Any], reference: Sequence[Any], dtype: str | None = None
) -> list[Difference]:
    """max|a-b| <= 1e-4 max|ref| in f32, 2e-2 in bf16 and f16; integers and booleans are exact.

    The bound goes by each reference's dtype unless `dtype`, a numpy name, says otherwise.

    Raises:
        ValueError: a result has another shape than its reference.
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
    """One result against its reference.

    Args:
        result, expected: arrays of one shape.
        index: the number of the result.
        dtype: the numpy name of the type whose bound applies; by default that of `expected`.
        old: the array that both replace, if they are a new state: their changes are compared.
        relative: the bound as a share of max|ref|, in place of that of the type.

    Raises:
        ValueError: the shapes differ.
    """
    a, b = np.asarray(result), np.asarray(expected)
    if a.shape != b.shape:
        raise ValueError(f"result {index} has shape {a.shape}, its reference {b.shape}")
    error = distance(a, b, old, old)
    if b.dtype.kind in "biu":
        bound = 0.0
    else:
        relative = _BOUNDS.get(dtype or b.dtype.name, _BOUND) if relative is None else relative
        rounding = 0.0 if old is None else float(jnp.finfo(b.dtype).eps) * _largest(_wide(b))
        bound = relative * _largest(_change(b, old)) + rounding
    return Difference(index=index, error=error, bound=bound, ok=error <= bound)


def distance(a: Any, b: Any, old_a: Any = None, old_b: Any = None) -> float:
    """max|a-b|, or that of their changes from old arrays; infinite where one holds NaN."""
    a, b = _change(a, old_a), _change(b, old_b)
    with np.errstate(invalid="ignore"):
        found = _largest(np.where(a == b, 0, a - b))
    return float("inf") if np.isnan(found) else found


def _change(array: Any, old: Any) -> np.ndarray:
    array = np.asarray(array)
    if old is None or array.dtype.kind in "biu":
        return _wide(array)
    return _wide(array) - _wide(np.asarray(old))


def _wide(array: np.ndarray) -> np.ndarray:
    return array.astype(np.complex128 if array.dtype.kind == "c" else np.float64)


def _largest(array: np.ndarray) -> float:
    return float(np.max(np.abs(array), initial=0))


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One result of a plan against that of the reference; of a new state its change.

    `perturbed` and `reassociated` are the distances of other runs of the reference to it: with
    arguments moved by one unit in the last place, and with sums in another order. They are None
    where there was no such run.
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
        """The largest distance of another run of the reference to it."""
        return max(self.perturbed or 0.0, self.reassociated or 0.0)

    @property
    def verdict(self) -> Verdict:
        """Whether the difference is within the bound, and if not, why that may be."""
        if self.difference <= self.bound:
            return "equal" if self.is_finite else "not finite"
        if not self.is_finite:
            return "not finite"
        return "noise" if self.difference <= FACTOR * self.noise else "differs"

    @property
    def share(self) -> float:
        """The difference in units of its bound."""
        if self.difference == 0:
            return 0.0
        return self.difference / self.bound if self.bound else float("inf")


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """The results of a plan against a reference. `str` is a table of the worst tensors."""

    reference: str
    """what the plan is compared with, in words"""
    tensors: tuple[Tensor, ...]

    def of(self, verdict: Verdict) -> tuple[Tensor, ...]:
        """The tensors of a verdict."""
        return tuple(tensor for tensor in self.tensors if tensor.verdict == verdict)

    @property
    def is_fault(self) -> bool:
        """Whether a tensor differs by more than noise, or the reference is not finite."""
        return bool(self.of("differs") or self.of("not finite"))

    @property
    def is_noise(self) -> bool:
        """Whether tensors differ, and none by more than noise."""
        return not self.is_fault and bool(self.of("noise"))

    def worst(self, count: int = SHOWN) -> list[Tensor]:
        """Faults first, then noise, then equal tensors, each by their share of the bound."""
        order: dict[Verdict, int] = {"not finite": 0, "differs": 1, "noise": 2, "equal": 3}
        ranked = sorted(self.tensors, key=lambda t: (order[t.verdict], -t.share))
        return ranked[:count]

    def table(self, count: int = SHOWN) -> str:
        """The worst tensors, with the scale of noise beside each difference."""
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
                "a smaller fault would not be seen; compare in 64 bits or with other arguments"
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
                "that nothing can be compared; give other arguments"
            )
        return "\n".join(lines)

    def __str__(self) -> str:
        return f"{self.table()}\n{self.summary()}"


def _number(value: float | None) -> str:
    return f"{'-':>9}" if value is None else f"{value:9.2e}"
