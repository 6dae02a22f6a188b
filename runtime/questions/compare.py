"""How two plans differ, from their PLAN.json, and what it is worth in seconds and bytes."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from alpa.passes.cost.device import size_text
from alpa.passes.plan.text import aligned, percent, ranges_text, seconds_text
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


def compare(first: Numbers, second: Numbers, names: tuple[str, str]) -> str:
    """The differences of two plans, the second against the first, as a text for a terminal."""
    return "\n".join(_lines(first, second, names)) + "\n"


def _lines(first: Numbers, second: Numbers, names: tuple[str, str]) -> Iterator[str]:
    yield from aligned(
        [
            ["", *names, "difference"],
            *_settings(first, second),
            *_seconds(first, second),
            *_bytes(first, second),
        ],
        left=(0,),
    )
    yield "(seconds of a step; bytes per device of the fullest mesh, others of a step in all)"
    yield ""
    yield from _stages(first, second, names)


def _settings(*plans: Numbers) -> Iterator[list[str]]:
    """What differs of the settings, and the number of stages."""
    for name in ("cluster", "num_micro_batches", "schedule"):
        values = [str(plan[name]) for plan in plans]
        if values[0] != values[1]:
            yield [name.replace("_", "-"), *values, ""]
    counts = [len(plan["stages"]) for plan in plans]
    yield [
        "stages",
        *map(str, counts),
        f"{counts[1] - counts[0]:+d}" if counts[0] != counts[1] else "",
    ]


def _seconds(*plans: Numbers) -> Iterator[list[str]]:
    """The predicted step, and what it is spent on."""
    steps = [plan["predicted_step_seconds"] for plan in plans]
    yield ["predicted step", *map(seconds_text, steps), _more(*steps)]
    parts = [_parts(plan) for plan in plans]
    for name in parts[0]:
        values = [part[name] for part in parts]
        if any(values):
            yield [f"  {name}", *map(seconds_text, values), _signed(values, steps[0])]


def _parts(plan: Numbers) -> dict[str, float]:
    """The predicted step by what it is spent on, in seconds."""
    stages = [stage["forward_seconds"] + stage["backward_seconds"] for stage in plan["stages"]]
    longest = plan["num_micro_batches"] * max(stages)
    fill = sum(stages) - max(stages)
    return {
        "slowest stage, all micro-batches": longest,
        "fill and drain": fill,
        "transfers and update": plan["predicted_step_seconds"] - longest - fill,
    }


def _bytes(*plans: Numbers) -> Iterator[list[str]]:
    """Memory, and what is sent."""
    peaks = [max((s["peak_bytes"] or 0 for s in plan["stages"]), default=0) for plan in plans]
    yield ["largest peak", *map(size_text, peaks), _signed_bytes(peaks)]
    kinds = [_sent(plan) for plan in plans]
    for kind in sorted({*kinds[0], *kinds[1]}):
        values = [sent[kind] for sent in kinds]
        yield [f"sent by {kind}", *(size_text(round(v)) for v in values), _signed_bytes(values)]
    crossing = [
        sum(
            it["bytes"] * (plan["num_micro_batches"] if it["per"] == "micro-batch" else 1)
            for it in plan["transfers"]
        )
        for plan in plans
    ]
    if any(crossing):
        yield ["between meshes", *map(size_text, crossing), _signed_bytes(crossing)]


def _sent(plan: Numbers) -> Counter[str]:
    """What all devices of a step's meshes send, by the kind of collective."""
    devices = {mesh["name"]: len(mesh["devices"]) for mesh in plan["meshes"]}
    sent = Counter[str]()
    for it in plan["collectives"]:
        sent[it["kind"]] += devices[it["mesh"]] * it["sent_bytes"]
    return sent


def _stages(first: Numbers, second: Numbers, names: tuple[str, str]) -> Iterator[str]:
    """The stages that differ, one beside the other."""
    ours, theirs = (_rows(plan) for plan in (first, second))
    if ours == theirs:
        yield "the stages are the same"
        return
    head = ["stage", "plan", "layers", "devices", "shape", "per micro-batch", "update", "peak"]
    rows = [head]
    for number in range(max(len(ours), len(theirs))):
        mine, other = (every[number] if number < len(every) else None for every in (ours, theirs))
        if mine == other:
            continue
        for name, row in zip(names, (mine, other), strict=True):
            if row is not None:
                rows.append([str(number), name, *row[:-1]])
    yield from aligned(rows, left=(1, 2, 3, 4))
    for name, every in zip(names, (ours, theirs), strict=True):
        for number, row in enumerate(every):
            pair = [it[number] if number < len(it) else None for it in (ours, theirs)]
            if row[-1] and pair[0] != pair[1]:
                yield f"stage {number} of {name}: {row[-1]}"


def _rows(plan: Numbers) -> list[list[str]]:
    """Of each stage: what the table shows, and its strategy in words."""
    meshes = {mesh["name"]: mesh for mesh in plan["meshes"]}
    found: list[list[str]] = []
    for stage in plan["stages"]:
        mesh = meshes[stage["mesh"]]
        layers = [int(name.rpartition("_")[2]) for name in stage["layers"]]
        found.append(
            [
                ranges_text(sorted(layers)) if layers else "-",
                ranges_text(mesh["devices"]),
                "x".join(map(str, mesh["logical_shape"])),
                seconds_text(stage["forward_seconds"] + stage["backward_seconds"]),
                seconds_text(stage["update_seconds"]),
                "-" if stage["peak_bytes"] is None else size_text(stage["peak_bytes"]),
                stage.get("strategy", ""),
            ]
        )
    return found


def _more(before: float, after: float) -> str:
    if not before:
        return ""
    share = after / before - 1
    return f"{'+' if share >= 0 else '-'}{percent(abs(share))}" if share else "0"


def _signed(values: Sequence[float], step: float) -> str:
    """A difference in seconds, and as a share of the first plan's step."""
    more = values[1] - values[0]
    if abs(more) <= 1e-9 * step:
        return "0"
    sign = "+" if more > 0 else "-"
    return f"{sign}{seconds_text(abs(more))}, {sign}{percent(abs(more) / step)}"


def _signed_bytes(values: Sequence[float]) -> str:
    more = round(values[1] - values[0])
    return f"{'+' if more > 0 else '-'}{size_text(abs(more))}" if more else "0"
