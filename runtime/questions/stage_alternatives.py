"""What other stages would cost: boundaries moved by a layer, other submeshes and logical shapes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from alpa.dialects import ir
from alpa.passes.cost.cluster import parse_cluster
from alpa.passes.plan.reader import read_planned
from alpa.passes.plan.report import PlanReport
from alpa.passes.plan.row_names import num_stages
from alpa.passes.plan.text import ranges_text
from alpa.passes.solve.stages import placement
from alpa.passes.stages.fixed_stages import FixedStage
from alpa.passes.stages.policy import logical_shapes
from alpa.runtime.choices import stage_text
from alpa.runtime.questions.explanation import Alternative, Explanation, QuestionError
from alpa.runtime.questions.variants import Variant, Variants, chosen_stages


def explain_stage(number: int, report: PlanReport, variants: Variants) -> Explanation:
    """What moving a boundary of a stage, or giving it another submesh or shape, would cost.

    Each mesh of the plan has one stage.

    Raises:
        QuestionError: the plan's meshes were given.
    """
    cut = variants.kept.cut
    assert cut is not None, "the search has kept what questions need"
    if cut.meshes != "auto":
        raise QuestionError(
            f"stage {number} cannot be explained: the plan's meshes were given "
            f"({cut.meshes}), so there are no others; its shardings can be explained"
        )
    stages = [it for it in chosen_stages(report) if it is not None]
    assert len(stages) == len(report.stages), "only given meshes may stay without layers"
    found = list[Alternative]()
    for text, fixed in _alternatives(number, stages, report):
        found.append(_alternative(text, variants.of_stages(fixed)))
    found.sort(key=lambda it: (bool(it.refused), it.step_seconds or 0.0))
    chosen = replace(_alternative("", Variant(module=None, report=report)), refused="")
    return Explanation(
        subject=f"stage {number} of {len(stages)}",
        chosen=replace(chosen, choice=stage_text(stages[number])),
        alternatives=tuple(found),
        notes=("the steps are those of finished plans: each cut has its shardings and transfers",),
    )


def explain_shared_stage(number: int, planned: ir.Module, report: PlanReport) -> Explanation:
    """The layers and the mesh of a stage, in a plan that has several on each mesh.

    No such stage can be forced, so nothing else has a price.
    """
    forward = [
        it for it in read_planned(planned).fragments if it.stage == number and it.runs_forward
    ]
    row, mesh = next(
        (row, mesh)
        for row, mesh in zip(report.stages, report.meshes, strict=True)
        if number in row.numbers
    )
    layers = [
        int(origin.name.rpartition("_")[2])
        for fragment in forward
        for origin in fragment.origins
        if origin.part != "update"
    ]
    hosts, each = len(mesh.hosts), len(row.numbers)
    stage = FixedStage(
        first=min(layers),
        last=max(layers),
        submesh=(hosts, len(mesh.devices) // hosts),
        shape=tuple(mesh.logical_shape),
    )
    others = [other for other in sorted(row.numbers) if other != number]
    beside = f"{'stage' if len(others) == 1 else 'stages'} {ranges_text(others)}"
    return Explanation(
        subject=f"stage {number} of {num_stages(report)}",
        chosen=Alternative(choice=f"{stage_text(stage)}, {mesh.name}, with {beside}"),
        alternatives=(),
        notes=(
            f"the schedule ({report.schedule}) has {each} stages on each of several equal meshes; "
            "none of them can be forced, so other stages have no price",
            "plan with a schedule of one stage per mesh, such as 1f1b, for what other stages cost",
        ),
    )


def _alternatives(
    number: int, stages: list[FixedStage], report: PlanReport
) -> Iterator[tuple[str, list[FixedStage]]]:
    """In words, and the stages that are fixed."""
    mine = stages[number]
    for other, name in ((number - 1, "the stage before"), (number + 1, "the stage behind")):
        if not 0 <= other < len(stages):
            continue
        for gives in (number, other):
            takes = other if gives == number else number
            moved = _moved(stages, gives, takes)
            if moved is not None:
                word = "one layer to" if gives == number else "one layer from"
                yield f"{word} {name}", moved
    hosts, devices = mine.submesh
    for shape in logical_shapes(hosts, devices, 2):
        if shape != mine.shape:
            changed = [*stages[:number], replace(mine, shape=shape), *stages[number + 1 :]]
            yield f"logical shape {'x'.join(map(str, shape))}", changed
    kinds = parse_cluster(report.cluster).kinds
    submeshes = {
        it for kind in kinds for it in placement.submeshes(kind.hosts, kind.devices_per_host)
    }
    if len(stages) > 1:  # The other layers need devices, too.
        submeshes -= {(kind.hosts, kind.devices_per_host) for kind in kinds if len(kinds) == 1}
    for submesh in sorted(submeshes - {mine.submesh}):
        text = f"{'x'.join(map(str, submesh))} for these layers, other stages searched"
        yield text, [replace(mine, submesh=submesh, shape=None)]


def _moved(stages: list[FixedStage], gives: int, takes: int) -> list[FixedStage] | None:
    """One layer moved between neighbours; None if the stage has no other."""
    giver, taker = stages[gives], stages[takes]
    if giver.first == giver.last:
        return None
    if gives < takes:
        giver, taker = replace(giver, last=giver.last - 1), replace(taker, first=taker.first - 1)
    else:
        giver, taker = replace(giver, first=giver.first + 1), replace(taker, last=taker.last + 1)
    moved = list(stages)
    moved[gives], moved[takes] = giver, taker
    return moved


def _alternative(text: str, variant: Variant) -> Alternative:
    report = variant.report
    if report is None:
        return Alternative(choice=text, refused=variant.refused)
    cut = ", ".join(stage_text(it) for it in chosen_stages(report) if it is not None)
    return Alternative(
        choice=text,
        step_seconds=report.predicted_step_seconds,
        peak_bytes=max(report.predicted_peak_bytes, default=None),
        changes=(f"the cut to {cut}",) if text.endswith("searched") else (),
    )
