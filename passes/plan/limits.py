"""What limits a plan, in words: balance, bubble, what a step is spent on, memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from alpa.passes.cost.device import seconds_text, size_text
from alpa.passes.plan.report import PlanReport, StageReport
from alpa.passes.plan.row_names import noun_of, num_stages, pipeline_text
from alpa.passes.plan.text import percent
from alpa.passes.schedules.measure import Costs, measure
from alpa.passes.schedules.planned import lists_of, splits_backward

_ONE_MICRO_BATCH = "one micro-batch: stages take turns, if it is not cut into token slices"


def limits(report: PlanReport) -> Iterator[str]:
    """What limits a plan: a title, then a line for each limit."""
    yield "what limits it"
    stages, batches, count = report.stages, report.num_micro_batches, len(report.stages)
    total = sum(stage.seconds for stage in stages)
    slowest = max(stages, key=lambda stage: stage.seconds)
    noun = noun_of(report)
    if count > 1 and total:
        yield f"  {_balance(stages, slowest, total, noun)}"
    yield f"  {_bubble(report)}"
    if report.predicted_step_seconds and total:
        word = "forward and backward" if count == 1 else f"slowest {noun}"
        parts = [
            (batches * slowest.seconds, f"{word} ({batches} x {seconds_text(slowest.seconds)})"),
            (total - slowest.seconds, "fill and drain"),
        ]
        if noun == "mesh":  # The schedule says how long it takes to fill and drain.
            parts.pop()
        yield f"  {_step_seconds(report.predicted_step_seconds, parts)}"
    yield from _inside_meshes(report)
    memory = report.memory_bytes
    if memory and any(stage.peak_bytes for stage in stages):
        peaks = [stage.peak_bytes or 0 for stage in stages]
        free = memory - max(peaks)
        yield (
            f"  memory: {noun} {peaks.index(max(peaks))} is the fullest; {size_text(free)} of "
            f"{size_text(memory)} per device stay free ({percent(free / memory)})"
        )
        if report.memory_margin is not None:
            share = percent(report.memory_margin)
            more = size_text(report.memory_margin * max(peaks))
            yield (
                f"  memory: XLA may need up to {share} more than predicted, {more} there; "
                "alpa-plan --verify says how much"
            )
    less = "assumes an even split" if report.solver is None else "leaves out tensors below 4 KiB"
    for number, stage in enumerate(stages):
        if stage.peak_bytes is not None and stage.state_bytes > stage.peak_bytes:
            yield (
                f"  {noun} {number} holds {size_text(stage.state_bytes)} of state per device, more "
                f"than its predicted peak, which {less}"
            )


def _inside_meshes(report: PlanReport) -> Iterator[str]:
    """Of the mesh that is busy for longest, what its compute does not explain."""
    if report.solver is None:
        return
    busiest = max(report.solver.meshes, key=lambda solved: solved.objective)
    stage = next(stage for stage in report.stages if stage.mesh == busiest.mesh)
    whole, compute = busiest.objective, stage.compute_seconds
    if compute is not None and whole - compute > 0.005 * whole:
        yield (
            f"  inside {busiest.mesh}: {percent((whole - compute) / whole)} of "
            f"{seconds_text(whole)} per step are collectives, repeated work and less efficient "
            "small parts"
        )


def _bubble(report: PlanReport) -> str:
    schedule, batches = report.schedule, report.num_micro_batches
    stages, meshes = num_stages(report), len(report.stages)
    if meshes == 1:
        text = f"one {'stage' if stages == 1 else 'mesh'}: no pipeline, so no bubble"
        return f"{text}; {_ONE_MICRO_BATCH}" if batches == 1 else text
    if schedule == "own":
        return f"pipeline bubble: that of your own schedule of {stages} stages"
    # Of equal stages, whose parts of a backward take as long as a forward.
    equal = measure(lists_of(schedule, stages, batches), Costs.uniform(stages))
    is_plain = not splits_backward(schedule) and stages == meshes
    form = "(S-1)/(S-1+B) = " if is_plain else ""
    share = percent(equal.bubble / equal.seconds)
    text = f"pipeline bubble: {form}{share} with S={pipeline_text(report)}"
    if batches == 1:
        return f"{text}; {_ONE_MICRO_BATCH}"
    return f"{text}, B={batches} micro-batches (auto finds the best B)"


def _balance(stages: Sequence[StageReport], slowest: StageReport, total: float, noun: str) -> str:
    share, count, longest = slowest.seconds / total, len(stages), seconds_text(slowest.seconds)
    if share * count < 1.005:
        plural = "meshes" if noun == "mesh" else "stages"
        return f"the {plural} are balanced: each takes {longest} per micro-batch"
    return (
        f"{noun} {stages.index(slowest)} is the slowest: {longest} of {seconds_text(total)} "
        f"per micro-batch, {percent(share)} where {percent(1 / count)} would be even"
    )


def _step_seconds(step: float, parts: Sequence[tuple[float, str]]) -> str:
    """The predicted step by what it is spent on; the rest is spent between and after the stages."""
    rest = step - sum(seconds for seconds, _ in parts)
    shares = [
        f"{percent(seconds / step)} {text}"
        for seconds, text in [*parts, (rest, "transfers and update")]
        if seconds > 1e-4 * step
    ]
    return f"step {seconds_text(step)} = {' + '.join(shares)}"
