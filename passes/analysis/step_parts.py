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

from collections.abc import Sequence
from dataclasses import dataclass

from alpa.dialects import ir, stablehlo, transform
from alpa.dialects.attributes import GRADIENT, Part, marker_of
from alpa.passes.analysis.graph import Graph, combiner, elements, union
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

    Without state that learns, all is forward. `doubts` say, in words, what may be wrong.
    `misplaced` are ops of a differentiation that were taken for update, though they are not linear
    in what the backward part makes.
    """

    part: list[Part | None]
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
    splitter = _Splitter(graph, batch, graph.first_equal())
    if not any(batch[graph.returned[r]] for r in pairs):
        part: list[Part | None] = ["forward"] * len(graph.ops)
        writes = any(graph.returned[r] != a for r, a in pairs.items())
        is_training = writes and any(batch[v] for v in graph.returned)
        if is_training:
            # State that does not depend on the samples (a count) is written once per step.
            part = ["forward" if it else None for it in splitter.on_batch]
        part = splitter.behind_marks(part) if exact else part
        return StepParts(part, is_training or "update" in part)
    results = [v for r, v in enumerate(graph.returned) if r not in pairs]
    forward, learned, gradients, doubts = splitter.forward(results, pairs, state)
    part = splitter.parts(*splitter.with_statistics(forward, gradients), learned)
    part = splitter.behind_marks(part) if exact else part
    misplaced = () if exact else splitter.misplaced(part)
    return StepParts(part, "update" in part, tuple(doubts), misplaced, learns=True)


@dataclass(frozen=True)
class _Splitter:
    graph: Graph
    batch: list[bool]
    first_equal: list[int]

    @property
    def marks(self) -> list[int]:
        return self.graph.gradient_marks

    @property
    def on_batch(self) -> list[bool]:
        """For each op whether it depends on the batch."""
        pairs = zip(self.graph.operands, self.graph.results, strict=True)
        return [any(self.batch[v] for v in (*operands, *results)) for operands, results in pairs]

    def forward(
        self, results: list[int], pairs: dict[int, int], state: set[int]
    ) -> tuple[set[int], list[int], set[int], list[str]]:
        """The forward ops, the new values of the parameters that learn, the ops that compute
        gradients, and what is in doubt."""
        graph = self.graph
        on_state = graph.depends(state)
        new = {a: graph.returned[r] for r, a in pairs.items()}
        marked = graph.depends(graph.made_by(self.marks))
        changes = {a: self._changes(v, marked) for a, v in new.items()}
        metrics = [graph.cone([v]) for v in results if self.batch[v] and on_state[v]]
        if self.marks:
            # One that is chosen by a gradient is written by the update, whatever it is made of.
            running = {a for a, v in new.items() if self.batch[v] and not marked[v]}
            losses = [cone for cone in metrics if cone.isdisjoint(self.marks)]
            doubts: list[str] = []
        else:
            running = running_states(graph, changes, results)
            shown = [self._shown(cone, changes) for cone in metrics]
            losses = [
                cone
                for cone, pairs_in in zip(metrics, shown, strict=True)
                if all(a in running for a, _ in pairs_in)
            ]
            doubts = self._doubts(metrics, shown)
        new = {a: v for a, v in new.items() if a not in running}
        gradients = {a: self._marks_of(changes[a], marked) for a in new}
        forward = set[int]().union(*losses)
        common = self._common(gradients)
        learning = graph.depends(a for a, found in gradients.items() if found)
        activations = self._activations(forward)
        if any(
            o in common and not self._repeats(o, activations)
            for v in range(len(graph.values))
            if learning[v] and not self.batch[v]
            for o in graph.users[v]
        ):
            # The loss itself is not returned: more layers lead to the gradients than to metrics.
            forward |= common
        # New values of parameters: state that the loss depends on, and that the batch changes.
        used = self._read(forward)
        learned = [v for a, v in new.items() if a in used and self.batch[v]]
        return forward, learned, {o for found in gradients.values() for o in found}, doubts

    def _shown(self, cone: set[int], changes: dict[int, list[int]]) -> list[tuple[int, int]]:
        """The states that a cone reads and the ops in it that compute their changes, in pairs."""
        return [(a, o) for a in self._read(cone) for o in changes.get(a, ()) if o in cone]

    def _doubts(self, metrics: list[set[int]], shown: list[list[tuple[int, int]]]) -> list[str]:
        """Results that may be losses, of which a state is a factor: its gradient is the other one,
        of the forward part, and what is made of it looks like what is made of a gradient."""
        return [
            f"argument {inside[0][0]} may be a factor of the loss, which is planned as if what is "
            "returned were made of its gradient: keep the locations of the program, "
            "as_text(debug_info=True), or mark the gradients by alpa.grad"
            for cone, inside in zip(metrics, shown, strict=True)
            if inside and all(self._is_factor(o, a, cone) for a, o in inside)
        ]

    def _is_factor(self, o: int, state: int, cone: set[int]) -> bool:
        """Whether an op of a cone multiplies what is made of a state by what an op makes without
        it."""
        graph = self.graph
        on_state, on_op = graph.depends([state]), graph.depends(graph.results[o])
        factors = [
            {(on_state[v], on_op[v]) for v in graph.operands[p]}
            for p in cone
            if graph.ops[p].name in PRODUCTS
        ]
        apart = {(True, False), (False, True)}
        return not any(on_state[v] for v in graph.results[o]) and any(apart <= it for it in factors)

    def with_statistics(self, forward: set[int], gradients: set[int]) -> tuple[set[int], set[int]]:
        """The forward ops with those that make statistics, and the ops that read these alone of
        what the forward part makes. Marked gradients need no such search."""
        graph = self.graph
        if self.marks:
            return forward, set()
        is_number = [elements(value.type) == 1 for value in graph.values]
        is_forward = [p < 0 or (p in forward and p not in gradients) for p in graph.producer]
        follows = {*range(len(graph.ops))} - forward - graph.cone(graph.made_by(gradients))
        statistics: list[int] = []
        for o in sorted(follows):
            if all(is_forward[v] for v in graph.operands[o]):
                for v in graph.results[o]:
                    is_forward[v] = True
                statistics += [v for v in graph.results[o] if self.batch[v] and is_number[v]]

        def are_numbers(o: int) -> set[bool]:
            """For what an op reads of the forward part whether it is one number."""
            return {is_number[v] for v in graph.operands[o] if self.batch[v] and is_forward[v]}

        readers = [o for o in graph.cone(statistics) if False in are_numbers(o)]
        makes = graph.cone(graph.made_by(readers))
        return forward | makes, {o for o in follows - makes if are_numbers(o) == {True}}

    def _changes(self, new: int, marked: Sequence[bool]) -> list[int]:
        """The ops whose results a new state is made of element by element, as far as they depend
        on the batch: of a parameter, those that compute its gradient.

        What a state is selected by is not what it is made of. A rate is shaped as the state where
        both are one number: then it is the operand that does not depend on a mark. `marked` says
        which values do.
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
            if not (alike and (same or marker_of(op) == GRADIENT)):
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
        found: list[int] = []
        for o in ops:
            if any(marked[v] for v in self.graph.results[o]):
                cone = self.graph.cone(self.graph.results[o])
                found += [mark for mark in self.marks if mark in cone]
            else:
                found.append(o)
        return found

    def _read(self, ops: set[int]) -> set[int]:
        """The values that ops read."""
        return {v for o in ops for v in self.graph.operands[o]}

    def parts(
        self, forward: set[int], of_statistics: set[int], learned: list[int]
    ) -> list[Part | None]:
        """Each op's part for a choice of forward ops."""
        graph = self.graph
        towards = graph.cone(learned)
        # Where our front end has marked the gradients, what comes after is update. Not all before
        # is backward: the sum of a shared parameter's gradients is update with a marker, too.
        before = graph.cone(graph.made_by(self.marks)) if self.marks else towards
        waiting = (towards & before) - of_statistics - forward
        activations = self._activations(forward)
        last_use = [
            o
            for o in waiting
            if any(self.batch[v] and self.first_equal[v] in activations for v in graph.operands[o])
        ]
        backward = graph.cone(graph.made_by(last_use))
        while products := self._products(forward, backward, waiting):
            backward |= graph.cone(graph.made_by(products))
        parts: list[Part | None] = []
        after: set[int] = set()
        for o, on_batch in enumerate(self.on_batch):
            if not on_batch:
                parts.append(None)
                continue
            if o in forward:
                part: Part = "forward"
            elif o in backward:
                part = "backward"
            elif o in towards or not after.isdisjoint(graph.operands[o]):
                part = "update"
            else:
                # Running averages and the like: made from the forward pass only.
                part = "forward"
            parts.append(part)
            if part == "update" or (part == "backward" and o in towards):
                after.update(graph.results[o])
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
        early = {
            o
            for o, operands in enumerate(graph.operands)
            if found[o] == "update" and not any(after[v] for v in operands)
        }
        not_of_totals = [o for o in early if not self._is_of_totals(o, found)]
        for o in early & graph.cone(graph.made_by(not_of_totals)):
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

    def _products(self, forward: set[int], backward: set[int], waiting: set[int]) -> list[int]:
        """Ops that multiply what is made of other values of the backward part.

        An update multiplies a gradient by what is made of it, or of all, and never two gradients by
        one another. So one of the factors is an activation that was computed once more and that
        `first_equal` did not know again, as jax may compute it in another way the second time.
        """
        graph, found = self.graph, list[int]()
        made_of, bit = [0] * len(graph.values), 1
        for o, results in enumerate(graph.results):
            if o in forward:
                continue
            if o in backward:
                for v in results:
                    if self.batch[v] and not backward.issuperset(graph.users[v]):
                        made_of[v], bit = bit, bit << 1
                continue
            factors = [made_of[v] for v in graph.operands[o] if made_of[v]]
            if o in waiting and len(factors) > 1:
                of_value = {graph.values[v]: made_of[v] for v in graph.operands[o]}
                if multiplies(graph.ops[o], of_value):
                    found.append(o)
            for v in results:
                made_of[v] = union(factors)
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

    def _common(self, gradients: dict[int, list[int]]) -> set[int]:
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
        return {o for o, leads in enumerate(leads_to) if every and leads & every == every}

    def _repeats(self, o: int, activations: set[int]) -> bool:
        """Whether an op is one of the forward ops, or computes once more what one of them does."""
        graph = self.graph
        if graph.ops[o].name == "stablehlo.optimization_barrier":
            return True
        return all(self.first_equal[v] in activations for v in graph.results[o])

    def _activations(self, forward: set[int]) -> set[int]:
        """The arguments and what the forward ops make; of equal values the first one."""
        graph = self.graph
        return {self.first_equal[v] for v, p in enumerate(graph.producer) if p < 0 or p in forward}


def _is_boolean(value: ir.Value) -> bool:
    type_ = value.type
    return isinstance(type_, ir.RankedTensorType) and str(type_.element_type) == "i1"
