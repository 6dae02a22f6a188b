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
        """The plan with the shortest predicted time."""
        return self.order[0]

    @property
    def order(self) -> list[Times]:
        """The predicted order. Plans with the same prediction stay in theirs, the search's first:
        another plan that is not better does not replace it."""
        return sorted(self.plans, key=lambda plan: plan.predicted)

    @property
    def rank(self) -> int:
        """The number of the first best plan in the predicted order, from 1."""
        limit = (1 + BEST_WITHIN) * self.best.real
        return 1 + next(n for n, plan in enumerate(self.order) if plan.real <= limit)

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
