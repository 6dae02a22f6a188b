"""The report as Markdown, and what in it misses a bar."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from alpa.passes.cost.device import seconds_text, size_text
from alpa.tools.gpu_report.machine import Machine
from alpa.tools.gpu_report.meshes import MeshesReport
from alpa.tools.gpu_report.steps import StepTimes
from alpa.tools.output import markdown_header, markdown_row

RATIO_BAR = 1.02
"""Seconds of a planned step over those of plain JAX, at most."""
PREDICTION_BAR = 0.10
"""The share by which predicted and measured seconds may differ."""
MEMORY_BAR = 0.10
"""The share by which the predicted and the measured peak of the memory may differ."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """What the parts of a report found; a part that was left out is None."""

    machine: Machine
    calibration: str | None = None
    cluster: str = ""
    """what the steps are planned for"""
    is_calibrated: bool = False
    """whether `cluster` was measured here, so that its predictions are judged"""
    steps: Sequence[StepTimes] | None = None
    meshes: Sequence[MeshesReport] | None = None
    failures: Mapping[str, str] = field(default_factory=dict[str, str])
    """errors, by part"""
    judges_seconds: bool = True
    """whether the bars on seconds and memory count: those of tiny models and of CPU devices say
    nothing"""

    def misses(self) -> list[str]:
        """What decides the exit status, in words."""
        found = [f"{part}: {error}" for part, error in self.failures.items()]
        for it in self.steps or ():
            name = it.model.program
            if not it.is_equal:
                found.append(f"{name}: the losses differ from plain JAX's by {it.loss_error:.2g}")
            if self.judges_seconds and not it.ratio <= RATIO_BAR:
                found.append(
                    f"{name}: a step takes {it.ratio:.3f} times plain JAX's (bar {RATIO_BAR})"
                )
            if self._judges_predictions and not abs(it.prediction - 1) <= PREDICTION_BAR:
                found.append(
                    f"{name}: predicted over measured is {it.prediction:.2f} (bar "
                    f"{1 - PREDICTION_BAR:g} to {1 + PREDICTION_BAR:g})"
                )
            ratio = it.memory_prediction
            if self.judges_seconds and ratio is not None and not abs(ratio - 1) <= MEMORY_BAR:
                found.append(
                    f"{name}: predicted over measured memory is {ratio:.2f} (bar "
                    f"{1 - MEMORY_BAR:g} to {1 + MEMORY_BAR:g})"
                )
        for it in self.meshes or ():
            if not it.is_equal:
                found.append(f"two meshes, {it.transport}: {it.comparison}")
            if not it.is_restored:
                found.append(f"two meshes, {it.transport}: a restored state differs")
        return found

    @property
    def _judges_predictions(self) -> bool:
        return self.judges_seconds and self.is_calibrated

    def markdown(self) -> str:
        """The whole report."""
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        yield "# Alpa on this machine"
        yield ""
        yield markdown_header(["", ""])
        for name, value in self.machine.about.items():
            yield markdown_row([name, value])
        if self.calibration is not None:
            yield from ("", f"## Calibration, beside the preset {self.machine.preset}", "")
            yield from ("```", self.calibration, "```")
        if self.steps is not None:
            yield from self._step_lines(self.steps)
        if self.meshes is not None:
            yield from _mesh_lines(self.meshes)
        yield from ("", "## Verdict", "")
        misses = self.misses()
        if not self.judges_seconds:
            yield from (
                "Seconds and memory do not count: the models are tiny, or the device is a CPU.",
                "",
            )
        elif self.steps is not None and not self.is_calibrated:
            yield from ("Predictions do not count: the device was not calibrated.", "")
        if not misses:
            yield "Nothing differs, and no bar that counts is missed."
        for miss in misses:
            yield _item(miss)

    def _step_lines(self, steps: Sequence[StepTimes]) -> Iterator[str]:
        yield from ("", "## Training steps on one device, in bf16", "")
        yield f"Planned for {self.cluster}. Bars: a ratio of {RATIO_BAR}, a prediction within"
        yield f"{100 * PREDICTION_BAR:g} % of the measured step, and within {100 * MEMORY_BAR:g} %"
        yield "of the measured peak of memory."
        yield ""
        columns = ["model", "batch", "plain JAX", "planned", "ratio", "predicted"]
        columns += ["predicted / measured", "memory", "predicted", "predicted / measured"]
        yield markdown_header([*columns, "losses"])
        for it in steps:
            yield markdown_row(
                [
                    it.model.program,
                    str(it.model.batch_size),
                    seconds_text(it.plain),
                    seconds_text(it.planned),
                    f"{it.ratio:.3f}",
                    seconds_text(it.predicted),
                    f"{it.prediction:.2f}",
                    "" if it.bytes is None else size_text(it.bytes),
                    size_text(it.predicted_bytes),
                    "" if (ratio := it.memory_prediction) is None else f"{ratio:.2f}",
                    f"{it.losses}: {'equal' if it.is_equal else 'DIFFER'} ({it.loss_error:.1e})",
                ]
            )


def _mesh_lines(meshes: Sequence[MeshesReport]) -> Iterator[str]:
    yield from ("", "## Two meshes on one device", "")
    columns = ["transport", "tiles travel by", "step", "large tiles", "results", "restored"]
    yield markdown_header(columns)
    for it in meshes:
        yield markdown_row(
            [
                it.transport,
                it.way,
                seconds_text(it.step),
                f"{it.rate / 1e9:.2f} GB/s",
                "equal" if it.is_equal else "DIFFER",
                "equal" if it.is_restored else "DIFFERS",
            ]
        )
    yield ""
    for it in meshes:
        yield _item(f"{it.transport}: {it.comparison}")


def _item(text: str) -> str:
    """An item of a list, which may have several lines."""
    return "* " + text.replace("\n", "\n  ")
