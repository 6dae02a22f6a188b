"""Finds equal layers of a program by structure: what the fold table prints.

The layers of a deep network stand one after another, so they are tandem repeats: a stretch of ops
of which each equals the op one layer further on. That is less than the frequent subgraphs that
TAPAS mines (section 4.3), and needs no candidates that grow op by op. Names and locations do not
count, only two things for every op:

* its signature: name, attributes but shardings, types of operands and results, regions;
* its connectivity: an operand comes from as far back as that of the equal op one layer on, or both
  come from before all layers (arguments do, and values that layers share), or, in the first layer,
  it comes from before while the others take it from an earlier layer.

What comes from before is known by its type alone, and what uses a layer's results does not matter.
Values made of constants alone are known by what they hold, and are part of the signatures of their
users: jax shares and moves them.

Candidates are all maximal repeats of the signatures (`repeats.py`). The one that saves most ops
whose connectivity agrees is taken, unless its members are stacks of layers themselves; then the
same is done on its left and on its right. A repeat may begin anywhere in a layer: a member is one
layer's ops in program order, not what its author calls one. What lies between repeats is one class
per stretch. Stretches and layers that are equal inside share a class.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise

import numpy as np

from alpa.dialects import body, func, ir, mpmd, terminator
from alpa.dialects.attributes import Part, read_part
from alpa.dialects.mpmd_types import Origin
from alpa.passes.analysis import op_cost
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.repeats import maximal_repeats
from alpa.passes.analysis.roles import infer_roles
from alpa.passes.analysis.step_parts import split_step

MIN_SHARE = 0.01
"""Of the ops, what a repeat has to save: two equal ops in a row are not worth a class. On
T5-large's forward part the stacks save 36 % and 58 %, the next repeat one op of 3,800."""

_SAME_VALUE = frozenset({"mpmd.transfer", "sdy.sharding_constraint"})
_NOT_STRUCTURE = frozenset({"sdy.sharding"})


@dataclass(frozen=True)
class FoldClass:
    """Equal subgraphs: members of `size` ops that start at these positions of the table's ops."""

    starts: tuple[int, ...]
    size: int
    flops: float
    """of one member"""

    @property
    def members(self) -> int:
        return len(self.starts)


@dataclass(frozen=True)
class FoldTable:
    """Classes in the order of their first members; each op is in one member of one class.

    `ops` are those that depend on an argument; those made of constants alone are not counted.
    """

    ops: tuple[ir.OpView, ...]
    classes: tuple[FoldClass, ...]

    @property
    def share(self) -> float:
        """Of the ops, those in classes of several members."""
        return _ratio(sum(c.members * c.size for c in self.classes if c.members > 1), len(self.ops))

    @property
    def flops_share(self) -> float:
        """Of the FLOPs, those in classes of several members."""
        return _ratio(sum(c.members * c.flops for c in self.classes if c.members > 1), self.flops)

    @cached_property
    def flops(self) -> float:
        return sum(c.members * c.flops for c in self.classes)

    @property
    def folded_ops(self) -> int:
        """Ops of the folded graph: one member of each class."""
        return sum(c.size for c in self.classes)


def _ratio(some: float, whole: float) -> float:
    return some / whole if whole else 0.0


@dataclass(frozen=True)
class PartOps:
    """Ops in program order, and which values are others under another name."""

    ops: list[ir.OpView]
    same: dict[ir.Value, ir.Value] = field(default_factory=dict[ir.Value, ir.Value])


def part_ops(function: func.FuncOp, part: Part | None = None) -> PartOps:
    """The ops of a part of a training step, or all of them.

    Before `layer-cluster` the forward part is told by analysis (`step_parts`), and what it needs
    that depends on no batch counts as part of it; afterwards, it is written in the program.

    Raises:
        ValueError: a part other than forward is asked for before `layer-cluster`.
    """
    block = body(function)
    if _has_parts(block):
        return _outlined_ops(block, part)
    graph = Graph.of(block)
    if part is None:
        return PartOps(graph.ops)
    if part != "forward":
        raise ValueError(f"the {part} part is known after layer-cluster only")
    parts = split_step(graph, infer_roles(function, graph)).part
    inside = graph.cone(
        v for o, results in enumerate(graph.results) if parts[o] == "forward" for v in results
    )
    return PartOps([op for op, wanted in zip(graph.ops, inside, strict=True) if wanted])


def is_clustered(module: ir.Module) -> bool:
    """Whether `layer-cluster` has run, so that the program says what belongs to which part."""
    functions = [op for op in module.body.operations if isinstance(op, func.FuncOp)]
    return any(_has_parts(block) for f in functions for block in f.regions[0].blocks)


def _has_parts(block: ir.Block) -> bool:
    return any(_part_of(op) is not None for op in block.operations)


def _part_of(op: ir.OpView) -> Part | None:
    if isinstance(op, mpmd.NamedComputationOp):
        return Origin.from_attr(op.attributes["origin"]).part
    return read_part(op)


def _outlined_ops(block: ir.Block, part: Part | None) -> PartOps:
    """The ops inside the named computations or fragments of a block."""
    ops: list[ir.OpView] = []
    same: dict[ir.Value, ir.Value] = {}
    for op in block.operations:
        if (its_part := _part_of(op)) is None:
            if op.name in _SAME_VALUE:
                same[op.results[0]] = op.operands[0]
            continue
        inner = body(op)
        same.update(zip(inner.arguments, op.operands, strict=True))
        same.update(zip(op.results, terminator(inner).operands, strict=True))
        if part in (None, its_part):
            ops += list(inner.operations)[:-1]
    return PartOps(ops, same)


def fold_classes(
    ops: Sequence[ir.OpView],
    same: Mapping[ir.Value, ir.Value] | None = None,
    *,
    min_share: float = MIN_SHARE,
) -> FoldTable:
    """Folds ops in program order; `same` names values that are others under another name.

    A repeat counts if it saves at least `min_share` of the ops.
    """
    flow = _Flow.of(ops, same or {})
    runs = flow.runs(max(1, math.ceil(min_share * len(flow.ops))))
    members: dict[bytes, list[tuple[int, int]]] = {}
    position = 0
    for start, period, count in [*runs, (len(flow.ops), 0, 0)]:
        if position < start:
            members.setdefault(flow.shape(position, start), []).append((position, start))
        if count:
            cuts = [start + period * i for i in range(count + 1)]
            found = members.setdefault(flow.shape(*cuts[:2]), [])
            found += pairwise(cuts)
        position = start + period * count
    classes = [
        FoldClass(
            starts=tuple(start for start, _ in found),
            size=found[0][1] - found[0][0],
            flops=sum(op_cost.flops(op) for op in flow.ops[slice(*found[0])]),
        )
        for found in members.values()
    ]
    return FoldTable(ops=tuple(flow.ops), classes=tuple(classes))


@dataclass(frozen=True)
class _Flow:
    """Ops that depend on an argument, as numbers: signature, and producers of the operands.

    The operands of op o are `producers[slots[o]:slots[o + 1]]`: the position of the op that makes
    each, -1 for arguments, constants and what no op here makes; `slot_op` is o.
    """

    ops: list[ir.OpView]
    signatures: np.ndarray
    slots: np.ndarray
    producers: np.ndarray
    slot_op: np.ndarray

    @classmethod
    def of(cls, ops: Sequence[ir.OpView], same: Mapping[ir.Value, ir.Value]) -> _Flow:
        named = _Names(dict(same))
        numbers: dict[Hashable, int] = {}
        position: dict[ir.Value, int] = {}
        kept: list[ir.OpView] = []
        signatures: list[int] = []
        operands: list[list[int]] = []
        for op in ops:
            if op.name in _SAME_VALUE:
                named.same[op.results[0]] = op.operands[0]
                continue
            used: list[ir.Value] = []
            recipe = _recipe(op, named, used, {})
            number = numbers.setdefault(recipe, len(numbers))
            if all(value in named.constants for value in used):
                for i, result in enumerate(op.results):
                    named.constants[result] = (number, i)
                continue
            for result in op.results:
                position[result] = len(kept)
            kept.append(op)
            signatures.append(number)
            operands.append([position.get(value, -1) for value in used])
        counts = [len(mine) for mine in operands]
        return cls(
            ops=kept,
            signatures=np.array(signatures, dtype=np.int64),
            slots=np.cumsum([0, *counts]),
            producers=np.array([p for mine in operands for p in mine], dtype=np.int64),
            slot_op=np.repeat(np.arange(len(kept)), counts),
        )

    def shape(self, start: int, stop: int) -> bytes:
        """Equal for stretches of equal ops that are equally connected inside."""
        producers = self.producers[self.slots[start] : self.slots[stop]]
        inside = np.where(producers >= start, producers - start, -1)
        return self.signatures[start:stop].tobytes() + inside.tobytes()

    def runs(self, least: int) -> list[tuple[int, int, int]]:
        """Start, period and count of repeats that save `least` ops each, from left to right."""
        candidates = maximal_repeats(self.signatures)
        size = len(self.ops)
        todo, found = [(0, size, size)], list[tuple[int, int, int]]()
        while todo:
            low, high, longest = todo.pop()
            run = self._best(candidates, low, high, longest, least)
            if run is None:
                continue
            start, period, count = run
            half = period // 2
            if self._best(candidates, start, start + period, half, max(least, half + 1)):
                # What itself repeats for the most part is a stack of layers, not a layer.
                todo.append((low, high, period - 1))
                continue
            found.append(run)
            todo += [(low, start, size), (start + period * count, high, size)]
        return sorted(found)

    def _best(
        self, candidates: np.ndarray, low: int, high: int, longest: int, least: int
    ) -> tuple[int, int, int] | None:
        """The repeat of up to `longest` ops between two positions that saves most, the shortest.

        It has to save `least` ops.
        """
        start, stop = np.maximum(candidates[:, 0], low), np.minimum(candidates[:, 1], high)
        period = candidates[:, 2]
        saves = ((stop - start) // period - 1) * period
        saves[period > longest] = 0
        best, most = None, 0
        for i in np.lexsort((start, period, -saves)):
            if saves[i] <= most or saves[i] < least:
                break
            p = int(period[i])
            for run in self._connected(int(start[i]), int(stop[i]), p, max(p, least)):
                saved = p * (run[2] - 1)
                if saved > most and saved >= least:
                    best, most = run, saved
        return best

    def _connected(
        self, start: int, stop: int, period: int, least: int
    ) -> list[tuple[int, int, int]]:
        """The parts of a repeat of signatures that are equally connected and save `least` ops."""
        runs: list[tuple[int, int, int]] = []
        while stop - start >= period + least:
            # What saves enough begins with this many ops that agree.
            _, better = self._disagreements(start, start + least, period)
            if better.size:
                start = int(better.max())
                continue
            ops, better = self._disagreements(start, stop - period, period)
            end = int(ops[0]) + period if ops.size else stop
            runs.append((start, period, (end - start) // period))
            if not ops.size:
                break
            start = int(better[0])
        return runs

    def _disagreements(self, start: int, stop: int, period: int) -> tuple[np.ndarray, np.ndarray]:
        """Ops of a stretch that are connected in another way than those one period on.

        Op o with an operand from a agrees with op o + period with one from b if b = a + period
        or b = a, if both lie before the repeat, or if a does, o is in the first member and b in
        an earlier one than o + period. The second array is the least start of the repeat with
        which they may agree.
        """
        first, last = self.slots[start], self.slots[stop]
        shift = self.slots[start + period] - first
        ops = self.slot_op[first:last]
        a, b = self.producers[first:last], self.producers[first + shift : last + shift]
        member = ops + period - (ops - start) % period
        carried = (b < member) & (ops < start + period)
        agrees = (b == a + period) | (b == a) | ((a < start) & ((b < start) | carried))
        moved = np.where(b >= member, start + b - member, np.minimum(ops - period, b))
        better = np.where(a >= start, a, moved) + 1
        return ops[~agrees], better[~agrees]


@dataclass(frozen=True)
class _Names:
    """Values under other names, and those that are made of constants alone."""

    same: dict[ir.Value, ir.Value]
    constants: dict[ir.Value, Hashable] = field(default_factory=dict[ir.Value, Hashable])

    def resolve(self, value: ir.Value) -> ir.Value:
        while value in self.same:
            value = self.same[value]
        return value


def _recipe(
    op: ir.OpView, names: _Names, used: list[ir.Value], inner: dict[ir.Value, int]
) -> Hashable:
    """The signature of an op; `used` gets the values from outside that it and its regions use.

    `inner` numbers the values of the regions around it.
    """
    operands: list[Hashable] = []
    for operand in op.operands:
        if operand in inner:
            operands.append(inner[operand])
            continue
        value = names.resolve(operand)
        used.append(value)
        operands.append(names.constants.get(value, operand.type))
    attributes = frozenset(
        (name, op.attributes[name])
        for name in op.attributes
        if name not in _NOT_STRUCTURE and not name.startswith("alpa.")
    )
    regions: list[Hashable] = []
    for region in op.regions:
        for block in region.blocks:
            for argument in block.arguments:
                inner[argument] = len(inner)
            regions.append(tuple(argument.type for argument in block.arguments))
            for nested in block.operations:
                regions.append(_recipe(nested, names, used, inner))
                for result in nested.results:
                    inner[result] = len(inner)
    results = tuple(result.type for result in op.results)
    return (op.name, tuple(operands), attributes, tuple(regions), results)
