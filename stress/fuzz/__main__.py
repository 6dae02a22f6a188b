"""Feeds broken input to its readers and checks their answers.

    python -m stress.fuzz test/passes --count 10000 --seed 0 --save found

Each case breaks an input in a few places and passes it to its reader: a program as text or bytecode
to `alpa-opt` or `alpa-plan`, a cluster or roles to `alpa-plan`, a plan to `plan_table`,
`alpa.runtime.load` or `alpa.parallelize(plan=...)`, the folder of a checkpoint to `alpa.restore`.
Others give attributes, options and arguments of public functions values that nobody expects.
The answer must be a result, or an error that gives the reason. Findings are Python tracebacks,
signals, hangs, files written in spite of an error, changes in a checkpoint's folder, and restored
states that differ from the saved one. The seed and the number of a case determine it completely.
"""

from __future__ import annotations

import argparse
import os
import platform
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any

import jax

from alpa.tools.arguments import amount, count
from alpa.tools.interrupts import until_interrupted
from stress.fuzz import calls, checkpoints, commands, plans
from stress.fuzz.commands import CommandCase
from stress.fuzz.corpus import DEVICES, Corpus, Seed, make, read_seeds
from stress.fuzz.process import Answer, Harm, alone, answers, problem

WEIGHTS = {
    "program": 20,
    "attribute": 10,
    "option": 10,
    "call": 10,
    "bytecode": 10,
    "table": 5,
    "cluster": 5,
    "roles": 5,
    "load": 5,
    "parallelize": 5,
    "checkpoint": 20,
}
"""The number of cases of each kind in a hundred."""
_EXAMPLES = """\
examples:
  python -m stress.fuzz test/passes --count 200
  python -m stress.fuzz step.mlir cluster.toml --count 10000 --seed 7 --save found
  python -m stress.fuzz --kinds checkpoint --count 500
"""


class Fuzz:
    """Cases of some kinds, by number; `folder` holds their inputs and outputs."""

    def __init__(
        self, seed: int, kinds: Sequence[str], paths: Sequence[Path], folder: Path
    ) -> None:
        # For the processes of the cases; JAX makes no devices in this one.
        jax.config.update("jax_num_cpu_devices", DEVICES)
        self._seed, self._kinds = seed, kinds
        self._folder = folder
        self.at, self._said = folder / "case", folder / "said"
        material = folder / "material"
        material.mkdir()
        seeds = read_seeds(paths)
        if {"table", "load", "parallelize", "checkpoint"} & set(kinds):
            # In this process it would start threads, which forked cases would lack.
            status, said = alone(lambda: make(material) or 0, self._said, 600)
            if status != 0:
                raise ValueError(f"the training step cannot be planned and saved: {said}")
            text = (material / "plan.mlir").read_text(encoding="utf-8")
            seeds.append(Seed(name="plan.mlir", text=text, kind="plan"))
        self.corpus = Corpus(seeds=tuple(seeds), checkpoints=material)
        self._bytecode = cache(commands.to_bytecode)

    def kind(self, number: int) -> str:
        """The kind of a case."""
        generator = random.Random(f"{self._seed}:{number} kind")
        return generator.choices(self._kinds, [WEIGHTS[kind] for kind in self._kinds])[0]

    def case(self, number: int, *, with_data: bool = True) -> Any:
        """Returns a case. Its label alone needs no bytecode, and MLIR then starts no threads."""
        kind, name = self.kind(number), f"{self._seed}:{number}"
        if kind == "call":
            return calls.draw(name)
        if kind == "checkpoint":
            return checkpoints.draw(name, self.corpus)
        if kind in ("load", "parallelize"):
            return plans.draw(name, kind, self.corpus)
        bytecode = self._bytecode if with_data else lambda _: None
        return commands.draw(name, kind, self.corpus, bytecode)

    def run(self, number: int) -> int:
        """Runs a case in its own folder, which stays until the next case."""
        self._empty()
        return self.case(number).run(self.at)

    def answers(self, numbers: Sequence[int], seconds: float) -> Any:
        """The answers to cases; a command that a signal ended runs again as users run it."""
        # Broken bytecode may corrupt the heap, and other cases would be blamed.
        bytecode = [number for number in numbers if self.kind(number) == "bytecode"]
        others = [number for number in numbers if self.kind(number) != "bytecode"]
        for number, answer in chain(*(self._answers(them, seconds) for them in (others, bytecode))):
            case = self.case(number, with_data=False)
            if isinstance(case, CommandCase) and (answer.problem or "").startswith("signal"):
                answer = self._guarded(case, seconds)
            yield number, case, answer

    def _answers(self, numbers: Sequence[int], seconds: float) -> Iterator[tuple[int, Answer]]:
        return answers(numbers, self.run, self._said, seconds)

    def _guarded(self, case: CommandCase, seconds: float) -> Answer:
        """Runs the command on the input in the folder, as users run it."""

        def command() -> int:
            os.chdir(self.at)
            return case.guarded(case.arguments)

        status, said = alone(command, self._said, seconds)
        found = problem(status, said)
        if found is None and status is not None:
            try:
                case.check(self.at, status)
            except Harm as harm:
                found = str(harm)
        return Answer(problem=found, said=said, refused=status != 0)

    def _empty(self) -> None:
        shutil.rmtree(self.at, ignore_errors=True)
        self.at.mkdir()
        os.chdir(self.at)


def _not_files(folder: str, names: list[str]) -> list[str]:
    """Lists pipes, which cannot be copied."""
    return [name for name in names if Path(folder, name).is_fifo()]


def parser() -> argparse.ArgumentParser:
    result = argparse.ArgumentParser(
        prog="python -m stress.fuzz",
        description="Feeds broken programs, bytecode, clusters, roles, plans and checkpoints to "
        "their readers, and reports what is not answered by a result or an error. The exit "
        "status is 1 if anything was found.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = result.add_argument
    add("paths", nargs="*", type=Path, metavar="PATH", help="files or folders with further texts")
    add("--count", type=count, default=1000, help="cases; default: 1000")
    add("--first", type=int, default=0, help="number of the first case; default: 0")
    add("--seed", type=int, default=0, help="default: 0")
    add("--kinds", nargs="+", choices=WEIGHTS, default=list(WEIGHTS), help="default: all")
    add("--timeout", type=amount, default=90, help="seconds for each case; default: 90")
    add("--save", type=Path, metavar="DIR", help="where to keep findings")
    return result


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command line and returns its exit status."""
    options = parser().parse_args(arguments)
    save = None if options.save is None else options.save.absolute()
    with tempfile.TemporaryDirectory() as name:
        try:
            fuzz = Fuzz(options.seed, options.kinds, options.paths, Path(name))
        except (OSError, ValueError) as error:
            print(f"fuzz: error: {error}", file=sys.stderr)
            return 1
        begin, found, refused = time.perf_counter(), Counter[str](), Counter[str]()
        numbers = range(options.first, options.first + options.count)
        for number, case, answer in fuzz.answers(numbers, options.timeout):
            refused[fuzz.kind(number)] += answer.refused
            if answer.problem is None:
                continue
            found[answer.problem] += 1
            last = answer.said.strip().splitlines()[-1:] or [""]
            print(f"case {number} of {case.seed}: {answer.problem}: {last[0][:200]}")
            print(f"  {case.label}", flush=True)
            if save is not None:
                target = save / f"{options.seed}-{number}"
                shutil.copytree(
                    fuzz.at, target, symlinks=True, dirs_exist_ok=True, ignore=_not_files
                )
                (target / "said.txt").write_text(f"{case.label}\n{answer.said}", encoding="utf-8")
        seconds = time.perf_counter() - begin
    kinds = Counter(fuzz.kind(number) for number in numbers)
    for kind, number in sorted(kinds.items()):
        print(f"{kind:>12}  {number:>6} cases, {refused[kind]} refused")
    versions = f"jax {jax.__version__}, Python {platform.python_version()}"
    print(f"seed {options.seed}, {options.count} cases in {seconds:.0f} s; {versions}")
    problems = ", ".join(f"{number} {it}" for it, number in found.items()) or "none"
    print(f"findings: {problems}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(until_interrupted("fuzz", main))
