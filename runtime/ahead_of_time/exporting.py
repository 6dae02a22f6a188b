"""Writes the executables of a plan's stages to a folder that travels to the plan's devices.

`load(..., executables=FOLDER)` and `parallelize(..., executables=FOLDER)` read them there.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from alpa.dialects import ir
from alpa.passes.cost.device import size_text
from alpa.runtime.ahead_of_time.compilation import Progress, compile_ahead
from alpa.runtime.exported import exported
from alpa.runtime.pjrt import CompilerOptions


@dataclass(frozen=True, kw_only=True)
class Executables:
    """What was written."""

    folder: Path
    stages: int
    files: tuple[Path, ...]
    """equal stages have one file"""
    tuned_on_device: tuple[str, ...]
    """the stages without an executable, because their kernels are chosen on the device"""

    def __str__(self) -> str:
        number, size = len(self.files), sum(path.stat().st_size for path in self.files)
        text = f"executables: {number} files of {self.stages} stages, {size_text(size)}"
        if self.tuned_on_device:
            text += (
                f"; none for {', '.join(self.tuned_on_device)}: cuDNN's kernels are chosen there"
            )
        return f"{text}, in {self.folder}"


def export_executables(
    module: ir.Module,
    folder: Path,
    *,
    processes: int | None = None,
    compiler_options: CompilerOptions | None = None,
    cache: Path | None = None,
    on_progress: Callable[[Progress], None] = lambda _: None,
) -> Executables:
    """Compiles a planned module's stages for its cluster's devices, which need not be here.

    `compiler_options` must be those of the run. `cache` is the folder of earlier results, also of
    `verify_plan`; without it, nothing is kept but the executables.

    Raises:
        CompilationError: the cluster's device is unknown, packages are missing, or XLA refuses a
            stage.
        CheckError, PassError: the module is not planned, or cannot be exported.
        UnsafeCacheError: other users can write to the cache.
        OSError: the folder cannot be written.
    """
    stages = exported(module)
    with tempfile.TemporaryDirectory() as temporary:
        kept = cache or Path(temporary)
        results = compile_ahead(
            stages,
            processes=processes,
            compiler_options=compiler_options,
            cache=kept,
            executables=True,
            on_progress=on_progress,
        )
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        files: dict[str, Path] = {}
        for result in results.values():
            if result.executable is not None and result.executable not in files:
                path = files[result.executable] = folder / result.executable
                unfinished = path.with_suffix(".unfinished")
                shutil.copy(kept / result.executable, unfinished)
                unfinished.replace(path)
    return Executables(
        folder=folder,
        stages=len(results),
        files=tuple(files.values()),
        tuned_on_device=tuple(name for name, it in results.items() if it.tuned_on_device),
    )
