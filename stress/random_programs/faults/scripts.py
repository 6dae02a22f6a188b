"""Faults of the schedule: a step reads, adds or returns other versions than its script lists."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from alpa.passes.plan.instructions import Add, Instruction, Move, Output, Run, Script
from alpa.passes.plan.versions import Key
from alpa.runtime.executable import Executable
from stress.random_programs.faults.planting import Fault, Sound


def _in_script(name: str, where: str, change: Callable[[Script], Script]) -> Fault:
    """A fault by another script; the same script if the program has no place for it."""

    def plant(sound: Sound) -> Executable | None:
        script = change(sound.script)
        return None if script == sound.script else sound.executable(script=script)

    return Fault(name=name, where=where, plant=plant)


def _each(script: Script, change: Callable[[Instruction], Instruction]) -> Script:
    return replace(script, instructions=tuple(map(change, script.instructions)))


def _first_batch_again(script: Script) -> Script:
    """Every forward and backward part reads the first micro-batch of the arguments."""
    batch = {a.value for a in script.program.arguments if a.attributes.role == "batch"}

    def change(i: Instruction) -> Instruction:
        if not isinstance(i, Run):
            return i
        return replace(i, inputs=tuple((v, 0) if v in batch else (v, m) for v, m in i.inputs))

    return _each(script, change)


def _not_carried(script: Script) -> Script:
    """Each micro-batch starts from the state of the step, not from that of the previous one."""
    carries = script.program.carries

    def change(i: Instruction) -> Instruction:
        if not isinstance(i, Run):
            return i
        pairs = zip(i.fragment.inputs, i.inputs, strict=True)
        return replace(i, inputs=tuple((v, 0) if v in carries else key for v, key in pairs))

    return _each(script, change)


def _fresh_accumulators(script: Script) -> Script:
    """Each micro-batch restarts its gradients: only the last one's are left."""

    def change(number: int, i: Instruction) -> Instruction:
        if not isinstance(i, Run):
            return i
        keys = tuple((value, -1 - number) for value, _ in i.accumulators)
        return replace(i, accumulators=keys)  # of no micro-batch: nobody wrote them

    changed = tuple(change(n, i) for n, i in enumerate(script.instructions))
    return replace(script, instructions=changed)


def _reused_buffers(script: Script) -> Script:
    """A backward part reads the values of the latest forward part, of any micro-batch."""
    latest: dict[int, Key] = {}

    def change(i: Instruction) -> Instruction:
        if not isinstance(i, Run):
            return i
        if i.fragment.part == "forward":
            latest.update({key[0]: key for key in i.outputs})
        if i.fragment.part == "backward":
            i = replace(i, inputs=tuple(latest.get(key[0], key) for key in i.inputs))
        return i

    return _each(script, change)


def _stale_moves(script: Script) -> Script:
    """Transfers carry the values of the previous micro-batch."""

    def change(i: Instruction) -> Instruction:
        if isinstance(i, Move) and i.source[1]:
            return replace(i, source=(i.source[0], i.source[1] - 1))
        return i

    return _each(script, change)


def _last_not_added(script: Script) -> Script:
    last = script.program.num_micro_batches - 1
    kept = (i for i in script.instructions if not (isinstance(i, Add) and i.source[1] == last))
    return replace(script, instructions=tuple(kept))


def _returned(script: Script, change: Callable[[Output], Output]) -> Script:
    return replace(script, outputs=tuple(map(change, script.outputs)))


def _not_averaged(script: Script) -> Script:
    return _returned(script, lambda output: replace(output, divisor=1))


def _reversed_parts(script: Script) -> Script:
    """Concatenations begin with the last micro-batch."""
    return _returned(
        script, lambda o: o if o.concat is None else replace(o, keys=tuple(reversed(o.keys)))
    )


def _one_mesh_updated(script: Script) -> Script:
    """If several meshes have a state, only the first one returns the new value."""
    program = script.program
    donated = {f.inputs[number] for f in program.fragments for number in f.donated}
    old = {
        new: argument
        for argument, states in program.new_states.items()
        for new in states
        if program.values[new] == program.values[argument] and argument not in donated
    }
    seen: set[int] = set()
    outputs: list[Output] = []
    for result, output in zip(program.results, script.outputs, strict=True):
        if result.number in seen and result.value in old:
            output = replace(output, keys=((old[result.value], None),))
        seen.add(result.number)
        outputs.append(output)
    return replace(script, outputs=tuple(outputs))


FAULTS = (
    _in_script("the first micro-batch is read again", "inputs", _first_batch_again),
    _in_script("a state is not carried on", "inputs", _not_carried),
    _in_script("buffers are reused too early", "inputs", _reused_buffers),
    _in_script("accumulators start anew", "sums", _fresh_accumulators),
    _in_script("the last micro-batch is not added", "sums", _last_not_added),
    _in_script("a transfer is a micro-batch late", "transfers", _stale_moves),
    _in_script("a result is not averaged", "results", _not_averaged),
    _in_script("a result is put together backwards", "results", _reversed_parts),
    _in_script("a shared state is updated on one mesh", "results", _one_mesh_updated),
)
