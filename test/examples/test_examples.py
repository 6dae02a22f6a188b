from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_an_example_learns(path: Path) -> None:
    if path.stem == "equinox_mlp":
        pytest.importorskip("equinox")
    # The example asks for its devices itself.
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, path]
    done = subprocess.run(command, check=True, capture_output=True, text=True, env=environment)
    losses = [float(text) for text in re.findall(r"step \d+: loss ([\d.]+)", done.stdout)]
    assert losses[-1] < 0.7 * losses[0]
    assert "is planned anew" not in done.stderr
