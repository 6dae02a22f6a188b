"""The work of each op of a block: FLOPs, the bytes that it moves, and the kernels that it starts.

A compiler fuses element-wise ops: what one makes for another never reaches memory. Ops fuse into a
*kernel* if one reads the other and no path between them leaves the kernel. To find these without a
search, each value gets a *depth*: the largest number of ops that do not fuse on a path to it. Ops
that fuse, are connected and make values of one depth are a kernel: a path that leaves it would
pass an op that does not fuse, and come back deeper.

* Element-wise ops, broadcasts and transposes fuse with what they read and with what reads them.
* Reductions fuse with what they read. Those over the last dimensions also fuse with what reads
  them (softmax and norms are one kernel), others end a kernel.
* Contractions, scatters, sorts, loops and others are kernels of their own.

A kernel reads a value once, and writes those that others read, with these exceptions:

* A value that can be computed from fewer bytes than its own, or hardly more, is computed again
  where it is read, unless an op that does not fuse needs it in memory: masks, broadcasts,
  conversions, activation functions. Its *roots* are what it is computed from.
* A slice is read where it lies.
* Constants, reshapes, and transposes that only contractions read cost nothing.
* With ``converts_in_dots`` a contraction converts an argument that it alone reads, as XLA's matrix
  products in Triton do (`gemm_fusion.cc`): it reads the argument, and no copy is written.

XLA's fusion (`priority_fusion.h`) is finer: it estimates the time of each alternative.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import Literal, NamedTuple

from alpa.dialects import body, ir, sdy, stablehlo
from alpa.dialects.caches import cached
from alpa.passes.analysis import op_cost
from alpa.passes.analysis.graph import elements, type_bytes
from alpa.passes.analysis.op_kinds import (
    BROADCASTS,
    CONTRACTIONS,
    FREE,
    FUSIBLE,
    SOURCES,
)

ROW = 2**16
"""A reduction of longer rows does not fit into one block of threads, and ends its kernel."""

_ALIASES = (FREE - BROADCASTS - SOURCES) | {"sdy.sharding_constraint"}
_SLICES = frozenset({"stablehlo.slice", "stablehlo.dynamic_slice"})
_FUSES = FUSIBLE - {"stablehlo.dynamic_update_slice"}
_HARDLY_MORE = 1.1  # The sums of softmax's rows beside its scores.

_Way = Literal["again", "alone", "fused", "slice"]
"""How an op runs: where its results are read, in a kernel of its own, in a kernel with others, or
as a view of a part of its operand"""


class Work(NamedTuple):
    """What one execution of an op takes, before it is sharded."""

    flops: float
    bytes: float
    """read from memory and written to it"""
    kernels: float
    """that it starts; the ops of a kernel are counted with the first of them that moves bytes"""
    dtype: str
    """the element type that it computes in"""
    kind: Literal["matrix", "convolution", "elementwise"] = "matrix"
    """`matrix` for all that is neither a convolution nor fuses with other ops"""


NOTHING = Work(0.0, 0.0, 0.0, "f32")


def unfused(ops: Iterable[ir.OpView]) -> list[Work]:
    """The work of ops if each reads its operands from memory and writes its results; kernels are
    not counted."""
    return [
        Work(op_cost.flops(op), op_cost.memory_bytes(op), 0.0, _dtype(*op.operands, *op.results))
        for op in ops
    ]


def fused(
    block: ir.Block,
    *,
    converts_in_dots: bool = False,
    known: dict[ir.Block, list[Work]] | None = None,
) -> list[Work]:
    """The work of each op of a block, its terminator among them, in order.

    `known` keeps that of blocks in regions, which is read once for the op and once for its block.
    """
    known = {} if known is None else known
    found = known.get(block)
    if found is None:
        found = known[block] = _Kernels(block, converts_in_dots, known).works()
    return found


def total(works: Iterable[Work]) -> tuple[float, float, float]:
    """FLOPs, bytes and kernels of several."""
    listed = list(works)
    return (
        sum(work.flops for work in listed),
        sum(work.bytes for work in listed),
        sum(work.kernels for work in listed),
    )


class _Row(NamedTuple):
    """An op as it was read."""

    op: ir.OpView
    name: str
    operands: tuple[ir.Value, ...]
    results: tuple[ir.Value, ...]


@dataclass(eq=False)
class _Kernels:
    """The kernels of a block, numbered by one of their ops."""

    block: ir.Block
    converts_in_dots: bool
    known: dict[ir.Block, list[Work]]
    depth: dict[ir.Value, int] = field(default_factory=dict[ir.Value, int])
    roots: dict[ir.Value, frozenset[ir.Value]] = field(
        default_factory=dict[ir.Value, frozenset[ir.Value]]
    )
    """of a value that is not in memory"""
    maker: dict[ir.Value, int] = field(default_factory=dict[ir.Value, int])
    """the op whose kernel makes a value and may go on with its readers"""

    def __post_init__(self) -> None:
        self.rows = [
            _Row(op, op.operation.name, tuple(op.operands), tuple(op.results))
            for op in self.block.operations
        ]
        self.parents = list(range(len(self.rows)))
        self.needed = self._needed()
        self.ways: list[_Way] = [self._add(number, row) for number, row in enumerate(self.rows)]

    def _needed(self) -> set[ir.Value]:
        """The values that an op that does not fuse reads, or a later block: these are in memory."""
        contracted: dict[ir.Value, bool] = {}
        for row in self.rows:
            for value in row.operands:
                only = row.name in CONTRACTIONS
                contracted[value] = contracted.get(value, True) and only
        self.converted = {
            row.results[0]: row.operands[0]
            for row in self.rows
            if self._converts_in_dot(row) and contracted.get(row.results[0], False)
        }
        self.folded = self.converted.keys() | {
            row.results[0]
            for row in self.rows
            if row.name == "stablehlo.transpose" and contracted.get(row.results[0], False)
        }
        needed = set[ir.Value]()
        for row in reversed(self.rows):
            if self._is_alias(row):
                if not needed.isdisjoint(row.results):
                    needed.update(row.operands)
            elif row.name not in _FUSES and row.name != "stablehlo.reduce":
                needed.update(row.operands)
        return needed

    def _converts_in_dot(self, row: _Row) -> bool:
        """Whether an op converts an argument that nothing else reads, for one reader."""
        if not self.converts_in_dots or row.name != "stablehlo.convert":
            return False
        (value,) = row.operands
        alone = all(len(list(it.uses)) == 1 for it in (value, *row.results))
        return alone and isinstance(value.owner, ir.Block)

    def _is_alias(self, row: _Row) -> bool:
        return bool(row.results) and (row.name in _ALIASES or row.results[0] in self.folded)

    def _add(self, number: int, row: _Row) -> _Way:
        """How an op runs; joins its kernel with those of the values that it reads."""
        sources = [self._roots(value) for value in row.operands]
        read = frozenset[ir.Value]().union(*sources)
        depth = max((self.depth.get(value, 0) for value in read), default=0)
        if self._is_alias(row):
            own = sources if len(sources) == len(row.results) else [read] * len(row.results)
            self.roots.update(zip(row.results, own, strict=True))
            return "again"
        reduces = row.name == "stablehlo.reduce"
        if not reduces and row.name not in _FUSES:
            self.depth.update(dict.fromkeys(row.results, depth + 1))
            return "alone"
        if row.name in _SLICES:
            self.depth.update(dict.fromkeys(row.results, depth + 1))
            return "slice"
        if not reduces and self._is_computed_again(row, read):
            self.roots[row.results[0]] = read
            return "again"
        for value in read:
            shared = elements(value.type) > 1  # A scalar makes no kernel of all that read it.
            if shared and value in self.maker and self.depth[value] == depth:
                self._join(number, self.maker[value])
        ends = reduces and not _by_row(row)
        self.depth.update(dict.fromkeys(row.results, depth + ends))
        if not ends:
            self.maker.update(dict.fromkeys(row.results, number))
        return "fused"

    def _is_computed_again(self, row: _Row, read: frozenset[ir.Value]) -> bool:
        (result,) = row.results
        if row.name in SOURCES:
            return True
        if result in self.needed:
            return False
        return sum(type_bytes(it.type) for it in read) <= _HARDLY_MORE * type_bytes(result.type)

    def _roots(self, value: ir.Value) -> frozenset[ir.Value]:
        return self.roots.get(value, frozenset((value,)))

    def _find(self, number: int) -> int:
        while self.parents[number] != number:
            self.parents[number] = number = self.parents[self.parents[number]]
        return number

    def _join(self, one: int, other: int) -> None:
        self.parents[self._find(one)] = self._find(other)

    def works(self) -> list[Work]:
        """The work of each op, in order."""
        reads, written = self._reads()
        started: set[int] = set()
        found: list[Work] = []
        for number, (row, way) in enumerate(zip(self.rows, self.ways, strict=True)):
            if way == "alone" and row.results:
                flops, num_bytes, kernels = self._own(row)
            else:
                flops, num_bytes, kernels = op_cost.flops(row.op), 0.0, 0.0
            if way == "fused":
                num_bytes = reads[number]
                num_bytes += sum(type_bytes(v.type) for v in row.results if v in written)
                if num_bytes > 0 and self._find(number) not in started:
                    started.add(self._find(number))
                    kernels = 1.0
            found.append(
                Work(
                    flops, num_bytes, kernels, _dtype(*row.operands, *row.results), _kind(row, way)
                )
            )
        return found

    def _reads(self) -> tuple[list[float], set[ir.Value]]:
        """The bytes that each op is the first of its kernel to read, and the values written."""
        made = {v: self._find(n) for n, row in enumerate(self.rows) for v in row.results}
        reads, written = [0.0] * len(self.rows), set[ir.Value]()
        seen: set[tuple[int, ir.Value]] = set()
        for number, (row, way) in enumerate(zip(self.rows, self.ways, strict=True)):
            if way == "again":
                continue
            kernel = self._find(number)
            for root in frozenset[ir.Value]().union(*map(self._roots, row.operands)):
                if way == "fused" and root in self.maker and made[root] == kernel:
                    continue
                written.add(root)
                if (kernel, root) not in seen:
                    seen.add((kernel, root))
                    reads[number] += type_bytes(root.type)
        return reads, written

    def _own(self, row: _Row) -> tuple[float, float, float]:
        """FLOPs, bytes and kernels of an op that does not fuse."""
        op = row.op
        inner = partial(fused, converts_in_dots=self.converts_in_dots, known=self.known)
        if isinstance(op, stablehlo.WhileOp):
            trips = op_cost.trip_count_or_default(op)
            flops, num_bytes, kernels = total(inner(body(op, 1)))
            return trips * flops, trips * num_bytes, trips * kernels
        if isinstance(op, stablehlo.CaseOp | stablehlo.IfOp):
            branches = [total(inner(body(op, i))) for i in range(len(op.regions))]
            flops, num_bytes, kernels = map(max, zip(*branches, strict=True))
            return flops, num_bytes, kernels
        if isinstance(op, sdy.ManualComputationOp):
            flops, num_bytes, kernels = total(inner(body(op)))
            ways = op_cost.manual_ways(op)
            return ways * flops, ways * num_bytes, kernels
        wider = sum(
            type_bytes(self.converted[value].type) - type_bytes(value.type)
            for value in row.operands
            if value in self.converted
        )
        num_bytes = op_cost.memory_bytes(op) + wider
        return op_cost.flops(op), num_bytes, float(row.name not in FREE)


def _kind(row: _Row, way: _Way) -> Literal["matrix", "convolution", "elementwise"]:
    if row.name == "stablehlo.convolution":
        return "convolution"
    return "elementwise" if way in ("fused", "again") else "matrix"


def _by_row(row: _Row) -> bool:
    """Whether a reduction is over the last dimensions, and its rows are short."""
    operand = ir.RankedTensorType(row.operands[0].type)
    dims = sorted(ir.DenseI64ArrayAttr(row.op.attributes["dimensions"]))
    last = list(range(operand.rank - len(dims), operand.rank))
    return dims == last and prod(operand.shape[d] for d in dims) <= ROW


def _dtype(*values: ir.Value) -> str:
    """The element type that an op of these operands and results computes in, as the cluster file
    names it (`f32`, `i8`)."""
    for value in values:
        name = _element_name(value.type)
        if name is not None:
            return name
    return "f32"


@cached
def _element_name(type_: ir.Type) -> str | None:
    return str(type_.element_type) if isinstance(type_, ir.RankedTensorType) else None
