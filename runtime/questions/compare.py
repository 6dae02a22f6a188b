"""How two plans differ, from their PLAN.json, and what it is worth in seconds and bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any, Literal, cast

from alpa.passes.cost.device import seconds_text, size_text
from alpa.passes.plan.text import aligned, percent, ranges_text
from alpa.passes.text_files import read_text

Numbers = Mapping[str, Any]
"""What PLAN.json holds."""
_NEEDED = (
    "cluster",
    "num_micro_batches",
    "schedule",
    "predicted_step_seconds",
    "meshes",
    "stages",
    "transfers",
    "collectives",
)


class ComparisonError(ValueError):
    """A file is no PLAN.json."""


def read_numbers(path: str | Path) -> Numbers:
    """Reads a PLAN.json.

    Raises:
        ComparisonError: it cannot be read, or is something else.
    """
    try:
        found = json.loads(read_text(path))
    except OSError as error:
        raise ComparisonError(f"{path}: error: {error.strerror}") from error
    except ValueError as error:
        raise ComparisonError(f"{path}: error: not JSON: {error}") from error
    numbers = cast("Numbers", found if isinstance(found, dict) else {})
    missing = [name for name in _NEEDED if name not in numbers]
    if missing:
        raise ComparisonError(
            f"{path}: error: no PLAN.json, which alpa-plan --json writes: it lacks {missing[0]!r}"
        )
    return numbers


@dataclass(frozen=True, kw_only=True)
class Difference:
    """What both plans have of something, and the second one's less the first one's."""

    name: str
    values: tuple[Any, Any]
    unit: Literal["text", "count", "seconds", "bytes"]
    step: float = 0.0
    """of the first plan, in seconds, where a difference in seconds is a share of it"""
    is_part: bool = False
    """of the row above"""
    entry: str = ""
    """of PLAN.json, if it has the values"""

    @property
    def texts(self) -> tuple[str, str]:
        """The values as people read them."""
        first, second = map(self._text, self.values)
        return first, second

    @property
    def text(self) -> str:
        """The difference as people read it; empty if there is none to count."""
        before, after = self.values
        if self.unit == "text":
            return ""
        if self.unit == "count":
            return f"{after - before:+d}" if before != after else ""
        if self.unit == "bytes":
            more = round(after - before)
            return f"{'+' if more > 0 else '-'}{size_text(abs(more))}" if more else "0"
        more = after - before
        if abs(more) <= 1e-9 * self.step:
            return "0"
        sign = "+" if more > 0 else "-"
        share = f", {sign}{percent(abs(more) / self.step)}" if self.step else ""
        return f"{sign}{seconds_text(abs(more))}{share}"

    def _text(self, value: Any) -> str:
        if self.unit == "seconds":
            return seconds_text(value)
        return size_text(round(value)) if self.unit == "bytes" else str(value)


@dataclass(frozen=True, kw_only=True)
class ComparedStage:
    """A mesh of one of the plans, with its stage or stages.

    They are alike if all that people read of them is the same.
    """

    numbers: str
    """of its stages"""
    layers: str
    devices: str
    shape: str
    seconds: str
    """of a micro-batch"""
    update: str
    peak: str
    strategy: str

    @property
    def texts(self) -> tuple[str, ...]:
        """All but the numbers and the strategy."""
        return (self.layers, self.devices, self.shape, self.seconds, self.update, self.peak)


STAGE_COLUMNS = ("layers", "devices", "shape", "per micro-batch", "update", "peak")
PARTS = ("slowest stage, all micro-batches", "fill and drain", "transfers and update")
"""Of a predicted step."""
SHARED_PARTS = ("slowest mesh, all micro-batches", "fill and drain, transfers and update")
"""If meshes have several stages: how long they take to fill and drain depends on the schedule."""
NOTE = "seconds of a step; bytes per device of the fullest mesh, others of a step in all"


@dataclass(frozen=True, kw_only=True)
class PlanComparison:
    """How a second plan differs from a first one; `str` is the text for a terminal."""

    names: tuple[str, str]
    rows: tuple[Difference, ...]
    stages: tuple[tuple[ComparedStage | None, ComparedStage | None], ...]
    """those that differ, mesh by mesh; None where a plan has fewer"""

    def __str__(self) -> str:
        return "\n".join(self._lines()) + "\n"

    def _lines(self) -> Iterator[str]:
        rows = [[f"  {it.name}" if it.is_part else it.name, *it.texts, it.text] for it in self.rows]
        yield from aligned([["", *self.names, "difference"], *rows], left=(0,))
        yield f"({NOTE})"
        yield ""
        if not self.stages:
            yield "the stages are the same"
            return
        table = [["stage", "plan", *STAGE_COLUMNS]]
        for pair in self.stages:
            for name, it in zip(self.names, pair, strict=True):
                if it is not None:
                    table.append([it.numbers, name, *it.texts])
        yield from aligned(table, left=(1, 2, 3, 4))
        for stages, name, strategy in self.strategies:
            yield f"{stages} of {name}: {strategy}"

    @property
    def strategies(self) -> list[tuple[str, str, str]]:
        """Of the stages that differ, those of the first plan first: stages, plan, strategy."""
        return [
            (
                f"stage {it.numbers}" if it.numbers.isdigit() else f"stages {it.numbers}",
                name,
                it.strategy,
            )
            for plan, name in enumerate(self.names)
            for pair in self.stages
            if (it := pair[plan]) is not None and it.strategy
        ]


def compare(first: Numbers, second: Numbers, names: tuple[str, str]) -> PlanComparison:
    """The differences of two plans, the second against the first."""
    pairs = zip_longest(_stages(first), _stages(second))
    return PlanComparison(
        names=names,
        rows=(*_settings(first, second), *_seconds(first, second), *_bytes(first, second)),
        stages=tuple(pair for pair in pairs if pair[0] != pair[1]),
    )


def _settings(*plans: Numbers) -> Iterator[Difference]:
    """What differs of the settings, and the number of stages."""
    for name in ("cluster", "num_micro_batches", "schedule"):
        first, second = (plan[name] for plan in plans)
        if first != second:
            dashed = name.replace("_", "-")
            yield Difference(name=dashed, values=(first, second), unit="text", entry=name)
    first, second = map(_num_stages, plans)
    yield Difference(name="stages", values=(first, second), unit="count")


def _seconds(*plans: Numbers) -> Iterator[Difference]:
    """The predicted step, and what it is spent on."""
    entry = "predicted_step_seconds"
    first, second = (plan[entry] for plan in plans)
    yield Difference(
        name="predicted step", values=(first, second), unit="seconds", step=first, entry=entry
    )
    shared = any(_num_stages(plan) > len(plan["stages"]) for plan in plans)
    ours, theirs = (_parts(plan, shared=shared) for plan in plans)
    for name in ours:
        values = (ours[name], theirs[name])
        if any(values):
            yield Difference(name=name, values=values, unit="seconds", step=first, is_part=True)


def _num_stages(plan: Numbers) -> int:
    """On all meshes together; a mesh without layers counts as one."""
    return sum(max(len(stage.get("numbers", ())), 1) for stage in plan["stages"])


def _parts(plan: Numbers, *, shared: bool) -> dict[str, float]:
    """The predicted step by what it is spent on, in seconds: `SHARED_PARTS` or `PARTS`."""
    stages = [stage["forward_seconds"] + stage["backward_seconds"] for stage in plan["stages"]]
    longest = plan["num_micro_batches"] * max(stages)
    rest = plan["predicted_step_seconds"] - longest
    if shared:
        return dict(zip(SHARED_PARTS, (longest, rest), strict=True))
    fill = sum(stages) - max(stages)
    return dict(zip(PARTS, (longest, fill, rest - fill), strict=True))


def _bytes(*plans: Numbers) -> Iterator[Difference]:
    """Memory, and what is sent."""
    first, second = (
        max((s["peak_bytes"] or 0 for s in plan["stages"]), default=0) for plan in plans
    )
    yield Difference(name="largest peak", values=(first, second), unit="bytes")
    ours, theirs = map(_sent, plans)
    for kind in sorted({*ours, *theirs}):
        values = (ours[kind], theirs[kind])
        yield Difference(name=f"sent by {kind}", values=values, unit="bytes")
    first, second = (
        sum(
            it["bytes"] * (plan["num_micro_batches"] if it["per"] == "micro-batch" else 1)
            for it in plan["transfers"]
        )
        for plan in plans
    )
    if first or second:
        yield Difference(name="between meshes", values=(first, second), unit="bytes")


def _sent(plan: Numbers) -> Counter[str]:
    """What all devices of a step's meshes send, by the kind of collective."""
    devices = {mesh["name"]: len(mesh["devices"]) for mesh in plan["meshes"]}
    sent = Counter[str]()
    for it in plan["collectives"]:
        sent[it["kind"]] += devices[it["mesh"]] * it["sent_bytes"]
    return sent


def _stages(plan: Numbers) -> Iterator[ComparedStage]:
    meshes = {mesh["name"]: mesh for mesh in plan["meshes"]}
    for number, stage in enumerate(plan["stages"]):
        mesh = meshes[stage["mesh"]]
        layers = [int(name.rpartition("_")[2]) for name in stage["layers"]]
        yield ComparedStage(
            numbers=ranges_text(sorted(stage.get("numbers") or (number,))),
            layers=ranges_text(sorted(layers)) if layers else "-",
            devices=ranges_text(mesh["devices"]),
            shape="x".join(map(str, mesh["logical_shape"])),
            seconds=seconds_text(stage["forward_seconds"] + stage["backward_seconds"]),
            update=seconds_text(stage["update_seconds"]),
            peak="-" if stage["peak_bytes"] is None else size_text(stage["peak_bytes"]),
            strategy=stage.get("strategy", ""),
        )
