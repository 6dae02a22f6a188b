"""Says whether a plan fits its devices, by what their compiler makes of its stages.

`verify_plan` compiles every stage for the plan's devices, which need not be here. A mesh's bytes
are those of all values on it, by the instructions of a step, and what XLA needs inside the stage
that runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpa.dialects import ir, main_function
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.device import size_text
from alpa.passes.cost.presets import USABLE_MEMORY
from alpa.passes.plan.attribute import plan_and_any_cluster
from alpa.passes.plan.data import Program
from alpa.passes.plan.instructions import write_script
from alpa.passes.plan.predicted_memory import FragmentMemory, predicted_memory
from alpa.passes.plan.text import aligned
from alpa.runtime.ahead_of_time.compilation import Progress, compile_ahead, gpus_of
from alpa.runtime.ahead_of_time.module_check import ModuleCheck, checks, ratio
from alpa.runtime.exported import Exported, exported, module_name
from alpa.runtime.pjrt import CompilerOptions
from alpa.runtime.script_checks import verify
from alpa.runtime.truth import Truth

_MARGIN = 0.01
"""The share of memory that a repaired plan leaves free beside what was missing."""


@dataclass(frozen=True, kw_only=True)
class MeshCheck:
    """The memory of one mesh, in bytes per device."""

    name: str
    planned: int | None
    """what the search counted, for parts that may have been merged since; None if it is unknown"""
    predicted: int
    """as `predicted_peaks`"""
    compiled: int
    """at the fullest time of a step, by XLA's temporaries"""
    usable: int

    @property
    def fits(self) -> bool:
        return self.compiled <= self.usable

    @property
    def verdict(self) -> str:
        """`fits`, or by how much it does not."""
        if self.fits:
            return "fits"
        return f"does not fit: {size_text(self.compiled)} of {size_text(self.usable)}"


@dataclass(frozen=True, kw_only=True)
class Verification:
    """A plan's predictions beside what the compiler of its devices made of it."""

    device: str
    modules: tuple[ModuleCheck, ...]
    meshes: tuple[MeshCheck, ...]

    @property
    def fits(self) -> bool:
        """Whether every mesh fits."""
        return all(mesh.fits for mesh in self.meshes)

    @property
    def problem(self) -> str:
        """Which meshes do not fit, in words; empty if all do."""
        return ", ".join(f"{it.name} {it.verdict}" for it in self.meshes if not it.fits)

    def memory_to_plan_with(self, cluster: Cluster) -> int:
        """Bytes per device for another search, whose plan is expected to fit.

        From what was planned for a mesh it takes what the compiled one exceeds the usable memory
        by, and `_MARGIN` more. It is less than the cluster's memory, with which this plan was
        found.
        """
        wanted = [
            (mesh.planned or mesh.compiled) - (mesh.compiled - mesh.usable)
            for mesh in self.meshes
            if not mesh.fits
        ]
        return int(min(cluster.device.memory, *wanted) * (1 - _MARGIN))

    def to_json(self) -> dict[str, Any]:
        """All numbers."""
        return {
            "device": self.device,
            "fits": self.fits,
            "modules": [module.to_json() for module in self.modules],
            "meshes": [
                {
                    "name": mesh.name,
                    "planned_bytes": mesh.planned,
                    "predicted_bytes": mesh.predicted,
                    "compiled_bytes": mesh.compiled,
                    "usable_bytes": mesh.usable,
                    "fits": mesh.fits,
                }
                for mesh in self.meshes
            ],
        }

    def __str__(self) -> str:
        modules = [["module", "", "predicted", "compiled", "ratio"]]
        for module in self.modules:
            rows = _rows(module)
            modules += [[module.name if i == 0 else "", *row] for i, row in enumerate(rows)]
        meshes = [["mesh", "planned", "predicted", "compiled", "usable", ""]]
        for mesh in self.meshes:
            planned = "unknown" if mesh.planned is None else size_text(mesh.planned)
            sizes = [size_text(it) for it in (mesh.predicted, mesh.compiled, mesh.usable)]
            meshes.append([mesh.name, planned, *sizes, mesh.verdict])
        return "\n".join(
            [
                f"compiled for {self.device}; bytes and FLOPs per device, of one run",
                *aligned(modules, left=(0, 1)),
                "",
                "memory of a device, at the fullest time of a step",
                *aligned(meshes, left=(0, 5)),
            ]
        )


def verify_plan(
    module: ir.Module,
    *,
    processes: int | None = None,
    compiler_options: CompilerOptions | None = None,
    cache: Path | None = None,
    executables: bool = False,
    usable: int | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Verification:
    """Compiles a planned module's stages for its cluster's devices, and compares.

    `export-stages` runs on a copy, unless it has run. For CPU, XLA compiles for virtual devices.
    `usable` is the memory of a device in bytes, by default `USABLE_MEMORY` of a GPU's, and the
    cluster's for CPU. `executables` keeps executables in the cache, for `export_executables`.

    Raises:
        CompilationError: the cluster's device is unknown, packages are missing, or XLA refuses a
            stage.
        CheckError, PassError: the module is not planned, or cannot be exported.
        HloError: XLA's text cannot be read.
    """
    stages = exported(module)
    results = compile_ahead(
        stages,
        processes=processes,
        compiler_options=compiler_options,
        cache=cache,
        executables=executables,
        on_progress=on_progress,
    )
    real = {name: result.truth for name, result in results.items()}
    _, cluster = plan_and_any_cluster(main_function(stages.module))
    gpus, names, memory = gpus_of(stages), list[str](), dict[str, int]()
    for mesh in stages.program.meshes:
        device, gpu = cluster.of(mesh.hosts).device, gpus[mesh.name]
        names.append(device.name if gpu is None else gpu.name)
        known = device.memory if gpu is None else int(gpu.memory * USABLE_MEMORY)
        memory[mesh.name] = known if usable is None else usable
    return Verification(
        device=", ".join(dict.fromkeys(names)),
        modules=tuple(checks(stages, real)),
        meshes=tuple(_mesh_checks(stages, real, memory)),
    )


def predicted_peaks(stages: Exported) -> Mapping[str, int]:
    """Bytes per device at the fullest time of a step, by mesh, from the predicted temporaries of
    the modules as they are compiled (`passes/plan/predicted_memory.py`).

    Raises:
        PassError: a sharding does not fit its mesh.
    """
    predicted = predicted_memory(stages.module)
    fragments = map(module_name, stages.program.fragments)
    return _peaks(stages.program, dict(zip(fragments, predicted, strict=True)))


def _peaks(program: Program, inside: Mapping[str, FragmentMemory | Truth]) -> Mapping[str, int]:
    script = write_script(program)
    return verify(script, inside=lambda it: inside[module_name(it)].temporaries).peak_bytes


def _mesh_checks(
    stages: Exported, real: Mapping[str, Truth], usable: Mapping[str, int]
) -> Iterator[MeshCheck]:
    program = stages.program
    predicted, compiled = predicted_peaks(stages), _peaks(program, real)
    planned = program.plan.predicted_peak_bytes
    for number, mesh in enumerate(program.meshes):
        yield MeshCheck(
            name=mesh.name,
            planned=planned[number] if number < len(planned) else None,
            predicted=predicted[mesh.name],
            compiled=compiled[mesh.name],
            usable=usable[mesh.name],
        )


def _rows(module: ModuleCheck) -> Iterator[list[str]]:
    """Cells: what, predicted, compiled, ratio."""
    for kind, (predicted, real) in module.payloads.items():
        counts = module.counts[kind]
        both = [f"{size_text(n)} in {k}" for n, k in zip((predicted, real), counts, strict=True)]
        yield [kind, *both, f"{ratio(predicted, real):.3f}"]
    pairs = {
        "memory": (module.memory.peak, module.real.peak),
        "temporaries": (module.memory.temporaries, module.real.temporaries),
        "bytes accessed": (module.bytes_accessed, module.real.bytes_accessed),
    }
    for what, (predicted, real) in pairs.items():
        yield [what, size_text(predicted), size_text(real), f"{ratio(predicted, real):.3f}"]
    flops = (module.flops, module.real.flops)
    yield ["FLOPs", *(f"{it:.4g}" for it in flops), f"{ratio(*flops):.3f}"]
