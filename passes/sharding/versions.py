"""The number of versions of a value, one per micro-batch, that are live on a mesh at a time.

A value moves to another mesh right before the work that reads it first (`runtime/instructions.py`),
and its mesh frees it then. The number of versions depends on who makes the value for whom:

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

from collections.abc import Mapping
from dataclasses import dataclass

from alpa.dialects import func, ir, mpmd
from alpa.dialects.attributes import Part, read_part
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.plan import Plan, read_meshes
from alpa.passes.solve.stages.schedule import in_flight


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Counts the versions of one mesh's values."""

    mesh: str
    kept: Mapping[str, int]
    """micro-batches in flight on each mesh, the first stage's first"""

    @classmethod
    def of_plan(cls, function: func.FuncOp, plan: Plan, mesh: str) -> Versions:
        """Counts as the schedule of a plan asks for."""
        names = [one.name for one in read_meshes(function)]
        to_last = {name: len(names) - stage for stage, name in enumerate(names)}
        kept = {
            name: in_flight(plan.schedule, plan.num_micro_batches, stages)
            for name, stages in to_last.items()
        }
        return cls(mesh=mesh, kept=kept)

    @property
    def in_flight(self) -> int:
        """Micro-batches in flight on the mesh itself."""
        return self.kept[self.mesh]

    def of(self, value: ir.Value) -> int:
        """The versions of a value that a fragment of the mesh returns or a transfer brings."""
        maker = value.owner
        source = maker.operands[0].owner if isinstance(maker, mpmd.TransferOp) else maker
        made = _part(source)
        users = [use.owner for use in value.uses]
        if any(isinstance(user, func.ReturnOp) for user in users):
            return 1 if made == "update" else self.in_flight
        read = {_part(user) for user in users}
        if isinstance(maker, mpmd.TransferOp):
            return self.in_flight if {"forward", "backward"} <= read else 1
        if made == "forward" and "backward" in read:
            return self.in_flight
        transfers = [user for user in users if isinstance(user, mpmd.TransferOp)]
        return max((self._until_taken(made, one) for one in transfers), default=1)

    def _until_taken(self, made: Part | None, transfer: mpmd.TransferOp) -> int:
        """The versions that wait until the other mesh reads them."""
        readers = [use.owner for use in transfer.results[0].uses]
        parts = {_part(reader) for reader in readers}
        if made in parts:
            there, stages = MeshTensor.from_type(transfer.results[0].type).mesh, list(self.kept)
            distance = abs(stages.index(there) - stages.index(self.mesh))
            return min(1 + distance, max(self.in_flight, self.kept[there]))
        return self.in_flight if "backward" in parts else 1


def _part(op: ir.OpView | ir.Operation | ir.Block) -> Part | None:
    """The part of the step that a fragment belongs to; None for other ops."""
    return read_part(op) if isinstance(op, mpmd.FragmentOp) else None
