"""Checks a script before it runs: deadlocks, and the memory of each mesh."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from alpa.passes.plan.data import Fragment
from alpa.passes.plan.instructions import Add, Instruction, Move, Run, Script, meshes_of
from alpa.passes.plan.versions import Key


class ScriptError(ValueError):
    """A mesh cannot run its list. The message names the mesh and the instruction."""


def verify(
    script: Script,
    lists: Mapping[str, Sequence[Instruction]] | None = None,
    *,
    inside: Callable[[Fragment], int] = lambda _: 0,
) -> Memory:
    """Runs the meshes' own lists (by default `script.on` of each) against one another.

    A move takes place when both of its meshes have reached it. `inside` gives the bytes per device
    that a fragment needs while it runs, beside its arguments and results.

    Raises:
        ScriptError: there is a deadlock; a value is read before it is made or after it is freed,
            is made or freed twice, or remains at the end without being a result.
    """
    names = [mesh.name for mesh in script.program.meshes]
    lists = lists or {name: script.on(name) for name in names}
    stores = {name: _Store(script, name, inside) for name in names}
    at = dict.fromkeys(names, 0)

    def head(name: str) -> Instruction | None:
        return lists[name][at[name]] if at[name] < len(lists[name]) else None

    progress = True
    while progress:
        progress = False
        for name in names:
            while (instruction := head(name)) is not None:
                meshes = meshes_of(script.program, instruction)
                if any(head(mesh) != instruction for mesh in meshes):
                    break
                for mesh in meshes:
                    stores[mesh].run(instruction)
                    at[mesh] += 1
                progress = True
    waiting = [
        f"{name} at {instruction_text(it)}" for name in names if (it := head(name)) is not None
    ]
    if waiting:
        raise ScriptError(f"these meshes wait for one another: {'; '.join(waiting)}")
    for store in stores.values():
        store.finish()
    return Memory(
        peak_bytes={name: store.peak for name, store in stores.items()},
        in_flight={name: store.most_kept for name, store in stores.items()},
    )


@dataclass(frozen=True, kw_only=True)
class Memory:
    """The peak memory of each mesh, by name.

    `peak_bytes` are per device: arguments, results, all values that fragments exchange, and
    `inside` of the fragment that runs. `in_flight` counts the micro-batches for which a mesh keeps
    values of its forwards for its backwards that are not results of the step.
    """

    peak_bytes: dict[str, int]
    in_flight: dict[str, int]


class _Store:
    """The values on one mesh."""

    def __init__(self, script: Script, mesh: str, inside: Callable[[Fragment], int]) -> None:
        program, self._inside = script.program, inside
        self._program, self._mesh = program, mesh
        self._results = {key for output in script.outputs for key in output.keys}
        self._live: dict[Key, int] = {}
        self._gone: set[Key] = set()
        self._donated: set[Key] = set()
        mine = [f for f in program.fragments if f.mesh == mesh]
        made = {value for f in mine if f.part == "forward" for value in f.outputs}
        self._activations = made & {v for f in mine if f.part == "backward" for v in f.inputs}
        self._bytes = 0
        self.peak = self.most_kept = 0
        for key in script.given:
            if self._is_here(key):
                self._make(key)
        self.peak = self._bytes

    def _is_here(self, key: Key) -> bool:
        return self._program.values[key[0]].mesh == self._mesh

    def _fail(self, key: Key, what: str) -> ScriptError:
        return ScriptError(f"{self._mesh}: {_name(key)} {what}")

    def _make(self, key: Key, *, added: bool = False) -> None:
        if key in self._live or key in self._gone:
            raise self._fail(key, "is made twice")
        size = self._program.local_sum_bytes if added else self._program.local_bytes
        self._live[key] = size(key[0])
        self._bytes += self._live[key]

    def _read(self, key: Key) -> None:
        if key not in self._live or key in self._donated:
            known = key in self._gone or key in self._donated
            raise self._fail(key, f"is read {'after it is freed' if known else 'and never made'}")

    def run(self, instruction: Instruction) -> None:
        """Runs this mesh's part of an instruction."""
        for key in self._inputs(instruction):
            if self._is_here(key):
                self._read(key)
        if isinstance(instruction, Run):
            # The fragment writes its results into the donated buffers.
            for number in instruction.fragment.donated:
                key = instruction.inputs[number]
                self._donated.add(key)
                self._bytes -= self._live[key]
                self._live[key] = 0
        added = isinstance(instruction, Add)
        for key in self._outputs(instruction):
            if self._is_here(key):
                self._make(key, added=added)
        beside = self._inside(instruction.fragment) if isinstance(instruction, Run) else 0
        self.peak = max(self.peak, self._bytes + beside)
        activations = (key for key in self._live if key[0] in self._activations)
        kept = {key[1] for key in activations if key not in self._results}
        self.most_kept = max(self.most_kept, len(kept))
        for key in instruction.free:
            if self._is_here(key):
                if key not in self._live:
                    raise self._fail(key, "is freed and not there")
                self._bytes -= self._live.pop(key)
                self._gone.add(key)

    def _inputs(self, instruction: Instruction) -> tuple[Key, ...]:
        """The keys that must exist; a sum starts with its first addend."""
        if isinstance(instruction, Add):
            return (instruction.source,)
        return instruction.inputs if isinstance(instruction, Run) else (instruction.source,)

    def _outputs(self, instruction: Instruction) -> tuple[Key, ...]:
        """The new keys; a sum is created by its first addend."""
        if isinstance(instruction, Move):
            return (instruction.target,)
        if isinstance(instruction, Add):
            return () if instruction.total in self._live else (instruction.total,)
        begun = {key for key in instruction.accumulators if key in self._live}
        return tuple(key for key in instruction.outputs if key not in begun)

    def finish(self) -> None:
        """Raises unless exactly the results of the step remain."""
        for key in self._results:
            if self._is_here(key):
                self._read(key)
        for key in self._live:
            if key not in self._results:
                raise self._fail(key, "is left")


def _name(key: Key) -> str:
    return f"value {key[0]}" if key[1] is None else f"value {key[0]} of micro-batch {key[1]}"


def instruction_text(instruction: Instruction) -> str:
    """An instruction in words."""
    if isinstance(instruction, Run):
        return f"the {instruction.fragment.part} {instruction.fragment.name}"
    if isinstance(instruction, Move):
        return f"the move of {_name(instruction.source)} to {_name(instruction.target)}"
    return f"the sum of {_name(instruction.source)}"
