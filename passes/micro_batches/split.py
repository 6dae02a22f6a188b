"""Splits a step in two: what runs in each micro-batch, and behind markers what runs once."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property

from alpa.dialects import body, filled, ir, stablehlo, terminator
from alpa.dialects.attributes import (
    GRADIENT,
    ResultRole,
    marker_of,
    read_results,
    write_interface,
)
from alpa.passes.analysis.graph import Graph, replace_op, replace_operands, used_values
from alpa.passes.analysis.micro_batches.context import is_float
from alpa.passes.analysis.micro_batches.relation import Kind, Relation
from alpa.passes.analysis.roles import Roles
from alpa.passes.micro_batches.enlarge import enlarge, enlarged_copy
from alpa.passes.micro_batches.related import RelatedStep


@dataclass(frozen=True, kw_only=True)
class Split(RelatedStep):
    """A step, and which of its ops run once, after all micro-batches."""

    totals: dict[ir.Value, ir.Value] = field(default_factory=dict[ir.Value, ir.Value])
    """what the step reads for a sum of a micro-batch"""
    wholes: dict[ir.Value, ir.Value] = field(default_factory=dict[ir.Value, ir.Value])
    """what the step reads for what is made of the batch's size"""

    @cached_property
    def in_step(self) -> list[bool]:
        """Which ops run once per step."""
        return _in_step(self.graph, self.roles, [it.kind for it in self.relations])

    @cached_property
    def relations(self) -> list[Relation]:
        """Those of the graph's values."""
        return [self.at(value) for value in self.graph.values]

    @cached_property
    def _of_micro_batches(self) -> set[int]:
        """The values in whose place the step may read others."""
        found = set(self.graph.made_by(self.graph.gradient_marks))
        found.update(
            v for v, it in enumerate(self.relations) if it.kind in ("sum", "size") or it.power
        )
        return found

    def rewrite(self) -> None:
        """Makes the program one of micro-batches and, behind markers, of the step."""
        graph = self.graph
        self._substitute()
        whole_is_known = self.context.whole_is_known
        for o, op in enumerate(graph.ops):
            if not self.in_step[o] or (
                not whole_is_known and self._of_micro_batches.isdisjoint(graph.operands[o])
            ):
                continue
            used = [graph.values[v] for v in graph.operands[o]]
            changed = {v: new for v in used if (new := self._for_step(v)) is not v}
            if changed:
                replace_operands(op, changed)
            if whole_is_known:
                enlarge(self.context, op, op)
        self._return()
        for o in graph.gradient_marks:
            replace_op(graph.ops[o], graph.ops[o].operands)
        self._erase_mixed()

    def _erase_mixed(self) -> None:
        """Erases what nothing depends on, and what may read arrays of two sizes."""
        graph = self.graph
        mixed = {graph.producer[v] for v, it in enumerate(self.relations) if it.kind == "mixed"}
        for o in sorted(mixed.difference([-1], graph.gradient_marks), reverse=True):
            op = graph.ops[o]
            if not any(True for value in op.results for _ in value.uses):
                op.operation.erase()

    def _substitute(self) -> None:
        """Puts ones where micro-batches would read a number of the step.

        Where it is known which operand a select takes, the other one is read no more.
        """
        for op, name in zip(self.graph.ops, self.graph.names, strict=True):
            chosen = self.at(op.operands[0]).splat if name == "stablehlo.select" else None
            if chosen is not None:
                taken = 1 if chosen else 2
                op.operands[3 - taken] = op.operands[taken]
        graph = self.graph
        # What is inside of a loop is mixed, or runs in the step.
        found = [
            (graph.producer[graph.number[v]], number)
            for v, number in self.context.substituted
            if v in graph.number
        ]
        for o, number in sorted(found):
            op = self.graph.ops[o]
            with ir.InsertionPoint(op), op.location:
                one = filled(ir.RankedTensorType(op.operands[number].type), 1.0)
                op.operands[number] = one

    def _for_step(self, value: ir.Value) -> ir.Value:
        """What the step reads in the place of a value."""
        relation = self.at(value)
        if value in self._marked:
            value = _unmarked(value)
            relation = self.at(value)
        if relation.kind == "sum":
            if self._is_in_step(value):
                return value
            if value not in self.totals:
                self.totals[value] = self._total(value, relation)
            return self.totals[value]
        if relation.kind == "size" or relation.power:
            return self._whole(value)
        return value

    def _is_in_step(self, value: ir.Value) -> bool:
        graph = self.graph
        producer = graph.producer[graph.number[value]] if value in graph.number else -1
        return producer >= 0 and self.in_step[producer]

    @cached_property
    def _marked(self) -> set[ir.Value]:
        """The values that markers give."""
        return {self.graph.values[v] for v in self.graph.made_by(self.graph.gradient_marks)}

    def _total(self, value: ir.Value, relation: Relation) -> ir.Value:
        """A marker on a sum, and what makes the sum of the step out of what is accumulated: the
        mean of the micro-batches of floats, the sum of integers."""
        type_ = ir.RankedTensorType(value.type)
        with self._after(value):
            total = stablehlo.CustomCallOp([type_], [value], GRADIENT).results[0]
            power = relation.power + (1 if is_float(type_) else 0)
            total = self._times_micro_batches(total, power)
            for root, exponent in relation.factors:
                factor = _spread(self._for_step(root), type_)
                combine = stablehlo.multiply if exponent > 0 else stablehlo.divide
                total = combine(total, factor)
        return total

    def _whole(self, value: ir.Value) -> ir.Value:
        """What is made of the batch's size alone, computed at the size of the whole batch."""
        if value in self.wholes or isinstance(value.owner, ir.Block):
            return self.wholes.get(value, value)
        op = value.owner.opview
        outside = [v for v in used_values(op) if v in self.graph.number]
        changed = {v: new for v in outside if (new := self._whole(v)) != v}
        copy = enlarged_copy(self.context, op, changed)
        self.wholes.update(zip(op.results, copy.results, strict=True))
        return self.wholes[value]

    def _return(self) -> None:
        """The results, and what they are: of each micro-batch, or of the step."""
        end = terminator(body(self.main))
        pairs = self.roles.state_pairs()
        results, given = list(self.roles.results), read_results(self.main)
        for r, value in enumerate(self.returned):
            relation = self.at(value)
            role, new = self._result(value, relation, r in pairs)
            if new != value:
                end.operands[r] = new
            if r not in pairs:
                results[r] = replace(results[r], role=self.agreed_role(r, given[r].role, role))
        write_interface(self.main, self.roles.arguments, results)
        types = self.main.type
        returned = [operand.type for operand in end.operands]
        if list(types.results) != returned:
            kind = ir.FunctionType.get(list(types.inputs), returned)
            self.main.attributes["function_type"] = ir.TypeAttr.get(kind)

    def _result(
        self, value: ir.Value, relation: Relation, is_state: bool
    ) -> tuple[ResultRole, ir.Value]:
        last = ResultRole("last")
        if relation.of_samples:
            if not self.made_of_batch[value]:
                return last, self._whole(value)
            with self._after(value):
                new = self._times_micro_batches(value, relation.power)
            return ResultRole("concat", relation.dim), new
        # What no sample changes is planned as a part of the step, which runs once.
        is_total = relation.kind == "sum" and self.made_of_batch[value]
        if is_total and not is_state and not relation.factors:
            power = -1 if is_float(value.type) else 0
            if not self._is_in_step(value) and relation.power in (power, 0):
                return ResultRole("mean" if relation.power else "sum"), value
        new = self._for_step(value)
        if relation.kind == "sum" and _unmarked(new) != new:
            # The step needs an op of its own that returns what was accumulated.
            with self._after(new):
                new = stablehlo.OptimizationBarrierOp([new]).results[0]
        return last, new

    @contextmanager
    def _after(self, value: ir.Value) -> Generator[None]:
        """Inserts ops behind the one that makes a value, at its place in the user's code."""
        maker = value.owner
        if isinstance(maker, ir.Block):
            point = ir.InsertionPoint.at_block_begin(maker)
        else:
            point = ir.InsertionPoint.after(maker)
        with point, self.place(value):
            yield

    def _times_micro_batches(self, value: ir.Value, power: int) -> ir.Value:
        """A value times a power of the number of micro-batches."""
        if not power:
            return value
        number = float(self.num_micro_batches) ** power
        return stablehlo.multiply(value, filled(ir.RankedTensorType(value.type), number))


_OF_SUMS: frozenset[Kind] = frozenset(("sum", "same", "size"))


def _in_step(graph: Graph, roles: Roles, kind: Sequence[Kind]) -> list[bool]:
    """Which ops run once per step: those that make functions of sums, and what only they need.

    Linear functions of sums could be computed on either side. They are on the step's side behind a
    marked gradient. What leads to a new state and to no mark is there from where a state is added,
    and where the step reads its operand anyway: then one value is accumulated and not two. The way
    to a loss stays in the micro-batch.
    """
    marks = set(graph.gradient_marks)
    marked = graph.cone(graph.made_by(marks))
    of_state = graph.depends(roles.state_pairs().values())
    leads = graph.cone(graph.returned[r] for r in roles.state_pairs())
    found: list[bool] = []
    flexible: list[int] = []
    behind = [False] * len(graph.values)
    for o, (operands, results) in enumerate(zip(graph.operands, graph.results, strict=True)):
        kinds = {kind[v] for v in results}
        here = "step" in kinds
        of_sums = "sum" in kinds and _OF_SUMS.issuperset([*kinds, *(kind[v] for v in operands)])
        if of_sums and o not in marks:
            flexible.append(o)
            here = here or any(behind[v] for v in operands)
            joins_state = any(kind[v] == "same" and of_state[v] for v in operands)
            here = here or (o in leads and o not in marked and joins_state)
        found.append(here)
        for v in results:
            behind[v] = here or (o in marks and kinds == {"sum"})
    for o in reversed(flexible):
        # The number travels, and not the array that repeats it.
        if graph.names[o] == "stablehlo.broadcast_in_dim" and not (found[o] or o in marked):
            users = [user for v in graph.results[o] for user in graph.users[v]]
            found[o] = bool(users) and all(found[user] for user in users)
    while True:
        read = {v for o, here in enumerate(found) if here for v in graph.operands[o]}
        made = {v for o, here in enumerate(found) if here for v in graph.results[o]}
        more = [
            o
            for o in flexible
            if not found[o]
            and (
                not made.isdisjoint(graph.operands[o])
                or (o in leads and o not in marked and not read.isdisjoint(graph.operands[o]))
            )
        ]
        if not more:
            return found
        for o in more:
            found[o] = True


def _unmarked(value: ir.Value) -> ir.Value:
    """The value that markers stand on."""
    while not isinstance(value.owner, ir.Block) and marker_of(value.owner.opview) == GRADIENT:
        value = value.owner.operands[0]
    return value


def _spread(number: ir.Value, type_: ir.RankedTensorType) -> ir.Value:
    """A number, all elements of a value, as a tensor of a type."""
    own = ir.RankedTensorType(number.type)
    if own.shape:
        ones = [1] * len(own.shape)
        first = stablehlo.slice(number, [0] * len(ones), ones, ones)
        number = stablehlo.reshape(ir.RankedTensorType.get([], own.element_type), first)
    if own.element_type != type_.element_type:
        number = stablehlo.convert(ir.RankedTensorType.get([], type_.element_type), number)
    if not type_.shape:
        return number
    return stablehlo.broadcast_in_dim(type_, number, ir.DenseI64ArrayAttr.get([]))
