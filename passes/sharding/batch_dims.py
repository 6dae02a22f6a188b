"""Finds the dimension of each value that counts the samples of the batch.

Data parallelism splits this dimension. It is followed from the batch arguments through every op by
the factors of the op's sharding rule. A dimension that merges the batch with others counts if the
batch is its major factor.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from alpa.dialects import body, func, ir, mpmd, sdy, stablehlo, terminator
from alpa.dialects.attributes import read_arguments
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.sharding import ShardingRule
from alpa.passes.base import PassError
from alpa.passes.sharding.rules import RuleOf


class BatchDims:
    """The batch dimension of each value of a planned `@main`, inside fragments too.

    `known` has the batch dimensions of further arguments, by number.
    """

    def __init__(
        self, function: func.FuncOp, rule_of: RuleOf, known: Mapping[int, int] | None = None
    ) -> None:
        self.of: dict[ir.Value, int] = {}
        self.sizes: set[int] = set()
        """of the batch dimensions of arguments"""
        self._rule_of = rule_of
        block = body(function)
        for number, dim in (known or {}).items():
            self.of[block.arguments[number]] = dim
        for i, argument in enumerate(read_arguments(function)):
            value = block.arguments[i]
            shape = MeshTensor.from_type(value.type).type.shape
            if argument.role == "batch" and shape:
                self.of[value] = argument.batch_dim or 0
                if not 0 <= self.of[value] < len(shape):
                    raise PassError(
                        function,
                        f"argument {i} is a batch and needs alpa.batch_dim below its rank of "
                        f"{len(shape)}; it has {argument.batch_dim}",
                    )
                self.sizes.add(shape[self.of[value]])
        for op in block.operations:
            if isinstance(op, mpmd.TransferOp):
                self._copy(op.operands, op.results)
            elif isinstance(op, mpmd.FragmentOp):
                inner = body(op)
                self._copy(op.operands, inner.arguments)
                self._visit(inner)
                self._copy(terminator(inner).operands, op.results)

    def factors(self, op: ir.OpView, rule: ShardingRule) -> tuple[int, ...]:
        """The factors of an op that are the batch: at most one, or one for each that it stacks."""
        found: dict[int, None] = {}
        for value, mapping in zip(op.operands, rule.operands, strict=True):
            if value in self.of and mapping[self.of[value]]:
                found[mapping[self.of[value]][0]] = None
        return tuple(found)

    def _copy(self, sources: Sequence[ir.Value], targets: Sequence[ir.Value]) -> None:
        for source, target in zip(sources, targets, strict=True):
            if source in self.of:
                self.of[target] = self.of[source]

    def _visit(self, block: ir.Block) -> None:
        end = terminator(block)
        for op in block.operations:
            if op == end:
                continue
            if isinstance(op, stablehlo.WhileOp):
                for i in range(2):
                    self._copy(op.operands, body(op, i).arguments)
                    self._visit(body(op, i))
                self._copy(op.operands, op.results)
            elif isinstance(op, stablehlo.CaseOp | stablehlo.IfOp):
                for i in range(len(op.regions)):
                    self._visit(body(op, i))
                    self._copy(terminator(body(op, i)).operands, op.results)
            elif isinstance(op, sdy.ShardingConstraintOp):
                self._copy(op.operands, op.results)
            else:
                self._follow_rule(op)

    def _follow_rule(self, op: ir.OpView) -> None:
        if not any(value in self.of for value in op.operands):
            return
        rule = self._rule_of(op)
        if rule is None:
            return
        batch = self.factors(op, rule)
        for value, mapping in zip(op.results, rule.results, strict=True):
            for dim, factors in enumerate(mapping):
                if factors and factors[0] in batch:
                    self.of.setdefault(value, dim)
