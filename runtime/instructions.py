"""The static list of what a step does, made from a program by the schedule that its plan names.

A **key** names one version of a value: `(value, m)` is that of micro-batch `m`, `(value, None)` the
one of the step: an argument, a total over the micro-batches, or what the update phase produces.

`write_script` makes one list for all meshes; a mesh's own list is what of it concerns that mesh
(`Script.on`). Every stage works in the order of `passes.solve.schedule`, a value moves right before
the work that reads it first, and each is freed after its last use. Each mesh can run its list for
itself, sends and receives may block until the other side is there: the first instruction of the
common list that has not run yet can always run, so no mesh waits for ever. A sender that need not
wait can offer a value as soon as it is made; its own list says when the value may be let go.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from functools import cached_property
from itertools import groupby

from alpa.passes.plan.data import Fragment, Program, ProgramResult, Transfer
from alpa.passes.solve.stages.schedule import Direction, StageTask, order

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
    """Copies a value into the mesh and sharding of another: a send there, a receive here."""

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

    `value` is the result as @main returns it: a total may lie otherwise, and be of a wider type.
    `concat` is a dimension, `divisor` what a total is divided by.
    """

    value: int
    keys: tuple[Key, ...]
    concat: int | None = None
    divisor: int = 1


@dataclass(frozen=True, kw_only=True)
class Script:
    """Instructions, and for each result of the planned @main what it is."""

    program: Program
    instructions: tuple[Instruction, ...]
    outputs: tuple[Output, ...]

    def on(self, mesh: str) -> tuple[Instruction, ...]:
        """The mesh's own list: a move between meshes is in the lists of both."""
        return tuple(i for i in self.instructions if mesh in meshes_of(self.program, i))

    @cached_property
    def given(self) -> frozenset[Key]:
        """The versions of arguments that the step reads or returns."""
        used = {key for instruction in self.instructions for key in reads(instruction)}
        used.update(key for output in self.outputs for key in output.keys)
        return frozenset(used & arguments(self.program))


def write_script(program: Program) -> Script:
    """What a step does under the schedule of the program's plan.

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
    """The versions of values that the caller gives: of a carried state, that of micro-batch 0."""
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
class _Versions:
    """Which version of a value is read where, and what it is moved from."""

    program: Program

    @cached_property
    def _transfers(self) -> dict[int, Transfer]:
        """By target."""
        return {step.target: step for step in self.program.transfers}

    @cached_property
    def summed(self) -> frozenset[int]:
        """Results that are added up here: gradients are so inside their fragments."""
        program = self.program
        if program.num_micro_batches == 1:
            return frozenset()
        summed = {result.value for result in program.results if result.sum_kind is not None}
        return frozenset(summed & program.varying - program.returned_totals.keys())

    def is_constant(self, transfer: Transfer) -> bool:
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
        late = value in self._transfers and value not in program.micro_used
        if value in program.totals or late:
            return (value, None)
        return self.version(value, program.num_micro_batches - 1)

    def source(self, key: Key) -> Key | None:
        """What a key is moved from; None for what arguments or fragments make."""
        value, m = key
        transfer = self._transfers.get(value)
        if transfer is not None:
            return self.last(transfer.source) if m is None else self.version(transfer.source, m)
        new = self.program.carries.get(value)
        # A carried state that lies where its argument does is read there: `version` says so.
        return (new, m - 1) if new is not None and m else None


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """Fragments of one mesh that a stage of the schedule runs for each micro-batch."""

    forward: tuple[Fragment, ...] = ()
    backward: tuple[Fragment, ...] = ()

    def fragments(self, kind: Direction) -> tuple[Fragment, ...]:
        return self.forward if kind == "forward" else self.backward

    def reads(self, kind: Direction) -> tuple[int, ...]:
        """The values that come from outside."""
        made = {value for fragment in self.fragments(kind) for value in fragment.outputs}
        inputs = [value for fragment in self.fragments(kind) for value in fragment.inputs]
        return tuple(dict.fromkeys(value for value in inputs if value not in made))


def _stages(program: Program) -> list[_Stage]:
    """The forwards in program order, each with the backward of its mesh.

    The backwards stand in program order from the last stage to the first. A forward without a
    backward, or a backward without a forward, is a stage of its own.
    """
    groups = {
        part: [
            tuple(fragments)
            for _, fragments in groupby(
                (f for f in program.fragments if f.part == part), key=lambda f: f.mesh
            )
        ]
        for part in ("forward", "backward")
    }
    forward, backward = groups["forward"], groups["backward"][::-1]
    meshes = [[group[0].mesh for group in part] for part in (forward, backward)]
    stages: list[_Stage] = []
    for tag, f0, f1, b0, b1 in SequenceMatcher(None, *meshes, autojunk=False).get_opcodes():
        if tag == "equal":
            both = zip(forward[f0:f1], backward[b0:b1], strict=True)
            stages += [_Stage(forward=f, backward=b) for f, b in both]
        else:
            stages += [_Stage(forward=f) for f in forward[f0:f1]]
            stages += [_Stage(backward=b) for b in backward[b0:b1]]
    return stages


class _Writer:
    """Writes instructions, and knows what has been made before the next one."""

    def __init__(self, program: Program) -> None:
        self.instructions: list[Instruction] = []
        self._program = program
        self._versions = _Versions(program)
        self._made = set(arguments(program))
        self._sums_here = self._versions.summed - {a.value for a in program.arguments}
        # Transfers to results of which every micro-batch's version is needed, by their source.
        every = {r.value for r in program.results if len(self._output(r).keys) > 1}
        self._returned: dict[int, list[int]] = {}
        for step in program.transfers:
            if step.target in every | self._versions.summed:
                self._returned.setdefault(step.source, []).append(step.target)

    def _write(self, instruction: Instruction) -> None:
        """Adds an instruction, and the sums of what it makes."""
        self.instructions.append(instruction)
        self._made.update(writes(instruction))
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

    def _is_made(self, key: Key | None) -> bool:
        """Whether a key is there, or is after moves only."""
        while key is not None and key not in self._made:
            key = self._versions.source(key)
        return key is not None

    def constants(self) -> None:
        """Moves what stays the same; an update may overwrite it where it comes from."""
        for step in self._program.transfers:
            if self._versions.is_constant(step):
                self._fetch((step.target, None))

    def micro_batches(self) -> None:
        """All forwards and backwards.

        The stages keep step: whoever can does its next piece of work, with what it reads moved
        before any of them begins. A stage waits for its neighbour even where it reads nothing of
        it, so that no stage runs ahead of what the schedule keeps in flight.
        """
        program, stages = self._program, _stages(self._program)
        backward = any(stage.backward for stage in stages)
        schedule, batches = program.plan.schedule, program.num_micro_batches
        todo = [
            list(order(schedule, batches, len(stages) - s, backward=backward))[::-1]
            for s in range(len(stages))
        ]
        done: dict[Direction, list[int]] = {
            "forward": [0] * len(stages),
            "backward": [0] * len(stages),
        }
        needs = [{k: stage.reads(k) for k in done} for stage in stages]

        def keys(s: int, work: StageTask) -> list[Key]:
            return [self._versions.version(v, work.micro_batch) for v in needs[s][work.kind]]

        def is_ready(s: int, work: StageTask) -> bool:
            neighbour = s - 1 if work.kind == "forward" else s + 1
            if 0 <= neighbour < len(stages) and done[work.kind][neighbour] <= work.micro_batch:
                return False
            return all(self._is_made(key) for key in keys(s, work))

        while any(todo):
            ready = [s for s, works in enumerate(todo) if works and is_ready(s, works[-1])]
            if not ready:
                raise ValueError(f"no stage can go on under {schedule}: each waits for another")
            for s in ready:
                for key in keys(s, todo[s][-1]):
                    self._fetch(key)
            for s in ready:
                work = todo[s].pop()
                done[work.kind][s] += 1
                for fragment in stages[s].fragments(work.kind):
                    self._run(fragment, work.micro_batch)

    def _run(self, fragment: Fragment, m: int) -> None:
        """Runs a fragment for a micro-batch, and moves what is a result elsewhere."""
        totals, used = self._program.totals, self._program.micro_used
        accumulated = [value for value in fragment.outputs if value in totals]
        self._write(
            Run(
                fragment=fragment,
                inputs=tuple(self._versions.version(value, m) for value in fragment.inputs),
                accumulators=tuple((value, None) for value in accumulated),
                outputs=(
                    *((value, None if value in totals else m) for value in fragment.outputs),
                    *((value, m) for value in accumulated if value in used),
                ),
            )
        )
        for value in fragment.outputs:
            for target in self._returned.get(value, ()):
                self._fetch((target, m))

    def sums(self) -> None:
        """Adds up arguments that are results, here or moved, and are not added up yet."""
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
        """How a result is made, of keys that have been moved there."""
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
    """The mesh that an instruction runs on; of a move between meshes source and target."""
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
    """Lets each instruction free what no later one touches."""
    seen, freed = set(kept), list[Instruction]()
    for instruction in reversed(instructions):
        touched = dict.fromkeys((*reads(instruction), *writes(instruction)))
        freed.append(replace(instruction, free=tuple(key for key in touched if key not in seen)))
        seen.update(touched)
    return freed[::-1]
