"""Broken input is answered, and unanswered input is found."""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import alpa
from stress.fuzz import calls, checkpoints, commands
from stress.fuzz.corpus import Corpus, read_seeds
from stress.fuzz.mutations import mutate_attribute
from stress.fuzz.process import Harm

PASSES = Path(__file__).parents[1] / "passes"


def corpus(*files: str) -> Corpus:
    seeds = read_seeds([PASSES / file for file in files])
    return Corpus(seeds=tuple(seeds), checkpoints=Path("nowhere"))


@pytest.mark.parametrize("kind", ["program", "attribute", "bytecode", "cluster", "roles"])
def test_a_case_follows_from_its_number(kind: str) -> None:
    seeds = corpus("layer_cluster.mlir")

    def case(number: int) -> tuple[bytes, tuple[str, ...]]:
        drawn = commands.draw(f"3:{number}", kind, seeds, commands.to_bytecode)
        return drawn.data, drawn.arguments

    inputs = [case(number) for number in range(20)]
    assert inputs == [case(number) for number in range(20)]
    whole = [seed.text.encode() for seed in seeds.seeds]
    assert sum(data not in whole for data, _ in inputs) >= 15
    assert len({data for data, _ in inputs}) >= 15


def test_a_command_is_named_without_its_bytecode() -> None:
    seeds = corpus("layer_cluster.mlir")
    for number in range(20):
        drawn = commands.draw(f"0:{number}", "bytecode", seeds, commands.to_bytecode)
        assert drawn.data.startswith(b"ML\xefR") or drawn.seed == "layer_cluster.mlir"
        named = commands.draw(f"0:{number}", "bytecode", seeds, lambda _: None)
        assert (named.arguments, named.seed) == (drawn.arguments, drawn.seed)


def test_options_and_calls_follow_from_their_numbers() -> None:
    for kind in ("options", "calls"):

        def label(number: int, kind: str = kind) -> str:
            if kind == "calls":
                return calls.draw(f"3:{number}").function
            return commands.draw(f"3:{number}", "option", corpus(), lambda _: None).label

        labels = [label(number) for number in range(50)]
        assert labels == [label(number) for number in range(50)]
        assert len(set(labels)) > 5


@pytest.mark.parametrize(
    ("error", "is_said"),
    [
        ("alpa.passes.run(None, '')", True),
        ("alpa.parallelize(lambda x: x, cluster=7)", True),
        ("alpa.nothing.at_all", True),
        ("[].append()", False),
        ("alpa.passes.run(**{'sauce': ''})", False),
    ],
)
def test_errors_that_nobody_raises_are_findings(error: str, *, is_said: bool) -> None:
    with pytest.raises((AttributeError, TypeError)) as caught:
        eval(error, {"alpa": alpa})
    assert calls.is_said(caught.value) is is_said


def test_an_attribute_of_a_plan_is_another_one() -> None:
    text = (PASSES / "export_stages.mlir").read_text().split("// -----")[0]
    changed = {mutate_attribute(text, random.Random(number)) for number in range(30)}
    assert len(changed) > 15
    for one in changed:
        lines = [a for a, b in zip(text.splitlines(), one.splitlines(), strict=True) if a != b]
        assert len(lines) <= 1
    assert mutate_attribute("module {}", random.Random(0)) == "module {}"


def test_every_kind_of_broken_input_is_answered(tmp_path: Path) -> None:
    files = [str(PASSES / "layer_cluster.mlir"), str(PASSES / "split_loops.mlir")]
    command = [sys.executable, "-m", "stress.fuzz", *files, "--count", "40", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "seed 1, 40 cases" in done.stdout
    assert done.stdout.endswith("findings: none\n")
    assert len(re.findall(r"^ *\w+ +\d+ cases, \d+ refused$", done.stdout, re.MULTILINE)) == 11


def test_a_state_that_is_another_one_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that reading has changed is a finding, too."""
    for step in (1, 2):
        alpa.save(tmp_path / "checkpoints", step, checkpoints.init(step))
    (tmp_path / "another").mkdir()
    empty = tmp_path / "case"

    def run(damage: Any) -> int:
        shutil.rmtree(empty, ignore_errors=True)
        empty.mkdir()
        monkeypatch.chdir(empty)
        case = checkpoints.CheckpointCase(
            number="0:0", whole=tmp_path, by_plan=False, damages=[damage]
        )
        return case.run(empty)

    def nothing(folder: Path, generator: random.Random) -> None:
        pass

    def forged(folder: Path, generator: random.Random) -> None:
        """The other step's checkpoint, under this one's number."""
        shutil.rmtree(folder / "checkpoints" / "2")
        alpa.save(folder / "checkpoints", 2, checkpoints.init(1))

    assert run(nothing) == 0
    with pytest.raises(Harm, match="restored another state"):
        run(forged)


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("os.abort()", "signal SIGABRT"),
        ("time.sleep(60)", "hang"),
        ("[][0]", "traceback"),
        ("sys.exit(3)", "traceback"),
        ("sys.exit(1)", "silent"),
        ("raise process.Harm('wrote')", "wrote"),
        ("print('no', file=sys.stderr); sys.exit(1)", None),
        ("sys.exit(0)", None),
    ],
)
def test_what_is_a_finding(line: str, problem: str | None, tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nfrom pathlib import Path\nfrom stress.fuzz import process\n"
        f"def case(number):\n    if number == 1:\n        {line}\n    return 0\n"
        f"said = Path({str(tmp_path / 'said')!r})\n"
        "for number, answer in process.answers(range(3), case, said, 2):\n"
        "    print(number, answer.problem)\n"
        "status, said = process.alone(lambda: case(1), said, 2)\n"
        "print(process.problem(status, said))"
    )
    # In a process without jax's threads: a fork would copy their locks but not their owners.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    # The cases before and after it are answered.
    alone = "traceback" if problem == "wrote" else problem
    expected = f"0 None\n1 {problem}\n2 None\n{alone}\n"
    assert done.stdout == expected, done.stderr


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("os.abort()", 1, "x: error: MLIR's C++ has crashed (SIGABRT)"),
        ("signal.alarm(1); time.sleep(60)", 1, "x: error: MLIR's reader did not finish"),
        ("sys.exit(3)", 3, ""),
        ("print('done')", 0, "done"),
    ],
)
def test_what_a_guarded_command_says(line: str, status: int, words: str) -> None:
    script = f"import os, signal, sys, time\nfrom alpa.tools.guard import guard\nguard('x')\n{line}"
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert process.returncode == status
    assert words in process.stderr + process.stdout


def test_a_guarded_command_is_terminated_with_its_guard(tmp_path: Path) -> None:
    script = (
        "import os, time\nfrom alpa.tools.guard import guard\nguard('x')\n"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid()))\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE, text=True)
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 1
    assert process.stderr is not None
    assert process.stderr.read() == "x: error: terminated\n"
    child = int((tmp_path / "pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)
