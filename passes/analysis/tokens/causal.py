"""Finds the dimensions along which a program is causal, and says what prevents it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from alpa.dialects import body, func, ir, mpmd, terminator
from alpa.dialects.attributes import Argument, Part, read_arguments, read_part
from alpa.dialects.mpmd_types import MeshTensor
from alpa.passes.analysis.graph import shape
from alpa.passes.analysis.micro_batches.relation import Reason
from alpa.passes.analysis.tokens.context import TokenContext
from alpa.passes.analysis.tokens.relate import relate
from alpa.passes.base import PassError

_NO_MASK = "makes numbers for pairs of tokens, and no mask tells queries from keys"


@dataclass(frozen=True, kw_only=True)
class Causal:
    """A program that is causal along a dimension of its batch."""

    length: int
    """tokens of a sequence"""
    dims: Mapping[int, int]
    """the dimension with the tokens of each argument that has one, by its number"""
    context: TokenContext


def causal(function: func.FuncOp, length: int | None = None) -> Causal:
    """The dimension of a program's batch along which no token reads later ones.

    Dimensions of equal size of all batches are tried together, except those of the samples, those
    of the most arguments first. In a program of stages, only forward and backward parts are looked
    at, and backward parts may read later tokens.

    Args:
        function: without calls.
        length: tokens of a sequence, if they are known.

    Raises:
        PassError: there is no such dimension. The error is at the op that mixes tokens along the
            dimension that was tried first.
    """
    block = body(function)
    first: Reason | None = None
    candidates = _candidates(block, read_arguments(function))
    if length is not None and candidates and length not in candidates:
        sizes = ", ".join(map(str, candidates))
        raise PassError(
            function,
            f"no dimension of the batch has {length} tokens; beside the samples, there are "
            f"dimensions of {sizes}",
        )
    for tokens, dims in candidates.items():
        if length not in (None, tokens):
            continue
        context = relate(block, dims)
        reason = _first_mixing(context, block)
        if reason is None:
            return Causal(length=tokens, dims=dims, context=context)
        first = first or reason
    if first is None:
        raise PassError(
            function,
            "no batch argument has a dimension for tokens beside that of its samples; say which "
            'arguments hold the samples (alpa.role = "batch", alpa.batch_dim)',
        )
    raise PassError(
        first.location,
        f"the program is not causal: {first.op} {first.text}; token slices need a model in which "
        "no token reads later ones",
    )


def _candidates(block: ir.Block, arguments: Sequence[Argument]) -> dict[int, dict[int, int]]:
    """Tokens of a sequence -> dimensions by argument, in the order in which to try them."""
    sizes: dict[int, dict[int, int]] = {}
    for number, (value, argument) in enumerate(zip(block.arguments, arguments, strict=True)):
        if argument.role != "batch":
            continue
        here = dict(enumerate(_sizes(value)))
        here.pop(argument.batch_dim or 0, None)
        counts = Counter(here.values())
        for dim, size in here.items():
            if size > 1 and counts[size] == 1:
                sizes.setdefault(size, {})[number] = dim
    return dict(sorted(sizes.items(), key=lambda it: (-len(it[1]), -it[0])))


def _sizes(value: ir.Value) -> tuple[int, ...]:
    """A tensor's shape, on a mesh or not."""
    is_tensor = isinstance(value.type, ir.RankedTensorType)
    return shape(value) if is_tensor else tuple(MeshTensor.from_type(value.type).type.shape)


def _first_mixing(context: TokenContext, block: ir.Block) -> Reason | None:
    """The first op that mixes tokens, or reads later ones where it must not."""
    fragments = [op for op in block.operations if isinstance(op, mpmd.FragmentOp)]
    parts: list[tuple[Part | None, ir.Block]] = [(read_part(op), body(op)) for op in fragments]
    parts = parts or [(None, block)]
    for part, inner in parts:
        if part == "update":
            continue
        for op in list(inner.operations)[:-1]:
            for relation in map(context.at, op.results):
                if relation.is_mixing:
                    return relation.reason
                if part == "forward" and relation.late is not None:
                    return relation.late
        if part is None:
            returned = map(context.at, terminator(inner).operands)
            late = next((it.late for it in returned if it.kind == "tokens" and it.late), None)
            if late is not None:
                return late
    return context.broken() or _first_undecided(context, parts)


def _first_undecided(
    context: TokenContext, parts: Sequence[tuple[Part | None, ir.Block]]
) -> Reason | None:
    """The first op that makes pairs of which nothing says what the queries are."""
    for part, block in parts:
        for op in () if part == "update" else list(block.operations)[:-1]:
            for relation in map(context.at, op.results):
                if relation.kind == "pairs" and relation.query is None:
                    return Reason(op.location, op.operation.name, _NO_MASK)
    return None
