"""The versions of values that instructions read, and who makes them.

A **key** names one version of a value. `(value, m)` is the version of micro-batch `m`.
`(value, None)` is the version of the step: an argument, a total over the micro-batches, or a value
that the update phase produces.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from alpa.dialects.attributes import BackwardHalf
from alpa.passes.plan.data import Program, Transfer
from alpa.passes.schedules.work import Work, WorkLists

Key = tuple[int, int | None]


@dataclass(frozen=True)
class Versions:
    """Finds which version of a value is read where, and from where it is moved."""

    program: Program

    @cached_property
    def _transfers(self) -> dict[int, Transfer]:
        """The transfers by target."""
        return {step.target: step for step in self.program.transfers}

    @cached_property
    def summed(self) -> frozenset[int]:
        """Results that instructions add up; gradients are added up inside their fragments."""
        program = self.program
        if program.num_micro_batches == 1:
            return frozenset()
        summed = {result.value for result in program.results if result.sum_kind is not None}
        return frozenset(summed & program.varying - program.returned_totals.keys())

    def is_constant(self, transfer: Transfer) -> bool:
        """Whether it moves an argument that is the same for all micro-batches."""
        program, source = self.program, transfer.source
        return program.parts[source] is None and source not in program.varying

    def version(self, value: int, m: int) -> Key:
        """The version that a forward or backward fragment of micro-batch `m` reads."""
        program = self.program
        if value not in program.varying:
            return (value, None)
        new = program.carries.get(value)
        if m and new is not None and program.values[new] == program.values[value]:
            return (new, m - 1)
        return (value, m)

    def may_move(self, value: int) -> bool:
        """Whether versions of a value may be moved from others."""
        return value in self._transfers or value in self.program.carries

    def last(self, value: int) -> Key:
        """The version that the update phase reads: a total, or that of the last micro-batch.

        If only the update reads the result of a transfer, it is moved in the update phase.
        """
        program = self.program
        late = value in self._transfers and value not in program.micro_used
        if value in program.totals or late:
            return (value, None)
        return self.version(value, program.num_micro_batches - 1)

    def source(self, key: Key) -> Key | None:
        """The key that a key is moved from; None for arguments and results of fragments."""
        value, m = key
        transfer = self._transfers.get(value)
        if transfer is not None:
            return self.last(transfer.source) if m is None else self.version(transfer.source, m)
        new = self.program.carries.get(value)
        # A carried state on the mesh of its argument is read there, as `version` does.
        return (new, m - 1) if new is not None and m else None


@dataclass(frozen=True)
class Maker:
    """A fragment that makes values, as far as a schedule says when it runs."""

    stage: int
    is_forward: bool
    half: BackwardHalf | None

    def work(self, m: int, schedule: WorkLists) -> Work | None:
        """The work that runs it for micro-batch `m`."""
        if self.is_forward:
            return Work(self.stage, "forward", m)
        work = schedule.backward_of(self.stage, m)
        if work is not None and work.kind == "backward-input" and self.half == "weight":
            return Work(self.stage, "backward-weight", m)
        return work
