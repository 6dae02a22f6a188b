"""Reads the collectives of a partitioned HLO program from its text.

Collectives of one device are ignored. A loop's body counts once per trip, and each branch of a
conditional counts. An all-reduce whose result is only sliced to the device's own part counts as a
reduce-scatter: XLA's CPU backend does not form one, other backends do later. If the slice is larger
than the device's share, it counts as a reduce-scatter and an all-reduce of the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from typing import get_args

from alpa.passes.analysis.op_cost import UNKNOWN_TRIP_COUNT
from alpa.passes.plan.predicted_collectives import Collective, Kind, merged
from alpa.runtime.hlo_text import Computation, HloError, Instruction, parse_hlo

_NAMES: tuple[Kind, ...] = get_args(Kind)
KINDS: dict[str, Kind] = {name + suffix: name for name in _NAMES for suffix in ("", "-start")}
CALLED = re.compile(r"(?:calls|to_apply)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_TWO_BRANCHES = re.compile(r"(?:true|false)_computation=%?([\w.\-]+)")
_MESH_GROUPS = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(.*?\)\))? \{(.*?)\}")


def real_collectives(text: str, devices: int) -> tuple[Collective, ...]:
    """Lists the collectives of one execution of a partitioned program for so many devices.

    The axes are empty: a program for devices has groups, but no axes.

    Raises:
        HloError: a collective or a loop cannot be read.
    """
    computations, entry = parse_hlo(text)
    return merged(HloReader(computations, devices).visit(entry, 1))


def has_16_bit_floats(text: str) -> bool:
    """Whether a program computes with bf16 or f16."""
    return re.search(r"\b(bf16|f16)\[", text) is not None


@dataclass(frozen=True)
class HloReader:
    """Reads what the instructions of a program for some devices do."""

    computations: dict[str, Computation]
    devices: int

    def visit(self, name: str, times: int) -> Iterator[Collective]:
        computation = self.computations[name]
        for instruction in computation.instructions.values():
            if instruction.opcode == "while":
                condition, loop = instruction.attribute("condition"), instruction.attribute("body")
                trips = self.trip_count(computation, instruction)
                yield from self.visit(condition, times * trips)
                yield from self.visit(loop, times * trips)
            elif instruction.opcode == "conditional":
                for branch in branches(instruction):
                    yield from self.visit(branch, times)
            elif instruction.opcode in ("call", "fusion", "async-start"):
                for called in CALLED.findall(instruction.attributes):
                    yield from self.visit(called, times)
            elif instruction.opcode in KINDS:
                yield from self._collectives(computation, instruction, times)

    def _collectives(
        self, computation: Computation, instruction: Instruction, times: int
    ) -> Iterator[Collective]:
        kind = KINDS[instruction.opcode]
        group = 2 if kind == "collective-permute" else self.group_size(instruction)
        if group == 1 or (kind == "collective-permute" and not _moves(instruction)):
            return
        size = instruction.bytes
        if kind == "reduce-scatter":
            size *= group
        parts: list[tuple[Kind, int, int]] = [(kind, group, size)]
        if kind == "all-reduce":
            cut = _cut(computation, instruction)
            if cut % group == 0:  # by other axes as well
                cut = group
            if cut > 1 and group % cut == 0:
                parts = [("reduce-scatter", cut, size), ("all-reduce", group // cut, size // cut)]
        for part, devices, num_bytes in parts:
            if devices > 1 and num_bytes > 0:
                yield Collective(kind=part, axes=(), devices=devices, bytes=num_bytes, count=times)

    def group_size(self, instruction: Instruction) -> int:
        """Devices of a group: `{{0,1},{2,3}}`, `[2,4]<=[8]`, or axes of a mesh; `{}` is all."""
        rest = instruction.attributes
        if "replica_groups={}" in rest:
            return self.devices
        if match := re.search(r"replica_groups=\{\{([\d,]+)\}", rest):
            return len(match[1].split(","))
        if match := re.search(r"replica_groups=\[\d+,(\d+)\]<=", rest):
            return int(match[1])
        if match := _MESH_GROUPS.search(rest):
            sizes = dict(re.findall(r"'([^']+)'=(\d+)", match[1]))
            used = re.findall(r"'([^']+)'(?::\(\d+\)(\d+))?", match[2])
            return prod(int(part or sizes[axis]) for axis, part in used)
        raise HloError(f"the groups of {instruction.name} cannot be read: {rest}")

    def trip_count(self, computation: Computation, loop: Instruction) -> int:
        """How often a loop's body runs, as far as the text says."""
        known = re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes)
        if known:
            return int(known[1])
        start = computation.instructions.get(loop.operands[0])
        condition = self.computations[loop.attribute("condition")]
        step = self.computations[loop.attribute("body")]
        compare = _origin(condition, condition.root)
        if compare is None or compare.opcode != "compare" or start is None:
            return UNKNOWN_TRIP_COUNT
        index, limit = (_element(condition, name) for name in compare.operands)
        if not isinstance(index, tuple) or start.opcode != "tuple":
            return UNKNOWN_TRIP_COUNT
        (counter,) = index
        added = _origin(step, step.instructions[step.root].operands[counter])
        stop = limit if isinstance(limit, int) else _started(computation, start, limit)
        first = _started(computation, start, index)
        if added is None or added.opcode != "add" or first is None or stop is None:
            return UNKNOWN_TRIP_COUNT
        amounts = [_element(step, name) for name in added.operands]
        by = next((a for a in amounts if isinstance(a, int)), None)
        if by is None or by <= 0 or index not in amounts or "LT" not in compare.attributes:
            return UNKNOWN_TRIP_COUNT
        return max(0, -((first - stop) // by))


def branches(conditional: Instruction) -> list[str]:
    """The names of the computations of which a conditional runs one."""
    found = _BRANCHES.search(conditional.attributes)
    names = found[1].split(",") if found else _TWO_BRANCHES.findall(conditional.attributes)
    return [name.strip().removeprefix("%") for name in names]


def _origin(computation: Computation, name: str) -> Instruction | None:
    """The instruction that produces a value, ignoring copies."""
    found = computation.instructions.get(name)
    while found is not None and found.opcode == "copy":
        found = computation.instructions.get(found.operands[0])
    return found


def _element(computation: Computation, name: str) -> tuple[int] | int | None:
    """A scalar in a loop: (number,) of its loop variable, or its constant value.

    jaxlib 0.12 prints the element of a tuple as `name#number`.
    """
    if "#" in name:
        return (int(name.rpartition("#")[2]),)
    found = _origin(computation, name)
    if found is None:
        return None
    if found.opcode == "get-tuple-element":
        return (int(found.attribute("index")),)
    if found.opcode == "constant" and found.operands[0].lstrip("-").isdigit():
        return int(found.operands[0])
    return None


def _started(
    computation: Computation, start: Instruction, variable: tuple[int] | int | None
) -> int | None:
    """The initial constant of a loop variable."""
    if not isinstance(variable, tuple):
        return None
    value = _element(computation, start.operands[variable[0]])
    return value if isinstance(value, int) else None


def _cut(computation: Computation, reduced: Instruction) -> int:
    """The factor by which all uses of a value reduce its size; 1 if a use reads more.

    A sharding constraint counts as a copy.
    """
    whole, factors, waiting = reduced.bytes, set[int](), [reduced.name]
    while waiting:
        name = waiting.pop()
        users = list(computation.users(name))
        if not users or name == computation.root:
            return 1
        for user in users:
            if user.opcode == "copy":
                waiting.append(user.name)
            elif user.opcode == "dynamic-slice" and user.operands[0] == name:
                factors.add(whole // max(1, user.bytes))
            else:
                return 1
    return factors.pop() if len(factors) == 1 else 1


def _moves(permute: Instruction) -> bool:
    match = re.search(r"source_target_pairs=\{(.*?)\}\}", permute.attributes)
    if match is None:
        raise HloError(f"{permute.name} has no source_target_pairs")
    pairs = re.findall(r"(\d+),(\d+)", match[1])
    return any(source != target for source, target in pairs)
