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
from functools import lru_cache
from math import prod
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Move:
    """One step of a kind along the same axes, from some layouts to others."""

    kind: Kind
    axes: tuple[int, ...]
    before: np.ndarray
    """[moves]: numbers of layouts"""
    after: np.ndarray
    grown: np.ndarray
    """[moves, dimensions]: whether more axes cut the dimension afterwards"""


class _Layouts:
    """The layouts of a rank on a mesh of these sizes, and every step from one to another."""

    def __init__(self, sizes: tuple[int, ...], rank: int, *, joined: bool) -> None:
        self.all = enumerate_layouts(len(sizes), rank, any_order=True)
        """every layout, also those with axes out of order"""
        self.index = {layout: number for number, layout in enumerate(self.all)}
        shards = [tuple(prod(sizes[a] for a in axes) for axes in layout) for layout in self.all]
        self.ways = np.array(shards, dtype=int).reshape(len(self.all), rank)
        """[layout, dimension]: the number of shards"""
        lengths = np.array([[len(axes) for axes in it] for it in self.all], dtype=int)
        self.lengths = lengths.reshape(self.ways.shape)
        """[layout, dimension]: the number of axes that cut it"""
        by_shards: dict[tuple[int, ...], list[int]] = defaultdict(list)
        for number, cut in enumerate(shards):
            by_shards[cut].append(number)
        self.kinds: dict[tuple[int, int], tuple[Kind, tuple[int, ...]]] = {
            (number, other): ("collective-permute", _moved_axes(layout, self.all[other]))
            for number, layout in enumerate(self.all)
            for other in by_shards[shards[number]]
            if other != number
        }
        """the kind and the axes of each step"""
        self.kinds |= {
            (number, self.index[after]): (kind, axes)
            for number, layout in enumerate(self.all)
            for kind, axes, after in _steps(layout, len(sizes), joined=joined)
        }
        pairs: dict[tuple[Kind, tuple[int, ...]], list[tuple[int, int]]] = defaultdict(list)
        for pair, alike in self.kinds.items():
            pairs[alike].append(pair)
        self.moves = [self._move(*alike, some) for alike, some in pairs.items()]

    def _move(self, kind: Kind, axes: tuple[int, ...], pairs: list[tuple[int, int]]) -> _Move:
        before, after = np.array(pairs).T
        grown = self.lengths[after] > self.lengths[before]
        return _Move(kind=kind, axes=axes, before=before, after=after, grown=grown)

    def step(self, before: int, after: int) -> _Move:
        """One step alone."""
        return self._move(*self.kinds[before, after], [(before, after)])


@lru_cache(maxsize=256)
def _layouts(sizes: tuple[int, ...], rank: int, joined: bool) -> _Layouts:
    return _Layouts(sizes, rank, joined=joined)


class ReshardTable:
    """Resharding costs of tensors of one rank on one mesh; results are cached by shape."""

    def __init__(self, mesh: LogicalMesh, rank: int) -> None:
        self.mesh, self.rank = mesh, rank
        self._space = _layouts(mesh.sizes, rank, mesh.joins_axes)
        self.layouts = self._space.all
        self._shortest: dict[tuple[tuple[int, ...], int, bool], np.ndarray] = {}
        self._befores: dict[tuple[tuple[int, ...], int, bool], np.ndarray] = {}
        self._are_uneven: dict[tuple[int, ...], np.ndarray] = {}

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
        found = self._paths(shape, itemsize).take(rows, axis=0).take(columns, axis=1)
        uneven = self._is_uneven(shape)
        padded = uneven[rows][:, None] | uneven[columns]
        if padded.any():
            seconds = self._paths(shape, itemsize, padded=True)
            found = np.where(padded, seconds.take(rows, axis=0).take(columns, axis=1), found)
        return found

    def path(
        self, source: Layout, target: Layout, shape: Sequence[int], itemsize: int
    ) -> list[Step]:
        """The steps of the cheapest path; their seconds add up to ``cost``."""
        start, at = self._number(source), self._number(target)
        padded = bool(self._is_uneven(shape)[[start, at]].any())
        previous = self._before_last(shape, itemsize, padded=padded)
        local = self._local_shapes(shape)
        steps: list[Step] = []
        while at != start:
            before = int(previous[start, at])
            move = self._space.step(before, at)
            size = self._bytes(move, local, itemsize)
            steps.append(
                Step(
                    kind=move.kind,
                    axes=move.axes,
                    bytes=float(size[0]),
                    seconds=float(self._seconds(move, size)[0]),
                    layout=self.layouts[at],
                )
            )
            at = before
        return steps[::-1]

    def _number(self, layout: Layout) -> int:
        if layout not in self._space.index:
            raise ValueError(
                f"{layout} is no layout of a rank-{self.rank} tensor on a mesh of "
                f"{len(self.mesh.sizes)} axes: each axis may stand once, one tuple per dimension"
            )
        return self._space.index[layout]

    def _local_shapes(self, shape: Sequence[int]) -> np.ndarray:
        """``[layout, dimension]``: the shape of a shard, with padding."""
        return -(-np.array(shape, dtype=int) // self._space.ways)

    def _bytes(self, move: _Move, local: np.ndarray, itemsize: int) -> np.ndarray:
        """``[moves]``: of an all-gather's result, or of another step's operand, with padding."""
        here, there = local[move.before], local[move.after]
        ways = prod(self.mesh.sizes[axis] for axis in move.axes)
        match move.kind:
            case "slice":
                return np.zeros(len(here))
            case "all-gather":
                elements = ways * here.prod(axis=1)
            case "all-to-all":
                elements = np.where(move.grown, ways * there, here).prod(axis=1)
            case "collective-permute":
                elements = np.maximum(here.prod(axis=1), there.prod(axis=1))
        return itemsize * elements.astype(float)

    def _seconds(self, move: _Move, num_bytes: np.ndarray) -> np.ndarray:
        """``[moves]``: seconds of moves of so many bytes."""
        match move.kind:
            case "slice":
                return num_bytes
            case "all-gather":
                return all_gather(self.mesh, move.axes, num_bytes)
            case "all-to-all":
                return all_to_all(self.mesh, move.axes, num_bytes)
            case "collective-permute":
                return collective_permute(self.mesh, move.axes, num_bytes)

    def _uneven(self, shape: Sequence[int]) -> np.ndarray:
        """``[layout, dimension]``: whether it is cut into uneven shards."""
        if len(shape) != self.rank:
            raise ValueError(f"shape {tuple(shape)} has rank {len(shape)}, not {self.rank}")
        uneven: np.ndarray = np.array(shape, dtype=int) % self._space.ways > 0
        return uneven

    def _is_uneven(self, shape: Sequence[int]) -> np.ndarray:
        """``[layout]``: whether it cuts some dimension into uneven shards."""
        key = tuple(int(size) for size in shape)
        found = self._are_uneven.get(key)
        if found is None:
            found = self._are_uneven[key] = np.any(self._uneven(shape), axis=1)
        return found

    def _paths(self, shape: Sequence[int], itemsize: int, *, padded: bool = False) -> np.ndarray:
        """``[from, to]``: seconds, by Floyd-Warshall."""
        key = (tuple(int(size) for size in shape), itemsize, padded)
        found = self._shortest.get(key)
        if found is None:
            found = self._shortest[key] = self._of_one_step(shape, itemsize)
            for k in self._on_the_way(shape, padded=padded):
                np.minimum(found, found[:, k, None] + found[k], out=found)
        return found

    def _before_last(self, shape: Sequence[int], itemsize: int, *, padded: bool) -> np.ndarray:
        """``[from, to]``: the layout before the last step of the paths."""
        key = (tuple(int(size) for size in shape), itemsize, padded)
        found = self._befores.get(key)
        if found is None:
            seconds, count = self._of_one_step(shape, itemsize), len(self.layouts)
            found = np.tile(np.arange(count, dtype=np.int32)[:, None], (1, count))
            for k in self._on_the_way(shape, padded=padded):
                through = seconds[:, k, None] + seconds[k]
                better = through < seconds
                seconds = np.where(better, through, seconds)
                found = np.where(better, found[k], found)
            self._befores[key] = found
        return found

    def _of_one_step(self, shape: Sequence[int], itemsize: int) -> np.ndarray:
        """``[from, to]``: the seconds of single steps, else infinity."""
        local, count = self._local_shapes(shape), len(self.layouts)
        seconds = np.full((count, count), np.inf)
        np.fill_diagonal(seconds, 0.0)
        for move in self._space.moves:
            size = self._bytes(move, local, itemsize)
            seconds[move.before, move.after] = self._seconds(move, size)
        return seconds

    def _on_the_way(self, shape: Sequence[int], *, padded: bool) -> np.ndarray:
        """The numbers of the layouts that may be on the way."""
        uneven = self._uneven(shape)
        # One axis that has fewer devices may cut a dimension unevenly.
        pads = (self._space.lengths == 1) & (np.array(shape, dtype=int) > self._space.ways)
        return np.flatnonzero(~(uneven & ~pads if padded else uneven).any(axis=1))


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
