"""Changing a tensor's layout inside a mesh: the cheapest path of slices and collectives.

A layout has one entry per dimension, the mesh axes that shard it from major to minor:
``((0,), (), (1,))`` is S0 R S1 of the paper (section 4.1, tables 1 and 2). The steps, as XLA's
partitioner and Shardy's ``sdy-reshard-to-collectives`` know them:

* slice: an unused axis is added at the end of a dimension; free
* all-gather: the last axis of a dimension is removed; bytes = local size afterwards with padding
* all-to-all: the last axis of a dimension goes to the end of another; bytes = local size before,
  with the other dimension padded
* the same with several last axes at once, if the mesh has a price for them together
* collective-permute: each dimension is cut into as many parts by other axes, or by the same ones in
  another order; bytes = local size

Costs are shortest paths, so they satisfy the triangle inequality. Layouts on the way may hold
axes in any order. If source and target divide the shape evenly, so do the layouts on the way.
Otherwise one axis alone may cut a dimension on the way unevenly, and XLA pads the shards.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import Literal

import numpy as np

from alpa.passes.cost.collectives import LogicalMesh, all_gather, all_to_all, collective_permute

Layout = tuple[tuple[int, ...], ...]
Kind = Literal["slice", "all-gather", "all-to-all", "collective-permute"]


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step of a path; ``bytes`` as in ``collectives`` (0 for a slice), ``seconds`` its time."""

    kind: Kind
    axes: tuple[int, ...]
    """one, or those that go together"""
    bytes: float
    seconds: float
    layout: Layout
    """after the step"""


def only_cuts(source: Layout, target: Layout) -> bool:
    """Whether a change of layout is slices alone."""
    return len(source) == len(target) and all(
        new[: len(old)] == old for old, new in zip(source, target, strict=True)
    )


def enumerate_layouts(num_axes: int, rank: int, *, any_order: bool = False) -> list[Layout]:
    """All layouts: each axis on at most one dimension, axes of one dimension ascending.

    With ``any_order`` the axes of a dimension come in every order. Replicated is first.
    """
    layouts: list[Layout] = [((),) * rank]
    for axis in range(num_axes):
        layouts += [grown for old in layouts for grown in _insert(old, axis, any_order)]
    return layouts


def _insert(layout: Layout, axis: int, any_order: bool) -> Iterator[Layout]:
    for dim, axes in enumerate(layout):
        for at in range(0 if any_order else len(axes), len(axes) + 1):
            yield _with(layout, dim, (*axes[:at], axis, *axes[at:]))


def _with(layout: Layout, dim: int, axes: tuple[int, ...]) -> Layout:
    return (*layout[:dim], axes, *layout[dim + 1 :])


class ReshardTable:
    """Resharding costs of tensors of one rank on one mesh; results are cached by shape."""

    def __init__(self, mesh: LogicalMesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        self.layouts = enumerate_layouts(len(mesh.sizes), rank, any_order=True)
        """every layout, also those with axes out of order"""
        self._index = {layout: number for number, layout in enumerate(self.layouts)}
        self._moves: dict[tuple[int, int], tuple[Kind, tuple[int, ...]]] = {
            (number, other): ("collective-permute", _moved_axes(layout, self.layouts[other]))
            for number, layout in enumerate(self.layouts)
            for other in self._cut_alike(layout)
            if other != number
        }
        self._moves |= {
            (number, self._index[after]): (kind, axes)
            for number, layout in enumerate(self.layouts)
            for kind, axes, after in _steps(layout, len(mesh.sizes), joined=mesh.joins_axes)
        }
        self._cache: dict[tuple[tuple[int, ...], int, bool], tuple[np.ndarray, np.ndarray]] = {}

    def cost(self, source: Layout, target: Layout, shape: Sequence[int], itemsize: int) -> float:
        """Seconds from ``source`` to ``target`` for a tensor of ``shape``."""
        return float(self.matrix([source], [target], shape, itemsize)[0, 0])

    def matrix(
        self,
        sources: Sequence[Layout],
        targets: Sequence[Layout],
        shape: Sequence[int],
        itemsize: int,
    ) -> np.ndarray:
        """Seconds, ``[len(sources), len(targets)]``: an edge's matrix of the sharding ILP."""
        rows = [self._number(layout) for layout in sources]
        columns = [self._number(layout) for layout in targets]
        uneven = self._uneven(shape)
        found = self._paths(shape, itemsize)[0][np.ix_(rows, columns)]
        padded = uneven[rows][:, None] | uneven[columns][None, :]
        if padded.any():
            seconds, _ = self._paths(shape, itemsize, padded=True)
            found = np.where(padded, seconds[np.ix_(rows, columns)], found)
        return found

    def path(
        self, source: Layout, target: Layout, shape: Sequence[int], itemsize: int
    ) -> list[Step]:
        """The steps of the cheapest path; their seconds add up to ``cost``."""
        start, at = self._number(source), self._number(target)
        padded = bool(self._uneven(shape)[[start, at]].any())
        _, previous = self._paths(shape, itemsize, padded=padded)
        local = self._local_shapes(shape)
        steps: list[Step] = []
        while at != start:
            before = int(previous[start, at])
            steps.append(self._step(before, at, local, itemsize))
            at = before
        return steps[::-1]

    def _number(self, layout: Layout) -> int:
        if layout not in self._index:
            raise ValueError(
                f"{layout} is no layout of a rank-{self.rank} tensor on a mesh of "
                f"{len(self.mesh.sizes)} axes: each axis may stand once, one tuple per dimension"
            )
        return self._index[layout]

    @cached_property
    def _ways(self) -> np.ndarray:
        """``[layout, dimension]``: the number of shards."""
        return np.array([self._shards(layout) for layout in self.layouts], dtype=int).reshape(
            len(self.layouts), self.rank
        )

    @cached_property
    def _by_shards(self) -> dict[tuple[int, ...], list[int]]:
        found: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, layout in enumerate(self.layouts):
            found[tuple(self._shards(layout))].append(number)
        return found

    def _cut_alike(self, layout: Layout) -> list[int]:
        """The numbers of the layouts with as many parts of each dimension."""
        return self._by_shards[tuple(self._shards(layout))]

    def _shards(self, layout: Layout) -> list[int]:
        return [prod(self.mesh.sizes[axis] for axis in axes) for axes in layout]

    def _local_shapes(self, shape: Sequence[int]) -> list[list[int]]:
        """The shapes of a shard, with padding, by layout."""
        return [
            [ceil(s / n) for s, n in zip(shape, self._shards(layout), strict=True)]
            for layout in self.layouts
        ]

    def _step(self, before: int, after: int, local: list[list[int]], itemsize: int) -> Step:
        kind, axes = self._moves[before, after]
        size, seconds = 0.0, 0.0
        if kind != "slice":
            size = float(itemsize * self._elements(kind, axes, before, after, local))
            if kind == "collective-permute":
                seconds = collective_permute(self.mesh, axes, size)
            else:
                collective = all_gather if kind == "all-gather" else all_to_all
                seconds = collective(self.mesh, axes, size)
        return Step(kind=kind, axes=axes, bytes=size, seconds=seconds, layout=self.layouts[after])

    def _elements(
        self,
        kind: Kind,
        axes: tuple[int, ...],
        before: int,
        after: int,
        local: list[list[int]],
    ) -> int:
        """Elements of an all-gather's result, or of another step's operand, with padding."""
        old, new = self.layouts[before], self.layouts[after]
        grown = (len(there) > len(here) for here, there in zip(old, new, strict=True))
        ways = prod(self.mesh.sizes[axis] for axis in axes)
        if kind == "all-gather":
            return ways * prod(local[before])
        if kind == "all-to-all":
            dims = zip(local[before], local[after], grown, strict=True)
            return prod(ways * there if more else here for here, there, more in dims)
        return max(prod(local[before]), prod(local[after]))

    def _uneven(self, shape: Sequence[int]) -> np.ndarray:
        """Whether each layout cuts a tensor of this shape into uneven shards."""
        if len(shape) != self.rank:
            raise ValueError(f"shape {tuple(shape)} has rank {len(shape)}, not {self.rank}")
        return np.any(np.array(shape, dtype=int) % self._ways, axis=1)

    def _pads(self, shape: Sequence[int], layout: Layout) -> bool:
        """Whether each dimension is cut evenly, or by one axis that has fewer devices."""
        return all(
            s % n == 0 or (len(axes) == 1 and s > n)
            for s, n, axes in zip(shape, self._shards(layout), layout, strict=True)
        )

    def _paths(
        self, shape: Sequence[int], itemsize: int, *, padded: bool = False
    ) -> tuple[np.ndarray, np.ndarray]:
        """``[from, to]``: the seconds, and the layout before the last step."""
        key = (tuple(int(size) for size in shape), itemsize, padded)
        if key not in self._cache:
            self._cache[key] = self._shortest(*key)
        return self._cache[key]

    def _shortest(
        self, shape: tuple[int, ...], itemsize: int, padded: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """Floyd-Warshall with only those layouts on the way that may be there."""
        uneven = self._uneven(shape)
        count = len(self.layouts)
        local = self._local_shapes(shape)
        seconds = np.full((count, count), np.inf)
        np.fill_diagonal(seconds, 0.0)
        previous = np.tile(np.arange(count, dtype=np.int32)[:, None], (1, count))
        for before, after in self._moves:
            seconds[before, after] = self._step(before, after, local, itemsize).seconds
        for k, layout in enumerate(self.layouts):
            if uneven[k] and not (padded and self._pads(shape, layout)):
                continue
            through = seconds[:, k, None] + seconds[None, k, :]
            better = through < seconds
            seconds = np.where(better, through, seconds)
            previous = np.where(better, previous[None, k, :], previous)
        return seconds, previous


def _moved_axes(source: Layout, target: Layout) -> tuple[int, ...]:
    """The axes of the dimensions that two layouts cut by other axes."""
    changed = [(a, b) for a, b in zip(source, target, strict=True) if a != b]
    return tuple(sorted({axis for pair in changed for axes in pair for axis in axes}))


def _steps(
    layout: Layout, num_axes: int, *, joined: bool
) -> Iterator[tuple[Kind, tuple[int, ...], Layout]]:
    """(kind, axes, layout afterwards) of every step that can be taken from ``layout``.

    With ``joined`` one step can take several axes from the end of a dimension.
    """
    used = {axis for axes in layout for axis in axes}
    for dim, axes in enumerate(layout):
        for axis in range(num_axes):
            if axis not in used:
                yield "slice", (axis,), _with(layout, dim, (*axes, axis))
        for start in range(0 if joined else max(0, len(axes) - 1), len(axes)):
            last, without = axes[start:], _with(layout, dim, axes[:start])
            yield "all-gather", last, without
            for other, there in enumerate(layout):
                if other != dim:
                    yield "all-to-all", last, _with(without, other, (*there, *last))
