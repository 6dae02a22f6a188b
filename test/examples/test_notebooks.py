"""The notebooks of `examples/` run, and are stored without outputs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")

EXAMPLES = Path(__file__).parents[2] / "examples"
NOTEBOOKS = sorted(EXAMPLES.glob("*.ipynb"))


def read(name: str) -> Any:
    return nbformat.read(EXAMPLES / f"{name}.ipynb", as_version=4)


def executed(name: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """What a notebook prints. A cell that raises fails the test."""
    # The notebook requests its devices itself.
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    notebook = read(name)
    nbclient.NotebookClient(notebook, timeout=600).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("<table>" in output.get("data", {}).get("text/html", "") for output in outputs)
    return "".join(output.text for output in outputs if output.get("name") == "stdout")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path: Path) -> None:
    notebook = read(path.stem)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


def test_a_function_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    said = executed("plan_a_function", monkeypatch)
    assert "plan for v100-16gb:2x4 (2 hosts x 4 V100-SXM2-16GB)" in said
    assert "data parallel:" in said


@pytest.mark.slow
def test_a_model_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    said = executed("train_on_cpu_devices", monkeypatch)
    assert "the first 10 losses are those of plain JAX" in said
    assert "20 of 20 results are equal to plain JAX on one device" in said
