"""Writes the modules of a plan's stages to files, for XLA or for other compilers of StableHLO."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from alpa import passes
from alpa.dialects import ir, separate, write_portable
from alpa.dialects.checks import CheckError
from alpa.passes.pipelines.diagnostics import Diagnostic, listening, place_of
from alpa.runtime.planning import PlanningError

_LISTING = ".alpa-export.json"
"""Names the files that an export wrote to its folder."""


@dataclass(frozen=True, kw_only=True)
class ExportFormat:
    """The form of the modules: text for XLA, text of StableHLO alone, or portable artifacts (VHLO).

    `version` is that of StableHLO in portable artifacts; None is jaxlib's own.
    """

    kind: Literal["xla", "stablehlo", "vhlo"] = "xla"
    version: str | None = None
    keeps_sdy: bool = True

    @property
    def pipeline(self) -> str:
        """The passes that bring a module for XLA into this form."""
        steps = () if self.keeps_sdy else ("strip-sdy",)
        if self.kind != "xla":
            steps = (*steps, "func.func(chlo-legalize-to-stablehlo)")
        return ",".join(steps)

    @property
    def suffix(self) -> str:
        return ".mlir.bc" if self.kind == "vhlo" else ".mlir"

    def written(self, module: ir.Module) -> bytes:
        """A module for XLA in this form, which changes it. Raises ir.MLIRError, CheckError."""
        if self.pipeline:
            passes.run(module, self.pipeline)
        if self.kind == "vhlo":
            return write_portable(module, self.version)
        return f"{module.operation.get_asm()}\n".encode()


def write_modules(module: ir.Module, folder: Path, form: ExportFormat) -> list[Path]:
    """Exports a planned module in place, and writes each module to a file of its name.

    Returns the files.

    Raises:
        OSError: the folder cannot be written.
        PlanningError: `export-stages` fails, or a module cannot be written in this form; then no
            module is written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said: list[Diagnostic] = []
    with listening(module.context, said.append):
        try:
            passes.run(module, "export-stages")
            files = dict(_files(module, form))
        except ir.MLIRError as error:
            raise PlanningError(tuple(said)) from error
        except CheckError as error:
            problem = Diagnostic("error", place_of(error.location), error.message)
            raise PlanningError((problem,)) from error
    for name, data in files.items():
        (folder / name).write_bytes(data)
    return [folder / name for name in files]


def remove_former(folder: Path, files: Collection[Path], read: Path) -> None:
    """Removes what an earlier export wrote to its folder, and notes what this one wrote.

    Args:
        folder: of `--export`. Other files stay, whatever their names are.
        files: those of this export.
        read: the program's file, which stays, too.

    Raises:
        OSError: a file cannot be removed, or the listing not be read or written.
    """
    listing, kept = folder / _LISTING, {path.resolve() for path in (*files, read)}
    former = json.loads(listing.read_text(encoding="utf-8")) if listing.exists() else []
    for path in (folder / name for name in former):
        if path.is_file() and path.resolve() not in kept:
            path.unlink()
    names = sorted(str(path.relative_to(folder)) for path in files)
    listing.write_text(f"{json.dumps(names, indent=1)}\n", encoding="utf-8")


def _files(module: ir.Module, form: ExportFormat) -> Iterator[tuple[str, bytes]]:
    """The files of the stages' modules by their names."""
    for op in module.body.operations:
        if op.operation.name == "builtin.module":
            name = ir.StringAttr(op.attributes["sym_name"]).value
            yield re.sub(r"[^\w.-]", "_", name) + form.suffix, form.written(separate(op))
