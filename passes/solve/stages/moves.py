"""What a DP over stages computes: for each layer, the least of many sums, all at once.

A *state* is a number of devices behind a stage, in a block that keeps its order or is moved. A
*move* is a stage of some kind and place from the state behind it to the one with it. The table of
sums over layers and states is filled layer by layer, from the last one on; what is read for a layer
lies together, sorted by the state that it leads to.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from alpa.passes.solve.stages.entries import Entries


class Sums(NamedTuple):
    """The sums of a layer, by the state that they lead to: of a stage and of those behind it."""

    entry: np.ndarray
    """[sum], of `Entries`"""
    source: np.ndarray
    """[sum], layers times states, of the table"""
    starts: np.ndarray
    """[target], the first sum that leads to each"""
    target: np.ndarray
    """[target], states"""


@dataclass(frozen=True, eq=False)
class Moves:
    """All moves, sorted by kind, place and devices."""

    places: int
    width: int
    """the most devices"""
    states: int
    key: np.ndarray
    """[move], ascending"""
    source: np.ndarray
    target: np.ndarray

    @classmethod
    def of(cls, moves: np.ndarray, places: int, width: int, states: int) -> Moves:
        """From the moves in any order: of each [move, 5] its kind and place, the devices behind
        it with its own, the state behind it and the one with it."""
        kind, place, devices, source, target = moves.T
        key = (kind * places + place) * (width + 1) + devices
        order = key.argsort(kind="stable")
        return cls(places, width, states, key[order], source[order], target[order])

    def by_layer(
        self, entries: Entries, low: np.ndarray, high: np.ndarray, layers: int
    ) -> dict[int, Sums]:
        """Of some stages, the sums of each layer with which one begins, if layers k.. may be on
        `low[k]` to `high[k]` devices, [K + 1] each."""
        kind = entries.g * self.places + entries.place
        # Stages that begin with the same layer, on the same kind and in the same place.
        begins = np.flatnonzero(np.diff(entries.i * (kind.max() + 1) + kind, prepend=-1))
        count = np.diff(begins, append=kind.size)
        i, kind = entries.i[begins], kind[begins] * (self.width + 1)
        first = self.key.searchsorted(kind + low[i])
        number = np.maximum(self.key.searchsorted(kind + high[i], side="right") - first, 0)
        # A run is what a move does with them.
        group, move = np.repeat(np.arange(begins.size), number), _ranges(first, number)
        order = np.lexsort((self.target[move], i[group]))
        group, move = group[order], move[order]
        each = count[group]
        entry = _ranges(begins[group], each)
        source = np.repeat(self.source[move], each) + (entries.j[entry] + 1) * self.states
        key = i[group] * self.states + self.target[move]
        first = np.flatnonzero(np.diff(key, prepend=-1))
        layer, target = np.divmod(key[first], self.states)
        starts = np.append((each.cumsum() - each)[first], entry.size)
        ends = layer.searchsorted(np.arange(layers + 1)).tolist()
        found: dict[int, Sums] = {}
        for k, (begin, end) in enumerate(pairwise(ends)):
            if begin < end:
                mine = slice(starts[begin], starts[end])
                at = starts[begin:end] - mine.start
                found[k] = Sums(entry[mine], source[mine], at, target[begin:end])
        return found


def _ranges(first: np.ndarray, count: np.ndarray) -> np.ndarray:
    """So many numbers from each first one on."""
    ends = count.cumsum()
    return np.arange(ends[-1] if ends.size else 0) + np.repeat(first - ends + count, count)
