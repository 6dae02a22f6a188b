"""The table of the cost equation's parts: how well each ranks the strategies of all programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alpa.tools.cost_ablation.candidates import BY_EQUATION, GAMMAS
from alpa.tools.output import markdown_header, markdown_row
from alpa.tools.plan_ranking.scores import Ranking, Times, accuracy, mean_reciprocal_rank

_COLUMNS = ["cost model", "Acc@1", "Acc@5", "MRR", "gamma"]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """The strategies of a program: seconds by cost model and name, and measured ones by name."""

    program: str
    costs: Mapping[str, Mapping[str, float]]
    seconds: Mapping[str, float]

    def ranking(self, model: str) -> Ranking:
        """The strategies in the order of a cost model."""
        plans = tuple(
            Times(name=name, predicted=cost, real=self.seconds[name])
            for name, cost in self.costs[model].items()
        )
        return Ranking(program=self.program, plans=plans)

    def without_least_messages(self) -> Measured:
        """The program without the strategy that repeats compute to save messages."""
        costs = {
            model: {name: cost for name, cost in by_name.items() if name != BY_EQUATION}
            for model, by_name in self.costs.items()
        }
        return Measured(program=self.program, costs=costs, seconds=self.seconds)


def table(programs: Sequence[Measured]) -> str:
    """Table 2 of the paper, with Alpa's own costs below."""
    rows = [
        _row("baseline", [one.ranking("baseline") for one in programs], ""),
        _row("+ CF", [one.ranking("CF") for one in programs], ""),
    ]
    for title, model in (("+ GO", "GO"), ("+ EC", "EC")):
        gammas = [_gamma(model, [p for p in programs if p is not one]) for one in programs]
        rankings = [
            one.ranking(f"{model} {gamma:g}") for one, gamma in zip(programs, gammas, strict=True)
        ]
        chosen = sorted(set(gammas))
        rows.append(_row(title, rankings, ", ".join(f"{gamma:g}" for gamma in chosen)))
    rows.append(_row("Alpa's", [one.ranking("alpa") for one in programs], ""))
    return "\n".join([markdown_header(_COLUMNS), *map(markdown_row, rows)])


def _gamma(model: str, others: Sequence[Measured]) -> float:
    """The gamma that ranks the other programs best: no program takes part in choosing its own."""

    def score(gamma: float) -> tuple[float, float]:
        rankings = [one.ranking(f"{model} {gamma:g}") for one in others]
        return (mean_reciprocal_rank(rankings) if rankings else 0.0, gamma)

    return max(GAMMAS, key=score)


def _row(title: str, rankings: Sequence[Ranking], gamma: str) -> list[str]:
    scores = (accuracy(rankings, 1), accuracy(rankings, 5), mean_reciprocal_rank(rankings))
    return [title, *(f"{score:.2f}" for score in scores), gamma]
