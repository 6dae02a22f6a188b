"""The project of docs/embedding.md builds and runs."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from test.docs.pages import ROOT, blocks
from test.libalpa.building import build, needs_compiler

FILES = {"cmake": "CMakeLists.txt", "c": "compiler.c"}


@needs_compiler
def test_the_project_of_the_page_prints_a_plan(tmp_path: Path) -> None:
    found = [it for it in blocks(ROOT / "docs" / "embedding.md") if it.language in FILES]
    assert sorted(it.language for it in found) == sorted(FILES)
    for block in found:
        (tmp_path / FILES[block.language]).write_text(block.text)
    build(tmp_path, tmp_path / "build")
    done = subprocess.run([tmp_path / "build" / "compiler"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["cluster"] == "cpu:1x2"
