"""What is known of the values in a manual computation, beside their relations (`manual.py`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from alpa.dialects import ir
from alpa.dialects.sharding import Mesh
from alpa.passes.analysis.collective_axes import collective_axes
from alpa.passes.analysis.graph import used_values
from alpa.passes.analysis.micro_batches.relation import Relation, mixed
from alpa.passes.analysis.op_kinds import COLLECTIVES, CONTROL_FLOW

_ARITHMETIC: dict[str, Callable[..., np.ndarray]] = {
    "stablehlo.add": np.add,
    "stablehlo.convert": np.asarray,
    "stablehlo.divide": np.floor_divide,
    "stablehlo.multiply": np.multiply,
    "stablehlo.remainder": np.remainder,
    "stablehlo.reshape": np.asarray,
}
"""Of integers of at least 0, which positions on the axes of a mesh are made with."""
_APART = "computes samples with values that differ between the shards of the samples"
PARTIAL = "computes with the sums of each shard's samples, which are not added up yet"


@dataclass(frozen=True, kw_only=True)
class Shards:
    """What is known of the values of a manual computation's body, beside their relations."""

    mesh: Mesh
    samples: tuple[str, ...]
    """the axes that split the samples, each of two devices or more"""
    differing: set[ir.Value] = field(default_factory=set[ir.Value])
    """`same` values that differ along these axes, and partial sums"""
    numbers: dict[ir.Value, np.ndarray] = field(default_factory=dict[ir.Value, np.ndarray])
    """integers by device, where they follow from the device's number"""

    def axes_of(self, op: ir.OpView) -> frozenset[str]:
        """Those of two devices or more that a collective is over. Raises PassError."""
        names = [name for name, _ in self.mesh.axes]
        return frozenset(names[axis] for axis in collective_axes(op, names, self.mesh.sizes))

    def checked(
        self, relations: Mapping[ir.Value, Relation], op: ir.OpView, found: Sequence[Relation]
    ) -> Sequence[Relation]:
        """The relations of an op's results, mixed where they hold for W' only.

        Args:
            relations: of all values before it.
            op: the op.
            found: the relations of its results on each shard.
        """
        name = op.operation.name
        if not self.samples or name in COLLECTIVES:
            return found
        if self._is_number(op):
            return found
        read = [*op.operands, *(used_values(op) if name in CONTROL_FLOW else ())]
        inside = [value for value in read if value in relations]
        kinds = [(relations[value], value in self.differing) for value in inside]
        rows = any(it.of_samples for it, _ in kinds)
        partial = any(it.kind == "sum" and differs for it, differs in kinds)
        fixed = any(it.kind == "same" and differs for it, differs in kinds)
        looks_inside = name in CONTROL_FLOW  # and has checked each op there
        if fixed and (rows or partial) and not looks_inside:
            return [mixed(op, _APART)] * len(found)
        checked: list[Relation] = []
        for value, it in zip(op.results, found, strict=True):
            is_apart = it.of_samples and fixed and not looks_inside
            if (it.kind in ("step", "size") and (partial or fixed)) or is_apart:
                it = mixed(op, PARTIAL if partial else _APART)
            differs = (it.kind == "sum" and (rows or partial)) or (it.kind == "same" and fixed)
            if differs and not looks_inside:
                self.differing.add(value)
            checked.append(it)
        return checked

    def one_of(
        self, op: ir.OpView, sources: Sequence[ir.Value], value: ir.Value, relation: Relation
    ) -> Relation:
        """The relation of a value that a loop or a branch takes from one of several.

        Which one it takes is the same on all devices, so the value differs along the axes of the
        samples if one of them does. Rows may not.
        """
        if self.differing.isdisjoint(sources) or relation.is_mixed:
            return relation
        if relation.kind not in ("same", "sum"):
            return mixed(op, _APART)
        self.differing.add(value)
        return relation

    def _is_number(self, op: ir.OpView) -> bool:
        """Whether an op's result follows from the device's number; notes what it is."""
        name = op.operation.name
        if name == "stablehlo.partition_id":
            found = np.arange(self.mesh.size)
        elif name == "stablehlo.constant":
            value = op.attributes["value"]
            if not isinstance(value, ir.DenseIntElementsAttr) or len(value) != 1:
                return False
            found = np.full(self.mesh.size, value[0])
        elif (
            name in _ARITHMETIC
            and isinstance(ir.RankedTensorType(op.results[0].type).element_type, ir.IntegerType)
            and all(value in self.numbers for value in op.operands)
        ):
            found = _ARITHMETIC[name](*(self.numbers[value] for value in op.operands))
        else:
            return False
        (result,) = op.results
        self.numbers[result] = found
        by_axis = found.reshape(self.mesh.sizes)
        along = [axis for axis, (name, _) in enumerate(self.mesh.axes) if name in self.samples]
        if any((by_axis != by_axis.take([0], axis=axis)).any() for axis in along):
            self.differing.add(result)
        return True
