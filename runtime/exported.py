"""The modules of a plan's fragments, which `export-stages` writes. Needs no JAX."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from alpa.dialects import ir, main_function, separate
from alpa.dialects.checks import CheckError, check_planned
from alpa.passes.export_stages import ExportStages
from alpa.passes.plan.data import Fragment, Program
from alpa.passes.plan.reader import read_planned


def module_name(fragment: Fragment) -> str:
    """The name of the nested module that a fragment runs."""
    return fragment.module or fragment.name


@dataclass(frozen=True, kw_only=True)
class Exported:
    """A planned module after `export-stages`, its program, and the modules for XLA by name."""

    module: ir.Module
    program: Program
    nested: Mapping[str, ir.OpView]


def exported(module: ir.Module) -> Exported:
    """Reads a planned module. If `export-stages` has not run, it runs on a copy.

    Raises:
        CheckError, PassError: the module is not planned, or its plan cannot be exported.
    """
    check_planned(module)
    program = read_planned(module)
    if not all(fragment.module for fragment in program.fragments):
        module = separate(module.operation)
        ExportStages().run(module, lambda location, text: None)
        program = read_planned(module)
    nested = {
        ir.StringAttr(op.attributes["sym_name"]).value: op
        for op in module.body.operations
        if "sym_name" in op.attributes
    }
    for fragment in program.fragments:
        if module_name(fragment) not in nested:
            raise CheckError(
                main_function(module).location,
                f"the planned module has no module @{module_name(fragment)}; run export-stages "
                "again",
            )
    return Exported(module=module, program=program, nested=nested)
