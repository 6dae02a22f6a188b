"""Puts the fragments of all token slices in the place of a program's forwards and backwards.

Slices run forward from the first to the last, through all stages, and backward from the last to the
first. What a fragment makes has a version for each slice, which the slice's other fragments read.
Sums over the tokens are handed on from slice to slice; updates and the caller get the last one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

from alpa.dialects import body, func, ir, mpmd, passmanager, terminator
from alpa.dialects.attributes import (
    COMPUTE_SECONDS,
    FLOPS,
    PART,
    REMAT,
    SECONDS,
    Part,
    read_float,
    read_part,
)
from alpa.dialects.mpmd_types import MeshTensor, mesh_of, return_, stage_of
from alpa.dialects.records import f64, i64
from alpa.passes.analysis import op_cost
from alpa.passes.analysis.tokens.context import TokenContext
from alpa.passes.base import PassError
from alpa.passes.tokens.cuts import Span, adds_later_queries
from alpa.passes.tokens.slicer import Given, Slicer, states

_Keep = Callable[[ir.Value], None]
"""Keeps a result of a slice's fragment for those that read it."""


@dataclass(kw_only=True)
class _Made:
    """What the slices made of a value, by the number of the slice."""

    rows: dict[int, ir.Value] = field(default_factory=dict[int, ir.Value])
    whole: ir.Value | None = None
    """of all slices"""
    running: ir.Value | None = None
    """a sum over the slices so far"""


class SlicedStages:
    """The stages of a program, cut into token slices."""

    def __init__(self, main: func.FuncOp, context: TokenContext, slices: Sequence[Span]) -> None:
        self.fragments: list[list[mpmd.FragmentOp]] = [[] for _ in slices]
        """those of each slice, once they are written"""
        self._context = context
        self._slices = slices
        self._made: dict[ir.Value, _Made] = {}
        self._states: dict[ir.Value, list[ir.Value]] = {}
        """inside forward fragments -> the rows of the slices so far"""
        self._later: dict[ir.Value, ir.Value] = {}
        """inside backward fragments -> what later slices hand on"""
        *ops, self._end = body(main).operations
        self._steps = _with_parts(ops)
        self._by_slices, self._by_others = self._read()
        self._once = passmanager.PassManager.parse("mpmd.fragment(cse)", main.context)

    def rewrite(self) -> None:
        """Puts the fragments of all slices in the place of the old ones."""
        self._move_to_end(None)
        for part, order in (("forward", self._slices), ("backward", self._slices[::-1])):
            for span in order:
                for op, its in self._steps:
                    if its == part and isinstance(op, mpmd.FragmentOp):
                        self._fragment(op, span, is_last=span is order[-1])
                    elif its == part:
                        self._transfer(op, span, is_last=span is order[-1])
        self._move_to_end("update")
        for value, made in self._made.items():
            if made.whole is not None:
                value.replace_all_uses_with(made.whole)
        for op, part in reversed(self._steps):
            if part in ("forward", "backward"):
                op.operation.erase()

    def _move_to_end(self, part: Part | None) -> None:
        for op, its in self._steps:
            if its == part:
                op.operation.move_before(self._end.operation)

    def _read(self) -> tuple[set[ir.Value], set[ir.Value]]:
        """The values that slices read, and those that updates or the caller read."""
        by_slices, by_others = set[ir.Value](), {*self._end.operands}
        for op, part in reversed(self._steps):
            if isinstance(op, mpmd.TransferOp):
                for read in (by_slices, by_others):
                    read |= {*op.operands} if op.results[0] in read else set()
            else:
                (by_others if part == "update" else by_slices).update(op.operands)
        return by_slices, by_others

    def _transfer(self, op: ir.OpView, span: Span, *, is_last: bool) -> None:
        (source,), (target,) = op.operands, op.results
        made = self._made[source]
        moved = self._made.setdefault(target, _Made())
        if target in self._by_slices:
            moved.rows[span.number] = self._moved(op, made.rows[span.number])
        if is_last and target in self._by_others:
            assert made.whole is not None
            moved.whole = self._moved(op, made.whole)

    def _moved(self, op: ir.OpView, value: ir.Value) -> ir.Value:
        mesh = MeshTensor.from_type(op.results[0].type).mesh
        type_ = MeshTensor(mesh, MeshTensor.from_type(value.type).type).to_type()
        with ir.InsertionPoint(self._end):
            return mpmd.TransferOp(type_, value, loc=op.location).result

    def _fragment(self, op: mpmd.FragmentOp, span: Span, *, is_last: bool) -> None:
        """The fragment of a slice."""
        old, forward = body(op), read_part(op) == "forward"
        scratch, block = _scratch(op)
        slicer = Slicer(
            context=self._context,
            span=span,
            block=block,
            given=lambda argument: self._given(op.operands[argument.arg_number], span),
            earlier=self._states.__getitem__ if forward else None,
            later=self._later.get,
        )
        slicer.write_all(old)
        returned: list[tuple[ir.Value, list[_Keep]]] = []
        for outer, inner in zip(op.results, terminator(old).operands, strict=True):
            for value, keep in self._results(op, slicer, outer, inner, is_last=is_last):
                returned.append((value, [keep]))
        if forward and span is not self._slices[-1]:
            # State that is returned anyway is not returned again.
            there = dict(returned)
            for state in states(self._context, old, self._slices[-1]):
                value, keep = slicer.own(state), self._states.setdefault(state, []).append
                if value in there:
                    there[value].append(keep)
                else:
                    there[value] = [keep]
                    returned.append((value, there[value]))
        if not forward and span.begin > 0:
            for inner_op in list(old.operations)[:-1]:
                if adds_later_queries(self._context, inner_op):
                    value = inner_op.results[0]
                    keep = partial(self._later.__setitem__, value)
                    returned.append((slicer.handed_on(value), [keep]))
        new = self._placed(op, slicer, [value for value, _ in returned])
        scratch.erase()
        self.fragments[span.number].append(new)
        for (_, keeps), result in zip(returned, new.results, strict=True):
            for keep in keeps:
                keep(result)

    def _results(
        self,
        op: mpmd.FragmentOp,
        slicer: Slicer,
        outer: ir.Value,
        inner: ir.Value,
        *,
        is_last: bool,
    ) -> Iterator[tuple[ir.Value, _Keep]]:
        """What a slice returns for a result of the fragment, each with what keeps it."""
        relation, span = self._context.at(outer), slicer.span
        made = self._made.setdefault(outer, _Made())
        others = outer in self._by_others
        if outer in self._by_slices or (others and relation.kind == "tokens" and not is_last):
            yield slicer.own(inner), partial(made.rows.__setitem__, span.number)
        if not others:
            return
        if relation.kind == "pairs":
            raise PassError(
                op,
                "scores of attention leave the stage for an update or the caller; token slices "
                "have no scores of keys after the slice: return what is made of them",
            )
        keep = partial(setattr, made, "whole")
        if relation.kind == "sum":
            total = slicer.total(inner, made.running)
            yield total, keep if is_last else partial(setattr, made, "running")
        elif is_last and relation.kind == "tokens":
            rows = {n: slicer.input(row) for n, row in made.rows.items()}
            rows[span.number] = slicer.own(inner)
            yield slicer.joined([rows[n] for n in sorted(rows)], relation.dims[0]), keep
        elif is_last:
            yield slicer.own(inner), keep

    def _given(self, value: ir.Value, span: Span) -> Given:
        made = self._made.get(value)
        if made is None:
            return Given(whole=value)
        if self._context.at(value).kind == "tokens":
            return Given(rows=[made.rows[n] for n in sorted(made.rows) if n <= span.number])
        return Given(rows=[made.rows[span.number]])

    def _placed(
        self, op: mpmd.FragmentOp, slicer: Slicer, returned: Sequence[ir.Value]
    ) -> mpmd.FragmentOp:
        """The fragment around a finished block, at the end of the program."""
        mesh = mesh_of(op)
        with ir.InsertionPoint(slicer.block), op.location:
            return_(returned)
        types = [MeshTensor(mesh, ir.RankedTensorType(it.type)).to_type() for it in returned]
        with ir.InsertionPoint(self._end):
            new = mpmd.FragmentOp(
                types,
                [*slicer.inputs],
                op.attributes["origin"],
                mesh,
                stage_id=stage_of(op),
                loc=op.location,
            )
        slicer.block.append_to(new.regions[0])
        for name in (PART, REMAT):
            if name in op.attributes:
                new.attributes[name] = op.attributes[name]
        self._once.run(new.operation)
        _write_work(op, new)
        return new


def _with_parts(ops: Sequence[ir.OpView]) -> list[tuple[ir.OpView, Part | None]]:
    """The ops of a program with their parts; a transfer is of the part that makes its source."""
    parts: dict[ir.Value, Part | None] = {}
    found: list[tuple[ir.OpView, Part | None]] = []
    for op in ops:
        is_transfer = isinstance(op, mpmd.TransferOp)
        part = parts.get(op.operands[0]) if is_transfer else read_part(op)
        parts.update(dict.fromkeys(op.results, part))
        found.append((op, part))
    return found


def _scratch(op: mpmd.FragmentOp) -> tuple[ir.Operation, ir.Block]:
    """A fragment beside another one, and its block, which has no arguments yet."""
    with ir.InsertionPoint(op):
        scratch = mpmd.FragmentOp(
            [], [], op.attributes["origin"], mesh_of(op), stage_id=stage_of(op), loc=op.location
        )
    return scratch.operation, scratch.regions[0].blocks.append()


def _write_work(old: mpmd.FragmentOp, new: mpmd.FragmentOp) -> None:
    """Writes the FLOPs of a slice, and its share of the seconds by them."""
    before, after = (sum(map(op_cost.flops, list(body(op).operations)[:-1])) for op in (old, new))
    if FLOPS in old.attributes:
        new.attributes[FLOPS] = i64(int(after))
    for name in (SECONDS, COMPUTE_SECONDS):
        seconds = read_float(old, name)
        if seconds is not None:
            new.attributes[name] = f64(seconds * after / before if before else 0.0)
