"""The paper's baseline "equal layer" (section 8.1, figure 9) on the stage DP's own costs.

Each of S stages gets floor(K / S) or ceil(K / S) of the K layers and a submesh of D / S of the D
devices. Which S, which stages get the layer more, and how each submesh is seen is still chosen by
cost: every S that divides D is solved by `stage_dp` with all other stages forbidden. Exact.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np

from alpa.passes.solve.stages import stage_dp
from alpa.passes.solve.stages.stage_dp import NoCutError, Problem, Solution


def solve(problem: Problem) -> Solution:
    """The best cut into equal stages. Raises ``ValueError`` and ``NoCutError``."""
    problem.check()
    found: list[Solution] = []
    reasons: list[str] = []
    for count in _counts(problem):
        try:
            found.append(stage_dp.solve(restricted(problem, count)))
        except NoCutError as error:
            reasons.append(str(error))
    if not found:
        wanted = "" if problem.num_stages is None else f"{problem.num_stages} "
        # The most stages have the smallest parts of the model each.
        reason = reasons[-1] if reasons else _no_count(problem)
        raise NoCutError(f"no {wanted}stages of equally many layers: {reason}")
    best = min(found, key=lambda solution: solution.objective)
    return replace(best, evaluations=sum(solution.evaluations for solution in found))


def restricted(problem: Problem, count: int) -> Problem:
    """The same with ``count`` stages, all others than equal ones taking infinite time."""
    layers = problem.num_layers
    sizes = np.array([hosts * devices for hosts, devices in problem.submeshes])
    length = np.arange(layers)[None, :] - np.arange(layers)[:, None] + 1
    equal = (length == layers // count) | (length == -(-layers // count))
    allowed = equal[:, :, None] & (sizes * count == problem.hosts * problem.devices_per_host)
    return replace(problem, t=np.where(allowed, problem.t, inf), num_stages=count)


def _counts(problem: Problem) -> list[int]:
    devices = problem.hosts * problem.devices_per_host
    counts = {devices // (n * m) for n, m in problem.submeshes if devices % (n * m) == 0}
    wanted = problem.num_stages
    return [n for n in sorted(counts) if n <= problem.num_layers and wanted in (None, n)]


def _no_count(problem: Problem) -> str:
    shapes = ", ".join(dict.fromkeys(f"{n}x{m}" for n, m in problem.submeshes))
    return (
        f"no number of stages up to {problem.num_layers}, the layers, cuts {problem.hosts}x"
        f"{problem.devices_per_host} devices into equal submeshes of {shapes}"
    )
