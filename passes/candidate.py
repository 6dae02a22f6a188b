"""A copy of a program's layers on its way to a plan."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field, replace
from typing import cast

from alpa.dialects import body, ir, main_function
from alpa.dialects.attributes import read_part, read_remat
from alpa.dialects.plan import Dropped, MeshAssignment, Plan, read_meshes
from alpa.passes.base import NoRoomError


@dataclass(frozen=True)
class Candidate:
    """A copy of the layers on its way to a plan."""

    module: ir.Module
    number: int = 0
    """in the order of the search"""
    remarks: list[tuple[ir.Location, str]] = field(default_factory=list[tuple[ir.Location, str]])
    stages: list[ir.Module] = field(default_factory=list[ir.Module])
    """a copy before shardings are chosen, where later questions need it"""

    def remark(self, location: ir.Location, message: str) -> None:
        self.remarks.append((location, message))

    @property
    def plan(self) -> Plan:
        """What is known so far; numbers that are not are 0."""
        return Plan.read(main_function(self.module)) or Plan()

    @property
    def meshes(self) -> list[MeshAssignment]:
        """Those of the stages."""
        return read_meshes(main_function(self.module))

    @property
    def step_seconds(self) -> float:
        """Predicted, by what is known so far."""
        return self.plan.predicted_step_seconds

    @property
    def key(self) -> Hashable:
        """The same for the same stages, before they are finished."""
        return self.step_seconds, self.plan.predicted_peak_bytes, tuple(self.meshes)

    def note_bound(self, seconds: float) -> None:
        """Writes down what the stages of every cut that was planned take at least, by estimates."""
        self._write(replace(self.plan, estimated_step_bound=seconds))

    def note_runner_up(self, schedule: str, seconds: float, *, estimated: bool) -> None:
        """Writes down the schedule that comes second."""
        self._write(
            replace(
                self.plan,
                runner_up=schedule,
                runner_up_seconds=seconds,
                runner_up_is_estimated=estimated,
            )
        )

    def leave_out(self, schedule: str, error: NoRoomError) -> None:
        """Says that a schedule was left out of the search, and why."""
        self.remark(error.location, f"{schedule} is left out of the search: {error.message}")
        if error.missing is None:
            dropped = (*self.plan.dropped, Dropped(what=schedule, reason=error.message))
            self._write(replace(self.plan, dropped=dropped))

    def _write(self, plan: Plan) -> None:
        with self.module.context:
            plan.write(main_function(self.module))

    @property
    def is_partly_rematerialised(self) -> bool:
        """Whether some backward parts compute again what others read."""
        fragments = list(body(main_function(self.module)).operations)
        backwards = [op for op in fragments if read_part(op) == "backward"]
        layers = [len(ir.ArrayAttr(op.attributes["origin"])) for op in backwards]
        again = [len(read_remat(op)) for op in backwards]
        return 0 < sum(again) < sum(layers)


def copied(module: ir.Module) -> ir.Module:
    """A copy of a module."""
    # The bindings give an op; as a view it has all that a pass uses of a module.
    return cast(ir.Module, module.operation.clone().opview)
