"""Tells forward, backward and update of a training step apart, by analysis alone.

The idea: the *forward* part computes the loss. An op of the *backward* part uses an activation of
the forward pass, or leads to an op that does; what comes after the last use of any activation is
the *update*. What flows from backward to update are the gradients. So Adam's `g * g` is update (no
activation in it) and `dot(activation, dy)` is backward, whatever the optimizer, and without a
marker in the program. Markers, where there are any, say where the backward part ends. The sum of a
shared parameter's gradients uses no activation either: it belongs to the update, as Alpa's
walkthrough, step 2, wants it. What rematerialisation computes once more is an activation, too,
though the backward part makes it. Running averages and counters are written by the forward part
(`running_state.py`).

An update may read the loss, for example for its learning rate. Without markers, a scalar of the
forward part that no gradient uses is a *statistic*; ops that use it belong to the update. The
gradient of a factor of the loss is also a value of the forward part. Without markers it cannot be
distinguished from a statistic, which is reported as a doubt.

Which results are losses: a *gradient* is a marked value, or the first value found on the way back
from a new state through element-wise ops. A result that depends on a gradient (its norm) is not a
loss. The forward part computes all other results. If these use fewer layers than the gradients, the
forward part also computes the value that all gradients depend on.

Only ops that depend on the batch are assigned. Other ops are computed in the part that uses them.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import or_

from alpa.dialects import ir, stablehlo, transform
from alpa.dialects.attributes import GRADIENT, Part, marker_of
from alpa.passes.analysis.graph import Graph, combiner, elements
from alpa.passes.analysis.micro_batches.context import is_float
from alpa.passes.analysis.op_kinds import PRODUCTS, TRIVIAL
from alpa.passes.analysis.products import is_linear, multiplies
from alpa.passes.analysis.roles import Roles
from alpa.passes.analysis.running_state import running_states

SAME_ELEMENTS = TRIVIAL - {
    "stablehlo.broadcast",
    "stablehlo.broadcast_in_dim",
    "stablehlo.reduce",
}
"""Ops whose result holds the operand's elements, each changed for itself."""
_SUMS = {"stablehlo.add", "stablehlo.subtract", "stablehlo.concatenate"}
"""Linear in all operands together."""


@dataclass(frozen=True)
class StepParts:
    """For each op its part, None where it does not depend on the batch.

    `batch[v]` says whether a value depends on the batch. Without state that learns, all is
    forward. `doubts` say, in words, what may be wrong. `misplaced` are ops of a differentiation
    that were taken for update, though they are not linear in what the backward part makes.
    """

    part: list[Part | None]
    batch: list[bool]
    is_training: bool
    doubts: tuple[str, ...] = ()
    misplaced: tuple[ir.OpView, ...] = ()
    learns: bool = False
    """whether any new state depends on the batch"""


def split_step(graph: Graph, roles: Roles, *, exact: bool = False) -> StepParts:
    """Splits a step whose roles are known as far as `infer_roles` could tell.

    `exact` says that `combine-micro-batches` has put a marker on all that leaves a micro-batch.
    """
    pairs = roles.state_pairs()
    state = set(pairs.values())
    data = [
        a
        for a, argument in enumerate(roles.arguments)
        if a not in state and argument.role in (None, "batch")
    ]
    batch = graph.depends(data)
    updates = [graph.returned[r] for r in pairs if batch[graph.returned[r]]]
    splitter = _Splitter(graph, batch, graph.first_equal(ignore_positions=True))
    if not updates:
        part: list[Part | None] = ["forward"] * len(graph.ops)
        writes = any(graph.returned[r] != a for r, a in pairs.items())
        is_training = writes and any(batch[v] for v in graph.returned)
        if is_training:
            # State that does not depend on the samples (a count) is written once per step.
            part = [
                "forward" if any(batch[v] for v in (*operands, *results)) else None
                for operands, results in zip(graph.operands, graph.results, strict=True)
            ]
        part = splitter.behind_marks(part) if exact else part
        if not is_training:
            batch = [True] * len(graph.values)
        return StepParts(part, batch, is_training or "update" in part)
    results = [graph.returned[r] for r in range(len(graph.returned)) if r not in pairs]
    forward, learned, gradients, doubts = splitter.forward(results, pairs, state)
    part = splitter.parts(*splitter.with_statistics(forward, gradients), learned)
    part = splitter.behind_marks(part) if exact else part
    misplaced = () if exact else splitter.misplaced(part)
    return StepParts(part, batch, "update" in part, tuple(doubts), misplaced, learns=True)


@dataclass(frozen=True)
class _Splitter:
    graph: Graph
    batch: list[bool]
    first_equal: list[int]

    @property
    def marks(self) -> list[int]:
        return self.graph.gradient_marks

    def forward(
        self, results: list[int], pairs: dict[int, int], state: set[int]
    ) -> tuple[list[bool], list[int], set[int], list[str]]:
        """The forward ops, the new values of the parameters that learn, the ops that compute
        gradients, and what is in doubt."""
        graph = self.graph
        on_state = graph.depends(state)
        new = {a: graph.returned[r] for r, a in pairs.items()}
        marked = graph.depends(graph.made_by(self.marks))
        marks = frozenset(self.marks)
        changes = {a: self._changes(v, marked, up_to=marks) for a, v in new.items()}
        running = running_states(graph, changes, results, self.marks)
        # One that is chosen by a gradient is written by the update, whatever it is made of.
        running = {a for a in running if not marked[new[a]]}
        new = {a: v for a, v in new.items() if a not in running}
        gradients = {a: self._marks_of(self._changes(v, marked), marked) for a, v in new.items()}
        metrics = [graph.cone([v]) for v in results if self.batch[v] and on_state[v]]
        losses = [
            cone
            for cone in metrics
            if not any(cone[o] for o in self.marks)
            and not any(cone[o] for a in self._read(cone) if a in new for o in changes[a])
        ]
        forward = [any(inside) for inside in zip([False] * len(graph.ops), *losses, strict=True)]
        common = self._common(gradients)
        learning = graph.depends(a for a, found in gradients.items() if found)
        activations = self._activations(forward)
        if any(
            common[o] and not self._repeats(o, activations)
            for v in range(len(graph.values))
            if learning[v] and not self.batch[v]
            for o in graph.users[v]
        ):
            # The loss itself is not returned: more layers lead to the gradients than to metrics.
            forward = [a or b for a, b in zip(forward, common, strict=True)]
        # New values of parameters: state that the loss depends on, and that the batch changes.
        used = self._read(forward)
        learned = [v for a, v in new.items() if a in used and self.batch[v]]
        doubts = self._doubts(metrics, changes)
        return forward, learned, {o for found in gradients.values() for o in found}, doubts

    def _doubts(self, metrics: list[list[bool]], changes: dict[int, list[int]]) -> list[str]:
        """Results that may be losses, of which a state is a factor: its gradient is the other one,
        of the forward part, and what is made of it looks like what is made of a gradient."""
        doubts: list[str] = []
        for cone in metrics:
            inside = [(a, o) for a in self._read(cone) for o in changes.get(a, ()) if cone[o]]
            if inside and all(self._is_factor(o, a, cone) for a, o in inside):
                doubts.append(
                    f"argument {inside[0][0]} may be a factor of the loss, which is planned as if "
                    "what is returned were made of its gradient: keep the locations of the "
                    "program, as_text(debug_info=True), or mark the gradients by alpa.grad"
                )
        return doubts

    def _is_factor(self, o: int, state: int, cone: list[bool]) -> bool:
        """Whether an op of a cone multiplies what is made of a state by what an op makes without
        it."""
        graph = self.graph
        on_state, on_op = graph.depends([state]), graph.depends(graph.results[o])
        if any(on_state[v] for v in graph.results[o]):
            return False
        return any(
            cone[p]
            and op.name in PRODUCTS
            and any(on_op[v] and not on_state[v] for v in graph.operands[p])
            and any(on_state[v] and not on_op[v] for v in graph.operands[p])
            for p, op in enumerate(graph.ops)
        )

    def with_statistics(
        self, forward: list[bool], gradients: set[int]
    ) -> tuple[list[bool], list[bool]]:
        """The forward ops with those that make statistics, and the ops that read these alone of
        what the forward part makes. Marked gradients need no such search."""
        graph = self.graph
        if self.marks:
            return forward, [False] * len(graph.ops)
        is_number = [elements(value.type) == 1 for value in graph.values]
        is_forward = [p < 0 or (forward[p] and p not in gradients) for p in graph.producer]
        makes_gradient = graph.cone(graph.made_by(gradients))
        follows = [not a and not b for a, b in zip(forward, makes_gradient, strict=True)]
        statistics: list[int] = []
        for o, (operands, results) in enumerate(zip(graph.operands, graph.results, strict=True)):
            if follows[o] and all(is_forward[v] for v in operands):
                for v in results:
                    is_forward[v] = True
                statistics += [v for v in results if self.batch[v] and is_number[v]]

        def reads(o: int, *, arrays: bool) -> bool:
            return any(
                self.batch[v] and is_forward[v] and is_number[v] != arrays
                for v in graph.operands[o]
            )

        leads = graph.cone(statistics)
        readers = [o for o, inside in enumerate(leads) if inside and reads(o, arrays=True)]
        makes = graph.cone(graph.made_by(readers))
        forward = [a or b for a, b in zip(forward, makes, strict=True)]
        return forward, [
            follows[o] and not makes[o] and reads(o, arrays=False) and not reads(o, arrays=True)
            for o in range(len(graph.ops))
        ]

    def _changes(
        self, new: int, marked: Sequence[bool], *, up_to: Collection[int] = ()
    ) -> list[int]:
        """The ops whose results a new state is made of element by element, as far as they depend
        on the batch: of a parameter, those that compute its gradient.

        What a state is selected by is not what it is made of. A rate is shaped as the state where
        both are one number: then it is the operand that does not depend on a mark. `marked` says
        which values do, `up_to` are ops to end at.
        """
        graph = self.graph
        size = elements(graph.values[new].type)
        is_choice = _is_boolean(graph.values[new])
        found: list[int] = []
        seen = {new}
        stack = [new]
        while stack:
            o = graph.producer[stack.pop()]
            if o < 0 or not any(self.batch[v] for v in graph.results[o]):
                continue
            op = graph.ops[o]
            # A layer's gradient is broadcast to a stack of one layer, which is shaped as the state;
            # a norm broadcasts its statistics to the shape of what it normalises.
            same = op.name in SAME_ELEMENTS or (
                op.name == "stablehlo.broadcast_in_dim"
                and graph.values[graph.results[o][0]].type == graph.values[new].type
            )
            alike = [
                v
                for v in graph.operands[o]
                if elements(graph.values[v].type) == size
                and (is_choice or not _is_boolean(graph.values[v]))
            ]
            if o in up_to or not (alike and (same or marker_of(op) == GRADIENT)):
                found.append(o)
                continue
            for v in [v for v in alike if marked[v]] or alike:
                if v not in seen:
                    seen.add(v)
                    stack.append(v)
        return [o for o in found if graph.ops[o].name != "stablehlo.broadcast_in_dim"]

    def _marks_of(self, ops: list[int], marked: Sequence[bool]) -> list[int]:
        """Ops that compute changes, with marks in the place of those that are behind marks (a
        branch that is taken by whether all gradients are finite)."""
        found: dict[int, None] = {}
        for o in ops:
            results = self.graph.results[o]
            if any(marked[v] for v in results):
                cone = self.graph.cone(results)
                found.update((mark, None) for mark in self.marks if cone[mark])
            else:
                found[o] = None
        return list(found)

    def _read(self, cone: list[bool]) -> set[int]:
        """The values that the ops of a cone read."""
        return {v for o, inside in enumerate(cone) if inside for v in self.graph.operands[o]}

    def parts(
        self, forward: list[bool], of_statistics: list[bool], learned: list[int]
    ) -> list[Part | None]:
        """Each op's part for a choice of forward ops."""
        graph, batch = self.graph, self.batch
        towards = graph.cone(learned)
        before = self._before_marks(towards)
        before = [a and not b for a, b in zip(before, of_statistics, strict=True)]
        last_use = self._uses_activation(forward, towards, before)
        backward = graph.cone(graph.made_by(last_use))
        while products := self._products(forward, backward, towards, before):
            more = graph.cone(graph.made_by(products))
            backward = [a or b for a, b in zip(backward, more, strict=True)]
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

    def behind_marks(self, parts: Sequence[Part | None]) -> list[Part | None]:
        """The parts where all that follows a marker runs once per step.

        Of what is in front of one, only linear ops on what is accumulated may run with it.
        """
        graph = self.graph
        after = graph.depends(graph.made_by(self.marks))
        found = list(parts)
        for o, operands in enumerate(graph.operands):
            if any(after[v] for v in operands):
                found[o] = "update"
            elif marker_of(graph.ops[o]) == GRADIENT:
                made_by = [found[graph.producer[v]] for v in operands if graph.producer[v] >= 0]
                found[o] = "update" if "update" in made_by else "backward"
        early = [
            part == "update" and not any(after[v] for v in operands)
            for part, operands in zip(found, graph.operands, strict=True)
        ]
        not_of_totals = [
            o for o, moves in enumerate(early) if moves and not self._is_of_totals(o, found)
        ]
        needed = graph.cone(graph.made_by(not_of_totals))
        for o, moves in enumerate(needed):
            if moves and early[o]:
                found[o] = "backward"
        return found

    def misplaced(self, parts: Sequence[Part | None]) -> tuple[ir.OpView, ...]:
        """Ops of the update that jax names as a part of a differentiation, and whose mean over the
        micro-batches is not made of their operands' means."""
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

    def _is_of_totals(self, o: int, parts: Sequence[Part | None]) -> bool:
        """Whether an op is linear in what it reads, and all of that is accumulated.

        Floats are averaged: what is the same for all micro-batches may be added to them. Integers
        are added up, and no average is made of them here.
        """
        operands = self.graph.operands[o]
        read = [v for v in operands if self.batch[v]]
        made_by = [self.graph.producer[v] for v in read]
        if any(producer < 0 or parts[producer] == "forward" for producer in made_by):
            return False
        op = self.graph.ops[o]
        if marker_of(op) == GRADIENT:
            return True
        makes_floats = is_float(self.graph.values[self.graph.results[o][0]].type)
        if any(is_float(self.graph.values[v].type) != makes_floats for v in read):
            return False
        if op.name in _SUMS:
            return makes_floats or len(read) == len(operands)
        if op.name == "stablehlo.divide":
            return makes_floats and len(operands) == 2 and read == operands[:1]
        return makes_floats and self._is_linear(o)

    def _before_marks(self, towards: list[bool]) -> list[bool]:
        """The ops that may compute gradients.

        Where our front end has marked the gradients, what comes after is update. Not all before
        is backward: the sum of a shared parameter's gradients is update with a marker, too.
        """
        marked = self.graph.made_by(self.marks)
        return self.graph.cone(marked) if marked else towards

    def _uses_activation(
        self, forward: list[bool], towards: list[bool], before: list[bool]
    ) -> list[int]:
        """The ops outside of the forward part that use an activation on the way to a new state."""
        graph, activations = self.graph, self._activations(forward)
        return [
            o
            for o, operands in enumerate(graph.operands)
            if towards[o]
            and before[o]
            and not forward[o]
            and any(self.batch[v] and self.first_equal[v] in activations for v in operands)
        ]

    def _products(
        self, forward: list[bool], backward: list[bool], towards: list[bool], before: list[bool]
    ) -> list[int]:
        """Ops that multiply what is made of other values of the backward part.

        An update multiplies a gradient by what is made of it, or of all, and never two gradients by
        one another. So one of the factors is an activation that was computed once more and that
        `first_equal` did not know again, as jax may compute it in another way the second time.
        """
        graph, found = self.graph, list[int]()
        made_of, bit = [0] * len(graph.values), 1
        for o, results in enumerate(graph.results):
            if forward[o]:
                continue
            if backward[o]:
                for v in results:
                    if self.batch[v] and any(not backward[user] for user in graph.users[v]):
                        made_of[v], bit = bit, bit << 1
                continue
            factors = [made_of[v] for v in graph.operands[o] if made_of[v]]
            if towards[o] and before[o] and len(factors) > 1:
                of_value = {graph.values[v]: made_of[v] for v in graph.operands[o]}
                if multiplies(graph.ops[o], of_value):
                    found.append(o)
            for v in results:
                made_of[v] = reduce(or_, factors, 0)
        return found

    def _pull_reductions(self, parts: list[Part | None]) -> None:
        """Moves linear ops that shrink a gradient, a bias' sum over the batch above all, from
        the update into the backward part, so that the small result is what accumulates."""
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
            "stablehlo.transpose",
        )

    def _common(self, gradients: dict[int, list[int]]) -> list[bool]:
        """The ops that the gradients of all parameters depend on.

        Parameters are the states that lead to a gradient, of their own or of another one.
        """
        graph = self.graph
        bit = {o: 1 << o for found in gradients.values() for o in found}
        # leads_to[o] is the set of the gradients whose operands depend on op o.
        leads_to = [0] * len(graph.ops)
        for o in reversed(range(len(graph.ops))):
            for p in (graph.producer[v] for v in graph.operands[o]):
                if p >= 0:
                    leads_to[p] |= leads_to[o] | bit.get(o, 0)
        every = 0
        for a, found in gradients.items():
            if any(leads_to[o] for o in graph.users[a]):
                for o in found:
                    every |= bit[o]
        return [every != 0 and leads & every == every for leads in leads_to]

    def _repeats(self, o: int, activations: set[int]) -> bool:
        """Whether an op is one of the forward ops, or computes once more what one of them does."""
        graph = self.graph
        if graph.ops[o].name == "stablehlo.optimization_barrier":
            return True
        return all(self.first_equal[v] in activations for v in graph.results[o])

    def _activations(self, forward: Sequence[bool]) -> set[int]:
        """The arguments and what the forward ops make; of equal values the first one."""
        graph = self.graph
        return {self.first_equal[v] for v, p in enumerate(graph.producer) if p < 0 or forward[p]}


def _is_boolean(value: ir.Value) -> bool:
    type_ = value.type
    return isinstance(type_, ir.RankedTensorType) and str(type_.element_type) == "i1"
