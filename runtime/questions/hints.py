"""The decisions of a plan as choices, one per line, that a person can edit and pass back."""

from __future__ import annotations

from collections.abc import Iterator

from alpa.dialects import ir, main_function
from alpa.dialects.attributes import input_number, read_arguments
from alpa.dialects.mpmd_types import MeshTensor
from alpa.passes.analysis.interface_names import Names
from alpa.passes.plan.report import PlanReport
from alpa.passes.stages.forced_shardings import Dims, dims_text
from alpa.runtime.choices import stage_text
from alpa.runtime.questions.variants import chosen_stages


def hints(planned: ir.Module, program: ir.Module) -> str:
    """The stages of a plan and the shardings of its arguments, for `read_hints`.

    Args:
        planned: the plan.
        program: what was planned, with the names of its arguments.
    """
    return "\n".join(_lines(planned, program)) + "\n"


def _lines(planned: ir.Module, program: ir.Module) -> Iterator[str]:
    report = PlanReport.of(planned)
    yield f"# plan for {report.cluster}, {report.num_micro_batches} micro-batches"
    yield "# Remove lines to let the search decide; what follows a # does not matter."
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
