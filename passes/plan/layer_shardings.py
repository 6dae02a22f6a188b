"""How the contractions of each stage split their inputs, parameters and results over the mesh.

These are the matrix products and convolutions of the forward parts, as in figure 12 of the Alpa
paper. Contractions in a row that repeat, with the same shapes and shardings, are one block: equal
layers are shown once, and so are stages of equal blocks.

Parameters are operands that no sample of the batch goes into; if no argument is the batch, all
operands are inputs. Names and lines are those of the
program's locations, which a plan in a file lacks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Literal

from alpa.dialects import body, ir, main_function, stablehlo, walk
from alpa.passes.pipelines.diagnostics import Place, name_of, place_of
from alpa.passes.plan.annotated import Annotated, annotated_fragments
from alpa.passes.plan.data import Program
from alpa.passes.sharding.batch_dims import BatchDims
from alpa.passes.sharding.rules import populated
from alpa.passes.sharding.sums import unreduced_axes

Use = Literal["input", "parameter", "activation"]


@dataclass(frozen=True, kw_only=True)
class ShardedTensor:
    """A tensor of a contraction: the axes that split each dimension, and what a device holds."""

    use: Use
    """an activation is a result"""
    shape: tuple[int, ...]
    dtype: str
    dims: tuple[tuple[str, ...], ...]
    unreduced: tuple[str, ...]
    """axes over which the devices hold parts of a sum"""
    local_bytes: int

    @property
    def in_words(self) -> str:
        """`8 x 1024/axis1 x 64`: the sizes, and the axes that split them."""
        sizes = [
            "/".join((str(size), *axes)) for size, axes in zip(self.shape, self.dims, strict=True)
        ]
        return " x ".join(sizes) or "scalar"


@dataclass(frozen=True, kw_only=True)
class Contraction:
    """A matrix product or a convolution; its operands in order, then its result."""

    op: str
    tensors: tuple[ShardedTensor, ...]
    name: str = field(compare=False)
    """the end of JAX's, or the op's"""
    place: Place = field(compare=False)


@dataclass(frozen=True, kw_only=True)
class Block:
    """Contractions in a row that come `repeats` times."""

    contractions: tuple[Contraction, ...]
    repeats: int


@dataclass(frozen=True, kw_only=True)
class StageShardings:
    """The blocks of stages that are equal in them, and the axes of their meshes."""

    meshes: tuple[str, ...]
    axes: tuple[tuple[str, int], ...]
    blocks: tuple[Block, ...]


def layer_shardings(module: ir.Module, program: Program) -> list[StageShardings]:
    """Those of a planned module with shardings, in the order of its meshes.

    Raises:
        PassError: a sharding does not fit its mesh.
    """
    found: dict[str, list[Contraction]] = {mesh.name: [] for mesh in program.meshes}
    with populated(module) as rule_of:
        batch = BatchDims(main_function(module), rule_of)
        for one, annotated in zip(program.fragments, annotated_fragments(module), strict=True):
            if one.runs_forward:
                found[one.mesh] += _contractions(annotated, batch)
    equal: dict[tuple[tuple[tuple[str, int], ...], tuple[Block, ...]], list[str]] = {}
    for mesh in program.meshes:
        equal.setdefault((mesh.axes, tuple(blocks(found[mesh.name]))), []).append(mesh.name)
    return [
        StageShardings(meshes=tuple(names), axes=axes, blocks=its)
        for (axes, its), names in equal.items()
    ]


def blocks(contractions: Sequence[Contraction]) -> list[Block]:
    """Cuts a list where it begins to repeat; of several periods the one that covers the most."""
    found: list[Block] = []
    alone: list[Contraction] = []
    at = 0
    while at < len(contractions):
        period, repeats = _repeated(contractions[at:])
        if repeats == 1:
            alone.append(contractions[at])
            at += 1
            continue
        found += _alone(alone)
        alone = []
        found.append(Block(contractions=tuple(contractions[at : at + period]), repeats=repeats))
        at += period * repeats
    return [*found, *_alone(alone)]


def _alone(contractions: Iterable[Contraction]) -> list[Block]:
    its = tuple(contractions)
    return [Block(contractions=its, repeats=1)] if its else []


def _repeated(contractions: Sequence[Contraction]) -> tuple[int, int]:
    """The length of what a list begins with, and how often that comes in a row."""
    best = (1, 1)
    for period in range(1, len(contractions) // 2 + 1):
        first, repeats = contractions[:period], 1
        while contractions[repeats * period : (repeats + 1) * period] == first:
            repeats += 1
        if repeats > 1 and period * repeats > best[0] * best[1]:
            best = (period, repeats)
    return best


def _contractions(annotated: Annotated, batch: BatchDims) -> list[Contraction]:
    found: list[Contraction] = []
    for op in walk(body(annotated.fragment)):
        if not isinstance(op, stablehlo.DotGeneralOp | stablehlo.ConvolutionOp):
            continue
        operands = (
            _tensor(annotated, value, "input" if value in batch.of or not batch.of else "parameter")
            for value in op.operands
        )
        tensors = (*operands, _tensor(annotated, op.results[0], "activation"))
        kind = op.operation.name.partition(".")[2]
        name, place = name_of(op.location) or kind, place_of(op.location)
        found.append(Contraction(op=kind, tensors=tensors, name=name, place=place))
    return found


def _tensor(annotated: Annotated, value: ir.Value, use: Use) -> ShardedTensor:
    type_ = ir.RankedTensorType(value.type)
    layout, names = annotated.layout(value), annotated.mesh.axis_names
    real = [axis for axis, size in enumerate(annotated.mesh.sizes) if size > 1]

    def named(axes: Iterable[int]) -> tuple[str, ...]:
        return tuple(names[axis] for axis in axes if axis in real)

    return ShardedTensor(
        use=use,
        shape=tuple(type_.shape),
        dtype=str(type_.element_type),
        dims=tuple(named(axes) for axes in layout[: type_.rank]),
        unreduced=named(unreduced_axes(layout, type_.rank)),
        local_bytes=annotated.local_bytes(value),
    )
