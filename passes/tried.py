"""What a search tried, and the outcome of each: candidates of stages, and whole plans."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

SubmeshOutcome = Literal["costed", "pruned", "infeasible", "dropped", "only"]
"""
* `costed`: the costs of shardings were found.
* `pruned`: lower bounds were enough. No cut that uses the submesh beats the chosen one.
* `infeasible`: there is no plan on the submesh.
* `dropped`: a solver ran out of time or failed, so a better plan may exist.
* `only`: every cut uses the submesh, so no costs were needed to choose one.
"""
PlanOutcome = Literal["taken", "slower", "pruned", "infeasible"]
"""
* `taken`: the result of the search.
* `slower`: finished, and its predicted step is not shorter than that of the plan taken.
* `pruned`: not finished, because its cut, or a bound of all cuts, predicts no shorter step than a
  finished plan.
* `infeasible`: it does not fit into memory.
"""


@dataclass(frozen=True, kw_only=True)
class TriedSubmesh:
    """A submesh in a logical shape. Each interval of layers on it is a stage candidate."""

    hosts: int
    devices: int
    """per host"""
    logical_shape: tuple[int, ...]
    device: str
    """the name of its devices"""
    num_candidates: int
    """stage candidates: one for each interval of layers"""
    outcome: SubmeshOutcome
    reason: str = ""
    """why it was not costed"""


@dataclass(frozen=True, kw_only=True)
class TriedPlan:
    """A cut into stages, which became a plan if it was finished."""

    schedule: str
    remat: str
    """as the option `remat` of `stage-mesh-partition`"""
    reserve: float
    """the share of each device's memory that the cut left free; negative: may exceed"""
    outcome: PlanOutcome
    reason: str = ""
    """why it is infeasible, or pruned before a cut was found"""
    estimated_step_seconds: float | None = None
    """by the costs that it was cut by; None if no cut fits, or none was found"""
    predicted_step_seconds: float | None = None
    """of the finished plan; None if it was not finished"""


@dataclass(frozen=True, kw_only=True)
class Tried:
    """What a search tried."""

    submeshes: tuple[TriedSubmesh, ...]
    """none if the program's own shardings name the one mesh"""
    plans: tuple[TriedPlan, ...]
    """in the order in which they were cut"""

    @property
    def num_candidates(self) -> int:
        """The number of stage candidates."""
        return sum(it.num_candidates for it in self.submeshes)

    @property
    def num_costed(self) -> int:
        """The number of stage candidates whose costs were found."""
        return self._number("costed")

    @property
    def num_pruned(self) -> int:
        """The number of stage candidates whose lower bounds were enough."""
        return self._number("pruned")

    @property
    def num_infeasible(self) -> int:
        """The number of stage candidates on submeshes without a plan."""
        return self._number("infeasible")

    @property
    def num_dropped(self) -> int:
        """The number of stage candidates on submeshes that no solver finished."""
        return self._number("dropped")

    def _number(self, outcome: SubmeshOutcome) -> int:
        return sum(it.num_candidates for it in self.submeshes if it.outcome == outcome)
