"""`alpa completion`: what shells offer for Alpa's commands."""

from __future__ import annotations

import io
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest

from alpa.passes.cost.presets import PRESETS
from alpa.tools import alpa_opt, zoo
from alpa.tools.alpa import main
from alpa.tools.alpa_plan_arguments import parser as plan_parser

pytest.importorskip("shtab")

OFFER = """\
source ./script
COMP_WORDS=({words}) COMP_CWORD={last}
_{name}_joined
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(scope="module")
def scripts() -> dict[str, str]:
    def printed(shell: str) -> str:
        with redirect_stdout(io.StringIO()) as output:
            assert main(["completion", shell]) == 0
        return output.getvalue()

    return {shell: printed(shell) for shell in ("bash", "zsh", "fish")}


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_all_options_and_names_are_there(shell: str, scripts: dict[str, str]) -> None:
    script = scripts[shell]
    usages = plan_parser().format_usage() + alpa_opt.parser().format_usage()
    options = {word.strip("[]") for word in usages.split() if word.startswith("[--")}
    assert {"--num-micro-batches", "--verify", "--split-input-file", "--version"} <= options
    before = "-l " if shell == "fish" else "--"
    for option in options:
        assert re.search(rf"[^\w-]{before}{option[2:]}[^\w-]", script), option
    for name in zoo.names():
        assert f"zoo:{name}" in script
    for name in PRESETS:
        assert f"{name}:1x8" in script
    # Each shell reads the script without an error.
    if shutil.which(shell):
        check = "--no-execute" if shell == "fish" else "-n"
        subprocess.run([shell, check, "/dev/stdin"], input=script, text=True, check=True)


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ("alpa-plan zoo : gpt-t", {"gpt-tiny", "gpt-tiny-dropout"}),
        ("alpa-plan zoo : unet-ti", {"unet-tiny"}),
        ("alpa-plan st", {"step.mlir", "stages"}),
        ("alpa-plan step.mlir --cluster h1", {"h100:1x8"}),
        ("alpa-plan step.mlir --cluster h100 : 2x8 --schedule g", {"gpipe"}),
        ("alpa-plan --cluster h100 : 2x8 zoo : t5-ti", {"t5-tiny"}),
        ("alpa-plan step.mlir --export st", {"stages"}),
        ("alpa-opt st", {"step.mlir", "stages"}),
        ("alpa-opt --pip", {"--pipeline"}),
        ("alpa-calibrate --check cp", {"cpu:1x8"}),
        ("alpa doctor --j", {"--json"}),
        ("alpa schema c", {"cluster"}),
    ],
)
def test_bash_offers(
    words: str, offered: set[str], scripts: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "script").write_text(scripts["bash"])
    (tmp_path / "step.mlir").touch()
    (tmp_path / "stages").mkdir()
    name, *_ = words.split()
    offer = OFFER.format(words=words, last=len(words.split()) - 1, name=name.replace("-", "_"))
    said = subprocess.run(["bash", "-c", offer], cwd=tmp_path, capture_output=True, text=True)
    assert {*said.stdout.split()} == offered


def test_without_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    monkeypatch.delitem(sys.modules, "alpa.tools.completion", raising=False)
    assert main(["completion", "bash"]) == 1
    assert capsys.readouterr().err == (
        "alpa: error: shtab is not installed; run pip install shtab, then alpa completion again\n"
    )
