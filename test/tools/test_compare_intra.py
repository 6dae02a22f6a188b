from __future__ import annotations

import re
from dataclasses import replace

import pytest

from alpa.tools import compare_intra, zoo
from alpa.tools.zoo import GPT_TINY


@pytest.fixture(autouse=True)
def mini(monkeypatch):
    monkeypatch.setitem(zoo.CONFIGS, "gpt-mini", replace(GPT_TINY, num_layers=1))


def test_prints_a_row_per_model_and_a_cell_per_baseline(capsys):
    arguments = ["gpt-mini", "--cluster", "cpu:1x4", "--global-batch", "16"]
    for intra in ("auto", "data-parallel", "none"):
        arguments += ["--intra", intra]
    assert compare_intra.main(arguments) == 0
    header, rule, row = capsys.readouterr().out.splitlines()
    assert header == "| model | auto | data-parallel | none |"
    assert rule.count("---") == 4
    seconds = [float(s) for s in re.findall(r"\| (\S+) s, ", row)]
    assert len(seconds) == 3
    assert seconds[0] <= min(seconds)
    assert seconds[0] < seconds[2]


def test_what_does_not_fit_says_what_it_needs(small_cluster):
    cluster = small_cluster("3MiB")
    (outcome,) = compare_intra.compare(
        "gpt-mini", micro_batch_size=8, global_batch=8, cluster=str(cluster), intra=["none"]
    )
    assert outcome.seconds is None
    assert re.fullmatch(r"out of memory \(\S+ MiB\)", outcome.text)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["gpt-mini", "--global-batch", "10", "--micro-batch-size", "4"], "cannot be cut into"),
        (["gpt-mini", "--cluster", "no-such:1x2"], "no-such"),
        (["no-model"], "no-model"),
    ],
)
def test_wrong_arguments_are_a_sentence(capsys, arguments, words):
    assert compare_intra.main(arguments) == 1
    assert words in capsys.readouterr().err
