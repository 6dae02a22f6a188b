"""Measures the seconds of planned steps.

    step = TimedStep(load(planned), arguments)
    median(in_turns({"mine": step}, runs=9)["mine"])

Each step gets the states that the one before returned, and the same batch. Several plans run in
turns, so that other work of the machine falls on all of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from random import Random
from typing import Any, TypeVar

import jax

from alpa.passes.plan.data import Program
from alpa.runtime.executable import Executable
from alpa.runtime.signature import is_donated

Name = TypeVar("Name")


class TimedStep:
    """Runs the step of a plan again and again."""

    def __init__(self, executable: Executable, arguments: Sequence[Any]) -> None:
        """`arguments` are those of the original `@main`, with whole batches.

        Those that steps only read, as batches, are placed on the devices once. A donated argument
        without a new value is given again, so it must be a numpy array.
        """
        self._executable = executable
        self._new = _new_states(executable.program)
        given = {it.number for it in executable.program.arguments if is_donated(it)}
        given |= set(self._new.values())
        self.arguments = [
            array if number in given else executable.place(number, array)
            for number, array in enumerate(arguments)
        ]
        """those of the next step"""

    def run(self, steps: int = 1) -> float:
        """Runs steps in a row, and returns the seconds of one until all results are computed."""
        begin, results = time.perf_counter(), ()
        for _ in range(steps):
            results = self._executable(*self.arguments)
            for number, argument in self._new.items():
                self.arguments[argument] = results[number]
        jax.block_until_ready(results)
        return (time.perf_counter() - begin) / steps


def in_turns(
    steps: Mapping[Name, TimedStep], *, runs: int, before: int = 3
) -> dict[Name, list[float]]:
    """The seconds of `runs` steps of each plan, in turns; the first `before` are not counted.

    Each round has another order: what a step finds in the caches depends on the one before it.
    """
    for step in steps.values():
        for _ in range(before):
            step.run()
    seconds: dict[Name, list[float]] = {name: [] for name in steps}
    order, draws = list(steps), Random(0)
    for _ in range(runs):
        draws.shuffle(order)
        for name in order:
            seconds[name].append(steps[name].run())
    return seconds


def _new_states(program: Program) -> dict[int, int]:
    """The numbers of the results that are new states, each with the number of its argument."""
    roles = {result.number: result.attributes.role for result in program.results}
    return {
        number: role.index
        for number, role in roles.items()
        if role is not None and role.kind == "state" and role.index is not None
    }
