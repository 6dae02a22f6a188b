"""How well one order of plans finds the plans that are best by their times.

As in TAPAS (appendix B): the mean over programs of the reciprocal rank of the first best plan
(MRR), and the share of programs with a best plan among the first k (Acc@k). Every plan within 5 %
of the shortest time is a best plan.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

BEST_WITHIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Times:
    """One plan's seconds of a step, as the model predicts them and as they are."""

    name: str
    predicted: float
    real: float


@dataclass(frozen=True, kw_only=True)
class Ranking:
    """The plans of one program."""

    program: str
    plans: tuple[Times, ...]

    @property
    def best(self) -> Times:
        """The plan with the shortest real time."""
        return min(self.plans, key=lambda plan: plan.real)

    @property
    def predicted_best(self) -> Times:
        """The plan with the shortest predicted time, of equal ones the slowest."""
        return min(self.plans, key=lambda plan: (plan.predicted, -plan.real))

    @property
    def rank(self) -> int:
        """The number of the first best plan in the predicted order, from 1.

        Plans with the same prediction count as if the best one stood last.
        """
        limit = (1 + BEST_WITHIN) * self.best.real
        first = min(plan.predicted for plan in self.plans if plan.real <= limit)
        return 1 + sum(
            plan.predicted < first or (plan.predicted == first and plan.real > limit)
            for plan in self.plans
        )

    @property
    def loss(self) -> float:
        """Real seconds of the predicted best over those of the best, minus 1."""
        return self.predicted_best.real / self.best.real - 1


def mean_reciprocal_rank(rankings: Sequence[Ranking]) -> float:
    """MRR."""
    return sum(1 / one.rank for one in rankings) / len(rankings)


def accuracy(rankings: Sequence[Ranking], first: int) -> float:
    """Acc@k, with k = `first`."""
    return sum(one.rank <= first for one in rankings) / len(rankings)
