"""Deals the ops of a backward fragment out to two: what other stages wait for, and the rest.

The first part has the ops that lead to a value that leaves (`split_at` has split loops and barriers
before), and ops that have to run anyway. The rest leads to weight gradients only. Of the rest, the
first part also takes ops that **shrink** what is kept between the parts: the sum of a gradient over
the batch for a bias, a conversion to a narrower type. A group of such ops moves if its results are
smaller than the values that nothing else of the rest reads. Products of matrices never move.

Values that depend on no argument are **free**: each part computes those that it reads.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from alpa.dialects import ir, stablehlo
from alpa.passes.analysis.graph import Graph, has_effects, inner_ops
from alpa.passes.analysis.op_kinds import BROADCASTS, DATA_MOVEMENT, SOURCES, TRIVIAL

_MOVED = TRIVIAL | DATA_MOVEMENT
"""Ops that may move to the first part."""
_GROUP = 16
"""The most ops that move together."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """The ops of the two parts, in order, by their numbers in the graph; `free` ones are in both as
    needed. `kept` are the values of the first part that the second one reads."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    free: frozenset[int]
    kept: tuple[int, ...]


def backward_slice(
    graph: Graph, leaving: Collection[int], wanted: Collection[int], states: Collection[int]
) -> Slice:
    """The parts of a fragment.

    Args:
        graph: of the fragment's block.
        leaving: values that the first part makes.
        wanted: values that only updates read.
        states: arguments that stay in memory anyway.
    """
    effects = [o for o, op in enumerate(graph.ops) if _has_to_run(op)]
    first = graph.cone(leaving) | graph.cone(v for o in effects for v in graph.operands[o])
    first |= set(effects)
    free = _free(graph)
    rest = graph.cone(wanted) - first
    arguments = {*range(graph.num_arguments)} - {*states}
    moved = _shrinking(graph, first, rest - free, free, arguments)
    first |= moved
    second = rest - moved
    made = {v for o in first - free for v in graph.results[o]}
    read = {v for o in second for v in graph.operands[o]} | (set(wanted) - made)
    return Slice(
        first=tuple(sorted(first)),
        second=tuple(sorted(second)),
        free=frozenset(free),
        kept=tuple(sorted(made & read)),
    )


def _has_to_run(op: ir.OpView) -> bool:
    return any(
        isinstance(it, stablehlo.CustomCallOp) and has_effects(it) for it in (op, *inner_ops(op))
    )


def _free(graph: Graph) -> set[int]:
    """The ops that depend on no argument and compute nothing."""
    found: set[int] = set()
    kinds = SOURCES | BROADCASTS | {"stablehlo.convert", "stablehlo.reshape"}
    for o, op in enumerate(graph.ops):
        producers = [graph.producer[v] for v in graph.operands[o]]
        if op.name in kinds and found.issuperset(producers):
            found.add(o)
    return found


def _shrinking(
    graph: Graph,
    first: Collection[int],
    rest: Collection[int],
    free: Collection[int],
    arguments: Collection[int],
) -> set[int]:
    """The ops of the rest that move to the first part."""
    there, moved = {*first, *free}, set[int]()
    returned = set(graph.returned)

    def crosses(v: int) -> bool:
        maker = graph.producer[v]
        return v in arguments if maker < 0 else maker in there and maker not in free

    def is_read(v: int, group: Collection[int]) -> bool:
        """Whether the rest reads a value without a group of its ops."""
        return any(u in rest and u not in moved and u not in group for u in graph.users[v])

    for o in sorted(rest):
        group = _group(graph, o, there)
        if group is None:
            continue
        read = {v for g in group for v in graph.operands[g]}
        made = graph.made_by(group)
        kept = sum(graph.bytes[v] for v in made if is_read(v, group))
        gone = sum(graph.bytes[v] for v in read if crosses(v) and not is_read(v, group))
        # What is returned is added up in the first part: it is not kept.
        if gone > kept and (kept or any(v in returned for v in made)):
            moved |= group
            there |= group
    return moved


def _group(graph: Graph, o: int, there: Collection[int]) -> set[int] | None:
    """The op with those that lead to it from what is there; None if they may not move."""
    found: set[int] = set()
    waiting = [o]
    while waiting:
        at = waiting.pop()
        if at in found or at in there:
            continue
        if graph.ops[at].name not in _MOVED or len(found) == _GROUP:
            return None
        found.add(at)
        waiting += [graph.producer[v] for v in graph.operands[at] if graph.producer[v] >= 0]
    return found
