"""The static list of what a step does, made from a program by a schedule.

A **key** names one version of a value: `(value, m)` is that of micro-batch `m`, `(value, None)` the
one of the step: an argument, a total over the micro-batches, or what the update phase produces.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from alpa.passes.analysis.planned import Fragment, Program, ProgramResult, Transfer

Key = tuple[int, int | None]


@dataclass(frozen=True, kw_only=True)
class Run:
    """Runs a fragment's module. `accumulators` are read, donated and written again."""

    fragment: Fragment
    inputs: tuple[Key, ...]
    accumulators: tuple[Key, ...]
    outputs: tuple[Key, ...]
    free: tuple[Key, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Move:
    """Copies a value into the mesh and sharding of another."""

    source: Key
    target: Key
    free: tuple[Key, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Add:
    """Adds a micro-batch's version to the total; the first one starts it."""

    source: Key
    total: Key
    free: tuple[Key, ...] = ()


Instruction = Run | Move | Add


@dataclass(frozen=True, kw_only=True)
class Output:
    """How a result of the original program is made: of one key, or of one per micro-batch.

    `concat` is a dimension, `divisor` what a total is divided by.
    """

    keys: tuple[Key, ...]
    concat: int | None = None
    divisor: int = 1


@dataclass(frozen=True, kw_only=True)
class Script:
    """Instructions, and for each result of the planned @main what it is."""

    instructions: tuple[Instruction, ...]
    outputs: tuple[Output, ...]


def gpipe(program: Program) -> Script:
    """All forwards, all backwards, then the update; each value is freed after its last use."""
    steps = _Steps(program)
    instructions: list[Instruction] = steps.prologue()
    for part in ("forward", "backward"):
        for micro_batch in range(program.num_micro_batches):
            for step in program.steps:
                instructions += steps.micro_batch(step, part, micro_batch)
    for step in program.steps:
        instructions += steps.update(step)
    outputs = tuple(steps.output(result) for result in program.results)
    kept = {key for output in outputs for key in output.keys}
    return Script(instructions=tuple(_free(instructions, kept)), outputs=outputs)


@dataclass(frozen=True)
class _Steps:
    """The instructions of each step of a program, with the versions that they read."""

    program: Program

    @cached_property
    def _transferred(self) -> frozenset[int]:
        return frozenset(step.target for step in self.program.transfers)

    @cached_property
    def _summed(self) -> frozenset[int]:
        """Results that are added up here: gradients are so inside their fragments."""
        program = self.program
        if program.num_micro_batches == 1:
            return frozenset()
        summed = {result.value for result in program.results if is_sum(result)}
        return frozenset(summed & program.varying - program.totals)

    def _is_constant(self, transfer: Transfer) -> bool:
        """Whether it moves an argument that is the same for all micro-batches."""
        program, source = self.program, transfer.source
        return program.parts[source] is None and source not in program.varying

    def version(self, value: int, m: int) -> Key:
        """The version that a forward or backward fragment of micro-batch `m` reads."""
        program = self.program
        if value not in program.varying:
            return (value, None)
        new = program.carries.get(value)
        if m and new is not None and program.values[new] == program.values[value]:
            return (new, m - 1)
        return (value, m)

    def last(self, value: int) -> Key:
        """The version that the update phase reads: a total, or the last micro-batch's.

        What only the update reads of a transfer is moved in the update phase.
        """
        program = self.program
        late = value in self._transferred and value not in program.micro_used
        if value in program.totals or late:
            return (value, None)
        return self.version(value, program.num_micro_batches - 1)

    def prologue(self) -> list[Instruction]:
        """Moves what stays the same, and starts the sums of arguments that are results."""
        program = self.program
        moves: list[Instruction] = [
            Move(source=(step.source, None), target=(step.target, None))
            for step in program.transfers
            if self._is_constant(step)
        ]
        return moves + [
            Add(source=(argument.value, m), total=(argument.value, None))
            for argument in program.arguments
            if argument.value in self._summed
            for m in range(program.num_micro_batches)
        ]

    def micro_batch(self, step: Fragment | Transfer, part: str, m: int) -> list[Instruction]:
        """What a step does for micro-batch `m` in the forward or the backward part."""
        program = self.program
        if isinstance(step, Transfer):
            here = (program.parts[step.source] or "forward") == part
            if not here or step.target not in program.micro_used:
                return []
            move = Move(source=self.version(step.source, m), target=(step.target, m))
            return [move, *self._after((step.target,), m)]
        if step.part != part:
            return []
        outputs: list[Key] = [
            (value, None if i in step.accumulators else m) for i, value in enumerate(step.outputs)
        ]
        run = Run(
            fragment=step,
            inputs=tuple(self.version(value, m) for value in step.inputs),
            accumulators=tuple((step.outputs[i], None) for i in step.accumulators),
            outputs=(*outputs, *((step.outputs[i], m) for i in step.extra_results)),
        )
        return [run, *self._after(step.outputs, m)]

    def _after(self, values: Sequence[int], m: int) -> list[Instruction]:
        """Adds results up; moves a carried state to its argument, unless it lies there already."""
        program = self.program
        more: list[Instruction] = [
            Add(source=(value, m), total=(value, None)) for value in values if value in self._summed
        ]
        if m + 1 < program.num_micro_batches:
            more += [
                Move(source=(new, m), target=(old, m + 1))
                for old, new in program.carries.items()
                if new in values and program.values[old] != program.values[new]
            ]
        return more

    def update(self, step: Fragment | Transfer) -> list[Instruction]:
        """What a step does in the update phase."""
        if isinstance(step, Transfer):
            target = (step.target, None)
            if self._is_constant(step) or self.last(step.target) != target:
                return []
            return [Move(source=self.last(step.source), target=target)]
        if step.part != "update":
            return []
        return [
            Run(
                fragment=step,
                inputs=tuple(self.last(value) for value in step.inputs),
                accumulators=(),
                outputs=tuple((value, None) for value in step.outputs),
            )
        ]

    def output(self, result: ProgramResult) -> Output:
        program = self.program
        role, value = result.attributes.role, result.value
        batches = program.num_micro_batches
        if value in program.varying and role is not None and batches > 1:
            if role.kind == "concat":
                return Output(keys=tuple((value, m) for m in range(batches)), concat=role.index)
            if is_sum(result):
                return Output(keys=((value, None),), divisor=batches if role.kind == "mean" else 1)
            return Output(keys=(self.version(value, batches - 1),))
        return Output(keys=(self.last(value),))


def is_sum(result: ProgramResult) -> bool:
    role = result.attributes.role
    return role is not None and role.kind in ("mean", "sum")


def reads(instruction: Instruction) -> tuple[Key, ...]:
    """The keys that an instruction reads."""
    if isinstance(instruction, Run):
        return (*instruction.inputs, *instruction.accumulators)
    if isinstance(instruction, Add):
        return (instruction.source, instruction.total)
    return (instruction.source,)


def writes(instruction: Instruction) -> tuple[Key, ...]:
    """The keys that an instruction writes."""
    if isinstance(instruction, Run):
        return instruction.outputs
    return (instruction.target if isinstance(instruction, Move) else instruction.total,)


def _free(instructions: Sequence[Instruction], kept: set[Key]) -> list[Instruction]:
    """Lets each instruction free what no later one touches."""
    seen, freed = set(kept), list[Instruction]()
    for instruction in reversed(instructions):
        touched = dict.fromkeys((*reads(instruction), *writes(instruction)))
        freed.append(replace(instruction, free=tuple(key for key in touched if key not in seen)))
        seen.update(touched)
    return freed[::-1]
