"""Plans that differ from a plan in one choice: the rest is solved again, as the plan was."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

from alpa.dialects import ir
from alpa.passes.alpa import Kept
from alpa.passes.base import Pass
from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.report import PlanReport
from alpa.passes.stages.fixed_stages import FixedStage
from alpa.runtime.planning import PlanningError, run_steps


@dataclass(frozen=True, kw_only=True)
class Variant:
    """A plan with another choice, or why there is none."""

    module: ir.Module | None
    report: PlanReport | None
    refused: str = ""


@dataclass(frozen=True, kw_only=True)
class Variants:
    """Makes variants of a plan from what its search has kept."""

    kept: Kept
    clock: Clock

    def of_shardings(self, edit: Callable[[ir.Module], None]) -> Variant:
        """The stages stay. `edit` changes a copy of them before their shardings are chosen."""
        assert self.kept.stages is not None, "the search has kept what questions need"
        return self._planned(self.kept.stages, edit, self.kept.to_plan)

    def of_stages(self, fixed: Sequence[FixedStage]) -> Variant:
        """Cuts the layers again, with these stages; layers of no stage are searched."""
        assert self.kept.layers is not None, "the search has kept what questions need"
        assert self.kept.cut is not None, "the search has kept what questions need"
        cut = replace(self.kept.cut, fixed_stages=",".join(map(str, fixed)))
        return self._planned(self.kept.layers, lambda _: None, (cut, *self.kept.to_plan))

    def _planned(
        self, source: ir.Module, edit: Callable[[ir.Module], None], steps: tuple[Pass, ...]
    ) -> Variant:
        module = cast(ir.Module, source.operation.clone().opview)
        with module.context:
            edit(module)
        try:
            run_steps([replace(step, is_checked=True) for step in steps], module, self.clock)
        except PlanningError as error:
            return Variant(module=None, report=None, refused=error.diagnostics[0].message)
        return Variant(module=module, report=PlanReport.of(module))


def chosen_stages(report: PlanReport) -> list[FixedStage | None]:
    """The stages of a plan with one on each mesh as choices; None for a mesh without layers."""
    meshes = {mesh.name: mesh for mesh in report.meshes}
    found: list[FixedStage | None] = []
    for stage in report.stages:
        mesh = meshes[stage.mesh]
        layers = [int(name.rpartition("_")[2]) for name in stage.layers]
        hosts = len(mesh.hosts)
        fixed = None
        if layers:
            fixed = FixedStage(
                first=min(layers),
                last=max(layers),
                submesh=(hosts, len(mesh.devices) // hosts),
                shape=tuple(mesh.logical_shape),
            )
        found.append(fixed)
    return found
