"""What the table of the stage DP is made of: possible stages, and their seconds by place.

A *place* is how near the stages before and behind are: 3 f + b, both as the last indices of
`Problem.c` and `Problem.back`. Two more are `MOVED`, for a stage in a block whose stages are moved,
each of whose transfers counts as the slower kind, and `NOWHERE`, where no stage can lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
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
    """Possible stages at places, by the first layer, the kind, and the slowest first.

    Kinds are numbered from the largest one. So of stages of the same layers the last one is on the
    smallest kind, and of those on the same kind it is the fastest.
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

    def at(self, index: np.ndarray) -> Entries:
        """Some of them."""
        return Entries(*(getattr(self, each.name)[index] for each in fields(self)))

    def fastest(
        self, layers: int, kinds: int, places: int
    ) -> Callable[[int, int], Iterator[tuple[int, int, np.ndarray]]]:
        """Gives, of the stages that begin with layer k, the kinds of their submeshes, their least
        last layer, and a of the fastest, [j - least, place, s - 1]: on that kind, and with s stages
        from it to the last one."""
        key = self.i * kinds + self.g
        begins = np.searchsorted(key, np.arange(layers * kinds + 1)).tolist()

        def of_layer(k: int, most: int) -> Iterator[tuple[int, int, np.ndarray]]:
            for g in range(kinds):
                mine = slice(*begins[k * kinds + g : k * kinds + g + 2])
                if mine.start == mine.stop:
                    continue
                j = self.j[mine]
                least = int(j.min())
                found = np.full((int(j.max()) - least + 1, places + 1, most), inf)
                s = np.minimum(self.admitted[mine], most) - 1
                found[j - least, self.place[mine], s] = self.a[mine]  # The last one stays.
                # A stage that fits far from the last stage also fits closer to it.
                backwards = found[..., ::-1]
                np.minimum.accumulate(backwards, axis=-1, out=backwards)
                yield g, least, found

        return of_layer
