"""Finds the subgraphs that a sharding problem repeats (TAPAS, section 4.3, algorithm 1).

A GraphNode of TAPAS is a node of the problem: a heavy op with the element-wise ops that follow it.
Two nodes are the same single-node subgraph if they have the same costs and the same bytes. A
subgraph is its nodes in an order, and the matrices of the edges between them.

Algorithm 1 merges all frequent subgraphs of a level that share edges. It lists every connected
part of a layer, which are exponentially many. Here instances do not overlap: a level joins pairs of
neighbouring instances, the most frequent kind of pair first, and each instance joins one pair at
most. As in the Apriori algorithm, a pair can be frequent only if both of its parts are. The largest
frequent subgraphs are found without their parts.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Container, Hashable, Iterator
from dataclasses import dataclass, field
from typing import Literal

from alpa.passes.solve.sharding.problem import Problem
from alpa.passes.solve.sharding.tie import facts

MIN_SIZE = 16
"""Nodes of the smallest subgraph that is significant. At 4, unet-tiny on 8 CPU devices costs 3.3 %
more than its optimum, and 0.5 % at 16; t5-large has the same subgraphs from 4 to 64."""
LEAST = 2
"""Instances and nodes of a subgraph that is repeated."""
_ENDS = 2
"""The first and the last layer of a training graph."""
_ROUNDS = 2
"""Of refinement, before nodes of a kind are counted: then the equal nodes of one layer differ."""


@dataclass(frozen=True, kw_only=True)
class Subgraph:
    """A frequent subgraph: its instances, whose nodes correspond in their order."""

    instances: tuple[tuple[int, ...], ...]

    @property
    def support(self) -> int:
        return len(self.instances)

    @property
    def size(self) -> int:
        """The nodes of one instance."""
        return len(self.instances[0])


@dataclass(frozen=True, kw_only=True)
class Mined:
    """The frequent subgraphs of a problem, which do not overlap, and the parts between them."""

    subgraphs: tuple[Subgraph, ...]
    parts: tuple[tuple[int, ...], ...]
    """the other nodes, by connected component"""
    min_support: int
    layers: int
    """of the graph; 0 where nothing is repeated"""

    @property
    def num_unique(self) -> int:
        """The subgraphs that are left to search: each frequent one once, and the parts."""
        return len(self.subgraphs) + len(self.parts)

    @property
    def missed_ends(self) -> bool:
        """Whether a support of the number of layers would have missed subgraphs."""
        return 0 < self.min_support < self.layers

    def colors(self, num_nodes: int) -> list[int]:
        """A number for each node; corresponding nodes of a subgraph's instances have the same."""
        color = list(range(num_nodes))
        for subgraph in self.subgraphs:
            for instance in subgraph.instances:
                for first, node in zip(subgraph.instances[0], instance, strict=True):
                    color[node] = first
        return color


def mine(
    problem: Problem,
    *,
    min_support: int | Literal["auto"] = "auto",
    min_size: int = MIN_SIZE,
    tensors: Collection[int] = (),
) -> Mined:
    """The frequent subgraphs with at least `min_size` nodes, and the parts between them.

    A tensor, such as a weight, that several parts share joins none of them. A node with one
    strategy and no edges is in no part.

    With `auto` the support is the number of layers, as in the paper. The first and the last layer
    of a training graph have neighbours of their own and may differ from the others; if two layers
    less leave fewer nodes to search, that is the support.
    """
    graph = _Graph.of(problem, tensors)
    layers = _num_layers(graph)
    if min_support != "auto":
        return graph.mine(min_support, min_size, layers)
    if layers < LEAST:
        return graph.mine(len(graph.kinds) + 1, min_size, layers)
    whole = graph.mine(layers, min_size, layers)
    if layers - _ENDS < LEAST:
        return whole
    fewer = graph.mine(layers - _ENDS, min_size, layers)
    return min(whole, fewer, key=lambda mined: len(set(mined.colors(len(graph.kinds)))))


Place = tuple[int, int, int, int]
"""Of an edge between two instances: the positions of its ends, its matrix and its way."""
Pair = tuple[int, int, tuple[Place, ...]]
"""A kind of pairs: the kinds of both instances, and all edges between them."""
Pairs = dict[Pair, list[tuple[int, int]]]


@dataclass
class _Graph:
    """Kinds of nodes, and edges `(kind, way, other node)` around each node."""

    kinds: list[int]
    around: list[list[tuple[int, int, int]]]
    tensors: Collection[int]
    searched: list[int]
    """the nodes with something to choose"""

    @classmethod
    def of(cls, problem: Problem, tensors: Collection[int]) -> _Graph:
        numbers = defaultdict[Hashable, int](lambda: len(numbers))
        own: list[list[int]] = [[] for _ in problem.node_costs]
        around: list[list[tuple[int, int, int]]] = [[] for _ in problem.node_costs]
        for nodes, fact in dict.fromkeys(facts(problem)):
            kind = numbers[fact]
            if len(nodes) == 1:
                own[nodes[0]].append(kind)
            else:
                source, target = nodes
                around[source].append((kind, 0, target))
                around[target].append((kind, 1, source))
        kinds = [numbers[tuple(sorted(facts_of))] for facts_of in own]
        sizes = [costs.size for costs in problem.node_costs]
        searched = [v for v, size in enumerate(sizes) if size > 1 or around[v]]
        return cls(kinds, around, tensors, searched)

    def mine(self, min_support: int, min_size: int, layers: int) -> Mined:
        instances = _Instances.of(self)
        while instances.merge(min_support):
            pass
        frequent = [
            Subgraph(instances=tuple(found))
            for found in instances.by_kind()
            if len(found) >= min_support and len(found[0]) >= min_size
        ]
        inside = {node for one in frequent for nodes in one.instances for node in nodes}
        return Mined(
            subgraphs=tuple(frequent),
            parts=tuple(self._parts(inside)),
            min_support=min_support,
            layers=layers,
        )

    def _parts(self, inside: set[int]) -> Iterator[tuple[int, ...]]:
        """The connected components of the other nodes, between the tensors that they share."""
        shared = self._shared(inside)
        yield from ((node,) for node in sorted(shared))
        yield from self._components(inside | shared)

    def _shared(self, inside: set[int]) -> set[int]:
        """The tensors that alone connect components of the other nodes."""
        others = [node for node in self.tensors if node not in inside]
        found: set[int] = set()
        number: dict[int, int] = {}
        for k, nodes in enumerate(self._components(inside | set(others))):
            number |= dict.fromkeys(nodes, k)
        for node in others:
            found |= {node} if len({number[v] for v in self._beside(node, number)}) > 1 else set()
        return found

    def _beside(self, node: int, nodes: Container[int]) -> set[int]:
        return {other for _, _, other in self.around[node] if other in nodes}

    def _components(self, removed: set[int]) -> Iterator[tuple[int, ...]]:
        seen = set(removed)
        for start in self.searched:
            if start in seen:
                continue
            seen.add(start)
            component = [start]
            for node in component:
                new = {other for _, _, other in self.around[node]} - seen
                seen |= new
                component += sorted(new)
            yield tuple(sorted(component))


@dataclass
class _Instances:
    """Subgraphs that do not overlap and cover the graph: at first each node is one."""

    graph: _Graph
    nodes: list[tuple[int, ...]]
    kinds: list[int]
    numbers: dict[Hashable, int] = field(default_factory=dict[Hashable, int])

    @classmethod
    def of(cls, graph: _Graph) -> _Instances:
        nodes = [(node,) for node in range(len(graph.kinds))]
        found = cls(graph, nodes, [])
        found.kinds = [found._number((kind,)) for kind in graph.kinds]
        return found

    def by_kind(self) -> list[list[tuple[int, ...]]]:
        """The instances of each subgraph."""
        found: dict[int, list[tuple[int, ...]]] = defaultdict(list)
        for kind, nodes in zip(self.kinds, self.nodes, strict=True):
            found[kind].append(nodes)
        return list(found.values())

    def merge(self, min_support: int) -> bool:
        """Joins the frequent pairs of a level; False if there are none.

        Two neighbours of one kind are joined only if nothing else can be: in a chain, each could
        join the one before or the one behind it.
        """
        pairs = self._pairs()
        alike = [key for key in pairs if key[0] == key[1]]
        others = [key for key in pairs if key[0] != key[1]]
        return any(self._join(pairs, keys, min_support) for keys in (others, alike))

    def _join(self, pairs: Pairs, keys: list[Pair], min_support: int) -> bool:
        """Joins frequent pairs of these kinds, the most frequent first."""
        order = sorted(keys, key=lambda key: (-len(pairs[key]), pairs[key][0]))
        taken: set[int] = set()
        joined: list[tuple[int, int, int]] = []
        for key in order:
            apart: list[tuple[int, int]] = []
            used: set[int] = set()
            for pair in pairs[key]:
                if not taken.intersection(pair) and not used.intersection(pair):
                    apart.append(pair)
                    used.update(pair)
            if len(apart) >= min_support:
                taken |= used
                number = self._number(key)
                joined += [(number, *pair) for pair in apart]
        for number, one, other in joined:
            self.nodes[one] += self.nodes[other]
            self.kinds[one] = number
        gone = {other for _, _, other in joined}
        kept = [i for i in range(len(self.nodes)) if i not in gone]
        self.nodes = [self.nodes[i] for i in kept]
        self.kinds = [self.kinds[i] for i in kept]
        return bool(joined)

    def _pairs(self) -> Pairs:
        """The pairs of neighbours by kind: the parts' kinds, and all edges between them."""
        place = {node: (i, k) for i, nodes in enumerate(self.nodes) for k, node in enumerate(nodes)}
        between: dict[tuple[int, int], list[Place]] = defaultdict(list)
        for node, around in enumerate(self.graph.around):
            i, k = place[node]
            for kind, way, other in around:
                j, m = place[other]
                if (self.kinds[i], i) < (self.kinds[j], j):
                    between[i, j].append((k, m, kind, way))
        found: Pairs = defaultdict(list)
        for (i, j), edges in between.items():
            found[self.kinds[i], self.kinds[j], tuple(sorted(edges))].append((i, j))
        return {key: sorted(pairs) for key, pairs in found.items() if len(pairs) >= LEAST}

    def _number(self, key: Hashable) -> int:
        return self.numbers.setdefault(key, len(self.numbers))


def _num_layers(graph: _Graph) -> int:
    """How often the graph repeats its layers; 0 if it repeats nothing.

    Nodes are of one kind if their surroundings are alike, so that the equal weights of one layer do
    not count as layers. The ends of a stack have other surroundings, so that some kinds of a layer
    are found once or twice less.
    """
    colors = graph.kinds
    repeated = set(Counter(colors).values())
    for _ in range(_ROUNDS):
        surroundings = [
            (color, *sorted((kind, way, colors[v]) for kind, way, v in around))
            for color, around in zip(colors, graph.around, strict=True)
        ]
        number = {it: k for k, it in enumerate(dict.fromkeys(surroundings))}
        colors = [number[it] for it in surroundings]
    nodes = Counter[int]()
    for count in Counter(colors).values():
        nodes[count] += count

    def covered(layers: int) -> tuple[int, int]:
        return sum(nodes[count] for count in range(max(LEAST, layers - _ENDS), layers + 1)), layers

    return max((count for count in repeated if count >= LEAST), key=covered, default=0)
