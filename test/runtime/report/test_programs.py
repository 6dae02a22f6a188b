"""The reports of large programs, as the paper's clusters run them."""

from __future__ import annotations

import json
import re

import pytest

from alpa.passes.pipelines.clock import Clock
from alpa.runtime.planning import Settings, plan
from alpa.runtime.report.content import Content
from alpa.runtime.report.page import page
from alpa.tools import zoo
from alpa.tools.programs import lowered
from test.runtime.report.pages import Parsed, checked_entries

PROGRAMS = [
    ("gpt-2.6b", 8, 128, "v100-16gb:1x8"),
    ("wresnet-4b", 32, 48, "v100-16gb:2x8"),
    ("moe-2.4b", 32, 32, "v100-16gb:1x8"),
]
"""Name, samples of a micro-batch, number of micro-batches, cluster."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "size", "number", "cluster"), PROGRAMS)
def test_numbers_equal_those_of_the_json(name: str, size: int, number: int, cluster: str) -> None:
    clock = Clock()
    module = lowered(zoo.get(name), size, locations=True)
    settings = Settings(cluster=cluster, num_micro_batches=number, schedule="1f1b")
    planned = plan(module, settings, clock)
    numbers = planned.numbers(clock)
    text = page(Content.of(planned.module, numbers, name, remarks=planned.remarks))
    shown = checked_entries(Parsed(text), json.loads(numbers.to_json()))
    assert len(shown) > 45
    assert shown["predicted_step_seconds"] == 2
    figures = sum(len(it) for it in re.findall(r'class="figure">(.*?)</script>', text))
    assert len(text) - figures < 1_500_000
