"""The sharding problem of a mesh whose backwards will be split.

`MeshProblem` counts the values of whole backwards. Here activations that only the first part of a
backward reads have as many versions as there are micro-batches before that part, and there are rows
for what the mesh keeps between the parts. All versions are those of one moment of the schedule, the
fullest one by the bytes of whole tensors: shardings are not known yet.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from alpa.dialects import ir, mpmd
from alpa.dialects.attributes import read_part
from alpa.dialects.mpmd_types import MeshTensor, stage_of
from alpa.dialects.plan import read_meshes
from alpa.passes.analysis.graph import type_bytes
from alpa.passes.plan.backward_halves import Halves
from alpa.passes.schedules.planned import chunks_of
from alpa.passes.schedules.split_memory import Bytes, Count, fullest
from alpa.passes.sharding.liveness import Held, buffer
from alpa.passes.sharding.mesh_problem import MeshProblem
from alpa.passes.sharding.versions import Versions


@dataclass(frozen=True)
class SplitMesh(MeshProblem):
    """A mesh of a plan whose schedule splits backwards. What `of` makes knows no halves yet."""

    halves: Mapping[mpmd.FragmentOp, Halves] = field(default_factory=dict[mpmd.FragmentOp, Halves])
    """of the backward fragments on all meshes"""

    @cached_property
    def versions(self) -> Versions:
        """Those at the fullest moment."""
        found = super().versions
        versions: dict[ir.Value, int] = {}
        for stage, it in self._stages.items():
            count = self._moment[stage]
            versions |= dict.fromkeys(it.freed, int(count.freed))
            versions |= dict.fromkeys(it.read, int(count.read))
        return _Versions(
            mesh=found.mesh,
            stages=found.stages,
            plan=found.plan,
            has_backward=found.has_backward,
            known=versions,
        )

    @cached_property
    def usages(self) -> list[Held]:
        """What this mesh holds when, with what it keeps between the parts of backwards."""
        return [*super().usages, *self._kept()]

    def _kept(self) -> list[Held]:
        whole, found = self.clock.micro_batch, list[Held]()
        for stage, it in self._stages.items():
            count = int(self._moment[stage].made)
            for value, rows in it.made:
                found += buffer(self.graph, "activations", value, whole, rows * count)
            # Of gradients from behind, one version is counted anyway.
            more = 0 if self.versions.are_counted else count - 1
            for value in it.gradients:
                found += buffer(self.graph, "gradients", value, whole, more)
        return [one for one in found if one.usage.bytes.any()]

    @cached_property
    def _moment(self) -> Mapping[int, Count]:
        meshes = [mesh.name for mesh in read_meshes(self.function)]
        stages = len(meshes) * chunks_of(self.plan.schedule)
        return fullest(
            self.plan.schedule,
            stages,
            self.plan.num_micro_batches,
            meshes.index(self.name),
            {stage: it.bytes for stage, it in self._stages.items()},
        )

    @cached_property
    def _stages(self) -> dict[int, _Stage]:
        """The stages of this mesh that have a backward."""
        found: dict[int, _Stage] = {}
        for op in self.fragments():
            stage = stage_of(op)
            if op in self.halves and stage is not None:
                found[stage] = _Stage.of(op, stage, self.halves[op])
        return found


@dataclass(frozen=True, kw_only=True)
class _Stage:
    """What a stage holds for its backward."""

    freed: list[ir.Value]
    """activations that the first part alone reads"""
    read: list[ir.Value]
    """activations that the second part reads"""
    gradients: list[ir.Value]
    """from the stage behind, that the second part reads"""
    made: tuple[tuple[ir.Value, int], ...]
    """as `Halves` has it"""

    @classmethod
    def of(cls, fragment: mpmd.FragmentOp, stage: int, halves: Halves) -> _Stage:
        """Of the stage's backward fragment."""
        values: dict[str, list[ir.Value]] = {"freed": [], "read": [], "gradients": []}
        for number, value in enumerate(fragment.operands):
            part, is_read = _made_by(value), number in halves.read
            if part == "forward" and _is_for(value, stage):
                values["read" if is_read else "freed"].append(value)
            elif part == "backward" and is_read and halves.is_split:
                values["gradients"].append(value)
        return cls(**values, made=halves.made)

    @cached_property
    def bytes(self) -> Bytes:
        """Of whole tensors, for one micro-batch."""
        made = sum(rows * type_bytes(value.type) for value, rows in self.made)
        return Bytes(
            freed=sum(map(_bytes, self.freed)),
            read=sum(map(_bytes, self.read)),
            made=made + sum(map(_bytes, self.gradients)),
        )


@dataclass(frozen=True, kw_only=True)
class _Versions(Versions):
    """Versions, some of which are known."""

    known: Mapping[ir.Value, int]

    def of(self, value: ir.Value) -> int:
        if value in self.known:
            return max(1, self.known[value])
        return super().of(value)


def _made_by(value: ir.Value) -> str | None:
    """The part of a step that makes a value, maybe on another mesh; None for arguments."""
    owner = value.owner
    while isinstance(owner, mpmd.TransferOp):
        owner = owner.operands[0].owner
    return read_part(owner) if isinstance(owner, mpmd.FragmentOp) else None


def _is_for(value: ir.Value, stage: int) -> bool:
    """Whether no other stage of the mesh makes or reads a value, nor the program returns it."""
    ops = [value.owner, *(use.owner for use in value.uses)]
    return all(
        isinstance(op, mpmd.TransferOp)
        or (isinstance(op, mpmd.FragmentOp) and stage_of(op) in (stage, None))
        for op in ops
    )


def _bytes(value: ir.Value) -> int:
    return type_bytes(MeshTensor.from_type(value.type).type)
