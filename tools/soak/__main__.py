"""Trains for a bounded time, and says whether memory, files and step times stay the same.

    python -m alpa.tools.soak --minutes 30 --json soak.json

A model of the zoo is trained on two meshes under 1F1B, with batches that are placed ahead, a
checkpoint now and then and an evaluation on the same meshes. Every few seconds the memory, open
files, sockets and threads of this process, of each worker and of Ray's own processes are recorded,
and what Ray's object store holds, the files of checkpoints, and the times of the steps. At the end
`verdict` says what of it grows. The exit status is 0 if nothing does.

With Ray it starts a cluster of its own in this process, unless the process has joined one.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import platform
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import ray

from alpa import runtime
from alpa.passes import PassError
from alpa.passes.cost.cluster import Cluster, ClusterError
from alpa.passes.cost.device import size_text
from alpa.runtime.planning import PlanningError
from alpa.tools import zoo
from alpa.tools.arguments import count, share
from alpa.tools.devices import make_devices
from alpa.tools.output import markdown_header, markdown_row, until_the_reader_goes
from alpa.tools.soak.samples import Sample
from alpa.tools.soak.training import SoakError, Training
from alpa.tools.soak.verdict import Verdict, verdicts

_EXAMPLES = """\
examples:
  python -m alpa.tools.soak --minutes 30 --json soak.json
  python -m alpa.tools.soak llama-tiny --executor local --steps 2000
"""


def watch(
    training: Training, *, steps: int | None, seconds: float, every: float
) -> Iterator[Sample]:
    """Trains until so many steps or seconds are over, and yields a sample every so many seconds.

    The first step, which waits for the workers to compile, counts as none.
    """
    running = training.steps()
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
    """The verdicts as Markdown."""
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


@contextmanager
def _cluster(executor: str, devices: int) -> Generator[None]:
    """A Ray cluster with so many CPU devices, in this process, where it has joined none."""
    if executor != "ray" or ray.is_initialized():
        yield
        return
    ray.init(
        address="local", num_cpus=devices, include_dashboard=False, logging_level=logging.WARNING
    )
    try:
        yield
    finally:
        ray.shutdown()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m alpa.tools.soak",
        description="Trains a model of the zoo for a bounded number of steps and minutes, and "
        "records memory, open files and threads of all processes, and the times of the steps. The "
        "exit status is 0 if nothing grows, else 1.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("model", nargs="?", default="gpt-tiny", metavar="MODEL", help="default: %(default)s")
    add("--steps", type=count, metavar="N", help="end after so many; default: as time allows")
    add("--minutes", type=float, default=30.0, metavar="M", help="or these; default: %(default)g")
    add("--executor", choices=("local", "ray"), default="ray", help="default: %(default)s")
    add("--cluster", default="cpu:2x2", metavar="C", help="hosts x devices; default: %(default)s")
    add("--mesh-shape", default="1x2", help="of each mesh; default: %(default)s")
    add("--num-micro-batches", type=count, default=4, metavar="N", help="default: %(default)s")
    add("--batch-size", type=count, default=16, metavar="N", help="samples; default: %(default)s")
    add("--save-every", type=count, default=100, metavar="N", help="steps; default: %(default)s")
    add("--evaluate-every", type=count, default=25, metavar="N", help="steps; default: %(default)s")
    add("--every", type=float, default=5.0, metavar="S", help="seconds; default: %(default)g")
    add("--seed", type=int, default=0, help="of the state and the batches; default: %(default)s")
    add(
        "--slower",
        type=share,
        default=0.1,
        metavar="S",
        help="by how much steps may take longer in the second half; default: %(default)g",
    )
    add("--checkpoints", type=Path, metavar="DIR", help="where they are; default: a new folder")
    add("--json", type=Path, metavar="FILE", help="where to write all samples and the verdict")
    return parser


def _soak(options: argparse.Namespace) -> bool:
    """Whether nothing grows."""
    devices = Cluster.parse(options.cluster).num_devices
    program = zoo.get(options.model)
    if any(entry.role == "key" for entry in program.config.inputs().values()):
        raise SoakError(
            f"{options.model} draws random numbers, which this run has not; try another"
        )
    make_devices(devices if options.executor == "local" else 1)
    samples: list[Sample] = []
    with tempfile.TemporaryDirectory() as folder, _cluster(options.executor, devices):
        training = Training(
            program=program,
            batch_size=options.batch_size,
            executor=options.executor,
            cluster=options.cluster,
            mesh_shape=options.mesh_shape,
            num_micro_batches=options.num_micro_batches,
            seed=options.seed,
            folder=options.checkpoints or Path(folder),
            save_every=options.save_every,
            evaluate_every=options.evaluate_every,
        )
        _say(f"training on {len(training.executable.program.meshes)} meshes")
        running = watch(
            training, steps=options.steps, seconds=60 * options.minutes, every=options.every
        )
        try:
            for sample in running:
                samples.append(sample)
                _tell(sample)
        except KeyboardInterrupt:
            _say("interrupted: the verdict is of what there is")
        finally:
            training.close()
    found = verdicts(samples, options.slower)
    if options.json is not None:
        options.json.write_text(f"{json.dumps(_record(options, samples, found))}\n")
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
    options: argparse.Namespace, samples: Sequence[Sample], found: Sequence[Verdict]
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
        "verdicts": [asdict(it) for it in found],
    }


def _tell(sample: Sample) -> None:
    own = sum(usage.own_bytes for usage in sample.processes.values())
    _say(
        f"{sample.seconds / 60:5.1f} min, step {sample.steps}: {1e3 * sample.step_seconds:.0f} ms, "
        f"{size_text(own)} in {len(sample.processes)} processes"
    )


def _say(text: str) -> None:
    """On a terminal only."""
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
    sys.exit(main())
