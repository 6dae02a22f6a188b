"""What the updates of a clustered `@main` are made of and for, checked layer by layer."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from alpa.dialects import body, func, ir, terminator
from alpa.dialects.attributes import Part, read_arguments, read_results, state_pairs
from alpa.dialects.mpmd_types import Origin
from alpa.passes.analysis.graph import union, used_values
from alpa.passes.base import PassError, errors_at


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A computation of a clustered `@main`, or a fragment of a planned one."""

    op: ir.OpView
    origins: tuple[Origin, ...]
    part: Part
    place: int
    """layer or stage; -1 for update_global"""
    name: str


def check_updates(function: func.FuncOp, units: Sequence[Unit]) -> None:
    """Checks that the updates of a clustered `@main` stand in the right layers.

    Each of thousands of values has a set of layers: a number, whose bit l says that layer l is in.

    Raises:
        PassError: at the update that is wrong.
    """
    with errors_at(function):
        states = state_pairs(read_arguments(function), read_results(function))
    arguments, returned = body(function).arguments, terminator(body(function)).operands
    updates = [unit for unit in units if unit.part == "update"]
    made_of: dict[ir.Value, int] = defaultdict(int)
    """the layers of the parameters and gradients that a value is made of"""
    leads_to: dict[ir.Value, int] = defaultdict(int)
    """the layers of the states that are made of a value"""
    forward = (unit for unit in units if unit.part == "forward")
    for unit in sorted(forward, key=lambda unit: unit.place, reverse=True):
        for value in unit.op.operands:
            if isinstance(value.owner, ir.Block):
                made_of[value] = 1 << unit.place  # the first layer that reads it comes last
    for result, argument in states.items():
        leads_to[returned[result]] |= made_of[arguments[argument]]
    for unit in units:
        if unit.part == "backward":
            made_of.update(dict.fromkeys(unit.op.results, 1 << unit.place))
    steps = [step for unit in updates for step in _steps(unit.op)]
    for read, made in steps:
        if above := _union(made_of, read):
            for value in made:
                made_of[value] |= above
    for read, made in reversed(steps):
        if below := _union(leads_to, made):
            for value in read:
                leads_to[value] |= below
    for unit in updates:
        for number, value in enumerate(terminator(body(unit.op)).operands):
            # An op with several results, such as a branch, is placed by all of them.
            made = [value] if isinstance(value.owner, ir.Block) else value.owner.results
            _check_result(unit, number, made_of[value], _union(leads_to, made))


def _steps(update: ir.OpView) -> Iterator[tuple[Sequence[ir.Value], Sequence[ir.Value]]]:
    """What an update reads and makes: its arguments, then each op, then its results."""
    block = body(update)
    *ops, end = block.operations
    for outer, inner in zip(update.operands, block.arguments, strict=True):
        yield [outer], [inner]
    for op in ops:
        yield used_values(op), tuple(op.results)
    for inner, outer in zip(end.operands, update.results, strict=True):
        yield [inner], [outer]


def _union(sets: Mapping[ir.Value, int], values: Iterable[ir.Value]) -> int:
    return union([sets.get(value, 0) for value in values])


def _check_result(unit: Unit, number: int, made_of: int, to: int) -> None:
    if unit.place < 0 or to == 1 << unit.place or made_of in (0, 1 << unit.place):
        return
    if to.bit_count() == 1:
        layer = to.bit_length() - 1
        raise PassError(
            unit.op,
            f"result {number} of {unit.name} is made for the state of layer {layer} alone: it "
            f"belongs to update_{layer}",
        )
    layers = ", ".join(str(n) for n in range(made_of.bit_length()) if made_of >> n & 1)
    raise PassError(
        unit.op,
        f"result {number} of {unit.name} is made of gradients or parameters of layers "
        f"{layers}, and for no layer's state alone: what mixes layers belongs to update_global",
    )
