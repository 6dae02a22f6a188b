"""One form of t(length, context), fitted to a setting's uniform slicings.

    t(b, l, c) = sqrt(floor^2 + (token b l)^2) + pair b l (c + l / 2)

are the seconds that a stage takes for the forward and backward of b sequences' slices of l tokens
after c others. Few tokens take `floor` seconds, because they do not fill a GPU; many take `token`
seconds each. A token reads the c tokens before its slice and on average half of the slice: `pair`
seconds for each pair. These are three parameters per setting.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from alpa.passes.solve.tokens.slice_dp import BatchSlice, Problem, Solution, latency, solve
from alpa.tools.token_slices.published import Measured, Setting

GRANULARITY = 8
"""tokens; slices have multiples of it, as in the thesis"""


@dataclass(frozen=True, kw_only=True)
class SliceTime:
    """t(b, l, c) of a stage."""

    floor: float
    """seconds"""
    token: float
    """seconds per token"""
    pair: float
    """seconds per token and token that it attends to"""

    def __call__(self, samples: np.ndarray, length: np.ndarray, context: np.ndarray) -> np.ndarray:
        """Seconds of slices, in the arguments' common shape."""
        tokens = samples * length
        whole = np.sqrt(self.floor**2 + (self.token * tokens) ** 2)
        return whole + self.pair * tokens * (context + length / 2)


def problem(setting: Setting, time: SliceTime, tokens: int) -> Problem:
    """A replica's batch of sequences of `tokens` tokens, in units of `GRANULARITY`."""
    units = tokens // GRANULARITY
    samples = np.arange(1, setting.samples + 1)[:, None, None]
    length = GRANULARITY * np.arange(1, units + 1)[None, :, None]
    context = GRANULARITY * np.arange(units)[None, None, :]
    return Problem(
        seconds=time(samples, length, context),
        num_samples=setting.samples,
        num_stages=setting.stages,
    )


def predicted(setting: Setting, time: SliceTime, row: Measured) -> float:
    """The seconds of a step with the row's slices."""
    lengths = tuple(length // GRANULARITY for length in row.slices)
    parts = (BatchSlice(samples=1, lengths=lengths),) * setting.samples
    return latency(problem(setting, time, row.tokens), parts)


def best(setting: Setting, time: SliceTime, tokens: int) -> Solution:
    """The slices of the shortest step, in units of `GRANULARITY`."""
    return solve(problem(setting, time, tokens))


def fit(setting: Setting, rows: Sequence[Measured]) -> SliceTime:
    """The parameters of least squared relative residuals of the rows.

    Raises:
        ValueError: there are fewer rows than parameters, or the fit does not converge.
    """
    if len(rows) < 3:
        raise ValueError(f"{len(rows)} rows do not fix three parameters; give at least three")
    # What a slice would take without context: between the shortest and the longest slices.
    alone = [row.seconds / (setting.samples * len(row.slices) + setting.stages - 1) for row in rows]
    longest = max(max(row.slices) for row in rows)
    start = np.array([min(alone), max(alone) / longest, max(alone) / longest**2])

    def residuals(logs: np.ndarray) -> np.ndarray:
        time = _times(start * np.exp(logs))
        return np.array([predicted(setting, time, row) / row.seconds - 1 for row in rows])

    found = least_squares(residuals, np.zeros(3), xtol=1e-12, ftol=1e-12)
    if not found.success:
        raise ValueError(f"the fit does not converge: {found.message}")
    return _times(start * np.exp(found.x))


def _times(values: np.ndarray) -> SliceTime:
    floor, token, pair = (float(value) for value in values)
    return SliceTime(floor=floor, token=token, pair=pair)
