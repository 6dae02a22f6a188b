"""The number of versions of a value, one per micro-batch, that are live on a mesh at a time.

A value moves to another mesh right before the work that reads it first
(`plan/instructions.py`), and its mesh frees it then. The number of versions depends on who makes
the value for whom. Under GPipe, 1F1B, ZB-H1 and a user's own schedule, with one stage per mesh:

* A forward part makes or receives it for the backward part of its own mesh: one version for each
  micro-batch in flight.
* A forward part makes it for the backward part of another mesh: the same number.
* A forward part makes it for forward parts of other meshes, or a backward part for backward parts:
  one version more than the number of stages to the farthest reader, which lags by that many
  micro-batches.
* Any other value has one version.

With one micro-batch in flight every value has one version. Under all other schedules the number is
counted in the schedule's lists (`schedules/waiting.py`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from alpa.dialects import body, func, ir, mpmd
from alpa.dialects.attributes import Part, read_part
from alpa.dialects.mpmd_types import MeshTensor, stage_of
from alpa.dialects.plan import Plan, read_meshes
from alpa.passes.schedules.planned import chunks_of, in_flight
from alpa.passes.schedules.waiting import Role, versions


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Counts the versions of one mesh's values."""

    mesh: str
    stages: Sequence[str]
    """all meshes, the first stage's first"""
    plan: Plan
    has_backward: bool = True
    """whether the program trains"""

    @property
    def are_counted(self) -> bool:
        """Whether the schedule's lists are counted."""
        return self.plan.schedule == "eager-1f1b" or self.has_several_stages

    @classmethod
    def on(cls, mesh: str, function: func.FuncOp, plan: Plan) -> Self:
        """Those of a mesh of a planned program."""
        stages = [it.name for it in read_meshes(function)]
        trains = any(_part(op) == "backward" for op in body(function).operations)
        return cls(mesh=mesh, stages=stages, plan=plan, has_backward=trains)

    @property
    def has_several_stages(self) -> bool:
        """Whether a mesh has several stages."""
        return chunks_of(self.plan.schedule) > 1

    def in_flight(self, mesh: str) -> int:
        """Micro-batches in flight on a mesh."""
        plan, count = self.plan, len(self.stages)
        to_last = count - self.stages.index(mesh)
        return in_flight(plan.schedule, plan.num_micro_batches, to_last, count)

    def lives(
        self, value: ir.Value, span: tuple[int, int], whole: tuple[int, int]
    ) -> tuple[tuple[int, int], int]:
        """When a value lives, and its versions.

        Args:
            value: as in `of`.
            span: when it lives in one micro-batch.
            whole: when the micro-batch runs. While one stage of a mesh works, its others keep the
                versions that they hold for their backwards.
        """
        count = self.of(value)
        return (whole if self.has_several_stages and count > 1 else span), count

    def of_gradient(self, value: ir.Value) -> int:
        """The versions of a gradient, of an activation or of a weight: one, unless stages of one
        mesh lie between those that exchange it."""
        return self.of(value) if self.are_counted else 1

    def of(self, value: ir.Value) -> int:
        """The versions of a value that a fragment of the mesh returns or a transfer brings."""
        maker = value.owner
        made = _part(maker.operands[0].owner if isinstance(maker, mpmd.TransferOp) else maker)
        users = [use.owner for use in value.uses]
        is_returned = any(isinstance(user, func.ReturnOp) for user in users)
        if is_returned and made == "update":
            return 1
        if self.are_counted:
            return self.plan.num_micro_batches if is_returned else self._counted(value)
        kept = self.in_flight(self.mesh)
        if is_returned:
            return kept
        read = {_part(user) for user in users}
        if isinstance(maker, mpmd.TransferOp):
            return kept if {"forward", "backward"} <= read else 1
        if made == "forward" and "backward" in read:
            return kept
        transfers = [user for user in users if isinstance(user, mpmd.TransferOp)]
        return max((self._until_taken(made, one) for one in transfers), default=1)

    def _counted(self, value: ir.Value) -> int:
        plan, stages = self.plan, len(self.stages) * chunks_of(self.plan.schedule)
        maker = None if isinstance(value.owner, mpmd.TransferOp) else _roles([value.owner])
        taken = [it for use in value.uses if isinstance(it := use.owner.opview, mpmd.TransferOp)]
        readers = _roles(use.owner for use in value.uses)
        sent = (_roles(use.owner for use in one.results[0].uses) for one in taken)
        if not (readers if maker is None else maker):
            return 1
        return versions(
            plan.schedule,
            stages,
            plan.num_micro_batches,
            None if maker is None else next(iter(maker)),
            readers,
            frozenset(roles for roles in sent if roles),
            has_backward=self.has_backward,
        )

    def _until_taken(self, made: Part | None, transfer: mpmd.TransferOp) -> int:
        """The versions that wait until the other mesh reads them."""
        (value,) = transfer.results
        parts = {_part(use.owner) for use in value.uses}
        kept, there = self.in_flight(self.mesh), MeshTensor.from_type(value.type).mesh
        if made in parts:
            distance = abs(self.stages.index(there) - self.stages.index(self.mesh))
            return min(1 + distance, max(kept, self.in_flight(there)))
        return kept if "backward" in parts else 1


def _part(op: ir.OpView | ir.Operation | ir.Block) -> Part | None:
    """The part of the step that a fragment belongs to; None for other ops."""
    return read_part(op) if isinstance(op, mpmd.FragmentOp) else None


def _roles(ops: Iterable[ir.OpView | ir.Operation | ir.Block]) -> frozenset[Role]:
    """The stages and parts of the fragments among ops that run for each micro-batch."""
    found: set[Role] = set()
    for op in ops:
        it = op.opview if isinstance(op, ir.Operation) else op
        stage = stage_of(it) if isinstance(it, mpmd.FragmentOp) else None
        part = _part(it) if isinstance(it, mpmd.FragmentOp) else None
        if stage is not None and (part == "forward" or part == "backward"):
            found.add((stage, part))
    return frozenset(found)
