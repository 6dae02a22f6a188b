"""Shardy's shardings, meshes and op sharding rules as frozen dataclasses, with conversions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from alpa.dialects.bindings import func, ir, sdy
from alpa.dialects.caches import cached


@dataclass(frozen=True)
class AxisRef:
    """A mesh axis, or the part of it of `size` devices that starts after `pre_size`."""

    name: str
    sub: tuple[int, int] | None = None

    @classmethod
    def from_attr(cls, attr: ir.Attribute) -> AxisRef:
        """Read `#sdy<axis_ref>`."""
        ref = sdy.AxisRefAttr(attr)
        if ref.sub_axis_info is None:
            return cls(ref.name)
        info = sdy.SubAxisInfoAttr(ref.sub_axis_info)
        return cls(ref.name, (info.pre_size, info.size))

    def to_attr(self) -> ir.Attribute:
        """Build the attribute in the current context."""
        info = sdy.SubAxisInfoAttr.get(*self.sub) if self.sub else None
        return sdy.AxisRefAttr.get(self.name, info)


@dataclass(frozen=True)
class Mesh:
    """`sdy.mesh`: axis names with their sizes, and device ids if they are not an iota."""

    axes: tuple[tuple[str, int], ...]
    device_ids: tuple[int, ...] = ()

    @classmethod
    def from_attr(cls, attr: ir.Attribute) -> Mesh:
        """Read `#sdy.mesh`."""
        mesh = sdy.MeshAttr(attr)
        axes = (sdy.MeshAxisAttr(axis) for axis in mesh.axes)
        return cls(tuple((a.name, a.size) for a in axes), tuple(mesh.device_ids))

    def to_attr(self) -> ir.Attribute:
        """Build the attribute in the current context."""
        axes = [sdy.MeshAxisAttr.get(name, size) for name, size in self.axes]
        return sdy.MeshAttr.get(axes, list(self.device_ids))

    @property
    def sizes(self) -> tuple[int, ...]:
        """Devices along each axis."""
        return tuple(size for _, size in self.axes)

    @property
    def size(self) -> int:
        """Number of devices."""
        total = 1
        for _, size in self.axes:
            total *= size
        return total

    def axis_size(self, axis: AxisRef) -> int:
        """Devices along an axis or sub-axis; KeyError if the mesh has no such axis."""
        return axis.sub[1] if axis.sub else dict(self.axes)[axis.name]


@dataclass(frozen=True)
class Sharding:
    """`#sdy.sharding`: for each dimension the axes that shard it, major first.

    `open_dims` are the dimensions that propagation may shard further; planned IR has none.
    """

    mesh: str
    dims: tuple[tuple[AxisRef, ...], ...]
    open_dims: frozenset[int] = frozenset()
    replicated: tuple[AxisRef, ...] = ()
    unreduced: tuple[AxisRef, ...] = ()

    def __hash__(self) -> int:
        """Shardings are keys of caches, so the hash is computed once."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.mesh, self.dims, self.open_dims, self.replicated, self.unreduced))

    @classmethod
    def of(cls, mesh: str, dims: tuple[tuple[str, ...], ...]) -> Sharding:
        """A closed sharding from axis names, one tuple per dimension."""
        return cls(mesh, tuple(tuple(AxisRef(axis) for axis in dim) for dim in dims))

    @classmethod
    def open(cls, mesh: str, rank: int) -> Sharding:
        """The sharding of a tensor of this rank that asks for nothing."""
        return cls(mesh, ((),) * rank, open_dims=frozenset(range(rank)))

    @property
    def is_open(self) -> bool:
        """Whether the sharding asks for nothing."""
        return self == Sharding.open(self.mesh, len(self.dims))

    @classmethod
    def from_attr(cls, attr: ir.Attribute) -> Sharding:
        """Reads `#sdy.sharding`. Raises ValueError for an inlined mesh, which is not supported."""
        return _read_sharding(attr)

    def to_attr(self) -> ir.Attribute:
        """Build the attribute in the current context."""
        dims = [
            sdy.DimensionShardingAttr.get(
                [axis.to_attr() for axis in axes], is_closed=i not in self.open_dims
            )
            for i, axes in enumerate(self.dims)
        ]
        return sdy.TensorShardingAttr.get(
            self.mesh,
            dims,
            [axis.to_attr() for axis in self.replicated],
            [axis.to_attr() for axis in self.unreduced],
        )

    def on(self, mesh: Mesh) -> Sharding:
        """The sharding without axes of one device in a mesh, which split nothing."""

        def cutting(axes: tuple[AxisRef, ...]) -> tuple[AxisRef, ...]:
            return tuple(axis for axis in axes if mesh.axis_size(axis) > 1)

        dims = tuple(cutting(dim) for dim in self.dims)
        return replace(self, dims=dims, replicated=cutting(self.replicated))

    def admits(self, other: Sharding) -> bool:
        """Whether its open dimensions allow another, closed sharding."""
        pairs = zip(self.dims, other.dims, strict=True)
        return not {axis for dim in other.dims for axis in dim} & {*self.replicated} and all(
            axes == given or (d in self.open_dims and axes[: len(given)] == given)
            for d, (given, axes) in enumerate(pairs)
        )

    @property
    def axis_names(self) -> tuple[tuple[str, ...], ...]:
        """The axis names of each dimension."""
        return tuple(tuple(axis.name for axis in dim) for dim in self.dims)


# Cached like rules, see `_read_rule`.
@cached
def _read_sharding(attr: ir.Attribute) -> Sharding:
    sharding = sdy.TensorShardingAttr(attr)
    if not isinstance(sharding.mesh_or_ref, ir.FlatSymbolRefAttr):
        raise ValueError(
            f"{attr} holds its mesh inline; run sdy-lift-inlined-meshes first to name it"
        )
    dims = [sdy.DimensionShardingAttr(d) for d in sharding.dimension_shardings]
    return Sharding(
        sharding.mesh_or_ref.value,
        tuple(tuple(AxisRef.from_attr(axis) for axis in dim.axes) for dim in dims),
        frozenset(i for i, dim in enumerate(dims) if not dim.is_closed),
        tuple(AxisRef.from_attr(axis) for axis in sharding.replicated_axes),
        tuple(AxisRef.from_attr(axis) for axis in sharding.unreduced_axes),
    )


def narrower(one: Sharding, other: Sharding, mesh: Mesh) -> Sharding | None:
    """Of two shardings over a mesh, the one that the other admits; None if neither admits."""
    a, b = one.on(mesh), replace(other.on(mesh), mesh=one.mesh)
    if a == b or (not a.open_dims and b.admits(a)):
        return one
    return other if not b.open_dims and a.admits(b) else None


def signature_shardings(
    function: func.FuncOp, name: Literal["arg_attrs", "res_attrs"]
) -> dict[int, Sharding]:
    """The `sdy.sharding`s of a function's arguments or results by number.

    Raises:
        ValueError: one holds its mesh inline.
    """
    if name not in function.attributes:
        return {}
    dictionaries = (ir.DictAttr(attrs) for attrs in ir.ArrayAttr(function.attributes[name]))
    return {
        number: Sharding.from_attr(attrs["sdy.sharding"])
        for number, attrs in enumerate(dictionaries)
        if "sdy.sharding" in attrs
    }


def op_shardings(op: ir.OpView | ir.Operation) -> tuple[Sharding, ...] | None:
    """The `sdy.sharding` of an op's results, or None."""
    attr = op.attributes.get("sdy.sharding")
    return None if attr is None else _read_per_value(attr)


# Cached like rules, see `_read_rule`.
@cached
def _read_per_value(attr: ir.Attribute) -> tuple[Sharding, ...]:
    per_value = sdy.TensorShardingPerValueAttr(attr)
    return tuple(Sharding.from_attr(sharding) for sharding in per_value.shardings)


def set_op_shardings(op: ir.OpView | ir.Operation, shardings: tuple[Sharding, ...]) -> None:
    """Writes the `sdy.sharding` of an op's results."""
    op.attributes["sdy.sharding"] = _per_value(shardings, op.context)


# Building an attribute takes about 40 us, and a large model has ten thousand of a few different
# ones. The context is part of the key: an attribute belongs to one.
@cached
def _per_value(shardings: tuple[Sharding, ...], context: ir.Context) -> ir.Attribute:
    with context:
        return sdy.TensorShardingPerValueAttr.get([sharding.to_attr() for sharding in shardings])


@dataclass(frozen=True)
class ShardingRule:
    """`#sdy.op_sharding_rule`: the factors of each dimension of each operand and result.

    `operands[o][d]` and `results[r][d]` hold factor indices, major first. `padded`, which the
    attribute lacks, are the factors that one axis may cut into uneven shards.
    """

    factor_sizes: tuple[int, ...]
    operands: tuple[tuple[tuple[int, ...], ...], ...]
    results: tuple[tuple[tuple[int, ...], ...], ...]
    reduction: frozenset[int] = frozenset()
    need_replication: frozenset[int] = frozenset()
    permutation: frozenset[int] = frozenset()
    blocked: frozenset[int] = frozenset()
    padded: frozenset[int] = frozenset()

    def __hash__(self) -> int:
        """Rules are keys of caches, so the hash is computed once."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.factor_sizes, self.operands, self.results, self.reduction))

    @classmethod
    def from_attr(cls, attr: ir.Attribute) -> ShardingRule:
        """Read `#sdy.op_sharding_rule`."""
        return _read_rule(attr)

    def to_attr(self) -> ir.Attribute:
        """Build the attribute in the current context."""

        def mappings(tensors: tuple[tuple[tuple[int, ...], ...], ...]) -> list[ir.Attribute]:
            return [
                sdy.TensorMappingAttr.get([sdy.DimMappingAttr.get(list(dim)) for dim in tensor])
                for tensor in tensors
            ]

        return sdy.OpShardingRuleAttr.get(
            list(self.factor_sizes),
            mappings(self.operands),
            mappings(self.results),
            sorted(self.reduction),
            sorted(self.need_replication),
            sorted(self.permutation),
            sorted(self.blocked),
            is_custom=True,
        )


# Reading a rule through the bindings takes about 30 us, and large models repeat a few of them.
@cached
def _read_rule(attr: ir.Attribute) -> ShardingRule:
    rule = sdy.OpShardingRuleAttr(attr)

    def tensors(mappings: list[ir.Attribute]) -> tuple[tuple[tuple[int, ...], ...], ...]:
        return tuple(
            tuple(
                tuple(sdy.DimMappingAttr(dim).factor_indices)
                for dim in sdy.TensorMappingAttr(mapping).dim_mappings
            )
            for mapping in mappings
        )

    return ShardingRule(
        tuple(rule.factor_sizes),
        tensors(rule.operand_mappings),
        tensors(rule.result_mappings),
        frozenset(rule.reduction_factors),
        frozenset(rule.need_replication_factors),
        frozenset(rule.permutation_factors),
        frozenset(rule.blocked_propagation_factors),
    )
