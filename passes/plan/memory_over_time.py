"""The bytes that a device of each mesh holds while a step runs, by what they are for.

Time is that of the simulated step (`step_time.py`); what exists follows from the instructions of
the step, which free a value after its last use. While a fragment runs, its temporaries at the
fullest time (`predicted_memory.py`) come on top. A mesh releases what it sends when its own list of
instructions has passed the move. So the largest sum is what `alpa-plan --verify` predicts for the
modules that are compiled; `predicted_peak_bytes` is what the search counted before, for the parts
of a stage apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

from alpa.passes.plan.data import Program
from alpa.passes.plan.instructions import Add, Instruction, Move, Run, write_script, writes
from alpa.passes.plan.predicted_memory import FragmentMemory
from alpa.passes.plan.step_time import Event, simulate
from alpa.passes.plan.versions import Key

Kind = Literal["parameters", "optimizer state", "gradients", "activations", "inputs", "temporaries"]
KINDS: tuple[Kind, ...] = (
    "parameters",
    "optimizer state",
    "gradients",
    "activations",
    "inputs",
    "temporaries",
)


@dataclass(frozen=True, kw_only=True)
class MeshMemory:
    """Bytes per device of a mesh: `bytes[kind][i]` from `seconds[i]` to the next."""

    mesh: str
    seconds: tuple[float, ...]
    bytes: Mapping[Kind, tuple[int, ...]]

    @cached_property
    def totals(self) -> tuple[int, ...]:
        """Of all kinds together."""
        return tuple(map(sum, zip(*self.bytes.values(), strict=True)))

    @property
    def peak(self) -> int:
        return max(self.totals)

    @property
    def fullest(self) -> int:
        """The number of the time with the most bytes."""
        return self.totals.index(self.peak)


def memory_over_time(program: Program, inside: Sequence[FragmentMemory]) -> list[MeshMemory]:
    """For each mesh of a plan whose modules are exported.

    Args:
        program: the plan.
        inside: `predicted_memory`, for each fragment of the program.
    """
    script = write_script(program)
    temporaries = {
        id(fragment): memory.temporaries
        for fragment, memory in zip(program.fragments, inside, strict=True)
    }
    kinds = _Kinds(program)
    held = {mesh.name: _Held(program, mesh.name, kinds) for mesh in program.meshes}
    for key in sorted(script.given, key=str):
        held[program.values[key[0]].mesh].make(key)
    for one in held.values():
        one.note()
    for event in simulate(script):
        it = event.instruction
        if isinstance(it, Run):
            held[event.mesh].run(it, event, temporaries[id(it.fragment)])
            continue
        if isinstance(it, Move):
            source = held[program.values[it.source[0]].mesh]
            if source is not held[event.mesh]:
                source.release(it)
        held[event.mesh].take(it, event)
    return [one.memory() for one in held.values()]


@dataclass(frozen=True)
class _Kinds:
    """What values are for."""

    program: Program

    def __getitem__(self, value: int) -> Kind:
        return self._known.get(value, "inputs")

    @cached_property
    def _known(self) -> dict[int, Kind]:
        program, known = self.program, dict[int, Kind]()
        for value, part in enumerate(program.parts):
            if part is not None:
                known[value] = "activations" if part == "forward" else "gradients"
        for old in program.states:
            kind: Kind = "parameters" if old in program.parameters else "optimizer state"
            known.update(dict.fromkeys((old, *program.new_states.get(old, ())), kind))
        known.update(dict.fromkeys(program.totals, "gradients"))
        return known


@dataclass
class _Held:
    """What a device of one mesh holds, up to a time."""

    program: Program
    mesh: str
    kinds: _Kinds
    _live: dict[Key, int] = field(default_factory=dict[Key, int])
    _now: dict[Kind, int] = field(default_factory=lambda: dict.fromkeys(KINDS, 0))
    _time: float = 0.0
    _times: list[float] = field(default_factory=list[float])
    _bytes: list[dict[Kind, int]] = field(default_factory=list[dict[Kind, int]])

    def make(self, key: Key, *, is_sum: bool = False) -> None:
        """Adds a value; a sum that has begun stays as it is."""
        if key not in self._live:
            size = self.program.local_sum_bytes if is_sum else self.program.local_bytes
            self._live[key] = size(key[0])
            self._now[self.kinds[key[0]]] += self._live[key]

    def run(self, it: Run, event: Event, temporaries: int) -> None:
        """A fragment writes its results into the donated buffers, or beside all others."""
        for number in it.fragment.donated:
            key = it.inputs[number]
            self._now[self.kinds[key[0]]] -= self._live[key]
            self._live[key] = 0
        for key in it.outputs:
            self.make(key)
        self._time = max(self._time, event.start)
        self._now["temporaries"] += temporaries
        self.note()
        self._now["temporaries"] -= temporaries
        self._end(it, event.end)

    def take(self, it: Move | Add, event: Event) -> None:
        """A value arrives, or is added to a sum."""
        self._time = max(self._time, event.start)
        for key in writes(it):
            self.make(key, is_sum=isinstance(it, Add))
        self.note()
        self._end(it, event.end)

    def release(self, it: Move) -> None:
        """The mesh has passed a send."""
        self._end(it, self._time)

    def _end(self, it: Instruction, time: float) -> None:
        self._time = max(self._time, time)
        for key in it.free:
            if self.program.values[key[0]].mesh == self.mesh:
                self._now[self.kinds[key[0]]] -= self._live.pop(key)
        self.note()

    def note(self) -> None:
        """Writes down what there is, unless that is what there was; at one time, the most."""
        if self._bytes and self._bytes[-1] == self._now:
            return
        self._times.append(self._time)
        self._bytes.append(dict(self._now))

    def memory(self) -> MeshMemory:
        return MeshMemory(
            mesh=self.mesh,
            seconds=tuple(self._times),
            bytes={kind: tuple(each[kind] for each in self._bytes) for kind in KINDS},
        )
