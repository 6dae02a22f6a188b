"""Broken input is answered; and what is not answered is found."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from alpa.tools import fuzz

PASSES = Path(__file__).parents[1] / "passes"

CLUSTER = """\
hosts = 2
devices_per_host = 4
[device]
name = "X"
memory = "16GiB"
peak_flops = { f32 = 15.7e12 }
memory_bandwidth = 900e9
[intra_host]
bandwidth = 150e9
latency = 5e-6
[inter_host]
bandwidth = 3.125e9
latency = 20e-6
"""


def test_a_case_follows_from_its_number() -> None:
    corpus = fuzz.seeds([PASSES / "layer_cluster.mlir"])
    inputs = [fuzz.case(number, 3, corpus)[1:3] for number in range(20)]
    assert inputs == [fuzz.case(number, 3, corpus)[1:3] for number in range(20)]
    texts = [seed.text.encode() for seed in corpus]
    assert sum(data not in texts for _, data in inputs) >= 15


def test_broken_input_is_answered(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    files = [str(PASSES / "layer_cluster.mlir"), str(PASSES / "split_loops.mlir"), str(tmp_path)]
    command = [sys.executable, "-m", "alpa.tools.fuzz", *files, "--count", "40", "--seed", "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("os.abort()", "signal SIGABRT"),
        ("time.sleep(60)", "hang"),
        ("[][0]", "traceback"),
        ("sys.exit(3)", "traceback"),
        ("sys.exit(1)", "silent"),
        ("print('no', file=sys.stderr); open('out', 'w'); sys.exit(1)", "wrote"),
        ("print('no', file=sys.stderr); sys.exit(1)", None),
        ("sys.exit(0)", None),
    ],
)
def test_what_is_a_finding(line: str, problem: str | None, tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nfrom pathlib import Path\nfrom alpa.tools import fuzz\n"
        f"def command():\n    {line}\n    return 0\n"
        f"folder = Path({str(tmp_path)!r})\n"
        "status, said = fuzz._child(command, folder, 2)\n"
        "print(fuzz._problem(status, said, wrote=(folder / 'out').exists()))"
    )
    # In a process without jax's threads, which a fork would leave without their locks' owners.
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.strip() == str(problem), done.stderr


@pytest.mark.parametrize(
    ("line", "status", "words"),
    [
        ("os.abort()", 1, "x: error: MLIR's C++ has ended the process (SIGABRT)"),
        ("signal.alarm(1); time.sleep(60)", 1, "x: error: MLIR's bytecode reader found no end"),
        ("sys.exit(3)", 3, ""),
        ("print('done')", 0, "done"),
    ],
)
def test_what_a_guarded_command_says(line: str, status: int, words: str) -> None:
    script = f"import os, signal, sys, time\nfrom alpa.tools.guard import guard\nguard('x')\n{line}"
    process = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60
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
