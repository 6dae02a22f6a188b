"""Measures the time of a request to `alpa-opt --server`, beside a run of `alpa-opt`.

    python -m alpa.tools.bench_server --ops 1000 --pipeline canonicalize --runs 50

The program is a chain of additions and products, so `canonicalize` visits each op and removes none.
A request is timed from its writing to the reading of its answer, which has the module as text. The
first requests are not counted. Processor time is that of all processes: of a request, what a server
with all of them takes more than one with the first ones alone. The command runs a tenth as often.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from alpa.tools.arguments import count
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row

_ALPA_OPT = (sys.executable, "-m", "alpa.tools.alpa_opt")
_FIRST = 3


def chain(ops: int) -> str:
    """A program of so many ops."""
    kinds = ("add", "multiply")
    lines = [
        f"  %{k + 1} = stablehlo.{kinds[k % 2]} %{k}, %y : tensor<4x4xf32>" for k in range(ops)
    ]
    head = "func.func @main(%0: tensor<4x4xf32>, %y: tensor<4x4xf32>) -> tensor<4x4xf32> {"
    body = "\n".join(lines).replace("%0,", "%x,")
    return f"{head.replace('%0', '%x')}\n{body}\n  return %{ops} : tensor<4x4xf32>\n}}\n"


@dataclass(frozen=True, kw_only=True)
class Times:
    """Seconds of each run, and processor seconds of the mean one."""

    seconds: list[float]
    processor: float


def time_requests(text: str, pipeline: str, runs: int) -> Times:
    """Times requests to one server."""
    few, _ = _served(text, pipeline, _FIRST)
    all_of_them, seconds = _served(text, pipeline, _FIRST + runs)
    return Times(seconds=seconds[_FIRST:], processor=(all_of_them - few) / runs)


def _served(text: str, pipeline: str, runs: int) -> tuple[float, list[float]]:
    """The processor seconds of a server, and the seconds of each of its requests."""
    params = {"module": text, "pipeline": pipeline}
    request = {"jsonrpc": "2.0", "id": 1, "method": "run", "params": params}
    line = json.dumps(request).encode() + b"\n"
    seconds: list[float] = []
    before = _processor_seconds()
    command = [*_ALPA_OPT, "--server"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdin is not None
        assert server.stdout is not None
        for _ in range(runs):
            begin = time.perf_counter()
            server.stdin.write(line)
            server.stdin.flush()
            answer = json.loads(server.stdout.readline())
            seconds.append(time.perf_counter() - begin)
            if "error" in answer:
                raise ValueError(answer["error"]["message"])
    return _processor_seconds() - before, seconds


def time_commands(text: str, pipeline: str, runs: int) -> Times:
    """Times runs of the command on a file."""
    seconds: list[float] = []
    before = _processor_seconds()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "program.mlir"
        file.write_text(text)
        command = [*_ALPA_OPT, str(file), f"--pipeline={pipeline}"]
        for _ in range(runs):
            begin = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            seconds.append(time.perf_counter() - begin)
    return Times(seconds=seconds, processor=(_processor_seconds() - before) / runs)


def _processor_seconds() -> float:
    """Of all processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="bench_server", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ops", type=count, default=1000, help="of the program")
    parser.add_argument("--pipeline", default="canonicalize")
    parser.add_argument("--runs", type=count, default=100, help="requests")
    given = parser.parse_args(argv)
    text, fewer = chain(given.ops), (given.runs + 9) // 10
    cells = ["ms, fastest", "ms, median", "processor ms", "runs"]
    print(f"`{given.pipeline}` on {given.ops} ops")
    print(markdown_header(["by", *cells]))
    for name, measure, runs in (
        ("a request", time_requests, given.runs),
        ("`alpa-opt`", time_commands, fewer),
    ):
        times = measure(text, given.pipeline, runs)
        numbers = (min(times.seconds), median(times.seconds), times.processor)
        print(markdown_row([name, *(f"{1e3 * it:.1f}" for it in numbers), str(runs)]))


if __name__ == "__main__":
    sys.exit(until_interrupted("bench_server", main))
