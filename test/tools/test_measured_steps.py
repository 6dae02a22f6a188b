"""`measured_steps`: predicted steps beside those that Alpa's authors measured."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from alpa.tools.measured_steps import MEASURED, RANKED, Step, main, predict
from alpa.tools.search_times import CASES


def test_the_models_are_planned_for_the_paper_s_gpus() -> None:
    assert set(MEASURED) <= set(CASES)
    assert set(RANKED) <= set(MEASURED)


def test_a_ratio_is_predicted_over_measured() -> None:
    step = Step(program="x", cluster="y", measured=10.0, predicted=9.0, restricted={})
    assert step.ratio == pytest.approx(0.9)


def test_an_unknown_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt-3"]) == 1
    assert capsys.readouterr().err.startswith("error: no model gpt-3; there are gpt-350m")


@pytest.mark.slow
@pytest.mark.parametrize("program", ["gpt-350m", "gpt-2.6b", "moe-2.4b", "wresnet-250m"])
def test_predictions_are_near_what_was_measured(program: str) -> None:
    assert predict(program).ratio == pytest.approx(1, abs=0.25)


@pytest.mark.slow
def test_restricted_searches_are_not_predicted_faster(tmp_path: Path) -> None:
    file = tmp_path / "steps.json"
    assert main(["gpt-1.3b", "--ranking", "--json", str(file)]) == 0
    (step,) = json.loads(file.read_text())
    assert set(step["restricted"]) == {"intra-only", "inter-only"}
    assert all(seconds >= step["predicted"] * 0.999 for seconds in step["restricted"].values())
