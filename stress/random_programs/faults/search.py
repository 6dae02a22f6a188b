"""Draws programs until each fault that is planted in them is found."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from alpa.dialects import ir
from alpa.runtime.executable import Executable
from alpa.runtime.local import LocalExecutable
from stress.random_programs import options
from stress.random_programs.check import (
    Reference,
    RefusedError,
    Run,
    differences,
    planned_step,
)
from stress.random_programs.draw import draw_base
from stress.random_programs.faults.planting import Fault, Sound
from stress.random_programs.program import RandomProgram


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The number of programs until a fault was found, of which `planted` had it.

    `seed` is that of the last one, None if the fault was not found. `difference` is the first
    difference from plain JAX.
    """

    fault: Fault
    programs: int
    planted: int
    seed: int | None = None
    difference: str = ""


class SoundProgramError(AssertionError):
    """A program without a planted fault differs from plain JAX."""


def search(faults: Iterable[Fault], seeds: Iterable[int]) -> Iterator[Finding]:
    """Yields the faults as they are found, and at the end those that were not.

    Needs 8 devices in this process.

    Raises:
        SoundProgramError: there is a fault that nobody planted.
    """
    missing, planted, programs = list(faults), Counter[str](), 0
    for seed in seeds:
        if not missing:
            return
        programs += 1
        with jax.enable_x64(draw_base(seed).dtype == "f64"):
            trial = _Trial.of(seed)
            for fault in list(missing) if trial is not None else ():
                assert trial is not None
                faulty = fault.plant(trial.sound)
                if faulty is None:
                    continue
                planted[fault.name] += 1
                wrong = trial.differences(faulty)
                if wrong:
                    missing.remove(fault)
                    yield Finding(
                        fault=fault,
                        programs=programs,
                        planted=planted[fault.name],
                        seed=seed,
                        difference=wrong[0],
                    )
        jax.clear_caches()
    for fault in missing:
        yield Finding(fault=fault, programs=programs, planted=planted[fault.name])


class _Switch(LocalExecutable):
    """A program whose executable can be replaced."""

    now: Executable

    def __init__(self, sound: Sound) -> None:
        super().__init__(sound.placement, {})
        self.sound = sound

    def run(self, arguments: Sequence[Any]) -> tuple[Any, ...]:
        return self.now.run(arguments)


class _Trial:
    """A random program that is planned once, for all faults."""

    def __init__(self, program: RandomProgram, switch: _Switch, run: Run) -> None:
        self.sound = switch.sound
        self._program, self._switch, self._run = program, switch, run
        self._reference = Reference.of(program)
        self._is_checked = False

    @classmethod
    def of(cls, seed: int) -> _Trial | None:
        """The program of a seed; None if the compiler refuses it."""
        program, made = draw_base(seed), list[_Switch]()

        def load(planned: ir.Module) -> Executable:
            made.append(_Switch(Sound.of(seed, planned)))
            return made[0]

        try:
            step = planned_step(program, options.draw(program), load)
        except RefusedError:
            return None
        return cls(program, made[0], step.run)

    def differences(self, faulty: Executable) -> list[str]:
        """The differences of a faulty executable from plain JAX; the sound one must have none."""
        if not self._is_checked:
            wrong = self._differences(self.sound.without_fault())
            if wrong:
                raise SoundProgramError(
                    f"seed {self.sound.seed} fails with no fault planted in it: {wrong[0]}; "
                    f"`python -m stress.random_programs --seed {self.sound.seed}` repeats it"
                )
            self._is_checked = True
        return self._differences(faulty)

    def _differences(self, executable: Executable) -> list[str]:
        self._switch.now = executable
        return differences(self._program, self._run, self._reference)
