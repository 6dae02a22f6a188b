"""What the rules of all ops share: the relations found so far, shapes, and what W says."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from alpa.dialects import ir
from alpa.dialects.attributes import WHOLE
from alpa.dialects.caches import cached
from alpa.dialects.records import entries
from alpa.passes.analysis.micro_batches.relation import STEP, Relation, Scale, mixed
from alpa.passes.analysis.micro_batches.shards import Shards

Shape = tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class Context:
    """The program's micro-batches, and the relations of its values as far as they are known.

    W is the program for the whole batch. `whole_is_known`: W was given (`whole.py`), and
    `alpa.whole` on the ops says how they differ in W. Without W, `sum_power` is the power of the
    batch size that sums of floats over samples are assumed to have: -1 if losses are means, because
    the divisor of a mean looks like any other number.
    """

    num_micro_batches: int
    whole_is_known: bool
    sum_power: int = 0
    samples: int = 1
    """a divisor of how many there are in a micro-batch"""
    relations: dict[ir.Value, Relation] = field(default_factory=dict[ir.Value, Relation])
    substituted: set[tuple[ir.Value, int]] = field(default_factory=set[tuple[ir.Value, int]])
    """operands, by the op's result and their number, that micro-batches see as one: the number
    itself is a factor of the step"""
    shapes: dict[ir.Type, Shape] = field(default_factory=dict[ir.Type, Shape])
    alike: dict[Hashable, list[Relation]] = field(default_factory=dict[Hashable, list[Relation]])
    """the relations of ops that were found, by all that they follow from"""
    shards: Shards | None = None
    """inside a manual computation"""

    def shape(self, value: ir.Value) -> Shape:
        return self.shape_of(value.type)

    def shape_of(self, type_: ir.Type) -> Shape:
        known = self.shapes.get(type_)
        if known is None:
            ranked = isinstance(type_, ir.RankedTensorType)
            known = self.shapes[type_] = tuple(type_.shape) if ranked else ()
        return known

    def at(self, value: ir.Value) -> Relation:
        return self.relations[value]

    def one_of(
        self, op: ir.OpView, sources: Sequence[ir.Value], value: ir.Value, relation: Relation
    ) -> Relation:
        """As `Shards.one_of`; the relation as it is outside of manual computations."""
        return relation if self.shards is None else self.shards.one_of(op, sources, value, relation)

    def differs(self, value: ir.Value) -> bool:
        """Whether a value in a manual computation differs along the axes of the samples."""
        return self.shards is not None and value in self.shards.differing

    @property
    def sums_are_parts_of_means(self) -> bool:
        """Whether sums of floats over samples are taken for parts of means: W is not known."""
        return not self.whole_is_known and self.sum_power != 0

    def power_of_sums(self, value: ir.Value) -> int:
        """The power that a sum over samples has where W does not tell, by its type."""
        known = self.whole_is_known or not is_float(value.type)
        return 0 if known else self.sum_power

    def sum_of(self, op: ir.OpView, scale: Scale) -> Relation:
        """The relation of what an op adds up of samples that are multiplied by a scale."""
        power, factors = scale
        power += self.power_of_sums(op.results[0])
        return Relation(kind="sum", power=power, factors=factors)

    def taken_out(self, op: ir.OpView, number: int, relation: Relation) -> Relation:
        """Replaces a factor of the step by one; the op's result is multiplied by it later.

        Applies only if all elements are the same number.
        """
        operand = op.operands[number]
        if relation.root is None or not is_real(operand.type):
            return relation
        self.substituted.add((op.results[0], number))
        dims = frozenset(range(len(self.shape(operand))))
        return Relation(kind="same", free=dims, splat=1.0, factors=((relation.root, 1),))

    def whole(self, op: ir.OpView) -> dict[str, ir.Attribute]:
        """What is different of an op in W, by name; `types` are those of its results."""
        if not self.whole_is_known:
            return {}
        attr = op.attributes.get(WHOLE)
        return {} if attr is None else entries(ir.DictAttr(attr))

    def whole_shapes(self, op: ir.OpView) -> list[Shape]:
        """The shapes of an op's results in W."""
        types = self.whole(op).get("types")
        if types is None:
            return [self.shape(result) for result in op.results]
        return [self.shape_of(ir.TypeAttr(attr).value) for attr in ir.ArrayAttr(types)]

    def may_count_samples(self, size: int) -> bool:
        """Whether a dimension without samples could have the length of the batch."""
        return not self.whole_is_known and self.sum_power == 0 and size % self.samples == 0

    def agreed(self, op: ir.OpView, results: Sequence[Relation]) -> list[Relation]:
        """The relations whose shapes agree with W; the others become mixed.

        If a value is equal along a dimension that is longer in W, that dimension holds rows. If it
        is also a sum, it becomes a function of sums, because it has more elements in W.
        """
        if not self.whole_is_known:
            return list(results)
        shapes = self.whole_shapes(op)
        return [
            self._agree(op, relation, self.shape(result), whole)
            for result, relation, whole in zip(op.results, results, shapes, strict=True)
        ]

    def _agree(self, op: ir.OpView, relation: Relation, micro: Shape, whole: Shape) -> Relation:
        if relation.kind in ("mixed", "size"):
            return relation
        if relation.of_samples:
            expected = list(micro)
            expected[relation.dim] *= self.num_micro_batches
            if tuple(expected) == whole:
                return relation
        elif micro == whole:
            return relation
        elif len(micro) == len(whole):
            dim, *others = (d for d, (a, b) in enumerate(zip(micro, whole, strict=True)) if a != b)
            alike = dim in relation.free or relation.is_zero
            fits = not others and micro[dim] * self.num_micro_batches == whole[dim]
            if alike and fits and relation.kind == "same":
                free = relation.free | {dim}
                return dataclasses.replace(relation, kind="rows", dim=dim, free=free)
            if alike and fits and relation.of_step:
                free = relation.free | {dim}
                return dataclasses.replace(STEP, free=free, root=relation.root)
        return mixed(
            op,
            f"makes {shape_text(micro)} of a micro-batch and {shape_text(whole)} of the whole "
            "batch, and not sample by sample",
        )


def shape_text(shape: Shape) -> str:
    """A shape in words."""
    return "x".join(map(str, shape)) or "one number"


def is_float(type_: ir.Type) -> bool:
    """Whether elements are real or complex numbers, and not integers."""
    element = type_.element_type if isinstance(type_, ir.RankedTensorType) else type_
    return isinstance(element, ir.FloatType | ir.ComplexType)


@cached
def is_complex(type_: ir.Type) -> bool:
    """Whether elements are complex numbers, constants of which the bindings cannot read."""
    return isinstance(ir.RankedTensorType(type_).element_type, ir.ComplexType)


def is_real(type_: ir.Type) -> bool:
    """Whether elements are real numbers."""
    return is_float(type_) and not is_complex(type_)


def is_bool(type_: ir.Type) -> bool:
    """Whether elements are truth values, whose sum is an or."""
    element = ir.RankedTensorType(type_).element_type
    return isinstance(element, ir.IntegerType) and element.width == 1
