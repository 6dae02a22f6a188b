"""A search within memory for problems with many nodes, or with memory binding at many times.

1. Prices of all times grow where a choice breaks the limit, and fall where it leaves room. The
   choice is read off the shifts of dual ascent at these prices, then improved by forests
   (``forest``).
2. From the last one, prices grow until it fits.
3. It is improved within memory: by forests of the whole graph at the prices, and, where the
   problem is not large, by forests of small neighbourhoods, first at noisy costs, then at the
   prices, last without prices. Of each result the parts that gain and fit are taken
   (``exchange``).
4. Where the problem is large, the best choice is now and then fused with others at the prices,
   made from it at noisy costs. What comes out is repaired where it is a little too large.

Every vector of prices gives a bound. The search is random, with a fixed seed.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from itertools import count
from math import inf

import numpy as np

from alpa.passes.solve.sharding.exchange import Pricing, parts, take_parts
from alpa.passes.solve.sharding.flat import spread
from alpa.passes.solve.sharding.forest import Forest
from alpa.passes.solve.sharding.fuse import fuse
from alpa.passes.solve.sharding.messages import Messages
from alpa.passes.solve.sharding.problem import Memory, Problem
from alpa.passes.solve.sharding.repair import repair
from alpa.passes.solve.sharding.settings import Settings


class ForestSearch:
    """Of one problem, with at least one usage."""

    def __init__(
        self, problem: Problem, memory: Memory, *, deadline: float, settings: Settings
    ) -> None:
        self._problem, self._memory = problem, memory
        self._settings, self._tuning = settings, settings.tuning
        self._limit, self._deadline = max(problem.memory_limit, 1e-300), deadline
        self._large = len(problem.node_costs) > self._tuning.large
        self._messages = Messages(
            problem, order=_colours(problem) if self._large else None, settings=settings
        )
        self._flat = self._messages.flat
        self._pricing = Pricing(self._flat, problem, memory)
        degrees = np.diff(self._flat.ends_of[1])
        # Two leaves with an edge between them are no leaves of anything else.
        leaf = degrees <= 1
        leaf[self._flat.node[leaf[self._flat.node] & leaf[self._flat.other]]] = False
        self._leaves, self._inner = np.flatnonzero(leaf), np.flatnonzero(~leaf)
        self._random = np.random.default_rng(0)
        self._costs, self._entries = self._flat.costs, self._flat.entries
        self._prices = np.zeros(len(memory.times))
        self.bound = -inf
        self.best: np.ndarray | None = None
        self.value = inf

    def start(self, choice: tuple[int, ...] | None) -> None:
        """Finds prices and a choice within memory; a known ``choice`` fits."""
        now = time.monotonic()
        until = now + self._tuning.growing * (self._deadline - now)
        self._prices = self._first_prices()
        last: np.ndarray | None = None
        for _ in range(self._tuning.price_rounds):
            self._charge()
            last = self._read(last)
            excess = self._excess(last)
            self._offer(last, excess)
            if excess.max() <= self._tuning.nearly or time.monotonic() > until:
                break
            steep = max(0.05, 0.5 * float(excess.max()))
            self._prices *= np.exp(self._tuning.price_growth * np.clip(excess / steep, -0.5, 1.0))
            self._keep_positive()
        if choice is not None:
            known = np.array(choice, dtype=np.int64)
            self._offer(known, self._excess(known))
        if last is not None:
            self._fit(last)

    def restart(self, prices: Mapping[int, float], choice: tuple[int, ...]) -> None:
        """Goes on from a choice that fits, at other prices: those of the times that have any."""
        self._prices = np.array([prices.get(int(t), 0.0) for t in self._memory.times])
        self._keep_positive()
        found = np.array(choice)
        self._offer(found, self._excess(found))

    def improve(self) -> Iterator[None]:
        """Rounds of changes to the best choice, which fits; each may find better ones.

        What gains at the prices may cost more: now and then the best choice is next again.
        """
        assert self.best is not None
        flat, tuning = self._flat, self._tuning
        choice, used = self.best, self._memory.over_time(self.best)
        for number in count(1):
            self._charge(sweeps=0)
            priced = self._costs, self._entries
            whole = self._whole().solve(*priced, choice)
            choice, used = self._take(choice, whole, used, *priced)
            for _ in range(0 if self._large else tuning.balls):
                nodes = self._neighbourhood()
                noisy = self._at_noisy_costs(nodes, choice)
                choice, used = self._take(choice, noisy, used, *priced)
                found = self._forest(nodes).solve(flat.costs, flat.entries, choice)
                choice, used = self._take(choice, found, used, flat.costs, flat.entries)
            self._offer(choice, used / self._limit - 1)
            if time.monotonic() > self._deadline:
                return
            if number % tuning.return_every == 0:
                if self._large:
                    self._fuse_noisy(choice)
                choice, used = self.best, self._memory.over_time(self.best)
            self._prices *= np.exp(0.3 * np.clip(self._excess(whole), -0.1, 0.1))
            self._keep_positive()
            yield

    def _take(
        self,
        old: np.ndarray,
        new: np.ndarray,
        used: np.ndarray,
        costs: np.ndarray,
        entries: np.ndarray,
    ) -> tuple[np.ndarray, np.ndarray]:
        """``old`` with the parts of ``new`` that gain at these costs and fit; its bytes over time.

        ``used``: those of ``old``."""
        if (old == new).all():
            return old, used
        found = parts(self._flat, costs, entries, old, new)
        return take_parts(found, self._memory, self._problem.memory_limit, old, new, used)

    def _charge(self, sweeps: int | None = None) -> None:
        """Charges the prices, sweeps at them, and notes the bound."""
        self._costs, self._entries = self._pricing.at(self._prices)
        self._messages.costs, self._messages.entries = self._costs, self._entries
        sweeps = self._tuning.price_sweeps if sweeps is None else sweeps
        for _ in range(sweeps):
            self._messages.sweep(forward=True)
            self._messages.sweep(forward=False)
        if sweeps:
            paid = self._problem.memory_limit * float(self._prices.sum())
            self.bound = max(self.bound, self._messages.bound()[0] - paid)

    def _first_prices(self) -> np.ndarray:
        """As much as the problem without memory costs, most of it where the least is held."""
        for _ in range(self._tuning.price_sweeps):
            self._messages.sweep(forward=True)
            self._messages.sweep(forward=False)
        self.bound = self._messages.bound()[0]
        usages = self._problem.usages
        least = np.array([float(usage.bytes.min()) for usage in usages])
        full = self._memory.summed(np.arange(len(usages)), least)
        weights = np.exp(self._tuning.wide * (full / max(float(full.max()), 1e-300) - 1))
        finite = self._flat.entries[np.isfinite(self._flat.entries)]
        unit = abs(self.bound) or float(np.abs(finite).max(initial=0.0)) or 1.0
        return weights / weights.sum() * unit / self._limit

    def _keep_positive(self) -> None:
        self._prices = np.maximum(self._prices, 0.01 * self._prices.mean())

    def _excess(self, choice: np.ndarray) -> np.ndarray:
        """Of the limit, over time, in parts of it."""
        return self._memory.over_time(choice) / self._limit - 1

    def _offer(self, choice: np.ndarray, excess: np.ndarray) -> None:
        cost = self._flat.cost(choice)
        if excess.max() <= 0 and cost < self.value:
            self.best, self.value = choice, cost

    def _whole(self) -> Forest:
        order = self._inner[self._random.permutation(self._inner.size)]
        return Forest(self._flat, order, self._leaves)

    def _read(self, last: np.ndarray | None) -> np.ndarray:
        """The best at the prices of choices read off the shifts, and of the last one."""
        starts = self._rounded()
        found = [self._polish(start) for start in starts]
        if last is not None:
            found.append(self._polish(last))
        return min(found, key=self._priced_cost)

    def _rounded(self) -> list[np.ndarray]:
        read: list[np.ndarray] = []
        for forward in (True, False):
            self._messages.sweep(forward=forward)
            read.append(np.array(self._messages.round(forward=not forward), dtype=np.int64))
        return read

    def _polish(self, choice: np.ndarray) -> np.ndarray:
        for _ in range(self._tuning.polish):
            choice = self._whole().solve(self._costs, self._entries, choice)
        return choice

    def _priced_cost(self, choice: np.ndarray) -> float:
        flat = self._flat
        nodes = self._costs[flat.begins + choice].sum()
        return float(nodes + self._entries[flat.pairs(flat.forward, choice)].sum())

    def _fit(self, choice: np.ndarray) -> None:
        """Lets prices grow where a choice breaks the limit, until it fits."""
        excess, growth = self._excess(choice), self._tuning.fit_growth
        for _ in range(self._tuning.price_rounds):
            fits = excess.max() <= 0 and self._flat.cost(choice) < inf
            if fits or time.monotonic() > self._deadline:
                break
            # A price where little is missing grows too: else the last few times take most rounds.
            self._prices *= np.exp(growth * np.clip(20 * excess, 0.5 * (excess > 0), 1.0))
            growth = min(1.05 * growth, 1.0)
            self._keep_positive()
            self._charge(sweeps=0)
            choice = self._whole().solve(self._costs, self._entries, choice)
            excess = self._excess(choice)
        self._offer(choice, excess)

    def _fuse_noisy(self, choice: np.ndarray) -> None:
        """Fuses a choice and the best with some made from it at noisy costs; offers what fits."""
        assert self.best is not None
        every = np.arange(self._flat.num_nodes)
        others = [self._at_noisy_costs(every, choice) for _ in range(self._tuning.fused_noisy)]
        found = fuse(
            self._flat.problem(self._costs, self._entries),
            [tuple(other.tolist()) for other in (self.best, choice, *others)],
            settings=self._settings,
        )
        repaired = repair(
            self._problem,
            self._memory,
            found,
            deadline=self._deadline,
            settings=self._settings,
        )
        if repaired is not None:
            fits = np.array(repaired)
            self._offer(fits, self._excess(fits))

    def _at_noisy_costs(self, nodes: np.ndarray, choice: np.ndarray) -> np.ndarray:
        """The best strategies of some nodes at noisy costs, improved at the true ones.

        The noise leads out of a local optimum (the noising method: Charon and Hudry 1993)."""
        flat, random = self._flat, self._random
        noise = np.exp(random.random() * random.standard_normal(nodes.size))
        strategies = spread(flat.begins[nodes], flat.sizes[nodes])
        noisy = self._costs.copy()
        noisy[strategies] *= np.repeat(noise, flat.sizes[nodes])
        for costs in (noisy, noisy, self._costs, self._costs):
            choice = self._forest(nodes).solve(costs, self._entries, choice)
        return choice

    def _forest(self, nodes: np.ndarray) -> Forest:
        return Forest(self._flat, self._random.permutation(nodes))

    def _neighbourhood(self) -> np.ndarray:
        """Some nodes: a random one, and those that are nearest to it."""
        flat, random = self._flat, self._random
        nodes = random.integers(flat.num_nodes, size=1)
        size = int(random.integers(self._tuning.ball // 8, self._tuning.ball + 1))
        while True:
            more = np.unique(np.append(nodes, flat.other[flat.ends_at(nodes)]))
            if more.size == nodes.size or more.size > size:
                break
            nodes = more
        fresh = np.setdiff1d(more, nodes)
        return np.append(nodes, random.permutation(fresh)[: size - nodes.size])


def _colours(problem: Problem) -> np.ndarray:
    """An order of the nodes colour by colour, no two of a colour neighbours: few levels."""
    around: list[list[int]] = [[] for _ in problem.node_costs]
    for edge in problem.edges:
        around[edge.source].append(edge.target)
        around[edge.target].append(edge.source)
    colour = [-1] * len(around)
    for node in sorted(range(len(around)), key=lambda node: -len(around[node])):
        taken = {colour[other] for other in around[node]}
        colour[node] = next(k for k in range(len(taken) + 1) if k not in taken)
    return np.argsort(np.array(colour), kind="stable")
