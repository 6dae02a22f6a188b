"""Plants a mistake that a compiler or a runtime could make in a sound program.

Nothing of the product is patched. A stage's module is rewritten and compiled, the list of
instructions is replaced, or a subclass replaces the class that runs them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

import jax
import numpy as np

from alpa import passes
from alpa.dialects import bytecode, ir
from alpa.passes.plan.data import Program
from alpa.passes.plan.instructions import Script, write_script
from alpa.passes.plan.reader import read_planned
from alpa.runtime.executable import Executable
from alpa.runtime.exported import module_name
from alpa.runtime.interpreter import Interpreter
from alpa.runtime.local import LocalExecutable
from alpa.runtime.pjrt import Compiled
from alpa.runtime.placement import Placement
from alpa.runtime.stages import compile_stages
from alpa.runtime.tiles import Tiles
from stress.random_programs.check import FAST_COMPILE

_STREAM = 0xFA17


@dataclass(frozen=True, kw_only=True)
class Sound:
    """A planned program without faults; `seed` is that of the random program.

    Its stages are compiled when first needed.
    """

    seed: int
    planned: bytes
    """the module in bytecode, not exported"""
    modules: Mapping[str, bytes]
    """the stages' modules, exported, by name"""
    placement: Placement

    @classmethod
    def of(cls, seed: int, planned: ir.Module) -> Sound:
        """Made from a planned module, which is exported in place, on this process's devices."""
        text = bytecode(planned.operation)
        modules = export(planned)
        placement = Placement(program=read_planned(planned), devices=tuple(jax.devices()))
        return cls(seed=seed, planned=text, modules=modules, placement=placement)

    @property
    def program(self) -> Program:
        return self.placement.program

    @cached_property
    def stages(self) -> Mapping[str, Compiled]:
        return _compiled(self.placement, self.modules)

    @cached_property
    def script(self) -> Script:
        """The step's instructions without frees, because a fault may read freed values."""
        script = write_script(self.program)
        kept = tuple(replace(i, free=()) for i in script.instructions)
        return replace(script, instructions=kept)

    def without_fault(self) -> Executable:
        """The program as it normally runs."""
        return LocalExecutable(self.placement, self.stages)

    def draw(self, count: int) -> int:
        """One of so many places for a fault; the same one each time."""
        return int(np.random.default_rng([_STREAM, self.seed]).integers(count))

    def with_modules(self, changed: Mapping[str, bytes]) -> Executable:
        """Replaces the modules of some stages, in bytecode."""
        return self.executable(stages={**self.stages, **_compiled(self.placement, changed)})

    def executable(
        self,
        *,
        stages: Mapping[str, Compiled] | None = None,
        script: Script | None = None,
        interpreter: Callable[..., Interpreter] = Interpreter,
        tiles: type[Tiles] = Tiles,
    ) -> Executable:
        """The program with some of its parts replaced."""
        stages, script = stages or self.stages, script or self.script
        placed = tiles(self.placement)
        return _Assembled(
            self.placement, stages, script, interpreter(self.placement, script, stages, placed)
        )


def export(planned: ir.Module, options: str = "") -> dict[str, bytes]:
    """The modules that `export-stages` writes into a planned module, by name."""
    passes.run(planned, f"export-stages{{{options}}}")
    return {
        ir.StringAttr(op.attributes["sym_name"]).value: bytecode(op)
        for op in planned.body.operations
        if op.operation.name == "builtin.module"
    }


def _compiled(placement: Placement, modules: Mapping[str, bytes]) -> dict[str, Compiled]:
    chosen = tuple(f for f in placement.program.fragments if module_name(f) in modules)
    of_these = replace(placement, program=replace(placement.program, steps=chosen))
    return compile_stages(modules, of_these, compiler_options=FAST_COMPILE)


class _Assembled(LocalExecutable):
    """A local executable made of given parts."""

    def __init__(
        self,
        placement: Placement,
        stages: Mapping[str, Compiled],
        script: Script,
        interpreter: Interpreter,
    ) -> None:
        super().__init__(placement, stages)
        self._script, self._interpreter = script, interpreter


@dataclass(frozen=True, kw_only=True)
class Fault:
    """A mistake: a short description, and the part that it is in.

    `plant` makes an executable with it, or returns None if the program has no place for it.
    """

    name: str
    where: str
    plant: Callable[[Sound], Executable | None]
