"""Writes the modules of a plan's stages to files."""

from __future__ import annotations

import re
from pathlib import Path

from alpa import passes
from alpa.dialects import ir
from alpa.passes.pipelines.diagnostics import Diagnostic, listening
from alpa.runtime.planning import PlanningError


def write_modules(module: ir.Module, folder: Path) -> None:
    """Exports a planned module in place, and writes each module to a file of its name.

    Raises:
        OSError: the folder cannot be written.
        PlanningError: `export-stages` fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    said: list[Diagnostic] = []
    with listening(module.context, said.append):
        try:
            passes.run(module, "export-stages")
        except ir.MLIRError as error:
            raise PlanningError(tuple(said)) from error
    for op in module.body.operations:
        if op.operation.name == "builtin.module":
            name = ir.StringAttr(op.attributes["sym_name"]).value
            path = folder / (re.sub(r"[^\w.-]", "_", name) + ".mlir")
            path.write_text(f"{op.operation.get_asm()}\n", encoding="utf-8")
