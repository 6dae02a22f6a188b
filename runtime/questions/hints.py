"""The decisions of a plan as choices, one per line, that a person can edit and pass back."""

from __future__ import annotations

from collections.abc import Iterator

from alpa.dialects import ir, main_function
from alpa.dialects.attributes import input_number, read_arguments
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.plan import Plan
from alpa.passes.analysis.interface_names import Names
from alpa.passes.plan.report import PlanReport
from alpa.passes.plan.row_names import num_stages
from alpa.passes.schedules.planned import label
from alpa.passes.stages.forced_shardings import Dims, dims_text
from alpa.runtime.choices import ForcedSchedule, stage_text
from alpa.runtime.questions.variants import chosen_stages


def hints(planned: ir.Module, program: ir.Module) -> str:
    """The stages of a plan and the shardings of its arguments, for `read_hints`.

    Several stages on one mesh cannot be forced: their schedule stands in place of them, under which
    the search finds the same ones.

    Args:
        planned: the plan.
        program: what was planned, with the names of its arguments.
    """
    return "\n".join(_lines(planned, program)) + "\n"


def _lines(planned: ir.Module, program: ir.Module) -> Iterator[str]:
    report = PlanReport.of(planned)
    yield f"# plan for {report.cluster}, {report.num_micro_batches} micro-batches"
    yield "# Remove lines to let the search decide; what follows a # does not matter."
    if num_stages(report) > len(report.stages):
        yield from _schedule(planned)
    else:
        for stage in chosen_stages(report):
            yield "# a mesh without layers" if stage is None else stage_text(stage)
    names = Names.of_arguments(main_function(program)).names
    function = main_function(planned)
    found: dict[int, list[Dims]] = {}
    for position, attributes in enumerate(read_arguments(function)):
        sharding = MeshTensor.from_type(function.arguments[position].type).sharding
        if sharding is not None:
            number = input_number(position, attributes)
            found.setdefault(number, []).append(sharding.axis_names)
    for number, dims in sorted(found.items()):
        name = names[number]
        is_clear = name is not None and names.count(name) == 1 and not {*name} & {*"#=*"}
        text = name if is_clear else str(number)
        if len(set(dims)) == 1:
            yield f"{text} = {dims_text(dims[0])}"
        else:
            there = " and ".join(map(dims_text, dict.fromkeys(dims)))
            yield f"# {text} is sharded differently on its meshes or in its layers: {there}"


def _schedule(planned: ir.Module) -> Iterator[str]:
    """What stands for the stages of a plan that has several on each mesh."""
    plan = Plan.read(main_function(planned))
    assert plan is not None, "a planned module has a plan"
    if label(plan.schedule) == plan.schedule:
        yield f"# the search finds the stages of {plan.schedule} again; they cannot be forced"
        yield str(ForcedSchedule(schedule=plan.schedule))
    else:
        yield "# the search finds the stages again; they cannot be forced; give your schedule again"
