"""The ops of a block as plain Python, read through the bindings once.

Each step through the bindings costs a microsecond, and all parts of `ilp-shard-annotate` ask the
same things of tens of thousands of ops. The stage search asks them for dozens of meshes, so what
does not depend on the mesh is kept by an `OpReader`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

from alpa.dialects import ir, stablehlo
from alpa.dialects.attributes import FOLLOW, read_int
from alpa.dialects.sharding import ShardingRule
from alpa.passes.analysis.block_rows import Row, rows_of
from alpa.passes.analysis.graph import has_effects, inner_blocks, type_bytes
from alpa.passes.analysis.op_work import NOTHING, Work
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.device import Device
from alpa.passes.sharding import sums
from alpa.passes.sharding.combining import combined_with
from alpa.passes.sharding.convolutions import sound_rule
from alpa.passes.sharding.op_seconds import block_works
from alpa.passes.sharding.rules import RuleOf

_CONSTANTS = frozenset({"stablehlo.constant", "stablehlo.iota", "sdy.constant"})
_OTHERS = frozenset(
    {
        "stablehlo.while",
        "stablehlo.case",
        "stablehlo.if",
        "stablehlo.optimization_barrier",
        "sdy.sharding_constraint",
        "sdy.manual_computation",
    }
)
"""Ops that are sharded otherwise than by a rule (`op_poser.py`)."""

_T = TypeVar("_T")
_UNKNOWN = object()


class Cache:
    """Things that are made once for a key."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}

    def once(self, key: Hashable, make: Callable[[], _T]) -> _T:
        """What was made for a key, which is made the first time."""
        found = self._known.get(key, _UNKNOWN)  # Most calls find it, and hashing a key takes time.
        if found is _UNKNOWN:
            found = self._known[key] = make()
        return found


@dataclass(frozen=True, eq=False)
class Op:
    """An op with the values that it had when it was read."""

    view: ir.OpView
    name: str
    operands: tuple[ir.Value, ...]
    results: tuple[ir.Value, ...]
    follow: int | None
    """the operand whose sharding it takes over, where `alpa.follow` names one"""
    work: Work
    """of one execution"""

    @classmethod
    def of(cls, row: Row, work: Work = NOTHING) -> Op:
        """An op that was read."""
        return cls(*row, read_int(row.op, FOLLOW), work)

    @cached_property
    def types(self) -> tuple[ir.Type, ...]:
        """Of the operands, then of the results."""
        return tuple(value.type for value in (*self.operands, *self.results))

    @cached_property
    def operand_bytes(self) -> int:
        """Of its largest operand, before it is sharded."""
        return max(map(type_bytes, self.types[: len(self.operands)]), default=0)

    @cached_property
    def is_free(self) -> bool:
        """Whether it is computed in whatever layout is used."""
        if self.name == "stablehlo.broadcast_in_dim":
            return type_bytes(self.operands[0].type) < type_bytes(self.results[0].type)
        return self.name in _CONSTANTS

    @cached_property
    def is_scalar(self) -> bool:
        """Whether it computes scalars of scalars, and does nothing else."""
        return all(
            isinstance(type_, ir.RankedTensorType) and type_.rank == 0 for type_ in self.types
        ) and not has_effects(self.view)

    @cached_property
    def is_ordinary(self) -> bool:
        """Whether it is sharded by its rule, wherever its operands are."""
        return not (self.name in _OTHERS or self.is_free or self.is_scalar)

    @cached_property
    def numbers(self) -> ir.Attribute | None:
        """The dimension numbers of a scatter, on which its strategies depend (`scatters.py`)."""
        if not isinstance(self.view, stablehlo.ScatterOp):
            return None
        return self.view.scatter_dimension_numbers

    @cached_property
    def starts_sums(self) -> bool:
        """Whether it sums from zero (`sums.starts_sums`)."""
        return sums.starts_sums(self.view)

    @cached_property
    def linear_operands(self) -> tuple[int, ...]:
        """The operands in which it is linear (`sums.linear_operands`)."""
        return sums.linear_operands(self.view)


@dataclass(frozen=True, eq=False)
class Kind:
    """Ops of one name with equal rules, work, types and numbers. Where their operands are alike, so
    are their strategies and costs on a mesh."""

    rule: ShardingRule


@dataclass(frozen=True, eq=False)
class OpReader:
    """Reads the ops of one program, each once. Problems of the program on all meshes share it."""

    device: Device
    rule_of: RuleOf
    kinds: Cache = field(default_factory=Cache)
    """of ops; readers of problems that share what is made for a mesh share them, too"""
    kept: Cache = field(default_factory=Cache)
    """what else depends on no mesh"""
    known: dict[ir.Block, list[Work]] = field(default_factory=dict[ir.Block, list[Work]])
    """the work of the ops of blocks and their terminators, as far as it was found"""

    def ops(self, block: ir.Block) -> list[Op]:
        """The ops of a block but its terminator."""

        def make() -> list[Op]:
            rows = self._rows(block)
            return list(map(Op.of, rows[:-1], self._works(block, rows)))

        return self.kept.once(("ops", block), make)

    def _rows(self, block: ir.Block) -> list[Row]:
        return self.kept.once(("rows", block), lambda: rows_of(block))

    def _works(self, block: ir.Block, rows: Sequence[Row]) -> list[Work]:
        """The work of each op of a block but its terminator."""
        if block not in self.known:
            works = block_works(block, self.device, self.known, rows)
            self.known.setdefault(block, [*works, NOTHING])
        return self.known[block][:-1]

    def read(self, block: ir.Block) -> None:
        """Reads all ops of a block and of those in their regions. Raises PassError."""
        for op in self.ops(block):
            self.kind(op)
        for inner in inner_blocks(block):
            self.ops(inner)

    def end(self, block: ir.Block) -> Op:
        """The terminator of a block."""
        return self.kept.once(("end", block), lambda: Op.of(self._rows(block)[-1]))

    def rule(self, op: Op) -> ShardingRule | None:
        """The sharding rule of an op, without what XLA gets wrong. Raises PassError."""

        def make() -> ShardingRule | None:
            rule = self.rule_of(op.view)
            if rule is not None and isinstance(op.view, stablehlo.ConvolutionOp):
                return sound_rule(op.view, rule)
            return rule

        return self.kept.once(("rule", op), make)

    def kind(self, op: Op) -> Kind | None:
        """The kind of an op that has a sharding rule. Raises PassError."""

        def make() -> Kind | None:
            rule = self.rule(op)
            if rule is None:
                return None
            # What is sound for a convolution depends on more than its rule.
            alone = op if isinstance(op.view, stablehlo.ConvolutionOp) else None
            key = op.name, rule, op.work, op.types, op.numbers, alone
            return self.kinds.once(key, lambda: Kind(rule))

        return self.kept.once(op, make)

    def combined_with(self, value: ir.Value, step: ir.OpView | None, mesh: LogicalMesh) -> int:
        """`combining.combined_with` of a value of a fragment, which is the same on all meshes that
        combine."""
        if not mesh.combines:
            return 1
        return self.kept.once(value, lambda: combined_with(value, step, mesh))

    def deferrable(self, block: ir.Block, results: Sequence[int]) -> set[ir.Value]:
        """The values of a fragment that may stay unreduced (`sums.deferrable`)."""
        if not results:  # as in all forward and update parts
            return set()
        key = ("deferrable", block, *results)
        return self.kept.once(key, lambda: sums.deferrable(block, results, self._rows(block)))
