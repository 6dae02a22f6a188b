"""Who to name where a node of a sharding problem has no strategy left."""

from __future__ import annotations

from collections.abc import Iterable


class Blame:
    """The nodes that are gone or forbade strategies, by the nodes where they did.

    Blaming a node blames all that are blamed there by then. Chains of thousands of nodes are
    minimised out, so these are not copied: a node is noted with how many of them there were.
    """

    def __init__(self, nodes: Iterable[int]) -> None:
        """Blames nobody."""
        self._blamed: dict[int, list[tuple[int, int]]] = {node: [] for node in nodes}

    def add(self, node: int, other: int) -> None:
        """Blames another node at a node, and all that are blamed at the other one by now."""
        self._blamed[node].append((other, len(self._blamed[other])))

    def at(self, node: int) -> set[int]:
        """All that are blamed at a node."""
        found, seen = set[int](), dict[int, int]()
        waiting = [(node, len(self._blamed[node]))]
        while waiting:
            by, count = waiting.pop()
            fresh = self._blamed[by][seen.get(by, 0) : count]
            seen[by] = max(count, seen.get(by, 0))
            found.update(other for other, _ in fresh)
            waiting += fresh
        return found
