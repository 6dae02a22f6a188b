"""What the table of the stage DP is made of: possible stages, and their seconds by place.

A *place* is how near the stages before and behind are: 3 f + b, both as the last indices of
`Problem.c` and `Problem.back`. Two more are `MOVED`, for a stage in a block whose stages are moved,
each of whose transfers counts as the slower kind, and `NOWHERE`, where no stage can lie.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from math import inf

import numpy as np

MOVED, NOWHERE = 9, 10


@dataclass(frozen=True, eq=False)
class Times:
    """Seconds of stages with their transfers from both sides, by place."""

    t: np.ndarray
    """[i, j, m]"""
    into: np.ndarray
    """[i, m, place]; the last place is none"""
    back: np.ndarray
    """[j, m, place]"""

    @classmethod
    def of(cls, t: np.ndarray, into: np.ndarray, back: np.ndarray, places: np.ndarray) -> Times:
        """From what `Problem` holds, and the numbers of the places that are used."""

        def ends(of: np.ndarray, way: np.ndarray) -> np.ndarray:
            # Where there is no other group, its transfers are never asked for.
            way = np.minimum(way, of.shape[2] - 1)
            found = np.append(of[..., way], np.full((*of.shape[:2], 1), inf), axis=2)
            found[..., :-1][..., places == MOVED] = of.max(axis=2)[..., None]
            return found

        return cls(t, ends(into, places // 3), ends(back, places % 3))

    def at(self, i: np.ndarray, j: np.ndarray, m: np.ndarray) -> np.ndarray:
        """Of some stages at all places, [stage, place]."""
        return self.t[i, j, m][:, None] + (self.into[i, m] + self.back[j, m])[:, :-1]

    def of_first(self, k: int, m: np.ndarray, place: np.ndarray) -> np.ndarray:
        """Of the stages that begin with layer k, on some submeshes and each at its place,
        [submesh, last layer]."""
        return self.t[k, k:, m] + (self.into[k, m, place][:, None] + self.back[k:, m, place].T)


@dataclass(frozen=True, eq=False)
class Entries:
    """Possible stages at places, by the first layer, the kind and the place.

    Kinds are numbered from the largest one. So of stages of the same layers the last one is on the
    smallest kind.
    """

    i: np.ndarray
    j: np.ndarray
    g: np.ndarray
    """kind of submesh"""
    place: np.ndarray
    admitted: np.ndarray
    """the largest number of stages from this one to the last that memory admits"""
    a: np.ndarray
    b: np.ndarray
    u: np.ndarray
    step: np.ndarray
    """what T of a cut with it is at least"""

    @classmethod
    def undominated(cls, **each: np.ndarray) -> Entries:
        """From stages in any order, without those for which another one of the same layers, kind
        and place is no slower and needs no more memory."""
        i, j, g, place, admitted, a, b, u = (each[field.name] for field in fields(cls)[:8])
        if not i.size:
            return cls(**each)
        key = np.ravel_multi_index((i, g, place, j), [int(it.max()) + 1 for it in (i, g, place, j)])
        order = np.lexsort((-admitted, u, b, a, key))
        key, admitted, b, u = (it[order] for it in (key, admitted, b, u))
        kept = np.ones(key.size, dtype=bool)
        # Each one against the n-th before it, which has no larger a.
        for n in range(1, key.size):
            first, second = slice(None, -n), slice(n, None)
            same = key[first] == key[second]
            if not same.any():
                break
            worse = same & (b[first] <= b[second]) & (u[first] <= u[second])
            kept[second] &= ~(worse & (admitted[first] >= admitted[second]))
        return cls(**each).at(order[kept])

    def at(self, index: np.ndarray) -> Entries:
        """Some of them."""
        return Entries(*(getattr(self, each.name)[index] for each in fields(self)))
