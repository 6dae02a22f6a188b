"""What a program computes again for its backward part, and what that should wait for.

A program may compute activations again (`jax.checkpoint`). What keeps a compiler from doing so for
all layers at the beginning, when all of them would have to be kept, is an `optimization_barrier`
behind which the second computation begins. Programs that were exported after optimisation have
lost theirs. A layer's backward part therefore begins with a barrier, if it has contractions or
loops that depend on activations, and not on what other backward parts hand on::

    %x1, %d1 = optimization_barrier %x, %d    // %x: from the forward part; %d: a cotangent
    ... = ops on %x1 that make activations again

Of the values from other backward parts, `%d` is the one that is made last.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from alpa.dialects import ir, stablehlo
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.op_kinds import CONTRACTIONS, CONTROL_FLOW, SUMS

_HEAVY = CONTRACTIONS | CONTROL_FLOW


@dataclass(kw_only=True)
class Recomputation:
    """Looks at the backward parts of layers in the order in which they run."""

    graph: Graph
    activations: Collection[int]
    """what differs between micro-batches, and exists before the backward parts"""
    _late: dict[int, int] = field(default_factory=dict[int, int])
    """what backward parts have made of cotangents, and the op that made it"""
    _has_begun: bool = False

    def gate(self, ops: Sequence[int], inputs: Collection[int]) -> tuple[int, ...]:
        """What the next backward part reads through a barrier: activations and a cotangent.

        Args:
            ops: its ops, in program order.
            inputs: what it reads of others.
        """
        graph, begun = self.graph, self._has_begun
        late = {v for v in inputs if v in self._late}
        self._has_begun = True
        after: set[int] = set(late)
        again: set[int] = set()
        """what is made of activations, but not of cotangents"""
        is_heavy = False
        for o in ops:
            read = graph.operands[o]
            if not begun or not after.isdisjoint(read):
                after.update(graph.results[o])
                self._late.update(dict.fromkeys(graph.results[o], o))
            elif any(v in again or v in self.activations for v in read):
                again.update(graph.results[o])
                is_heavy = is_heavy or graph.names[o] in _HEAVY
        if not is_heavy:
            return ()
        inside = set(ops)
        entering = [
            v
            for v in inputs
            if v in self.activations
            and any(u in inside and not again.isdisjoint(graph.results[u]) for u in graph.users[v])
        ]
        cotangent = max(
            (v for v in late if self._is_waited_for(v, inside)),
            key=lambda v: self._late[v],
            default=None,
        )
        return () if cotangent is None else (*entering, cotangent)

    def _is_waited_for(self, value: int, ops: Collection[int]) -> bool:
        """Whether more is done with a value than to add it to others, as to a tied gradient."""
        graph = self.graph
        type_ = graph.types[value]
        return (
            isinstance(type_, ir.RankedTensorType)
            and isinstance(type_.element_type, ir.FloatType)
            and any(u in ops and graph.names[u] not in SUMS for u in graph.users[value])
        )


def read_through_barrier(arguments: Sequence[ir.Value]) -> None:
    """Puts a barrier for arguments at the beginning of their block."""
    block = ir.BlockArgument(arguments[0]).owner
    with ir.InsertionPoint.at_block_begin(block), arguments[0].location:
        barrier = stablehlo.OptimizationBarrierOp(arguments)
    for argument, result in zip(arguments, barrier.results, strict=True):
        argument.replace_all_uses_except(result, [barrier.operation])
