"""Parses HLO text into computations and instructions."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod

_INSTRUCTION = re.compile(r"\s*(ROOT )?%?([\w.\-]+) = (.*)")
_COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{")
_WITH_OPERANDS = frozenset(
    f"{kind}-start" for kind in ("all-gather", "all-to-all", "collective-permute", "reduce-scatter")
)
"""Started collectives whose result is a tuple of operands, what is received, and other things."""
_COMMENT = re.compile(r"/\*index=\d+\*/")
"""Before every fifth operand."""
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")


class HloError(ValueError):
    """The text is not what XLA prints for a partitioned program."""


@dataclass(frozen=True, kw_only=True)
class Instruction:
    """One line. `operands` also holds a parameter's number or a constant's text."""

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str

    def attribute(self, name: str) -> str:
        """The text of an attribute without brackets, names without `%`."""
        match = re.search(rf"\b{name}=%?([^\s,]+)", self.attributes)
        if match is None:
            raise HloError(f"{self.name} has no {name}")
        return match[1]

    @property
    def bytes(self) -> int:
        """Bytes of the result; for a started collective, of the received data."""
        if self.opcode in _WITH_OPERANDS:
            return shape_bytes(_split(self.shape[1:-1])[1])
        return shape_bytes(self.shape)


@dataclass
class Computation:
    """Instructions by name, in order."""

    instructions: dict[str, Instruction] = field(default_factory=dict)
    root: str = ""

    def users(self, name: str) -> Iterator[Instruction]:
        return (i for i in self.instructions.values() if name in i.operands)


def shape_bytes(shape: str) -> int:
    """Bytes of an array or of all arrays of a tuple, each element padded to whole bytes."""
    return sum(
        prod(int(d) for d in dims.split(",") if d) * max(1, int(bits or 8) // 8)
        for _, bits, dims in _ARRAY.findall(shape)
    )


def shape_arrays(shape: str) -> list[tuple[str, tuple[int, ...]]]:
    """The element type and the dimensions of an array, or of each array of a tuple."""
    return [
        (dtype, tuple(int(d) for d in dims.split(",") if d))
        for dtype, _, dims in _ARRAY.findall(shape)
    ]


def parse_hlo(text: str) -> tuple[dict[str, Computation], str]:
    """Returns the computations by name, and the name of the entry computation.

    Raises:
        HloError: there is no entry computation, or a line does not parse.
    """
    computations: dict[str, Computation] = {}
    current, entry = None, None
    for line in text.splitlines():
        header = _COMPUTATION.match(line)
        if header is not None:
            current = computations[header[1]] = Computation()
            entry = header[1] if line.startswith("ENTRY") else entry
        elif line.startswith("}"):
            current = None
        elif current is not None and (match := _INSTRUCTION.match(line)) is not None:
            instruction = _instruction(match[2], match[3])
            current.instructions[instruction.name] = instruction
            current.root = instruction.name if match[1] else current.root
    if entry is None:
        raise HloError("the program has no ENTRY computation")
    return computations, entry


def _instruction(name: str, text: str) -> Instruction:
    """Splits `f32[8]{0} add(%a, %b), metadata={...}` into its parts."""
    shape_end = _close(text, 0) if text.startswith("(") else text.index(" ")
    rest = text[shape_end:].lstrip()
    start = rest.index("(")
    end = _close(rest, start)
    listed = _COMMENT.sub("", rest[start + 1 : end - 1])
    operands = tuple(part.strip().split(" ")[-1].removeprefix("%") for part in _split(listed))
    return Instruction(
        name=name,
        shape=text[:shape_end],
        opcode=rest[:start],
        operands=operands,
        attributes=rest[end:],
    )


def _close(text: str, start: int) -> int:
    """The position after the bracket that closes the one at `start`."""
    depth = 0
    for i in range(start, len(text)):
        depth += (text[i] in "([{") - (text[i] in ")]}")
        if depth == 0:
            return i + 1
    raise HloError(f"unbalanced brackets in {text}")


def _split(text: str) -> list[str]:
    """The parts between commas that are outside all brackets."""
    parts: list[str] = []
    depth = start = 0
    for i, char in enumerate(text):
        depth += (char in "([{") - (char in ")]}")
        if char == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    return [*parts, text[start:]] if text.strip() else []
