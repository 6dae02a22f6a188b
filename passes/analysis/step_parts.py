"""Assigns each op of a training step to the forward part, the backward part or the update.

The *forward* part computes the loss. An op of the *backward* part reads an activation of the
forward part, or leads to an op that does. The *update* is the rest: it follows the last use of an
activation. The values that flow from backward to update are the gradients. So `dot(activation, dy)`
is backward and Adam's `g * g` is update, for any optimizer and without markers in the program. If
there are markers, the backward part ends at them. A rematerialised value counts as an activation,
though the backward part computes it. The sum of a shared parameter's gradients reads no activation:
it belongs to the update, as in step 2 of Alpa's walkthrough. The forward part writes running
averages and counters (`running_state.py`). Gradients that are returned, of parameters that the
program does not update (`returned_gradients.py`), are treated like new states.

An update may read the loss, for example for its learning rate. Without markers, a scalar of the
forward part that no gradient uses is a *statistic*; ops that use it belong to the update. The
gradient of a factor of the loss is also a value of the forward part. Without markers it cannot be
distinguished from a statistic, which is reported as a doubt.

Which results are losses: a *gradient* is a marked value, or the first value found on the way back
from a new state through element-wise ops. A result that depends on a gradient (its norm) is not a
loss. The forward part computes all other results. If these use fewer layers than the gradients, the
forward part also computes the value that all gradients depend on.

Only ops that depend on the batch are assigned. Other ops are computed in the part that uses them,
and the counter of a running average in the forward part, where each micro-batch is a batch of its
own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alpa.dialects import ir
from alpa.dialects.attributes import GRADIENT, Part
from alpa.dialects.caches import cached
from alpa.passes.analysis.graph import Graph, elements, union
from alpa.passes.analysis.micro_batches.context import is_float
from alpa.passes.analysis.once_per_step import OncePerStep
from alpa.passes.analysis.op_kinds import PRODUCTS, TRIVIAL
from alpa.passes.analysis.products import multiplies
from alpa.passes.analysis.returned_gradients import returned_gradients
from alpa.passes.analysis.roles import Roles
from alpa.passes.analysis.running_state import counters, running_states

SAME_ELEMENTS = TRIVIAL - {
    "stablehlo.broadcast",
    "stablehlo.broadcast_in_dim",
    "stablehlo.reduce",
}
"""Ops whose result holds the operand's elements, each changed on its own."""


@dataclass(frozen=True)
class StepParts:
    """For each op its part, None where it does not depend on the batch.

    If no state learns, all ops are forward. `doubts` are sentences about what may be wrong.
    `misplaced` are ops of a differentiation that were assigned to the update, although they are not
    linear in what the backward part computes.
    """

    part: list[Part | None]
    is_training: bool
    doubts: tuple[str, ...] = ()
    misplaced: tuple[ir.OpView, ...] = ()
    learns: bool = False
    """whether any new state depends on the batch"""
    counters: tuple[int, ...] = ()
    """the states, by argument, that count the runs of the forward part"""


def split_step(
    graph: Graph, roles: Roles, *, exact: bool = False, several: bool = False
) -> StepParts:
    """Splits a step, given the roles that `infer_roles` found.

    `exact` says that `combine-micro-batches` has marked every value that leaves a micro-batch, and
    `several` that there are several. Then the roles of results tell what is added up, and returned
    gradients are results like others.
    """
    pairs = roles.state_pairs()
    # A gradient that is returned is treated like a new state, which is made of it.
    if not several:
        pairs |= returned_gradients(graph, pairs)
    state = set(pairs.values())
    data = [
        a
        for a, argument in enumerate(roles.arguments)
        if a not in state and argument.role in (None, "batch")
    ]
    batch = graph.depends(data)
    splitter, once = _Splitter(graph, batch), OncePerStep(graph, batch)
    if not any(batch[graph.returned[r]] for r in pairs):
        part: list[Part | None] = ["forward"] * len(graph.ops)
        writes = any(graph.returned[r] != a for r, a in pairs.items())
        is_training = writes and any(batch[v] for v in graph.returned)
        if is_training:
            # State that does not depend on the samples (a count) is written once per step.
            part = ["forward" if it else None for it in splitter.on_batch]
        part = once.behind_marks(part, _returned_by_each(graph, roles)) if exact else part
        return StepParts(part, is_training or "update" in part)
    results = [v for r, v in enumerate(graph.returned) if r not in pairs]
    forward, learned, gradients, doubts = splitter.forward(results, pairs, state)
    part = splitter.parts(*splitter.with_statistics(forward, gradients), learned)
    once.pull_reductions(part)
    part = once.behind_marks(part, _returned_by_each(graph, roles)) if exact else part
    misplaced = () if exact else once.misplaced(part)
    counting: list[int] = []
    if several and not exact:
        new = {a: graph.returned[r] for r, a in pairs.items()}
        counting = counters(graph, new, batch, part)
        for a in counting:
            part[graph.producer[new[a]]] = "forward"
    return StepParts(
        part, "update" in part, tuple(doubts), misplaced, learns=True, counters=tuple(counting)
    )


def _returned_by_each(graph: Graph, roles: Roles) -> set[int]:
    """What each micro-batch returns: rows that are joined, and floats that are added up."""
    kept: set[int] = set()
    for v, result in zip(graph.returned, roles.results, strict=True):
        kind = None if result.role is None else result.role.kind
        if kind == "concat" or (kind == "sum" and is_float(graph.values[v].type)):
            kept.add(v)
    return kept


@dataclass(frozen=True)
class _Splitter:
    graph: Graph
    batch: list[bool]

    @property
    def marks(self) -> list[int]:
        return self.graph.gradient_marks

    @property
    def first_equal(self) -> list[int]:
        return self.graph.first_equal

    @property
    def on_batch(self) -> list[bool]:
        """For each op whether it depends on the batch."""
        pairs, batch = zip(self.graph.operands, self.graph.results, strict=True), self.batch
        # All results of an op depend on it, or none.
        return [
            batch[results[0]] if results else any(batch[v] for v in operands)
            for operands, results in pairs
        ]

    def forward(
        self, results: list[int], pairs: dict[int, int], state: set[int]
    ) -> tuple[set[int], list[int], set[int], list[str]]:
        """The forward ops, the new values of the parameters that learn, the ops that compute
        gradients, and the doubts."""
        graph = self.graph
        on_state = graph.depends(state)
        new = {a: graph.returned[r] for r, a in pairs.items()}
        marked = graph.depends(graph.made_by(self.marks))
        changes = {a: self._changes(v, marked) for a, v in new.items()}
        metrics = [graph.cone([v]) for v in results if self.batch[v] and on_state[v]]
        if self.marks:
            # A state that a gradient selects is written by the update, whatever it is made of.
            running = {a for a, v in new.items() if self.batch[v] and not marked[v]}
            losses = [cone for cone in metrics if cone.isdisjoint(self.marks)]
            doubts: list[str] = []
        else:
            running = running_states(graph, new, changes, results)
            losses, doubts = self._unmarked_losses(metrics, changes, running)
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

    def _unmarked_losses(
        self, metrics: list[set[int]], changes: dict[int, list[int]], running: set[int]
    ) -> tuple[list[set[int]], list[str]]:
        """The metrics that depend on no gradient, and a sentence for each one that may be a loss
        with a state as a factor.

        The gradient of a factor is the other factor, a value of the forward part. What is computed
        from it looks like what is computed from a gradient.
        """
        losses: list[set[int]] = []
        doubts: list[str] = []
        for cone in metrics:
            inside = [(a, o) for a in self._read(cone) for o in changes.get(a, ()) if o in cone]
            if all(a in running for a, _ in inside):
                losses.append(cone)
            if inside and all(self._is_factor(o, a, cone) for a, o in inside):
                doubts.append(
                    f"argument {inside[0][0]} may be a factor of the loss, which is planned as if "
                    "what is returned were made of its gradient: keep the locations of the "
                    "program, as_text(debug_info=True), or mark the gradients by alpa.grad"
                )
        return losses, doubts

    def _is_factor(self, o: int, state: int, cone: set[int]) -> bool:
        """Whether an op of a cone multiplies a value that depends on a state by one that depends on
        op `o` and not on the state."""
        graph = self.graph
        on_state, on_op = graph.depends([state]), graph.depends(graph.results[o])
        factors = [
            {(on_state[v], on_op[v]) for v in graph.operands[p]}
            for p in cone
            if graph.names[p] in PRODUCTS
        ]
        apart = {(True, False), (False, True)}
        return not any(on_state[v] for v in graph.results[o]) and any(apart <= it for it in factors)

    def with_statistics(self, forward: set[int], gradients: set[int]) -> tuple[set[int], set[int]]:
        """The forward ops, with those that compute statistics, and the ops that read statistics but
        no other values of the forward part. If gradients are marked, nothing is searched."""
        graph = self.graph
        if self.marks:
            return forward, set()
        is_number = [elements(type_) == 1 for type_ in graph.types]
        is_forward = [p < 0 or (p in forward and p not in gradients) for p in graph.producer]
        follows = {*range(len(graph.ops))} - forward - graph.cone(graph.made_by(gradients))
        statistics: list[int] = []
        for o in sorted(follows):
            if all(is_forward[v] for v in graph.operands[o]):
                for v in graph.results[o]:
                    is_forward[v] = True
                statistics += [v for v in graph.results[o] if self.batch[v] and is_number[v]]

        def are_numbers(o: int) -> set[bool]:
            """Whether each value of the forward part that an op reads is a single number."""
            return {is_number[v] for v in graph.operands[o] if self.batch[v] and is_forward[v]}

        readers = [o for o in graph.cone(statistics) if False in are_numbers(o)]
        makes = graph.cone(graph.made_by(readers))
        return forward | makes, {o for o in follows - makes if are_numbers(o) == {True}}

    def _changes(self, new: int, marked: Sequence[bool]) -> list[int]:
        """The ops on the batch from whose results a new state is computed element by element. For
        a parameter, they compute its gradient.

        The predicate that selects a state is not one of them. If the state is one number, a rate
        has the same shape: then it is the operand that depends on no mark. `marked` says which
        values depend on one. The gradient of a batch norm's scale is divided by a deviation, which
        has the same shape, too: then the gradient is the operand that depends on the others.
        """
        graph = self.graph
        size, is_choice = elements(graph.types[new]), _is_boolean(graph.types[new])
        found: list[int] = []
        seen = {new}
        stack = [new]
        while stack:
            o = graph.producer[stack.pop()]
            if o < 0 or not any(self.batch[v] for v in graph.results[o]):
                continue
            name = graph.names[o]
            # A stack of one layer is the broadcast gradient of that layer, in the state's shape. A
            # norm, in contrast, broadcasts its statistics to the shape of its operand.
            same = name in SAME_ELEMENTS or (
                name == "stablehlo.broadcast_in_dim"
                and graph.types[graph.results[o][0]] == graph.types[new]
            )
            alike = [
                v
                for v in graph.operands[o]
                if elements(graph.types[v]) == size
                and (is_choice or not _is_boolean(graph.types[v]))
            ]
            if not (alike and (same or graph.markers[o] == GRADIENT)):
                found.append(o)
                continue
            for v in [v for v in alike if marked[v]] or alike:
                if v not in seen:
                    seen.add(v)
                    stack.append(v)
        found = [o for o in found if graph.names[o] != "stablehlo.broadcast_in_dim"]
        if len(found) > 1:
            first = min(found)
            before = [graph.cone(graph.operands[o], first) for o in found]
            found = [o for o in found if not any(o in cone for cone in before)]
        return found

    def _marks_of(self, ops: list[int], marked: Sequence[bool]) -> list[int]:
        """The ops that compute changes. Those behind marks, such as a branch that needs all
        gradients to be finite, are replaced by their marks."""
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
        """Each op's part, given the forward ops."""
        graph = self.graph
        towards = graph.cone(learned)
        # If gradients are marked, ops behind the marks are update. Not all ops before them are
        # backward: the sum of a shared parameter's gradients is update with a marker, too.
        before = graph.cone(graph.made_by(self.marks)) if self.marks else towards
        waiting = (towards & before) - of_statistics - forward
        activations = self._activations(forward)
        last_use = [o for o in waiting if self._uses(o, activations, forward)]
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
                # Running averages and the like are computed from the forward part only.
                part = "forward"
            parts.append(part)
            if part == "update" or (part == "backward" and o in towards):
                after.update(graph.results[o])
        return parts

    def _uses(self, o: int, activations: set[int], forward: set[int]) -> bool:
        """Whether an op computes with an activation.

        A gradient may equal a forward value (a penalty of the gradients computes them twice). A sum
        of gradients does not use it.
        """
        graph = self.graph
        return any(
            self.batch[v]
            and self.first_equal[v] in activations
            and (graph.names[o] != "stablehlo.add" or (p := graph.producer[v]) < 0 or p in forward)
            for v in graph.operands[o]
        )

    def _products(self, forward: set[int], backward: set[int], waiting: set[int]) -> list[int]:
        """Ops that multiply values computed from different values of the backward part.

        An update multiplies a gradient by what it computes from that gradient, or from all of them,
        but never two gradients. So one factor is a rematerialised activation that `first_equal`
        does not recognise, because JAX may compute it differently the second time.
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

    def _common(self, gradients: dict[int, list[int]]) -> set[int]:
        """The ops that the gradients of all parameters depend on.

        Parameters are the states that lead to a gradient, of their own or of another one.
        """
        graph = self.graph
        numbered = enumerate(dict.fromkeys(o for found in gradients.values() for o in found))
        bit = {o: 1 << number for number, o in numbered}
        # leads_to[o] is the set of the gradients whose operands depend on op o.
        leads_to = [0] * len(graph.ops)
        for o in reversed(range(len(graph.ops))):
            reached = leads_to[o] | bit.get(o, 0)
            if not reached:
                continue
            for v in graph.operands[o]:
                if (p := graph.producer[v]) >= 0:
                    leads_to[p] |= reached
        every = 0
        for a, found in gradients.items():
            if any(leads_to[o] for o in graph.users[a]):
                for o in found:
                    every |= bit[o]
        return {o for o, leads in enumerate(leads_to) if every and leads & every == every}

    def _repeats(self, o: int, activations: set[int]) -> bool:
        """Whether an op is a forward op, or computes the same values as one."""
        graph = self.graph
        if graph.names[o] == "stablehlo.optimization_barrier":
            return True
        return all(self.first_equal[v] in activations for v in graph.results[o])

    def _activations(self, forward: set[int]) -> set[int]:
        """The arguments and the results of the forward ops; of equal values, the first one."""
        graph = self.graph
        return {self.first_equal[v] for v, p in enumerate(graph.producer) if p < 0 or p in forward}


@cached
def _is_boolean(type_: ir.Type) -> bool:
    return isinstance(type_, ir.RankedTensorType) and str(type_.element_type) == "i1"
