"""Tells forward, backward and update of a training step apart, by analysis alone.

The idea: the *forward* part computes the loss. An op of the *backward* part uses an activation
of the forward pass, or leads to an op that does; what comes after the last use of any
activation is the *update*. What flows from backward to update are the gradients. So Adam's
`g * g` is update (no activation in it) and `dot(activation, dy)` is backward, whatever the
optimizer, and without a marker in the program. The sum of a shared parameter's gradients uses
no activation either: it belongs to the update, as Alpa's walkthrough, step 2, wants it.

Only ops that depend on the batch are told apart; the others are computed where they are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from alpa.dialects import ir, stablehlo
from alpa.dialects.attributes import GRADIENT, Part
from alpa.passes.graph import Graph
from alpa.passes.roles import Roles


@dataclass(frozen=True)
class StepParts:
    """For each op its part, None where it does not depend on the batch.

    `batch[v]` says whether a value depends on the batch. Without state that learns, all is
    forward.
    """

    part: list[Part | None]
    batch: list[bool]
    is_training: bool


def split_step(graph: Graph, roles: Roles) -> StepParts:
    """Splits a step whose roles are known as far as `infer_roles` could tell."""
    pairs = roles.state_pairs()
    state = set(pairs.values())
    data = [
        a
        for a, argument in enumerate(roles.arguments)
        if a not in state and argument.role in (None, "batch")
    ]
    batch = graph.depends(data)
    updates = [graph.returned[r] for r in pairs if batch[graph.returned[r]]]
    if not updates:
        everything: list[Part | None] = ["forward"] * len(graph.ops)
        return StepParts(everything, [True] * len(graph.values), False)
    splitter = _Splitter(graph, batch)
    results = [graph.returned[r] for r in range(len(graph.returned)) if r not in pairs]
    forward, learned = splitter.forward(results, pairs, state)
    part = splitter.parts(forward, learned)
    return StepParts(part, batch, "update" in part)


@dataclass(frozen=True)
class _Splitter:
    graph: Graph
    batch: list[bool]

    def forward(
        self, results: list[int], pairs: dict[int, int], state: set[int]
    ) -> tuple[list[bool], list[int]]:
        """The forward ops and the new values of the parameters that learn."""
        on_state = self.graph.depends(state)
        losses = [v for v in results if self.batch[v] and on_state[v]]
        losses.sort(key=lambda v: sum(self.graph.cone([v])))
        if losses:
            forward = self.graph.cone(losses[:1])
        else:
            forward = self._common_cone([self.graph.returned[r] for r in pairs])
        learned = self._learned(forward, pairs)
        for loss in losses[1:]:
            # A gradient's norm is computed from the gradients: it belongs to the update.
            cone = self.graph.cone([loss])
            part = self.parts(forward, learned)
            gradients = set(self._gradient_ops(part))
            if any(
                inside and (part[o] == "update" or o in gradients) for o, inside in enumerate(cone)
            ):
                continue
            forward = [a or b for a, b in zip(forward, cone, strict=True)]
            learned = self._learned(forward, pairs)
        return forward, learned

    def parts(self, forward: list[bool], learned: list[int]) -> list[Part | None]:
        """Each op's part for a choice of forward ops."""
        graph, batch = self.graph, self.batch
        towards = graph.cone(learned)
        last_use = self._uses_activation(forward, towards)
        backward = graph.cone(
            v for o, used in enumerate(last_use) if used for v in graph.results[o]
        )
        parts: list[Part | None] = []
        after: list[bool] = [False] * len(graph.values)
        for o, results in enumerate(graph.results):
            if not any(batch[v] for v in results) and not any(batch[v] for v in graph.operands[o]):
                parts.append(None)
                continue
            follows_update = any(after[v] for v in graph.operands[o])
            if forward[o]:
                part: Part = "forward"
            elif backward[o]:
                part = "backward"
            elif towards[o] or follows_update:
                part = "update"
            else:
                # Running averages and the like: made from the forward pass only.
                part = "forward"
            parts.append(part)
            if part == "update" or (part == "backward" and towards[o]):
                for v in results:
                    after[v] = True
        self._pull_reductions(parts)
        return parts

    def _uses_activation(self, forward: list[bool], towards: list[bool]) -> list[bool]:
        graph, batch = self.graph, self.batch
        markers = [o for o, op in enumerate(graph.ops) if is_marker(op, GRADIENT)]
        if markers:
            # Our front end has marked the gradients: all before them is backward.
            marked = set(markers)
            return [o in marked for o in range(len(graph.ops))]
        return [
            towards[o]
            and not forward[o]
            and any(
                batch[v] and (graph.producer[v] < 0 or forward[graph.producer[v]])
                for v in graph.operands[o]
            )
            for o in range(len(graph.ops))
        ]

    def _pull_reductions(self, parts: list[Part | None]) -> None:
        """Moves linear ops that shrink a gradient, a bias' sum over the batch above all, from
        the update into the backward part, so that the small result is what accumulates."""
        graph, batch = self.graph, self.batch
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
                    if value in graph.returned or value != start and len(graph.users[value]) != 1:
                        break
                    chain.append(users[0])
                    value = graph.results[users[0]][0]
                    if graph.bytes[value] < graph.bytes[start]:
                        best = len(chain)
                for pulled in chain[:best]:
                    parts[pulled] = "backward"

    def _is_linear(self, o: int) -> bool:
        """Whether an op is linear in its one operand that depends on the batch."""
        op, graph = self.graph.ops[o], self.graph
        if sum(self.batch[v] for v in graph.operands[o]) != 1 or len(graph.results[o]) != 1:
            return False
        if isinstance(op, stablehlo.ReduceOp):
            combiner = [inner.name for inner in op.regions[0].blocks[0].operations]
            return combiner == ["stablehlo.add", "stablehlo.return"]
        return op.name in (
            "stablehlo.convert",
            "stablehlo.dot_general",
            "stablehlo.multiply",
            "stablehlo.negate",
            "stablehlo.reshape",
            "stablehlo.transpose",
        )

    def _learned(self, forward: list[bool], pairs: dict[int, int]) -> list[int]:
        """New values of parameters: state that the loss depends on, and that the batch changes."""
        used = {v for o, inside in enumerate(forward) if inside for v in self.graph.operands[o]}
        new = {a: self.graph.returned[r] for r, a in pairs.items()}
        return [value for a, value in new.items() if a in used and self.batch[value]]

    def _gradient_ops(self, parts: list[Part | None]) -> Iterable[int]:
        for o, part in enumerate(parts):
            if part == "backward" and any(
                parts[u] == "update" for v in self.graph.results[o] for u in self.graph.users[v]
            ):
                yield o

    def _common_cone(self, values: list[int]) -> list[bool]:
        """Without a loss among the results: what every parameter's new value depends on."""
        common = [True] * len(self.graph.ops)
        for value in values:
            if self.batch[value]:
                cone = self.graph.cone([value])
                common = [a and b for a, b in zip(common, cone, strict=True)]
        return common


def is_marker(op: ir.OpView, target: str) -> bool:
    """Whether an op is one of the front end's marker custom calls."""
    return (
        isinstance(op, stablehlo.CustomCallOp)
        and ir.StringAttr(op.attributes["call_target_name"]).value == target
    )
