"""The results of a step whose values are related: what is refused, and what each result is."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from alpa.dialects import func, ir
from alpa.dialects.attributes import ResultRole, signature_attrs
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.micro_batches.context import Context
from alpa.passes.analysis.micro_batches.relation import Relation
from alpa.passes.analysis.roles import Roles
from alpa.passes.base import PassError

_ONE_MICRO_BATCH = "plan with 1 micro-batch (the batch can still be sharded)"
REMEDIES = (
    f"{_ONE_MICRO_BATCH}, or, if each micro-batch is meant to be a batch of its own, with "
    'micro-batches=independent (micro_batches="independent" in Python)'
)


@dataclass(frozen=True, kw_only=True)
class RelatedStep:
    """A step with the relations of its values to those of the whole batch."""

    main: func.FuncOp
    graph: Graph
    roles: Roles
    context: Context

    @property
    def num_micro_batches(self) -> int:
        return self.context.num_micro_batches

    @property
    def returned(self) -> list[ir.Value]:
        return [self.graph.values[v] for v in self.graph.returned]

    @cached_property
    def made_of_batch(self) -> dict[ir.Value, bool]:
        """Whether a value is made of the batch's samples, and not of its size alone."""
        batch = [a for a, it in enumerate(self.roles.arguments) if it.role == "batch"]
        return dict(zip(self.graph.values, self.graph.depends(batch), strict=True))

    def at(self, value: ir.Value) -> Relation:
        return self.context.at(value)

    def place(self, value: ir.Value) -> ir.Location:
        """Where a value is made."""
        return self.main.location if isinstance(value.owner, ir.Block) else value.owner.location

    def check(self) -> None:
        """Raises PassError where a result is not what the whole batch gives."""
        pairs = self.roles.state_pairs()
        for r, value in enumerate(self.returned):
            reason, remedy = self.at(value).reason, ""
            if reason is not None:
                place = reason.location
                op = reason.op.partition(".")[2]
                what = f"{op} {reason.text}, and {self._name(r)} depends on it"
                remedy = f"{reason.remedy}, or " if reason.remedy else ""
            elif (problem := self._problem(value, is_state=r in pairs)) is not None:
                place, what = self.place(value), f"{self._name(r)} {problem}"
            else:
                continue
            raise PassError(
                place,
                f"{what}: {self.num_micro_batches} micro-batches would not give what the whole "
                f"batch gives; {remedy}{self._remedies(r)}",
            )

    def _problem(self, value: ir.Value, *, is_state: bool) -> str | None:
        """What a result is that micro-batches do not give."""
        relation, of_samples = self.at(value), self.made_of_batch[value]
        if relation.kind == "rows" and is_state:
            return "is a new state, and grows with the batch"
        if relation.kind == "same" and is_state and of_samples:
            return (
                "is a new state that no sample changes, made in a loop, a branch or a barrier "
                "that computes with samples, too (compute the two apart)"
            )
        if relation.kind == "rows" and of_samples and relation.outer != 1:
            return "holds the samples in several blocks, which cannot be joined"
        if relation.kind == "rows" and of_samples and relation.factors:
            return "holds samples multiplied by a function of all samples"
        if relation.kind in ("sum", "step") and self._grows(value):
            return "repeats a function of all samples for each of them"
        return None

    def _grows(self, value: ir.Value) -> bool:
        maker = value.owner
        if isinstance(maker, ir.Block):
            return False
        wholes = self.context.whole_shapes(maker.opview)
        return wholes[ir.OpResult(value).result_number] != self.context.shape(value)

    def _remedies(self, r: int) -> str:
        """What else can be asked for. Micro-batches of their own cannot go on with their samples
        after the update, which runs once behind the marks."""
        graph = self.graph
        marked = graph.depends(graph.made_by(graph.gradient_marks))
        leads = graph.cone([graph.returned[r]])
        goes_on = any(
            any(marked[v] for v in operands)
            and any(self.made_of_batch[graph.values[v]] and not marked[v] for v in operands)
            and any(self.at(graph.values[v]).is_mixed for v in graph.results[o])
            for o, operands in enumerate(graph.operands)
            if o in leads
        )
        return _ONE_MICRO_BATCH if goes_on else REMEDIES

    def _name(self, r: int) -> str:
        attrs = signature_attrs(self.main, "res_attrs", len(self.graph.returned))[r]
        info = attrs.get("jax.result_info")
        named = isinstance(info, ir.StringAttr) and info.value
        return named or f"result {r}"

    def agreed_role(self, r: int, given: ResultRole | None, proven: ResultRole) -> ResultRole:
        """What the program says of a result; it has to be what was proven.

        Where the whole batch is not known, the program may tell a mean from a sum.
        """
        if given is None or given == proven:
            return proven
        if given.kind in ("mean", "sum") and proven.kind in ("mean", "sum"):
            return given
        raise PassError(
            self.main,
            f"{self._name(r)} is said to be {given} of the micro-batches, and it is {proven}; "
            f"leave its alpa.result out, or say {proven}",
        )
