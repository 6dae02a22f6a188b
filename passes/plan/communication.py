"""What the collectives and the transfers of a step take, each with the op that needs it.

Collectives are those of `predicted_collectives.py`, priced as the search prices them: where the
devices' compiler combines small ones, each takes its share. Transfers have the seconds that
`insert-cross-mesh-reshard` found. Equal ones of the same op are one entry.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from alpa.dialects import body, ir, main_function, mpmd
from alpa.dialects.attributes import Part
from alpa.passes.cost import collectives as cost
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.pipelines.diagnostics import Place, name_of, place_of
from alpa.passes.plan.annotated import annotated_fragments
from alpa.passes.plan.data import Program
from alpa.passes.plan.predicted_collectives import Collective, Placed, collectives_in_order
from alpa.passes.sharding.rules import populated


@dataclass(frozen=True, kw_only=True)
class Communication:
    """Equal collectives on a mesh, or transfers of a value between two, that one op needs.

    `bytes` are what one device holds of the full array of a collective, or the whole tensor of a
    transfer, each time.
    """

    kind: str
    """of a collective, or the method of a transfer"""
    source: str
    """the mesh"""
    target: str
    """another mesh for transfers, else the same"""
    part: Part | None
    """None for transfers of what is no result of a fragment"""
    axes: tuple[str, ...]
    bytes: int
    count: int
    """in a step"""
    seconds: float
    """of a step"""
    op: str
    """that needs it: the end of its name in JAX, or its kind; empty if an argument is brought to
    its result"""
    place: Place
    """the op's, in the program's source"""

    @property
    def is_transfer(self) -> bool:
        """Whether it crosses from one mesh to another."""
        return self.source != self.target


@dataclass(frozen=True, kw_only=True)
class Communications:
    """All of a step, the costliest first, and the seconds of one run of each fragment's."""

    entries: tuple[Communication, ...]
    fragment_seconds: tuple[float, ...]

    @classmethod
    def of(cls, module: ir.Module, program: Program) -> Communications:
        """Those of a planned module with shardings.

        Raises:
            PassError: a sharding does not fit its mesh.
        """
        entries: list[Communication] = []
        seconds: list[float] = []
        with populated(module):
            annotated = list(annotated_fragments(module))
            for one, fragment in zip(program.fragments, annotated, strict=True):
                found = [
                    (placed, collective_seconds(placed.collective, fragment.mesh))
                    for placed in collectives_in_order(fragment)
                ]
                seconds.append(sum(it for _, it in found))
                entries += _collectives(one.mesh, one.part, program.runs(one), found)
        entries += _transfers(module, program)
        entries.sort(key=lambda it: -it.seconds)
        return cls(entries=tuple(entries), fragment_seconds=tuple(seconds))


def collective_seconds(collective: Collective, mesh: LogicalMesh) -> float:
    """The predicted seconds of all that a collective stands for."""
    axes = tuple(mesh.axis_names.index(name) for name in collective.axes)
    priced, size = replace(mesh, combined=collective.combined), float(collective.bytes)
    if collective.kind == "all-gather":
        each = cost.all_gather(priced, axes, size)
    elif collective.kind == "reduce-scatter":
        each = cost.reduce_scatter(priced, axes, size)
    elif collective.kind == "all-reduce":
        each = cost.all_reduce(priced, axes, size)
    elif collective.kind == "all-to-all":
        each = cost.all_to_all(priced, axes, size)
    else:
        each = cost.collective_permute(priced, axes, size)
    return collective.count * float(each)


class _Key(NamedTuple):
    collective: Collective
    op: str
    place: Place


def _collectives(
    mesh: str, part: Part, runs: int, found: Sequence[tuple[Placed, float]]
) -> Iterator[Communication]:
    """Those of one fragment, added up by op."""
    counts: Counter[_Key] = Counter()
    seconds: dict[_Key, float] = {}
    for placed, its in found:
        op, one = placed.op, placed.collective
        name = "" if op is None else _op_name(op)
        place = Place("unknown") if op is None else place_of(op.location)
        key = _Key(replace(one, count=1), name, place)
        counts[key] += one.count
        seconds[key] = seconds.get(key, 0.0) + its
    for key, count in counts.items():
        yield Communication(
            kind=key.collective.kind,
            source=mesh,
            target=mesh,
            part=part,
            axes=key.collective.axes,
            bytes=key.collective.bytes,
            count=runs * count,
            seconds=runs * seconds[key],
            op=key.op,
            place=key.place,
        )


def _op_name(op: ir.OpView) -> str:
    return name_of(op.location) or op.operation.name.partition(".")[2]


def _transfers(module: ir.Module, program: Program) -> Iterator[Communication]:
    """The transfers; what micro-batches send goes once for each of them."""
    ops = [op for op in body(main_function(module)).operations if isinstance(op, mpmd.TransferOp)]
    for op, one in zip(ops, program.transfers, strict=True):
        count = program.num_micro_batches if one.target in program.micro_used else 0
        if not count or one.target in program.totals:
            count += 1
        yield Communication(
            kind=one.method or "transfer",
            source=program.values[one.source].mesh,
            target=program.values[one.target].mesh,
            part=program.parts[one.source],
            axes=(),
            bytes=program.values[one.target].bytes,
            count=count,
            seconds=count * one.seconds,
            op=_op_name(op),
            place=place_of(op.location),
        )
