"""Checks a piece of a pipeline that MLIR's own passes run, element by element.

MLIR itself names no position inside our text, and ends the process when a pass that works on
modules is nested in a function. So each element is tried alone first: then we know what is wrong.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from alpa.dialects import ir, make_context, passmanager
from alpa.passes.pipelines.text import Element, PipelineError, did_you_mean, parse

# Candidates for a suggestion only; one that this jaxlib does not register is never suggested.
_LIKELY = (
    "canonicalize",
    "chlo-legalize-to-stablehlo",
    "cse",
    "inline",
    "loop-invariant-code-motion",
    "print-ir",
    "sccp",
    "sdy-close-shardings",
    "sdy-convert-global-to-local",
    "sdy-drop-sharding-and-mesh",
    "sdy-drop-sharding-rules",
    "sdy-export-pipeline",
    "sdy-import-pipeline",
    "sdy-inline-meshes",
    "sdy-insert-explicit-reshards",
    "sdy-lift-inlined-meshes",
    "sdy-populate-op-sharding-rules",
    "sdy-propagation-pipeline",
    "sdy-reshard-to-collectives",
    "sdy-sharding-constraint-to-reshard",
    "stablehlo-complex-math-expander",
    "strip-debuginfo",
    "symbol-dce",
)
_UNKNOWN = "does not refer to a registered pass"
_RESTRICTED = re.compile(r"restricted to '([^']+)'")


def registered() -> list[str]:
    """The usual upstream passes, as far as this jaxlib registers them."""
    context = make_context()
    return [name for name in _LIKELY if _failure("any", name, context) is None]


def is_registered(name: str, context: ir.Context) -> bool:
    """Whether MLIR has a pass, or a pipeline, of this name."""
    return _UNKNOWN not in (_failure("any", name, context) or "")


def check(text: str, element: Element, ours: Callable[[], list[str]], context: ir.Context) -> None:
    """Checks an element of the pipeline `text` that MLIR shall run on a module.

    Args:
        text: the pipeline.
        element: a pass of MLIR's or an anchor op.
        ours: gives the names of other passes, for messages about unknown ones.
        context: where to try the element; it stays as it is.

    Raises:
        PipelineError: MLIR would refuse the element.
    """
    _check(text, element, "builtin.module", ours, context)


def _check(
    text: str, element: Element, anchor: str, ours: Callable[[], list[str]], context: ir.Context
) -> None:
    if element.nested is not None:
        for each in element.nested:
            _check(text, each, element.name, ours, context)
        return
    failure = _failure("any", element.source, context)
    if failure is not None:
        if _UNKNOWN in failure:
            raise _unknown_pass(text, element, anchor, ours())
        raise _options_error(text, element, failure)
    needed = _needed_anchor(element.source, anchor, context)
    if needed is not None:
        message = f"'{element.name}' runs on {needed}, not on {anchor}"
        if anchor == "builtin.module":
            message += f": write {needed}({element.source})"
        raise PipelineError(text, element.position, message)


def _unknown_pass(text: str, element: Element, anchor: str, ours: list[str]) -> PipelineError:
    if element.name in ours:
        message = f"'{element.name}' rewrites whole modules: it cannot stand inside {anchor}(...)"
    else:
        suggestion = did_you_mean(element.name, [*ours, *registered()])
        message = f"unknown pass '{element.name}'{suggestion}"
    return PipelineError(text, element.position, message)


def _failure(anchor: str, source: str, context: ir.Context) -> str | None:
    """What MLIR says when one pass is added for an op, or None if it is accepted."""
    try:
        passmanager.PassManager(anchor, context=context).add(source)
    except ValueError as error:
        return str(error)
    return None


def _needed_anchor(source: str, anchor: str, context: ir.Context) -> str | None:
    """The op that a pass or a registered pipeline needs, if it cannot run on `anchor`."""
    manager = passmanager.PassManager("any", context=context)
    manager.add(source)
    for element in parse(str(manager)):
        if element.nested is None:
            restricted = _RESTRICTED.search(_failure(anchor, element.source, context) or "")
            if restricted:
                return restricted.group(1)
    return None


def _options_error(text: str, element: Element, failure: str) -> PipelineError:
    """MLIR does not say which option is wrong unless it is unknown."""
    unknown = re.search(r"no such option (\S+)", failure)
    for option in element.options:
        if unknown and option.key == unknown.group(1):
            message = f"unknown option '{option.key}' of '{element.name}'"
            return PipelineError(text, option.position, message)
    words = [line for line in failure.splitlines() if line and not line.startswith("failed to add")]
    detail = f": {words[0]}" if words else ""
    position = element.options[0].position if element.options else element.position
    message = f"'{element.name}' does not take the options{detail}"
    return PipelineError(text, position, message)
