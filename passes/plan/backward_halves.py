"""What the two parts of a backward fragment hold and take, before its values have shardings.

`split-backward` splits fragments when a plan is ready. What a mesh keeps between the parts is part
of the memory by which stages are cut and shardings are chosen, so it has to be known before. The
fragment is split as it will be, in a copy, and each value that is kept is traced to one of the
fragment, which has the same shape, or that of a row.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from alpa.dialects import body, ir, main_function, mpmd, stablehlo, terminator, walk
from alpa.dialects.records import i64
from alpa.passes.analysis.graph import Graph
from alpa.passes.cost.device import Device
from alpa.passes.loops.fission import split_at
from alpa.passes.plan.backward_slice import Slice, backward_slice
from alpa.passes.plan.data import Fragment, Program
from alpa.passes.plan.reader import read_planned
from alpa.passes.sharding.op_seconds import block_works, work_seconds

_NUMBER = "alpa.number"
"""Of an op in the copy: its place in the fragment."""


@dataclass(frozen=True, kw_only=True)
class Halves:
    """Values of a backward fragment that a mesh holds between its parts."""

    read: frozenset[int]
    """the arguments that the second part reads"""
    made: tuple[tuple[ir.Value, int], ...]
    """what the first part makes for the second: values of the fragment, and how many rows of each
    are kept, one per trip of its loops"""
    seconds: tuple[float, float]
    """of the parts on one device, if that is given"""
    is_split: bool
    """whether both parts have something to do"""


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a fragment's block is split, after `split_at` has split its loops and barriers."""

    graph: Graph
    parts: Slice
    second: tuple[int, ...]
    """the fragment's results that the second part makes; if there are none, nothing is split"""

    @classmethod
    def of(cls, block: ir.Block, leaving: Sequence[int], states: Collection[int]) -> Split:
        """Of a block, whose loops and barriers are split in place.

        Args:
            block: of a backward fragment.
            leaving: the results that others than updates read.
            states: arguments that stay in memory anyway.
        """
        split_at(block, [terminator(block).operands[n] for n in leaving])
        graph = Graph.of(block)
        wanted = {v for n, v in enumerate(graph.returned) if n not in leaving}
        parts = backward_slice(graph, {graph.returned[n] for n in leaving}, wanted, states)
        later = set(parts.second) - parts.free
        second = [n for n, v in enumerate(graph.returned) if graph.producer[v] in later]
        return cls(graph=graph, parts=parts, second=tuple(second))


def halves(
    fragment: mpmd.FragmentOp,
    leaving: Sequence[int],
    states: Collection[int],
    device: Device | None = None,
) -> Halves:
    """What a fragment's parts hold and take. The fragment stays as it is.

    Args:
        fragment: a backward.
        leaving: as in `Split.of`, and so are `states`.
        states: see `leaving`.
        device: for the seconds.
    """
    block = body(fragment)
    if not leaving:  # All of it is the second part.
        seconds = 0.0, sum(_seconds(block, device))
        every = frozenset(range(len(block.arguments)))
        return Halves(read=every, made=(), seconds=seconds, is_split=False)
    copy = fragment.operation.clone(ip=False)
    try:
        return _halves_of_copy(block, body(copy.opview), leaving, states, device)
    finally:
        copy.erase()


def _halves_of_copy(
    block: ir.Block,
    copy: ir.Block,
    leaving: Sequence[int],
    states: Collection[int],
    device: Device | None,
) -> Halves:
    for number, op in enumerate(walk(copy)):
        op.attributes[_NUMBER] = i64(number)
    split = Split.of(copy, leaving, states)
    graph, parts = split.graph, split.parts
    each = _seconds(copy, device)
    if not split.second:
        return Halves(read=frozenset(), made=(), seconds=(sum(each), 0.0), is_split=False)
    ops, made = list(walk(block)), list[tuple[ir.Value, int]]()
    for v in parts.kept:
        source, rows = _source(graph.values[v])
        owner = source.owner
        if isinstance(owner, ir.Block):
            made.append((block.arguments[ir.BlockArgument(source).arg_number], rows))
        else:
            number = ir.IntegerAttr(owner.attributes[_NUMBER]).value
            made.append((ops[number].results[ir.OpResult(source).result_number], rows))
    read = {v for o in parts.second for v in graph.operands[o]}
    second = sum(each[o] for o in parts.second if o not in parts.free) if each else 0.0
    return Halves(
        read=frozenset(v for v in read if v < graph.num_arguments),
        made=tuple(made),
        seconds=(sum(each) - second, second),
        is_split=True,
    )


def _seconds(block: ir.Block, device: Device | None) -> list[float]:
    """Of each op on a device; none without one."""
    if device is None:
        return []
    return [float(work_seconds(it, device)) for it in block_works(block, device)]


def _source(value: ir.Value) -> tuple[ir.Value, int]:
    """The result of a numbered op, or an argument of the fragment, that a value of the copy has
    come from, and how many rows like it the value has."""
    rows = 1
    while True:
        owner = value.owner
        if isinstance(owner, ir.Block):
            loop = owner.owner.opview
            if isinstance(loop, mpmd.FragmentOp):
                return value, rows
            value = loop.operands[ir.BlockArgument(value).arg_number]
            continue
        op = owner.opview if isinstance(owner, ir.Operation) else owner
        if _NUMBER in op.attributes:
            return value, rows
        number = ir.OpResult(value).result_number
        if not isinstance(op, stablehlo.WhileOp):  # A part of a barrier, or a reshape of a row.
            value = op.operands[number]
            continue
        value = terminator(body(op, 1)).operands[number]
        last = value.owner.opview if isinstance(value.owner, ir.Operation) else value.owner
        if isinstance(last, stablehlo.DynamicUpdateSliceOp) and _NUMBER not in last.attributes:
            rows *= ir.RankedTensorType(value.type).shape[0]
            value = last.operands[1]


def leaving_of(program: Program, fragment: Fragment) -> list[int]:
    """The results of a backward fragment that others than updates read."""
    weights = program.gradients - program.micro_used
    return [n for n, value in enumerate(fragment.outputs) if value not in weights]


def states_of(program: Program, fragment: Fragment) -> set[int]:
    """The arguments of a fragment that stay in memory anyway."""
    inputs, states = enumerate(fragment.inputs), program.states
    return {n for n, value in inputs if program.sources[value] in states}


def halves_of(module: ir.Module) -> dict[mpmd.FragmentOp, Halves]:
    """Those of all backward fragments of a planned module, none of which is split yet.

    Raises:
        PassError: the micro-batches cannot be run as the plan says.
    """
    program = read_planned(module)
    ops = list(body(main_function(module)).operations)
    return {
        op: halves(op, leaving_of(program, step), states_of(program, step))
        for step, op in zip(program.steps, ops, strict=False)
        if isinstance(step, Fragment)
        and isinstance(op, mpmd.FragmentOp)
        and step.part == "backward"
    }
