"""Refuses programs that call Python while they run, before planning, with their place."""

from __future__ import annotations

from alpa.dialects import ir, main_function, walk
from alpa.passes.base import PassError
from alpa.passes.pipelines.diagnostics import Diagnostic, place_of
from alpa.passes.simplify import host_calls
from alpa.runtime.planning import PlanningError


def refuse_host_calls(module: ir.Module) -> None:
    """Checks that a lowered program runs without the process that lowered it.

    Raises:
        PlanningError: it has callbacks, debug prints or ordered effects.
    """
    try:
        host_calls.refuse_host_calls(main_function(module), walk(module.body))
    except PassError as error:
        found = Diagnostic("error", place_of(error.location), error.message)
        raise PlanningError((found,)) from None
