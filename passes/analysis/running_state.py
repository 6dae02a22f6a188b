"""Finds the states that the forward part writes: running averages, counters and the like.

A parameter and a running mean look alike. The loss reads both, and the new value of both is
computed element by element from the old value and a *change* that depends on the batch. The change
of a parameter is its gradient, which is accumulated over the micro-batches. The change of a running
mean is a statistic of activations, and the next micro-batch reads what the forward part has
written.

If gradients are marked (`alpa.grad`), a change that depends on no mark is a statistic. Otherwise
the second derivatives of the loss decide. A gradient depends on its own parameter, unless the loss
is linear in it. A statistic does not depend on the average that it is added to. So a change is a
statistic if it does not depend on its own state and

- the loss is not linear in that state, or
- the change of another state depends on this one, but this change does not depend on the other
  state: second derivatives are symmetric.

The loss of a batch norm that trains does not read the running averages at all, and neither does any
other new value. The change of such a state is a statistic if it is made of no change of a state
that is read: an average of parameters is made of their gradients.

A statistic that depends on its own average is taken for a gradient; such a program needs marks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alpa.dialects.attributes import Part
from alpa.passes.analysis.graph import Graph, union
from alpa.passes.analysis.op_kinds import CURVED, OF_FACTORS


def running_states(
    graph: Graph,
    new: Mapping[int, int],
    changes: Mapping[int, Sequence[int]],
    results: Sequence[int],
) -> set[int]:
    """The states that the forward part writes, in a step without marked gradients.

    Args:
        graph: of the whole step.
        new: for each state, an argument, its new value.
        changes: for each state, an argument, the ops that compute its change.
        results: the returned values that are no new states, losses among them.
    """
    changes = {state: ops for state, ops in changes.items() if ops}
    bit = {state: 1 << number for number, state in enumerate(changes)}
    of_value, made_of, curved = _made_of(graph, bit)
    reads = {state: union(made_of[o] for o in ops) for state, ops in changes.items()}
    gradients = {o for state, ops in changes.items() if reads[state] & bit[state] for o in ops}
    losses = [cone for v in results if gradients.isdisjoint(cone := graph.cone([v]))]
    inside = graph.cone(graph.made_by(o for ops in changes.values() for o in ops)).union(*losses)
    bends = union(curved[o] for o in inside)
    # No change reads an optimizer's moments, so their own changes say nothing about symmetry.
    every = union(reads.values())
    # Changes of alike layers read the same states.
    readers: dict[int, int] = {}
    for state, read in reads.items():
        readers[read] = readers.get(read, 0) | bit[state]
    unread = _unread(graph, new, of_value, bit)
    of_read = {o for state, ops in changes.items() if state not in unread for o in ops}
    return {
        state
        for state, read in reads.items()
        if not read & bit[state]
        and (
            bends & bit[state]
            or any(
                others & every & ~read
                for other_reads, others in readers.items()
                if other_reads & bit[state]
            )
            or (state in unread and of_read.isdisjoint(graph.cone(graph.made_by(changes[state]))))
        )
    }


def counters(
    graph: Graph, new: Mapping[int, int], batch: Sequence[bool], parts: Sequence[Part | None]
) -> list[int]:
    """The states that count how often the forward part runs, as Haiku's running average without
    bias does: no sample changes them, the forward part reads their new value for a state that it
    writes, and the update does not read it.

    Args:
        graph: of the whole step.
        new: for each state, an argument, its new value.
        batch: for each value whether it depends on the batch.
        parts: the part of each op.
    """
    producer = graph.producer
    written = [v for v in new.values() if batch[v] and parts[producer[v]] == "forward"]
    inside = graph.cone(written)
    found: list[int] = []
    for state, v in new.items():
        if producer[v] < 0 or batch[v]:
            continue
        counted = graph.depends([v])
        readers = {
            o
            for o, operands in enumerate(graph.operands)
            if parts[o] is not None and any(counted[u] and not batch[u] for u in operands)
        }
        if not readers.isdisjoint(inside) and all(parts[o] != "update" for o in readers):
            found.append(state)
    return found


def _unread(
    graph: Graph, new: Mapping[int, int], of_value: Sequence[int], bit: Mapping[int, int]
) -> set[int]:
    """The states that no returned value depends on, except their own new values."""
    once = twice = 0
    for v in set(graph.returned):
        once, twice = once | of_value[v], twice | (once & of_value[v])
    own = {state: of_value[new[state]] for state in bit}
    return {state for state, bits in bit.items() if own[state] & bits and not twice & bits}


def _made_of(graph: Graph, arguments: Mapping[int, int]) -> tuple[list[int], list[int], list[int]]:
    """Sets of arguments, as bits: those that each value depends on, those that each op depends on,
    and those in which it is not linear."""
    of_value = [0] * len(graph.values)
    for argument, bits in arguments.items():
        of_value[argument] = bits
    made_of: list[int] = []
    curved: list[int] = []
    for o, (op, operands) in enumerate(zip(graph.ops, graph.operands, strict=True)):
        sets = [of_value[v] for v in operands]
        made = union(sets)
        for v in graph.results[o]:
            of_value[v] = made
        made_of.append(made)
        if op.name in CURVED or (op.name in OF_FACTORS and len(sets) == 1):
            curved.append(made)
        elif op.name in OF_FACTORS:
            curved.append(sets[0] & sets[1])
        else:
            curved.append(sets[-1] if op.name == "stablehlo.divide" else 0)
    return of_value, made_of, curved
