"""Programs as command lines name them: the path of a file, `-` (standard input), or `zoo:NAME`.

A program that cannot be read or lowered raises a PlanningError, as if a pass had refused it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from alpa import passes
from alpa.dialects import ir, make_context, parse
from alpa.passes.pipelines.diagnostics import Diagnostic, Place, listening
from alpa.runtime.planning import PlanningError
from alpa.tools.guard import parse_within

if TYPE_CHECKING:
    from alpa.tools.zoo import TrainingProgram

ZOO = "zoo:"


def read(file: str, sizes: Sequence[str] = ()) -> ir.Module:
    """Parses a file, and refines its symbolic dimensions to sizes such as `b=8`, if any are given.

    Raises:
        PlanningError: it does not parse, or does not fit the sizes.
    """
    if file.endswith(".py"):
        text = "a Python file; write its program, train_step.lower(...).as_text(), to a file first"
        raise PlanningError((Diagnostic("error", Place(file), text),))
    context = make_context()
    said: list[Diagnostic] = []
    with listening(context, said.append):
        try:
            module = parse_within(file, context)
            if sizes:
                passes.run(module, f"refine-dimensions{{sizes={','.join(sizes)}}}")
            return module
        except OSError as error:
            problem = Diagnostic("error", Place(file), error.strerror or str(error))
            raise PlanningError((problem,)) from error
        except ir.MLIRError as error:
            problem = Diagnostic("error", Place(file), error.message)
            raise PlanningError(tuple(said) or (problem,)) from error


def lowered(
    program: TrainingProgram, micro_batch_size: int, *, locations: bool = False
) -> ir.Module:
    """Lowers a zoo program at the size of a micro-batch. Raises PlanningError.

    With `locations`, ops know their names in JAX and the lines of the model.
    """
    try:
        return parse(program.lower(micro_batch_size, locations=locations))
    except ValueError as error:
        # Some models require that their batch divides evenly.
        raise PlanningError((Diagnostic("error", Place("-"), str(error)),)) from error


def placed(diagnostic: Diagnostic, program: str) -> Diagnostic:
    """Names the program in a place that has no file.

    The user does not have the text of a zoo program, so its lines are left out.
    """
    place = diagnostic.place
    if place.file not in ("-", "unknown"):
        return diagnostic
    if program.startswith(ZOO):
        return replace(diagnostic, place=Place(program))
    name = "<stdin>" if program == "-" else program
    return replace(diagnostic, place=replace(place, file=name))
