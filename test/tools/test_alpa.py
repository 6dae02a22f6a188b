"""`alpa`: its small commands."""

from __future__ import annotations

import json

import pytest

from alpa.tools.alpa import main
from test.schemas import read_schema


@pytest.mark.parametrize(("name", "folder"), [("plan", "plan"), ("cluster", "cost")])
def test_schemas_are_printed(name: str, folder: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["schema", name]) == 0
    schema = read_schema(f"alpa.passes.{folder}", f"{name}.schema.json")
    assert json.loads(capsys.readouterr().out) == schema
