"""Plans and runs random programs and compares them with plain JAX.

    python -m stress.random_programs --seed 0 --count 100 --minutes 20
    python -m stress.random_programs --seed 10000 --passed 2000 --jobs 2

A seed determines the program, its numbers, the cluster and the options of the passes. It also
determines whether the program mixes samples and must therefore be refused with several
micro-batches. A failure prints its seed, the program, and the command that repeats it. `--widen`
computes it in 64 bits, where a difference is not rounding. The exit status is 1 if a program gives
a wrong result or an exception, or if more than 2 % are refused without need.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import get_args

import jax

from alpa.tools.arguments import amount, count
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row
from stress.random_programs import options as random_options
from stress.random_programs.check import Kind, Outcome
from stress.random_programs.draw import draw
from stress.random_programs.workers import outcomes

_REFUSED = "refused as expected"
_NEEDLESS = "refused without need"
_FAILURES = ("wrong", "traceback")
_ALLOWED = 0.02
"""The share of programs that may be refused without need."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; the exit status is 1 if programs fail."""
    parser = argparse.ArgumentParser(
        prog="python -m stress.random_programs",
        description="Plans and runs random programs and compares them with plain JAX.",
    )
    parser.add_argument("--seed", type=int, default=0, help="first seed; default: %(default)s")
    length = parser.add_mutually_exclusive_group()
    length.add_argument("--count", type=count, default=1, help="seeds; default: %(default)s")
    length.add_argument("--passed", type=count, help="continue until so many programs have passed")
    parser.add_argument("--minutes", type=amount, help="start no program after so many minutes")
    parser.add_argument("--jobs", type=count, default=1, help="processes; default: %(default)s")
    parser.add_argument("--timeout", type=amount, default=300, help="seconds for each program")
    parser.add_argument("--widen", action="store_true", help="compute in 64 bits")
    parser.add_argument("--show", action="store_true", help="print the programs, run nothing")
    parser.add_argument("--log", type=Path, help="write a line of JSON for each program")
    options = parser.parse_args(arguments)
    if options.show:
        for seed in range(options.seed, options.seed + options.count):
            program = draw(seed)
            print(f"{seed}: {program}\n    {random_options.draw(program)}")
        return 0
    start = time.monotonic()
    found: list[Outcome] = []
    for outcome in _run(options):
        found.append(outcome)
        _tell(outcome, widen=options.widen)
        if options.log is not None:
            with options.log.open("a") as file:
                file.write(f"{json.dumps(outcome.to_json())}\n")
    seconds = time.monotonic() - start
    print("\n".join(table(found, seconds)))
    kinds = Counter(outcome.kind for outcome in found)
    needless = kinds[_NEEDLESS] > _ALLOWED * len(found)
    return int(needless or any(kinds[kind] for kind in _FAILURES))


def _run(options: argparse.Namespace) -> Iterator[Outcome]:
    """The outcomes of `--count` seeds, or of as many as `--passed` takes."""
    deadline = None if options.minutes is None else time.monotonic() + 60 * options.minutes
    seed, missing = options.seed, options.passed or options.count
    while missing:
        passed, left = 0, None if deadline is None else (deadline - time.monotonic()) / 60
        for outcome in outcomes(
            range(seed, seed + missing),
            jobs=options.jobs,
            timeout=options.timeout,
            minutes=left,
            widen=options.widen,
        ):
            passed += outcome.kind == "passed"
            yield outcome
        if options.passed is None or not passed:
            return
        seed, missing = seed + missing, missing - passed


def _tell(outcome: Outcome, *, widen: bool) -> None:
    if outcome.kind == "passed":
        return
    print(f"seed {outcome.seed} {outcome.kind}: {outcome.reason}", flush=True)
    if outcome.kind in (*_FAILURES, _NEEDLESS):
        program = draw(outcome.seed)
        chosen = " ".join(f"{k}={v}" for k, v in random_options.draw(program).items())
        flag = " --widen" if widen else ""
        print(f"    {program}\n    alpa{{{chosen}}}")
        print(f"    python -m stress.random_programs --seed {outcome.seed}{flag}", flush=True)


def table(found: Sequence[Outcome], seconds: float) -> Iterator[str]:
    """Summarises a run as Markdown: all programs, then the contents of those that passed."""
    kinds = Counter(one.kind for one in found)
    seeds = [one.seed for one in found]
    versions = f"jax {jax.__version__}, Python {sys.version_info.major}.{sys.version_info.minor}"
    if not found:
        yield "no program was run"
        return
    yield (
        f"seeds {min(seeds)} to {max(seeds)}: {len(found)} programs in {seconds / 60:.1f} min, "
        f"{sum(one.seconds for one in found) / len(found):.1f} s each; {versions}"
    )
    yield ", ".join(f"{kinds[kind]} {kind}" for kind in get_args(Kind))
    passed = [one for one in found if one.kind == "passed"]
    pipelined = sum(one.meshes > 1 and one.micro_batches > 1 for one in passed)
    yield (
        f"{pipelined} of the {len(passed)} that passed on two meshes or more with several "
        "micro-batches"
    )
    yield ""
    yield markdown_header(("of the programs that passed", "how many"))
    yield _row("ops", (op for one in passed for op in one.ops))
    yield _row("what", ("training" if one.optimizer else "inference" for one in passed))
    yield _row("type", (one.dtype for one in passed))
    yield _row("optimizer", (one.optimizer or "none (inference)" for one in passed))
    yield _row("meshes", (str(one.meshes) for one in passed))
    yield _row("devices", (str(one.devices) for one in passed))
    yield _row("micro-batches", (str(one.micro_batches) for one in passed))
    yield _row("mode", (one.mode for one in passed if one.micro_batches > 1))
    yield _row("features", (name for one in passed for name in one.features))
    yield ""
    yield markdown_header(("of all programs", "how many"))
    for kind in get_args(Kind):
        yield _row(kind, (one.truth for one in found if one.kind == kind))
    yield _row("ran with a remedy", (one.remedy for one in found if one.remedy))
    refused = [one for one in found if one.kind == _REFUSED]
    yield _row("features of what is refused", (name for one in refused for name in one.features))
    for kind in (_REFUSED, _NEEDLESS):
        refusals = Counter(_sentence(one.reason) for one in found if one.kind == kind)
        if refusals:
            yield ""
            yield markdown_header((f"{kind}, because", "how many"))
            for sentence, number in refusals.most_common():
                yield markdown_row((sentence, str(number)))


def _row(name: str, values: Iterable[str]) -> str:
    counts = sorted(Counter(values).items())
    return markdown_row((name, ", ".join(f"{value} {number}" for value, number in counts)))


def _sentence(reason: str) -> str:
    """A refusal without its numbers."""
    return re.sub(r"\d+(\.\d+)?", "N", reason)


if __name__ == "__main__":
    sys.exit(until_interrupted("random_programs", main))
