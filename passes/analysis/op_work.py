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

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Literal, NamedTuple

from alpa.dialects import body, ir, sdy, stablehlo
from alpa.dialects.caches import cached
from alpa.passes.analysis import op_cost
from alpa.passes.analysis.block_rows import Row, rows_of
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
_NONE = frozenset[int]()
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
        Work(
            op_cost.flops(op),
            op_cost.memory_bytes(op),
            0.0,
            _dtype(value.type for value in (*op.operands, *op.results)),
        )
        for op in ops
    ]


def fused(
    block: ir.Block,
    *,
    converts_in_dots: bool = False,
    known: dict[ir.Block, list[Work]] | None = None,
    rows: Sequence[Row] | None = None,
) -> list[Work]:
    """The work of each op of a block, its terminator among them, in order.

    `known` keeps that of blocks in regions, which is read once for the op and once for its block.
    `rows` are those of the block, if they have been read.
    """
    known = {} if known is None else known
    found = known.get(block)
    if found is None:
        rows = rows_of(block) if rows is None else rows
        found = known[block] = _Kernels(block, converts_in_dots, known, rows).works()
    return found


def total(works: Iterable[Work]) -> tuple[float, float, float]:
    """FLOPs, bytes and kernels of several."""
    listed = list(works)
    return (
        sum(work.flops for work in listed),
        sum(work.bytes for work in listed),
        sum(work.kernels for work in listed),
    )


@dataclass(eq=False)
class _Kernels:
    """The kernels of a block, numbered by one of their ops. Values are numbered as they come."""

    block: ir.Block
    converts_in_dots: bool
    known: dict[ir.Block, list[Work]]
    rows: Sequence[Row]

    def __post_init__(self) -> None:
        number: dict[ir.Value, int] = {v: n for n, v in enumerate(self.block.arguments)}
        self.read: list[list[int]] = []
        self.made: list[list[int]] = []
        for row in self.rows:
            self.read.append([number.setdefault(v, len(number)) for v in row.operands])
            self.made.append([number.setdefault(v, len(number)) for v in row.results])
        self.values = list(number)
        self.types = [value.type for value in self.values]
        self.bytes = list(map(type_bytes, self.types))
        self.depth = [0] * len(self.values)
        self.roots = [frozenset((v,)) for v in range(len(self.values))]
        """itself, or those of a value that is not in memory"""
        self.maker = [-1] * len(self.values)
        """the op whose kernel makes a value and may go on with its readers"""
        self.parents = list(range(len(self.rows)))
        self.converted, self.folded = self._read_by_contractions()
        self.aliases = [
            bool(made) and (row.name in _ALIASES or made[0] in self.folded)
            for row, made in zip(self.rows, self.made, strict=True)
        ]
        self.needed = self._needed()
        self.ways: list[_Way] = [self._add(number, row) for number, row in enumerate(self.rows)]

    def _read_by_contractions(self) -> tuple[dict[int, int], set[int]]:
        """Conversions that contractions alone read, with their operands; and these with such
        transposes, which cost nothing."""
        contracted, others = set[int](), set[int]()
        for row, read in zip(self.rows, self.read, strict=True):
            (contracted if row.name in CONTRACTIONS else others).update(read)
        contracted -= others
        converted, transposed = dict[int, int](), set[int]()
        for row, read, made in zip(self.rows, self.read, self.made, strict=True):
            if made and made[0] in contracted:
                if self._converts_in_dot(row):
                    converted[made[0]] = read[0]
                elif row.name == "stablehlo.transpose":
                    transposed.add(made[0])
        return converted, transposed | converted.keys()

    def _needed(self) -> set[int]:
        """The values that an op that does not fuse reads, or a later block: these are in memory."""
        needed = set[int]()
        for n in range(len(self.rows) - 1, -1, -1):
            if self.aliases[n]:
                if not needed.isdisjoint(self.made[n]):
                    needed.update(self.read[n])
            elif (name := self.rows[n].name) not in _FUSES and name != "stablehlo.reduce":
                needed.update(self.read[n])
        return needed

    def _converts_in_dot(self, row: Row) -> bool:
        """Whether an op converts an argument that nothing else reads, for one reader."""
        if not self.converts_in_dots or row.name != "stablehlo.convert":
            return False
        (value,) = row.operands
        alone = all(len(list(it.uses)) == 1 for it in (value, *row.results))
        return alone and isinstance(value.owner, ir.Block)

    def _add(self, number: int, row: Row) -> _Way:
        """How an op runs; joins its kernel with those of the values that it reads."""
        made, depths = self.made[number], self.depth
        sources = [self.roots[v] for v in self.read[number]]
        read = sources[0] if len(sources) == 1 else _NONE.union(*sources)
        if self.aliases[number]:
            own = sources if len(sources) == len(made) else [read] * len(made)
            for v, roots in zip(made, own, strict=True):
                self.roots[v] = roots
            return "again"
        depth = max([depths[v] for v in read], default=0)
        reduces = row.name == "stablehlo.reduce"
        if not reduces and row.name not in _FUSES:
            for v in made:
                depths[v] = depth + 1
            return "alone"
        if row.name in _SLICES:
            for v in made:
                depths[v] = depth + 1
            return "slice"
        if not reduces and self._is_computed_again(row.name, made, read):
            self.roots[made[0]] = read
            return "again"
        for v in read:
            # A scalar makes no kernel of all that read it.
            if self.maker[v] >= 0 and depths[v] == depth and elements(self.types[v]) > 1:
                self._join(number, self.maker[v])
        ends = reduces and not _by_row(row)
        for v in made:
            depths[v] = depth + ends
            if not ends:
                self.maker[v] = number
        return "fused"

    def _is_computed_again(self, name: str, made: list[int], read: frozenset[int]) -> bool:
        (result,) = made
        if name in SOURCES:
            return True
        if result in self.needed:
            return False
        return sum([self.bytes[v] for v in read]) <= _HARDLY_MORE * self.bytes[result]

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
                flops, num_bytes, kernels = self._own(number, row)
            else:
                flops, num_bytes, kernels = op_cost.flops(row.op), 0.0, 0.0
            if way == "fused":
                num_bytes = reads[number]
                num_bytes += sum([self.bytes[v] for v in self.made[number] if v in written])
                if num_bytes > 0 and self._find(number) not in started:
                    started.add(self._find(number))
                    kernels = 1.0
            types = [self.types[v] for v in (*self.read[number], *self.made[number])]
            found.append(Work(flops, num_bytes, kernels, _dtype(types), _kind(row, way)))
        return found

    def _reads(self) -> tuple[list[float], set[int]]:
        """The bytes that each op is the first of its kernel to read, and the values written."""
        maker = [self._find(n) if n >= 0 else -1 for n in self.maker]
        reads, written = [0.0] * len(self.rows), set[int]()
        seen: set[tuple[int, int]] = set()
        for number, way in enumerate(self.ways):
            if way == "again":
                continue
            kernel = self._find(number)
            for root in _NONE.union(*[self.roots[v] for v in self.read[number]]):
                if way == "fused" and maker[root] == kernel:
                    continue
                written.add(root)
                if (kernel, root) not in seen:
                    seen.add((kernel, root))
                    reads[number] += self.bytes[root]
        return reads, written

    def _own(self, number: int, row: Row) -> tuple[float, float, float]:
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
            self.bytes[self.converted[v]] - self.bytes[v]
            for v in self.read[number]
            if v in self.converted
        )
        num_bytes = op_cost.memory_bytes(op) + wider
        return op_cost.flops(op), num_bytes, float(row.name not in FREE)


def _kind(row: Row, way: _Way) -> Literal["matrix", "convolution", "elementwise"]:
    if row.name == "stablehlo.convolution":
        return "convolution"
    return "elementwise" if way in ("fused", "again") else "matrix"


def _by_row(row: Row) -> bool:
    """Whether a reduction is over the last dimensions, and its rows are short."""
    operand = ir.RankedTensorType(row.operands[0].type)
    dims = sorted(ir.DenseI64ArrayAttr(row.op.attributes["dimensions"]))
    last = list(range(operand.rank - len(dims), operand.rank))
    return dims == last and prod(operand.shape[d] for d in dims) <= ROW


def _dtype(types: Iterable[ir.Type]) -> str:
    """The element type that an op with operands and results of these types computes in, as the
    cluster file names it (`f32`, `i8`)."""
    for type_ in types:
        name = _element_name(type_)
        if name is not None:
            return name
    return "f32"


@cached
def _element_name(type_: ir.Type) -> str | None:
    return str(type_.element_type) if isinstance(type_, ir.RankedTensorType) else None
