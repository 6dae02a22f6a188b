"""The number of versions of a value, one per micro-batch, that are live on a mesh at a time.

A value moves to another mesh right before the work that reads it first
(`plan/instructions.py`), and its mesh frees it then. The number of versions depends on who makes
the value for whom:

* A forward part makes or receives it for the backward part of its own mesh: one version for each
  micro-batch in flight.
* A forward part makes it for the backward part of another mesh: the same number.
* A forward part makes it for forward parts of other meshes, or a backward part for backward parts:
  one version more than the number of stages to the farthest reader, which lags by that many
  micro-batches.
* Any other value has one version.

With one micro-batch in flight every value has one version.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from alpa.dialects import func, ir, mpmd
from alpa.dialects.attributes import Part, read_part
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.plan import Plan
from alpa.passes.schedules.planned import in_flight


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Counts the versions of one mesh's values."""

    mesh: str
    stages: Sequence[str]
    """all meshes, the first stage's first"""
    plan: Plan

    def in_flight(self, mesh: str) -> int:
        """Micro-batches in flight on a mesh."""
        plan, count = self.plan, len(self.stages)
        to_last = count - self.stages.index(mesh)
        return in_flight(plan.schedule, plan.num_micro_batches, to_last, count)

    def of(self, value: ir.Value) -> int:
        """The versions of a value that a fragment of the mesh returns or a transfer brings."""
        maker, kept = value.owner, self.in_flight(self.mesh)
        made = _part(maker.operands[0].owner if isinstance(maker, mpmd.TransferOp) else maker)
        users = [use.owner for use in value.uses]
        if any(isinstance(user, func.ReturnOp) for user in users):
            return 1 if made == "update" else kept
        read = {_part(user) for user in users}
        if isinstance(maker, mpmd.TransferOp):
            return kept if {"forward", "backward"} <= read else 1
        if made == "forward" and "backward" in read:
            return kept
        transfers = [user for user in users if isinstance(user, mpmd.TransferOp)]
        return max((self._until_taken(made, one) for one in transfers), default=1)

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
