"""Trains for a bounded time, and checks that memory, files and step times do not grow.

    python -m stress.soak --minutes 30 --json soak.json

A zoo model is trained on two meshes under 1F1B, with batches placed ahead, checkpoints, and an
evaluation on the same meshes. Every few seconds a sample records memory, open files, sockets and
threads of this process, of each worker and of Ray's own processes. It also records the contents of
Ray's object store, the files of checkpoints, and the times of the steps. At the end, a fresh run in
another process alternates with this one. `verdict` says what grows, and whether steps are slower
than the fresh run's. The exit status is 0 if neither is the case.

With Ray, it starts its own cluster in this process, unless the process has joined one.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import ray

from alpa import runtime
from alpa.passes import PassError
from alpa.passes.cost.cluster import ClusterError
from alpa.passes.cost.device import size_text
from alpa.runtime.planning import PlanningError
from alpa.tools.arguments import amount, count, count_or_zero, share
from alpa.tools.interrupts import until_interrupted
from alpa.tools.output import markdown_header, markdown_row, until_the_reader_goes
from stress.soak.samples import Sample
from stress.soak.training import SoakError, Training, started
from stress.soak.turns import Round, Runner, rounds
from stress.soak.verdict import Verdict, judge_rounds, verdicts

_EXAMPLES = """\
examples:
  python -m stress.soak --minutes 30 --json soak.json
  python -m stress.soak llama-tiny --executor local --steps 2000
"""


def watch(
    training: Training,
    running: Iterator[tuple[int, float]],
    *,
    steps: int | None,
    seconds: float,
    every: float,
) -> Iterator[Sample]:
    """Trains until so many steps or seconds are over, and yields a sample every few seconds.

    The first of the `running` steps waits for the workers to compile and does not count.
    """
    first, _ = next(running)
    begin = last = time.monotonic()
    window: list[float] = []
    for number, took in running:
        window.append(took)
        now = time.monotonic()
        over = now - begin >= seconds or (steps is not None and number - first >= steps)
        if over or now - last >= every:
            yield Sample.of(
                training.executable, training.folder, now - begin, number - first, window
            )
            window, last = [], now
        if over:
            return


def table(found: Sequence[Verdict]) -> Iterator[str]:
    """Formats the verdicts as Markdown."""
    yield markdown_header(["", "begins with", "ends with", "per hour", "per 1000 steps", ""])
    words = {None: "too short to say", True: "GROWS", False: "flat"}
    for it in found:
        text = {"bytes": size_text, "count": _count_text, "seconds": _milliseconds}[it.unit]
        slopes = (it.per_hour, 1000 * it.per_step)
        cells = ["", ""] if it.unit == "seconds" else [_signed(text, slope) for slope in slopes]
        yield markdown_row([it.name, text(it.begin), text(it.end), *cells, words[it.grows]])


def _count_text(number: float) -> str:
    return f"{number:.3g}"


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"


def _signed(text: Any, number: float) -> str:
    return f"{'-' if number < 0 else '+'}{text(abs(number))}" if number else "0"


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m stress.soak",
        description="Trains a zoo model for a bounded number of steps and minutes, and records "
        "memory, open files and threads of all processes, and the times of the steps. The exit "
        "status is 0 if nothing grows, else 1.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", nargs="?", default="gpt-tiny", metavar="MODEL", help="default: %(default)s")
    add("--steps", type=count, metavar="N", help="end after so many steps; default: no limit")
    add("--minutes", type=amount, default=30.0, metavar="M", help="limit; default: %(default)g")
    add("--executor", choices=("local", "ray"), default="ray", help="default: %(default)s")
    add("--cluster", default="cpu:2x2", metavar="C", help="hosts x devices; default: %(default)s")
    add("--mesh-shape", default="1x2", help="of each mesh; default: %(default)s")
    add("--num-micro-batches", type=count, default=4, metavar="N", help="default: %(default)s")
    add("--batch-size", type=count, default=16, metavar="N", help="samples; default: %(default)s")
    add("--save-every", type=count, default=100, metavar="N", help="steps; default: %(default)s")
    add("--evaluate-every", type=count, default=25, metavar="N", help="steps; default: %(default)s")
    add("--every", type=amount, default=5.0, metavar="S", help="seconds; default: %(default)g")
    add("--seed", type=int, default=0, help="of the state and the batches; default: %(default)s")
    add(
        "--slower",
        type=share,
        default=0.1,
        metavar="S",
        help="share by which steps may take longer than a fresh run's; default: %(default)g",
    )
    add(
        "--rounds",
        type=count_or_zero,
        default=10,
        metavar="N",
        help="rounds at the end, in which this run and a fresh one alternate, from one checkpoint "
        "to the next; 0: none; default: %(default)s",
    )
    add("--checkpoints", type=Path, metavar="DIR", help="their folder; default: a new folder")
    add("--json", type=Path, metavar="FILE", help="where to write all samples and the verdict")
    return parser


def _soak(options: argparse.Namespace) -> bool:
    """Whether nothing grows."""
    samples: list[Sample] = []
    turns: list[Round] = []
    with started(options) as training:
        _say(f"training on {len(training.executable.program.meshes)} meshes")
        running = training.steps()
        limits = {"steps": options.steps, "seconds": 60 * options.minutes, "every": options.every}
        try:
            for sample in watch(training, running, **limits):
                samples.append(sample)
                _tell(sample)
            if options.rounds:
                _say("a fresh run starts, and alternates with this one")
                for turn in rounds(Runner(training, running), options, options.rounds):
                    turns.append(turn)
                    _tell_turn(turn)
        except KeyboardInterrupt:
            _say("interrupted: the verdict uses the samples so far")
    found = [*verdicts(samples), *judge_rounds(turns, options.slower)]
    if options.json is not None:
        options.json.write_text(f"{json.dumps(_record(options, samples, turns, found))}\n")
    with until_the_reader_goes():
        _report(samples, found)
    return not any(it.grows for it in found)


def _report(samples: Sequence[Sample], found: Sequence[Verdict]) -> None:
    if samples:
        last = samples[-1]
        print(f"{last.steps} steps in {last.seconds / 60:.1f} min, {len(samples)} samples\n")
    if not found:
        print("too short to say anything")
        return
    print("\n".join(table(found)))
    growing = [it.name for it in found if it.grows]
    unknown = any(it.grows is None for it in found)
    verdict = f"GROWS: {', '.join(growing)}" if growing else "nothing grows"
    print(f"\n{'too short to say' if unknown and not growing else verdict}")


def _record(
    options: argparse.Namespace,
    samples: Sequence[Sample],
    turns: Sequence[Round],
    found: Sequence[Verdict],
) -> dict[str, Any]:
    return {
        "options": {name: str(value) for name, value in vars(options).items()},
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "ray": ray.__version__,
        },
        "cores": os.cpu_count(),
        "samples": [asdict(sample) for sample in samples],
        "rounds": [asdict(turn) for turn in turns],
        "verdicts": [asdict(it) for it in found],
    }


def _tell(sample: Sample) -> None:
    own = sum(usage.own_bytes for usage in sample.processes.values())
    _say(
        f"{sample.seconds / 60:5.1f} min, step {sample.steps}: {1e3 * sample.step_seconds:.0f} ms, "
        f"{size_text(own)} in {len(sample.processes)} processes"
    )


def _tell_turn(turn: Round) -> None:
    fresh, old = (_milliseconds(it.step_seconds) for it in (turn.fresh, turn.old))
    _say(f"fresh {fresh}, old {old}")


def _say(text: str) -> None:
    """Prints on a terminal only."""
    if sys.stderr.isatty():
        print(text, file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line; the exit status is 0 if nothing grows."""
    options = _parser().parse_args(arguments)
    if options.json is not None and not options.json.absolute().parent.is_dir():
        print(f"error: cannot write {options.json}: there is no such folder", file=sys.stderr)
        return 1
    try:
        return 0 if _soak(options) else 1
    except PassError as error:
        message = error.message
    except (
        ClusterError,
        PlanningError,
        SoakError,
        ValueError,
        runtime.CheckpointError,
        runtime.WorkerError,
    ) as error:
        message = str(error)
    print(f"error: {message}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(until_interrupted("soak", main))
