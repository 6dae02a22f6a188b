"""The report of a small GPT on two hosts of four devices."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from alpa.passes.pipelines.clock import Clock
from alpa.runtime.planning import Planned, Settings, plan
from alpa.runtime.report.content import Content
from alpa.runtime.report.page import page
from alpa.tools import zoo
from alpa.tools.programs import lowered
from test.runtime.report.pages import Parsed


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One worker runs all tests of this folder, since they share the plan."""
    for item in items:
        if item.path.parent.name == "report":
            item.add_marker(pytest.mark.xdist_group("report"))


@dataclass(frozen=True)
class Report:
    """A plan, what its report shows, and the page."""

    planned: Planned
    content: Content
    text: str


@pytest.fixture(scope="session")
def report() -> Report:
    clock = Clock()
    program = zoo.get("gpt-tiny", num_layers=2)
    settings = Settings(
        cluster="cpu:2x4",
        num_micro_batches=4,
        schedule="1f1b",
        num_stages=2,
        num_layers=4,
        intra="data-parallel",
    )
    planned = plan(lowered(program, 4, locations=True), settings, clock)
    content = Content.of(planned.module, planned.numbers(clock), "zoo:gpt-tiny")
    return Report(planned, content, page(content))


@pytest.fixture(scope="session")
def parsed(report: Report) -> Parsed:
    return Parsed(report.text)
