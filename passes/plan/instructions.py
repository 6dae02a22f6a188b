"""Lists the instructions of a step, from a program and the schedule of its plan.

`write_script` makes one list for all meshes; `Script.on` selects a mesh's own list. Every stage
follows its list in the plan's schedule (`passes.schedules`). A value moves directly before the work
that reads it first, and is freed after its last use. Stages of one mesh read one another's values
where they are. Each mesh can run its list independently, with sends and receives that block until
the other side is ready. The first instruction of the common list that has not run can always run,
so there is no deadlock. A sender that need not wait can offer a value as soon as it exists; its own
list says when the value may be released.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property

from alpa.passes.plan.data import Fragment, Program, ProgramResult
from alpa.passes.plan.stage_order import read_by, rounds, schedule_of_stages, stages_of
from alpa.passes.plan.versions import Key, Maker, Versions
from alpa.passes.schedules.work import Kind, Work


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
    """Copies a value into the mesh and sharding of another: a send there, a receive here."""

    source: Key
    target: Key
    free: tuple[Key, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Add:
    """Adds a micro-batch's version to the total; the first version starts the total."""

    source: Key
    total: Key
    free: tuple[Key, ...] = ()


Instruction = Run | Move | Add


@dataclass(frozen=True, kw_only=True)
class Output:
    """Describes how a result of the original program is made: from one key, or one per micro-batch.

    `value` is the result as @main returns it; a total may have another sharding and a wider type.
    `concat` is a dimension, `divisor` divides a total.
    """

    value: int
    keys: tuple[Key, ...]
    concat: int | None = None
    divisor: int = 1


@dataclass(frozen=True, kw_only=True)
class Script:
    """Instructions, and the source of each result of the planned @main."""

    program: Program
    instructions: tuple[Instruction, ...]
    outputs: tuple[Output, ...]

    def on(self, mesh: str) -> tuple[Instruction, ...]:
        """The mesh's own list; a move between meshes is in the lists of both."""
        return tuple(i for i in self.instructions if mesh in meshes_of(self.program, i))

    @cached_property
    def given(self) -> frozenset[Key]:
        """The versions of arguments that the step reads or returns."""
        used = {key for instruction in self.instructions for key in reads(instruction)}
        used.update(key for output in self.outputs for key in output.keys)
        return frozenset(used & arguments(self.program))


def write_script(program: Program) -> Script:
    """Lists the instructions of a step under the schedule of the program's plan.

    Raises:
        ValueError: the parts of the program wait for one another.
    """
    writer = _Writer(program)
    writer.constants()
    writer.micro_batches()
    writer.sums()
    for fragment in program.fragments:
        if fragment.part == "update":
            writer.update(fragment)
    outputs = tuple(writer.output(result) for result in program.results)
    kept = {key for output in outputs for key in output.keys}
    instructions = tuple(_free(writer.instructions, kept))
    return Script(program=program, instructions=instructions, outputs=outputs)


def arguments(program: Program) -> frozenset[Key]:
    """The versions that the caller gives; for a carried state, that of micro-batch 0."""
    keys: set[Key] = set()
    for argument in program.arguments:
        if argument.value not in program.varying:
            keys.add((argument.value, None))
        else:
            whole = argument.attributes.role == "batch"
            keys.update(
                (argument.value, m) for m in range(program.num_micro_batches if whole else 1)
            )
    return frozenset(keys)


@dataclass(frozen=True)
class _Runs:
    """The runs of a fragment for micro-batches.

    A stage may read hundreds of parameters and add up as many gradients: their keys are the same
    for all micro-batches.
    """

    versions: Versions
    fragment: Fragment

    @cached_property
    def _alike(self) -> tuple[list[Key], tuple[Key, ...], list[Key]]:
        """The inputs, the accumulators and the outputs, those that vary with any number."""
        program, outputs = self.versions.program, self.fragment.outputs
        accumulated = [value for value in outputs if value in program.totals]
        used = [value for value in accumulated if value in program.micro_used]
        return (
            [(value, None) for value in self.fragment.inputs],
            tuple((value, None) for value in accumulated),
            [(value, None) for value in (*outputs, *used)],
        )

    @cached_property
    def _varying(self) -> tuple[list[int], list[int]]:
        """The positions of inputs and of outputs that vary."""
        program, inputs, outputs = self.versions.program, self.fragment.inputs, self._alike[2]
        made = len(self.fragment.outputs)
        return (
            [i for i, value in enumerate(inputs) if value in program.varying],
            [i for i, (value, _) in enumerate(outputs) if i >= made or value not in program.totals],
        )

    def run(self, m: int) -> Run:
        """The run for micro-batch `m`."""
        inputs, accumulators, outputs = self._alike
        inputs, outputs = inputs.copy(), outputs.copy()
        (read, made), carries = self._varying, self.versions.program.carries
        for i in read:
            value, _ = inputs[i]
            inputs[i] = self.versions.version(value, m) if value in carries else (value, m)
        for i in made:
            outputs[i] = (outputs[i][0], m)
        return Run(
            fragment=self.fragment,
            inputs=tuple(inputs),
            accumulators=accumulators,
            outputs=tuple(outputs),
        )


class _Writer:
    """Writes instructions, and tracks which keys exist before the next one."""

    def __init__(self, program: Program) -> None:
        self.instructions: list[Instruction] = []
        self._program = program
        self._versions = Versions(program)
        self._made = set(arguments(program))
        self._sums_here = self._versions.summed - {a.value for a in program.arguments}
        # Transfers to results that need the version of every micro-batch, by their source.
        every = {r.value for r in program.results if len(self._output(r).keys) > 1}
        self._returned: dict[int, list[int]] = {}
        for step in program.transfers:
            if step.target in every | self._versions.summed:
                self._returned.setdefault(step.source, []).append(step.target)

    def _write(self, instruction: Instruction) -> None:
        """Adds an instruction, and the sums of its results."""
        self.instructions.append(instruction)
        self._made.update(writes(instruction))
        if not self._sums_here:
            return
        for value, m in writes(instruction):
            if m is not None and value in self._sums_here:
                self._write(Add(source=(value, m), total=(value, None)))

    def _fetch(self, key: Key) -> None:
        """Moves a key to where it is read, unless it is there."""
        if key in self._made:
            return
        source = self._versions.source(key)
        if source is None:
            raise ValueError(f"version {key[1]} of value {key[0]} is read and never made")
        self._fetch(source)
        self._write(Move(source=source, target=key))

    def constants(self) -> None:
        """Moves constants first, because an update may overwrite their source."""
        for step in self._program.transfers:
            if self._versions.is_constant(step):
                self._fetch((step.target, None))

    def micro_batches(self) -> None:
        """Adds all forwards and backwards.

        In each round of the schedule, every stage that can go on does its next work, after the
        values that this work reads have moved.
        """
        program, stages = self._program, stages_of(self._program)
        # Other values do not vary: they are arguments, or constants that have moved.
        read: dict[tuple[int, Kind], list[int]] = {
            (s, kind): [value for value in read_by(fragments) if value in program.varying]
            for s, stage in enumerate(stages)
            for kind, fragments in stage.items()
        }
        makers = {
            value: Maker(s, is_forward=fragment.runs_forward, half=fragment.half)
            for s, stage in enumerate(stages)
            for fragment in (*stage["forward"], *stage["backward"])
            for value in fragment.outputs
        }
        schedule = schedule_of_stages(program, stages)

        @cache
        def made_by(stage: int, kind: Kind, m: int) -> dict[tuple[Maker, int], None]:
            """Who makes what a work of micro-batch `m` reads, and how many micro-batches later."""
            keys = (self._versions.version(value, m) for value in read[stage, kind])
            found = (self._maker(key, makers) for key in keys)
            return dict.fromkeys((it[0], it[1] - m) for it in found if it is not None)

        def needs(work: Work) -> list[Work]:
            m = work.micro_batch
            # All micro-batches but the first one, which has no other before it, are alike.
            alike = made_by(work.stage, work.kind, min(m, 1))
            made = (maker.work(m + later, schedule) for maker, later in alike)
            return [it for it in made if it is not None]

        moved = {
            place: [value for value in values if self._versions.may_move(value)]
            for place, values in read.items()
        }
        runs = {
            (s, kind): [_Runs(self._versions, fragment) for fragment in fragments]
            for s, stage in enumerate(stages)
            for kind, fragments in stage.items()
        }
        for together in rounds(schedule, needs):
            for work in together:
                for value in moved[work.stage, work.kind]:
                    self._fetch(self._versions.version(value, work.micro_batch))
            for work in together:
                for it in runs[work.stage, work.kind]:
                    self._run(it.run(work.micro_batch), work.micro_batch)

    def _maker(self, key: Key, makers: Mapping[int, Maker]) -> tuple[Maker, int] | None:
        """Who makes a key, or what it is moved from, for which micro-batch; None if it exists
        already.

        Raises:
            ValueError: nothing makes it.
        """
        while key not in self._made:
            value, m = key
            if value in makers and m is not None:
                return makers[value], m
            source = self._versions.source(key)
            if source is None:
                raise ValueError(f"version {m} of value {value} is read and never made")
            key = source
        return None

    def _run(self, run: Run, m: int) -> None:
        """Runs a fragment for a micro-batch, and moves results that another mesh returns."""
        self._write(run)
        if self._returned:
            for value in run.fragment.outputs:
                for target in self._returned.get(value, ()):
                    self._fetch((target, m))

    def sums(self) -> None:
        """Adds up arguments that are results, here or moved, if that has not happened yet."""
        for value in sorted(self._versions.summed):
            if (value, None) in self._made:
                continue
            for m in range(self._program.num_micro_batches):
                key = self._versions.version(value, m)
                self._fetch(key)
                if value not in self._sums_here:
                    self._write(Add(source=key, total=(value, None)))

    def update(self, fragment: Fragment) -> None:
        """Runs a fragment of the update phase."""
        inputs = tuple(self._versions.last(value) for value in fragment.inputs)
        for key in inputs:
            self._fetch(key)
        outputs = tuple((value, None) for value in fragment.outputs)
        self._write(Run(fragment=fragment, inputs=inputs, accumulators=(), outputs=outputs))

    def output(self, result: ProgramResult) -> Output:
        """Describes how a result is made from keys that have been moved there."""
        output = self._output(result)
        for key in output.keys:
            self._fetch(key)
        return output

    def _output(self, result: ProgramResult) -> Output:
        program, versions = self._program, self._versions
        role, value = result.attributes.role, result.value
        batches = program.num_micro_batches
        if value in program.varying and role is not None and batches > 1:
            if role.kind == "concat":
                return Output(
                    value=value,
                    keys=tuple((value, m) for m in range(batches)),
                    concat=role.index,
                )
            if result.sum_kind is not None:
                divisor = batches if result.sum_kind == "mean" else 1
                total = program.returned_totals.get(value, value)
                return Output(value=value, keys=((total, None),), divisor=divisor)
            return Output(value=value, keys=(versions.version(value, batches - 1),))
        return Output(value=value, keys=(versions.last(value),))


def reads(instruction: Instruction) -> tuple[Key, ...]:
    """The keys that an instruction reads."""
    if isinstance(instruction, Run):
        return (*instruction.inputs, *instruction.accumulators)
    if isinstance(instruction, Add):
        return (instruction.source, instruction.total)
    return (instruction.source,)


def meshes_of(program: Program, instruction: Instruction) -> tuple[str, ...]:
    """The mesh of an instruction; for a move between meshes, source and target."""
    if isinstance(instruction, Run):
        return (instruction.fragment.mesh,)
    if isinstance(instruction, Add):
        return (program.values[instruction.source[0]].mesh,)
    ends = (instruction.source, instruction.target)
    return tuple(dict.fromkeys(program.values[value].mesh for value, _ in ends))


def writes(instruction: Instruction) -> tuple[Key, ...]:
    """The keys that an instruction writes."""
    if isinstance(instruction, Run):
        return instruction.outputs
    return (instruction.target if isinstance(instruction, Move) else instruction.total,)


def _free(instructions: Sequence[Instruction], kept: set[Key]) -> list[Instruction]:
    """Lets each instruction free the keys that no later one uses."""
    seen, freed = set(kept), list[Instruction]()
    varying: dict[int, list[int]] = {}
    """where a fragment, by its id, has keys of micro-batches; all of its runs have the others"""
    for instruction in reversed(instructions):
        keys = (*reads(instruction), *writes(instruction))
        if isinstance(instruction, Run):
            places = varying.get(id(instruction.fragment))
            if places is None:
                places = [i for i, (_, m) in enumerate(keys) if m is not None]
                varying[id(instruction.fragment)] = places
            else:
                keys = [keys[i] for i in places]
        free = tuple(key for key in dict.fromkeys(keys) if key not in seen)
        freed.append(replace(instruction, free=free) if free else instruction)
        seen.update(free)
    return freed[::-1]
