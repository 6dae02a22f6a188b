"""What the updates of a clustered `@main` are made of and for, checked layer by layer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alpa.dialects import body, ir
from alpa.dialects.attributes import Part
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.layer_placement import union
from alpa.passes.base import PassError


@dataclass(frozen=True, kw_only=True)
class Unit:
    """A computation or fragment; others are named by their numbers."""

    op: ir.OpView
    part: Part
    place: int
    """layer or mesh; -1 for update_global"""
    name: str
    inputs: list[int]
    """for each operand what makes it, transfers apart; -1 for arguments"""
    readers: list[set[int] | None]
    """for each result what reads it, transfers apart; None where it leaves `@main`"""


@dataclass(frozen=True)
class Updates:
    """The updates of a clustered `@main`, with the data flow inside.

    Each of thousands of values has a set of layers: a number, whose bit l says that layer l is in.
    """

    graph: Graph
    operands: list[list[int]]
    """of each computation, as they stand there"""
    units: Sequence[Unit]
    inner: dict[int, Graph]
    """by number of the update"""
    owner: dict[int, int]
    """argument -> the first layer whose forward reads it"""
    leads_to: dict[int, list[int]]
    """by number of the update, for each value inside the set of layers of the states made of it"""

    @classmethod
    def of(
        cls,
        graph: Graph,
        operands: list[list[int]],
        units: Sequence[Unit],
        states: dict[int, int],
    ) -> Updates:
        """`states`: result number -> the argument that it replaces."""
        inner = {
            o: Graph.of(body(unit.op)) for o, unit in enumerate(units) if unit.part == "update"
        }
        owner: dict[int, int] = {}
        for a in range(graph.num_arguments):
            layers = [units[o].place for o in graph.users[a] if units[o].part == "forward"]
            if layers:
                owner[a] = min(layers)
        outside = [0] * len(graph.values)
        for r, a in states.items():
            if a in owner:
                outside[graph.returned[r]] |= 1 << owner[a]
        leads_to: dict[int, list[int]] = {}
        for o in reversed(inner):
            here = inner[o]
            reached = leads_to[o] = [0] * len(here.values)
            for v, result in zip(here.returned, graph.results[o], strict=True):
                reached[v] |= outside[result]
            for i in reversed(range(len(here.ops))):
                below = union(reached, here.results[i])
                for v in here.operands[i]:
                    reached[v] |= below
            for number, v in enumerate(operands[o]):
                outside[v] |= reached[number]
        return cls(graph, operands, units, inner, owner, leads_to)

    def check(self) -> None:
        graph = self.graph
        made_of = [0] * len(graph.values)
        for a, layer in self.owner.items():
            made_of[a] |= 1 << layer
        for o, unit in enumerate(self.units):
            if unit.part == "backward":
                for v in graph.results[o]:
                    made_of[v] |= 1 << unit.place
            if unit.part != "update":
                continue
            here = self.inner[o]
            inside = [0] * len(here.values)
            for number, v in enumerate(self.operands[o]):
                inside[number] |= made_of[v]
            for i, used in enumerate(here.operands):
                above = union(inside, used)
                for v in here.results[i]:
                    inside[v] |= above
            for number, (v, result) in enumerate(zip(here.returned, graph.results[o], strict=True)):
                made_of[result] |= inside[v]
                # An op with several results, such as a branch, is placed by all of them.
                made = [v] if here.producer[v] < 0 else here.results[here.producer[v]]
                self._check_result(unit, number, inside[v], union(self.leads_to[o], made))

    def _check_result(self, unit: Unit, number: int, made_of: int, to: int) -> None:
        if unit.place < 0 or to == 1 << unit.place or made_of in (0, 1 << unit.place):
            return
        if to.bit_count() == 1:
            layer = to.bit_length() - 1
            raise PassError(
                unit.op,
                f"result {number} of {unit.name} is made for the state of layer {layer} alone: it "
                f"belongs to update_{layer}",
            )
        layers = ", ".join(str(n) for n in range(made_of.bit_length()) if made_of >> n & 1)
        raise PassError(
            unit.op,
            f"result {number} of {unit.name} is made of gradients or parameters of layers "
            f"{layers}, and for no layer's state alone: what mixes layers belongs to update_global",
        )
