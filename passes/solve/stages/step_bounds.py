"""What a step takes at least if a cut has a certain stage: most stages can be in no good cut.

Of the stages before and behind, only the layers and the seconds count, not how many devices are
left for them. A stage's *work* is its b times its devices. D devices together do the work of all
stages, each of them for at most max b. With the least sums over stages that cover the layers before
and behind:

    max b >= max(b, (work before + work + work behind) / D)
    T >= e (a before + a + a behind) + v ((B - e) max b + max(u, the least u of any stage))
"""

from __future__ import annotations

from math import inf

import numpy as np

from alpa.passes.solve.stages.least_sums import least_before, least_behind
from alpa.passes.solve.stages.problem import Problem


class StepBounds:
    """Lower bounds of T by the stages that a cut has (`Problem`)."""

    def __init__(self, problem: Problem, devices: int) -> None:
        self._layers, self._devices = problem.num_layers, devices
        self._weights = problem.weights()

    def of(
        self,
        i: np.ndarray,
        j: np.ndarray,
        size: np.ndarray,
        a: np.ndarray,
        b: np.ndarray,
        u: np.ndarray,
    ) -> np.ndarray:
        """Of stages in places, [stage, place], if cuts consist of these.

        Args:
            i: the first layers, [stage]; ascending, and so are the last ones of the same first.
            j: the last layers.
            size: devices.
            a: seconds [stage, place], or less.
            b: the same.
            u: seconds [stage].
        """
        if not i.size:
            return a
        each_b, each_u, each = self._weights
        work = self._around(i, j, b * size[:, None]) / self._devices
        with np.errstate(invalid="ignore"):  # 0 * inf: it is in no cut
            slowest = each_b * np.maximum(b, work) + each_u * np.maximum(u, u.min())[:, None]
        return each * self._around(i, j, a) + slowest

    def _around(self, i: np.ndarray, j: np.ndarray, least: np.ndarray) -> np.ndarray:
        """The least sum over the stages of a cut with each one, [stage, place]."""
        layers = self._layers
        alone = np.full((layers, layers), inf)
        begins = np.flatnonzero(np.diff(i * layers + j, prepend=-1))
        alone[i[begins], j[begins]] = np.minimum.reduceat(least.min(axis=1), begins)
        return least + (least_before(alone)[i] + least_behind(alone)[j + 1])[:, None]
