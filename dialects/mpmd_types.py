"""Shardy MPMD's topology and mesh_tensor types, and builders for its ops.

jaxlib has no Python classes for these types. Only this module builds and reads them, as text.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from alpa.dialects.attributes import Part
from alpa.dialects.bindings import ir, mpmd
from alpa.dialects.caches import cached
from alpa.dialects.sharding import Mesh, Sharding

_MESH_NAME = re.compile(r'!mpmd\.mesh_tensor<"([^"]*)", ')


@dataclass(frozen=True)
class MeshTensor:
    """`!mpmd.mesh_tensor`: a global tensor on a mesh, with its sharding if known."""

    mesh: str
    type: ir.RankedTensorType
    sharding: Sharding | None = None

    @classmethod
    def from_type(cls, type_: ir.Type) -> MeshTensor:
        """Raises ValueError for any other type."""
        return _read(type_)

    def to_type(self) -> ir.Type:
        return _write(self)


# A large program has thousands of values of few types.
@cached
def _read(type_: ir.Type) -> MeshTensor:
    text = str(type_)
    match = _MESH_NAME.match(text)
    if match is None:
        raise ValueError(f"expected an !mpmd.mesh_tensor, got {text}")
    tensor, rest = _split_brackets(text[match.end() : -1])
    _, marker, sharding = rest.partition("sharding=")
    if not marker:
        return MeshTensor(match[1], ir.RankedTensorType(ir.Type.parse(tensor, type_.context)))
    value, _ = _split_brackets(sharding)
    return MeshTensor(
        match[1],
        ir.RankedTensorType(ir.Type.parse(tensor, type_.context)),
        Sharding.from_attr(ir.Attribute.parse(f"#sdy.sharding{value}", type_.context)),
    )


@cached
def _write(tensor: MeshTensor) -> ir.Type:
    sharding = ""
    context = tensor.type.context
    if tensor.sharding is not None:
        with context:
            attr = tensor.sharding.to_attr()
        sharding = f", sharding={str(attr).removeprefix('#sdy.sharding')}"
    return ir.Type.parse(f'!mpmd.mesh_tensor<"{tensor.mesh}", {tensor.type}{sharding}>', context)


def _split_brackets(text: str) -> tuple[str, str]:
    """Splits after the bracket that closes the first one opened."""
    depth, quoted = 0, False
    for i, char in enumerate(text):
        if char == '"':
            quoted = not quoted
        elif not quoted and char == "<":
            depth += 1
        elif not quoted and char == ">" and text[i - 1] != "-":
            depth -= 1
            if depth == 0:
                return text[: i + 1], text[i + 1 :]
    raise ValueError(f"unbalanced brackets in {text}")


def topology_attr(meshes: dict[str, Mesh]) -> ir.Attribute:
    """`#mpmd.topology` of named meshes, in order."""
    items = (
        f'<"{name}" : {str(mesh.to_attr()).removeprefix("#sdy.mesh")}>'
        for name, mesh in meshes.items()
    )
    return ir.Attribute.parse(f"#mpmd.topology<{', '.join(items)}>")


def read_topology(function: ir.OpView) -> dict[str, Mesh]:
    """The meshes of a function's `topology` attribute; empty if it has none."""
    attr = function.attributes.get("topology")
    if attr is None:
        return {}
    found = re.findall(r'<"([^"]+)" : (<\[[^\]]*\](?:, device_ids=\[[^\]]*\])?>)>', str(attr))
    return {
        name: Mesh.from_attr(ir.Attribute.parse(f"#sdy.mesh{text}", attr.context))
        for name, text in found
    }


@dataclass(frozen=True)
class Origin:
    """The name of a computation and how often it was transposed (1 = its backward)."""

    name: str
    transpose_count: int = 0

    @classmethod
    def from_attr(cls, attr: ir.Attribute) -> Origin:
        origin = mpmd.UserOriginAttr(attr)
        return cls(origin.user_name, origin.transpose_count)

    @classmethod
    def of(cls, computation: ir.OpView) -> Origin:
        """That of a named computation."""
        return cls.from_attr(computation.attributes["origin"])

    def to_attr(self) -> ir.Attribute:
        return mpmd.UserOriginAttr.get(self.name, self.transpose_count)

    @property
    def layer(self) -> int | None:
        """The number in `layer_3` or `update_3`; None for `update_global`."""
        number = self.name.rpartition("_")[2]
        return int(number) if number.isdigit() else None

    @property
    def part(self) -> Part:
        """The part of a step that the computation belongs to."""
        if self.name.startswith("update_"):
            return "update"
        return "backward" if self.transpose_count else "forward"


def named_computation(
    origin: Origin,
    inputs: Sequence[ir.Value],
    results: Sequence[ir.Type],
    *,
    loc: ir.Location | None = None,
) -> tuple[mpmd.NamedComputationOp, ir.Block]:
    """An `mpmd.named_computation` with an empty block of the inputs' types, to be filled."""
    op = mpmd.NamedComputationOp(list(results), list(inputs), origin.to_attr(), loc=loc)
    types = [value.type for value in inputs]
    block = op.regions[0].blocks.append(*types, arg_locs=[op.location] * len(types))
    return op, block


def mesh_of(fragment: mpmd.FragmentOp) -> str:
    """The name of a fragment's mesh."""
    return ir.StringAttr(fragment.attributes["mesh_name"]).value


def stage_of(fragment: mpmd.FragmentOp) -> int | None:
    """The number of a fragment's stage, if it has one."""
    number = fragment.attributes.get("stage_id", None)
    return None if number is None else ir.IntegerAttr(number).value


def fragment(
    mesh: str,
    origins: Sequence[Origin],
    stage: int | None,
    inputs: Sequence[ir.Value],
    results: Sequence[ir.Type],
    *,
    loc: ir.Location | None = None,
) -> tuple[mpmd.FragmentOp, ir.Block]:
    """An `mpmd.fragment` on mesh tensors; its empty block takes their global types."""
    op = mpmd.FragmentOp(
        list(results),
        list(inputs),
        ir.ArrayAttr.get([origin.to_attr() for origin in origins]),
        mesh,
        stage_id=stage,
        loc=loc,
    )
    types = [MeshTensor.from_type(value.type).type for value in inputs]
    block = op.regions[0].blocks.append(*types, arg_locs=[op.location] * len(types))
    return op, block


def return_(values: Sequence[ir.Value], *, loc: ir.Location | None = None) -> mpmd.ReturnOp:
    """The terminator of named computations and fragments."""
    return mpmd.ReturnOp(list(values), loc=loc)
