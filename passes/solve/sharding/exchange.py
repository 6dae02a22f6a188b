"""Prices of all times, and the parts of another choice that fit into memory.

Two choices differ in *parts*: sets of nodes with no edges between them. What a part changes of the
cost, and of the bytes, does not depend on other parts.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from alpa.passes.solve.sharding.flat import Flat, spread
from alpa.passes.solve.sharding.problem import Memory, Problem


class Pricing:
    """The costs of strategies and pairs when a byte at each time has a price."""

    def __init__(self, flat: Flat, problem: Problem, memory: Memory) -> None:
        self._flat, self._memory = flat, memory
        usages = problem.usages
        alone = [k for k, usage in enumerate(usages) if len(usage.nodes) == 1]
        nodes = np.array([usages[k].nodes[0] for k in alone], dtype=np.int64)
        self._strategies = spread(flat.begins[nodes], flat.sizes[nodes])
        self._alone = np.repeat(np.array(alone, dtype=np.int64), flat.sizes[nodes])
        self._held = _joined([usages[k].bytes for k in alone])
        # Bytes of a pair are entries at both ends of an edge between the two.
        names = zip(flat.node.tolist(), flat.other.tolist(), strict=True)
        at = {name: end for end, name in enumerate(names)}
        places: list[np.ndarray] = []
        numbers: list[np.ndarray] = []
        held: list[np.ndarray] = []
        for number, usage in enumerate(usages):
            if len(usage.nodes) == 2:
                end = at[usage.nodes[0], usage.nodes[1]]
                for one, size in ((end, usage.bytes), (int(flat.twin[end]), usage.bytes.T)):
                    begin = int(flat.rows[flat.slots[one]])
                    places.append(np.arange(begin, begin + size.size))
                    numbers.append(np.full(size.size, number))
                    held.append(size.ravel())
        self._entries = _joined(places).astype(np.int64)
        self._together = _joined(numbers).astype(np.int64)
        self._held_together = _joined(held)

    def at(self, prices: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Costs and entries, as in ``Flat``, at the price of each of the memory's times."""
        flat, memory = self._flat, self._memory
        before = np.append(0.0, np.cumsum(prices))
        weights = before[memory.end] - before[memory.first]
        paid = self._held * weights[self._alone]
        costs = flat.costs + np.bincount(self._strategies, paid, minlength=flat.costs.size)
        if not self._entries.size:
            return costs, flat.entries
        entries = flat.entries.copy()
        np.add.at(entries, self._entries, self._held_together * weights[self._together])
        return costs, entries


def _joined(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0), *arrays])


@dataclass(frozen=True, kw_only=True, eq=False)
class Parts:
    """In what two choices differ."""

    nodes: np.ndarray
    part: np.ndarray
    """of each of these nodes"""
    gains: np.ndarray
    """of each part: how much lower the cost is with it"""


def parts(
    flat: Flat, costs: np.ndarray, entries: np.ndarray, old: np.ndarray, new: np.ndarray
) -> Parts:
    """The parts in which ``new`` differs from ``old``; costs and entries as in ``flat``."""
    differs = old != new
    nodes = np.flatnonzero(differs)
    number = np.empty(flat.num_nodes, dtype=np.int64)
    number[nodes] = np.arange(nodes.size)
    ends = flat.ends_at(nodes)
    inner = differs[flat.other[ends]]
    part = connected(nodes.size, number[flat.node[ends[inner]]], number[flat.other[ends[inner]]])
    count = int(part.max(initial=-1)) + 1
    before, after = (flat.begins[nodes] + choice[nodes] for choice in (old, new))
    gains = np.bincount(part, costs[before] - costs[after], minlength=count)
    # An edge between two nodes of a part is met from both ends.
    share = np.where(inner, 0.5, 1.0)
    saved = entries[flat.pairs(ends, old)] - entries[flat.pairs(ends, new)]
    gains += np.bincount(part[number[flat.node[ends]]], saved * share, minlength=count)
    return Parts(nodes=nodes, part=part, gains=gains)


def connected(count: int, some: np.ndarray, others: np.ndarray) -> np.ndarray:
    """The component of each of ``count`` nodes, in a graph that has each edge both ways."""
    # scipy has a function for it, but takes half a second to import.
    least = np.arange(count)
    """the first node of the component, as far as known"""
    while True:
        nearer = least.copy()
        np.minimum.at(nearer, some, least[others])
        nearer = nearer[nearer]
        if np.array_equal(nearer, least):
            return np.unique(least, return_inverse=True)[1]
        least = nearer


def take_parts(
    found: Parts,
    memory: Memory,
    limit: float,
    old: np.ndarray,
    new: np.ndarray,
    used: np.ndarray,
) -> tuple[np.ndarray, np.ndarray]:
    """``old`` with the parts of ``new`` that gain and fit, the best first; and its bytes over time.

    ``used``: those of ``old``.
    """
    usages, begins = memory.usages_of
    counts = begins[found.nodes + 1] - begins[found.nodes]
    touched = usages[spread(begins[found.nodes], counts)]
    owner = np.repeat(found.part, counts)
    # One of two nodes is enough, where both are in a part.
    _, once = np.unique(touched, return_index=True)
    touched, owner = touched[once], owner[once]
    more = memory.held(touched, new) - memory.held(touched, old)
    change = more != 0
    touched, owner, more = touched[change], owner[change], more[change]
    order = np.argsort(owner, kind="stable")
    touched, owner, more = touched[order], owner[order], more[order]
    cuts = np.searchsorted(owner, np.arange(found.gains.size + 1))
    used, taken = used.copy(), np.zeros(found.gains.size, dtype=bool)
    gaining = np.flatnonzero(found.gains >= 0)
    gaining = gaining[np.argsort(-found.gains[gaining], kind="stable")]
    grows = np.bincount(owner[more > 0], minlength=taken.size)[gaining] > 0
    # The last one is next: first all that make room.
    waiting = [gaining[grows], gaining[~grows]]
    while waiting:
        some = waiting.pop()
        mine = spread(cuts[some], cuts[some + 1] - cuts[some])
        change = touched[mine]
        first = int(memory.first[change].min(initial=used.size))
        end = int(memory.end[change].max(initial=0))
        if first < end:
            within = np.zeros(end - first + 1)
            np.add.at(within, memory.first[change] - first, more[mine])
            np.subtract.at(within, memory.end[change] - first, more[mine])
            within = np.cumsum(within)[:-1]
            after = used[first:end] + within
            # Where the limit is broken already, less is enough.
            if ((after > limit) & (within > 0)).any():
                half = some.size // 2
                if half:
                    waiting += [some[half:], some[:half]]
                continue
            used[first:end] = after
        taken[some] = True
    choice = old.copy()
    moved = taken[found.part]
    choice[found.nodes[moved]] = new[found.nodes[moved]]
    return choice, used
