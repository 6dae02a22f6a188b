from __future__ import annotations

import pytest

from alpa.tools.plan_ranking.scores import Ranking, Times, accuracy, mean_reciprocal_rank


def ranking(*plans: tuple[float, float]) -> Ranking:
    """Plans by their predicted and their real seconds."""
    named = (Times(name=str(n), predicted=p, real=r) for n, (p, r) in enumerate(plans))
    return Ranking(program="p", plans=tuple(named))


def test_the_best_plan_is_predicted_first() -> None:
    one = ranking((1.0, 20.0), (2.0, 30.0), (3.0, 25.0))
    assert (one.rank, one.loss, one.best.name) == (1, 0.0, "0")


def test_the_best_plan_is_predicted_last() -> None:
    one = ranking((1.0, 30.0), (2.0, 25.0), (3.0, 20.0))
    assert (one.rank, one.best.name, one.predicted_best.name) == (3, "2", "0")
    assert one.loss == pytest.approx(0.5)


def test_a_plan_within_five_percent_is_a_best_one() -> None:
    assert ranking((1.0, 21.0), (2.0, 20.0)).rank == 1
    assert ranking((1.0, 21.1), (2.0, 20.0)).rank == 2


def test_equal_predictions_stay_in_their_order() -> None:
    assert ranking((1.0, 40.0), (1.0, 30.0), (1.0, 20.0)).rank == 3
    assert ranking((1.0, 20.0), (1.0, 30.0)).rank == 1
    assert ranking((1.0, 30.0), (1.0, 20.0)).loss == pytest.approx(0.5)


def test_means_over_programs() -> None:
    first, third = ranking((1.0, 1.0), (2.0, 2.0)), ranking((1.0, 3.0), (2.0, 2.0), (3.0, 1.0))
    assert mean_reciprocal_rank([first, third]) == pytest.approx((1 + 1 / 3) / 2)
    assert accuracy([first, third], 1) == 0.5
    assert accuracy([first, third], 2) == 0.5
    assert accuracy([first, third], 3) == 1.0
