"""The shifts of dual ascent, and the choices that are read off them, level by level.

A visit works on all nodes of a level (``flat``) at once.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from alpa.passes.solve.sharding.flat import Flat, Level, least_places
from alpa.passes.solve.sharding.problem import Edge, Problem
from alpa.passes.solve.sharding.settings import DEFAULT, Settings, Step


class Messages:
    """The shifts of a problem: ``theta_uv(i, j) + m_u(i) + m_v(j)``, the same off the nodes."""

    def __init__(
        self,
        problem: Problem,
        begin: Messages | None = None,
        *,
        order: np.ndarray | None = None,
        settings: Settings = DEFAULT,
    ) -> None:
        """``begin`` with the shifts, and in the order, of a problem of the same nodes and edges."""
        self._problem = problem
        self._rounds = settings.tuning.descent_rounds if Step.DESCENT in settings.steps else 0
        self.flat: Flat = Flat(problem, order) if begin is None else begin.flat.at(problem)
        self.costs, self.entries = self.flat.costs, self.flat.entries
        """of the problem; another one's with the same nodes and edges may take their place"""
        self._shifts = np.zeros(self.flat.strategy.size)
        """of each slot"""
        if begin is not None:
            self._shifts[:] = begin._shifts
        behind = np.bincount(self.flat.node[~self.flat.ahead], minlength=self.flat.num_nodes)
        ahead = np.bincount(self.flat.node[self.flat.ahead], minlength=self.flat.num_nodes)
        parts = np.maximum(np.maximum(behind, ahead), 1)
        self._parts = parts[self.flat.owner].astype(float)
        """that a sweep, in either direction, divides each strategy's cost into"""
        levels = self.flat.levels
        most = max((level.entries.stop - level.entries.start for level in levels), default=0)
        self._room = np.empty(most)
        """for the entries of a level: new arrays at each visit take longer than the sums in them"""

    def _least(self, level: Level) -> np.ndarray:
        """The least of each slot's row, without the slot's own shift."""
        if not len(level.rows):
            return np.zeros(0)
        across = self.flat.across[level.entries]
        seen = self._room[: across.size]
        # All places are valid; numpy checks them in a copy unless it may clip them.
        self._shifts.take(across, out=seen, mode="clip")
        seen += self.entries[level.entries]
        return np.minimum.reduceat(seen, level.rows)

    def sweep(self, *, forward: bool) -> None:
        flat = self.flat
        for level in flat.levels if forward else reversed(flat.levels):
            begin, split, end = level.slots
            if begin == end:
                continue
            least = self._least(level)
            sums = np.bincount(level.places, least, minlength=level.strategies.size)
            share = (self.costs[level.strategies] + sums) / self._parts[level.strategies]
            np.negative(least, out=least)
            towards = slice(split - begin, None) if forward else slice(None, split - begin)
            least[towards] += share[level.places[towards]]
            self._shifts[begin:end] = least

    def shifted(self) -> np.ndarray:
        """The costs of all strategies."""
        flat = self.flat
        return self.costs - np.bincount(flat.strategy, self._shifts, minlength=self.costs.size)

    def bound(self) -> tuple[float, np.ndarray]:
        """``dual_bound(self.problem())``, and the shifted costs of all strategies."""
        flat, costs = self.flat, self.shifted()
        bound = float(np.minimum.reduceat(costs, flat.begins).sum()) if costs.size else 0.0
        if flat.node.size:
            entries = self._shifts.take(flat.across, mode="clip")  # All places are valid.
            entries += self.entries
            least = np.minimum.reduceat(entries, flat.rows[:-1]) + self._shifts
            bound += float(np.minimum.reduceat(least, flat.slots[:-1])[flat.ahead].sum())
        return bound, costs

    def problem(self) -> Problem:
        flat = self.flat
        begins = np.empty((len(self._problem.edges), 2), dtype=np.int64)
        begins[flat.edge, flat.axis] = flat.slots[:-1]
        edges: list[Edge] = []
        for (here, there), edge in zip(begins.tolist(), self._problem.edges, strict=True):
            source = self._shifts[here : here + edge.costs.shape[0]]
            target = self._shifts[there : there + edge.costs.shape[1]]
            edges.append(Edge(edge.source, edge.target, edge.costs + source[:, None] + target))
        nodes = tuple(np.split(self.shifted(), flat.begins[1:])) if flat.num_nodes else ()
        return Problem(node_costs=nodes, edges=tuple(edges))

    def round(self, *, forward: bool) -> tuple[int, ...]:
        """Node by node the best strategy, given those chosen and the best of those to come.

        Goes against the last sweep, which has left each node what is behind it.
        """
        flat, choice = self.flat, np.zeros(self.flat.num_nodes, dtype=np.int64)
        for level in flat.levels if forward else reversed(flat.levels):
            begin, split, _ = level.slots
            seen = self._least(level)
            done = slice(None, split - begin) if forward else slice(split - begin, None)
            seen[done] = self._chosen(level, choice)[done]
            choice[level.nodes] = least_places(self._sums(level, seen), flat.sizes[level.nodes])
        return tuple(choice.tolist())

    def improve(self, choice: Sequence[int]) -> tuple[int, ...]:
        """Changes one node at a time while that lowers the cost, as the problem has it."""
        flat, now = self.flat, np.array(choice, dtype=np.int64)
        waiting = np.ones(flat.num_nodes, dtype=bool)
        for _ in range(self._rounds):
            again = np.zeros(flat.num_nodes, dtype=bool)
            for level in flat.levels:
                if not waiting[level.nodes].any():
                    continue
                sizes = flat.sizes[level.nodes]
                costs = self._sums(level, self._chosen(level, now))
                best, begins = least_places(costs, sizes), np.cumsum(sizes) - sizes
                better = costs[begins + best] < costs[begins + now[level.nodes]]
                changed = level.nodes[better]
                if changed.size:
                    now[changed] = best[better]
                    again[flat.other[flat.ends_at(changed)]] = True
            if not again.any():
                break
            waiting = again
        return tuple(now.tolist())

    def _chosen(self, level: Level, choice: np.ndarray) -> np.ndarray:
        """The entry of each slot under a choice of the nodes at the other ends."""
        slots = slice(level.slots[0], level.slots[2])
        return self.entries[self.flat.rows[slots] + choice[self.flat.partner[slots]]]

    def _sums(self, level: Level, seen: np.ndarray) -> np.ndarray:
        """The costs of the level's strategies with what their slots add."""
        sums = np.bincount(level.places, seen, minlength=level.strategies.size)
        return self.costs[level.strategies] + sums
