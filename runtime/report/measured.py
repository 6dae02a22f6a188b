"""The section of a measured step: its timeline, and its parts beside what was predicted."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence

from alpa.passes.cost.device import seconds_text
from alpa.passes.plan.text import count_text
from alpa.passes.plan.timeline import StepSpan
from alpa.runtime.report.content import Content
from alpa.runtime.report.figures import drawn, in_unit
from alpa.runtime.report.markup import Cell, Html, element, section, table
from alpa.runtime.report.measured_step import MeasuredStep
from alpa.runtime.report.time_rows import HELP, sums, time_rows

_Key = tuple[str, str]
"""A mesh, and a fragment of it or the mesh that it receives from."""


def measured(content: Content) -> Html:
    """The section, where a step was measured."""
    step = content.measured
    assert step is not None, "the page has the section where there is a trace"
    seconds, predicted = step.timeline.seconds, content.compiled.seconds
    of = "the only step of the trace"
    if step.steps > 1:
        of = f"the step of median length of {count_text(step.steps, 'step')} of the trace"
    ratio = f", {seconds / predicted:.2f} times the predicted one" if predicted else ""
    return section(
        "measured",
        "The measured step",
        element(
            "p",
            f"It took {seconds_text(seconds)}{ratio}; this is {of}. A traced step waits for every "
            "instruction. The compiled modules can hold a forward and a backward part together.",
        ),
        drawn(
            "measured-figure",
            time_rows(step.timeline, step.workers),
            f"Timeline of the measured step, {seconds_text(seconds)}; the tables below have its "
            "sums",
            HELP,
        ),
        sums(step.timeline, step.workers, "Seconds of each worker, and shares of the step"),
        _runs(content, step),
        _transfers(content, step),
    )


def _runs(content: Content, step: MeasuredStep) -> Html:
    """The fragments, each run."""
    rows: list[list[Cell]] = []
    predicted = _grouped(content.compiled.spans, "run", lambda span: span.mesh)
    taken = _grouped(step.timeline.spans, "run", lambda span: step.mesh_of(span.mesh))
    for (mesh, name), found in predicted.items():
        its = taken.get((mesh, name), [])
        row = [mesh, name, str(len(found)), in_unit(_mean(found)), *_beside(its, _mean(found))]
        rows.append(list(row))
    header = ["mesh", "fragment", "runs", "predicted", "measured", "ratio"]
    return table(header, rows, caption="Seconds of a run, in the mean", left=(0, 1))


def _transfers(content: Content, step: MeasuredStep) -> Html:
    """The transfers between two meshes, all of a step, where they are received."""
    predicted = _grouped(content.compiled.spans, "transfer", lambda span: span.mesh)
    taken = _grouped(step.timeline.spans, "transfer", lambda span: step.mesh_of(span.mesh))
    rows: list[list[Cell]] = []
    for (mesh, source), found in predicted.items():
        its = taken.get((mesh, f"receive from {source}"), [])
        mean = _mean(found)
        name = f"{source} to {mesh}"
        rows.append([name, str(len(found)), in_unit(mean), *_beside(its, mean)])
    header = ["transfers", "number", "predicted", "measured", "ratio"]
    if not rows:
        return element("p", "The step has no transfers.")
    return table(header, rows, caption="Seconds of a transfer, in the mean, since it was sent")


def _grouped(
    spans: Iterable[StepSpan], kind: str, mesh_of: Callable[[StepSpan], str]
) -> dict[_Key, list[float]]:
    """The seconds of runs or of transfers."""
    found: dict[_Key, list[float]] = defaultdict(list)
    activities = ("transfer",) if kind == "transfer" else ("forward", "backward", "update")
    for span in spans:
        if span.activity in activities:
            found[mesh_of(span), span.name].append(span.seconds)
    return found


def _mean(seconds: Sequence[float]) -> float:
    return sum(seconds) / len(seconds)


def _beside(found: Sequence[float], predicted: float) -> list[str]:
    """The measured mean, and its ratio to the predicted one."""
    if not found:
        return ["-", "-"]
    mean = _mean(found)
    return [in_unit(mean), f"{mean / predicted:.2f}" if predicted else "-"]
