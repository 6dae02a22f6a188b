"""Decides which ops of a training step may run once per step, on accumulated values.

An op that runs once reads the means of its operands over the micro-batches. Its result is the mean
of the micro-batches' results only if the op is linear. So linear ops may move between the backward
part, which runs in each micro-batch, and the update, which runs once. Other ops may not.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import dataclass

from alpa.dialects import ir, stablehlo, transform
from alpa.dialects.attributes import GRADIENT, Part
from alpa.passes.analysis.graph import Graph, combiner
from alpa.passes.analysis.micro_batches.context import is_float
from alpa.passes.analysis.products import is_linear

_SUMS = {"stablehlo.add", "stablehlo.subtract", "stablehlo.concatenate"}
"""Linear in all operands together."""


@dataclass(frozen=True)
class OncePerStep:
    """The ops of a step, and for each value whether it depends on the batch."""

    graph: Graph
    batch: list[bool]

    def behind_marks(self, parts: Sequence[Part | None], returned: Set[int]) -> list[Part | None]:
        """The parts if every op behind a marker runs once per step.

        In front of a marker, only linear ops on accumulated values may run once per step, too, and
        only if they make none of the values `returned`, rows or sums of each micro-batch: the
        update reads the mean of the micro-batches.
        """
        graph = self.graph
        after = graph.depends(graph.made_by(graph.gradient_marks))
        found = list(parts)
        for o, operands in enumerate(graph.operands):
            if any(after[v] for v in operands):
                found[o] = "update"
            elif graph.markers[o] == GRADIENT:
                made_by = [found[graph.producer[v]] for v in operands if graph.producer[v] >= 0]
                found[o] = "update" if "update" in made_by else "backward"
        early = {
            o
            for o, operands in enumerate(graph.operands)
            if found[o] == "update" and not any(after[v] for v in operands)
        }
        not_of_totals = [
            o
            for o in early
            if not self._is_of_totals(o, found) or not returned.isdisjoint(graph.results[o])
        ]
        for o in early & graph.cone(graph.made_by(not_of_totals)):
            found[o] = "backward"
        return found

    def misplaced(self, parts: Sequence[Part | None]) -> tuple[ir.OpView, ...]:
        """The ops of the update that JAX names as a part of a differentiation and that are not
        linear: the mean of their results is not what they make of their operands' means."""
        graph = self.graph
        of_forward = [p < 0 or parts[p] == "forward" for p in graph.producer]
        varying = {
            value for v, value in enumerate(graph.values) if self.batch[v] and not of_forward[v]
        }
        return tuple(
            op
            for o, op in enumerate(graph.ops)
            if parts[o] == "update"
            and transform(op.location) is not None
            and not any(self.batch[v] and of_forward[v] for v in graph.operands[o])
            and not is_linear(op, varying)
        )

    def pull_reductions(self, parts: list[Part | None]) -> None:
        """Moves linear ops that shrink a gradient from the update into the backward part, above all
        a bias' sum over the batch or a slice. The small result is accumulated then."""
        graph = self.graph
        for o in range(len(graph.ops)):
            if parts[o] != "backward":
                continue
            for start in graph.results[o]:
                chain: list[int] = []
                value, best = start, 0
                while True:
                    users = [u for u in graph.users[value] if parts[u] == "update"]
                    if len(users) != 1 or not self._is_linear(users[0]):
                        break
                    if value in graph.returned or (value != start and len(graph.users[value]) != 1):
                        break
                    chain.append(users[0])
                    value = graph.results[users[0]][0]
                    if graph.bytes[value] < graph.bytes[start]:
                        best = len(chain)
                for pulled in chain[:best]:
                    parts[pulled] = "backward"

    def _is_of_totals(self, o: int, parts: Sequence[Part | None]) -> bool:
        """Whether an op is linear in its operands on the batch, and all of these are accumulated.

        Floats are averaged, so a value that all micro-batches share may be added to them. Integers
        are summed and not averaged.
        """
        operands = self.graph.operands[o]
        read = [v for v in operands if self.batch[v]]
        made_by = [self.graph.producer[v] for v in read]
        if any(producer < 0 or parts[producer] == "forward" for producer in made_by):
            return False
        op = self.graph.ops[o]
        if self.graph.markers[o] == GRADIENT:
            return True
        makes_floats = is_float(self.graph.values[self.graph.results[o][0]].type)
        if any(is_float(self.graph.values[v].type) != makes_floats for v in read):
            return False
        if op.name in _SUMS:
            return makes_floats or len(read) == len(operands)
        if op.name == "stablehlo.divide":
            return makes_floats and len(operands) == 2 and read == operands[:1]
        return makes_floats and self._is_linear(o)

    def _is_linear(self, o: int) -> bool:
        """Whether an op is linear in its one operand that depends on the batch."""
        op, graph = self.graph.ops[o], self.graph
        if len(set(op.operands)) < len(op.operands):
            return False
        if sum(self.batch[v] for v in graph.operands[o]) != 1 or len(graph.results[o]) != 1:
            return False
        if isinstance(op, stablehlo.ReduceOp):
            return combiner(op) == "stablehlo.add"
        return op.name in (
            "stablehlo.convert",
            "stablehlo.dot_general",
            "stablehlo.multiply",
            "stablehlo.negate",
            "stablehlo.reshape",
            "stablehlo.slice",
            "stablehlo.transpose",
        )
