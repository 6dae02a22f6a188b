"""One step of a trace that was measured, for the report.

The file is that of `Executable.trace` (`runtime/trace.py`). Of its steps the one of median length
is taken.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from alpa.passes.plan.timeline import Activity, StepSpan, Timeline
from alpa.runtime.report import ReportError

_MICRO = 1e-6
_NOISE = 1e-3
"""Microseconds that rounding makes of nothing."""
_Row = tuple[int, int]
"""The numbers of a process and of its row."""


@dataclass(frozen=True, kw_only=True)
class MeasuredStep:
    """The spans of a step, a row for each worker; `steps` is how many the trace has.

    A receive counts from when its sender was ready; before that, the worker waited.
    """

    timeline: Timeline
    workers: tuple[str, ...]
    steps: int

    @classmethod
    def read(cls, path: str | Path) -> MeasuredStep:
        """Reads a trace.

        Raises:
            ReportError: the file is not a trace of steps.
            OSError: it cannot be read.
        """
        try:
            return _Reader(_events(Path(path))).step()
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ReportError(
                f"{path} is not the trace of a step ({error}); write one by "
                "`with step.trace(path): ...`"
            ) from error

    def mesh_of(self, worker: str) -> str:
        """The mesh of a worker; its name begins with it."""
        return worker.partition(" ")[0]


def _events(path: Path) -> list[dict[str, Any]]:
    found = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    if not any(event["ph"] == "X" for event in found):
        raise ValueError("it has no step")
    return found


class _Reader:
    def __init__(self, events: Sequence[dict[str, Any]]) -> None:
        self._slices = [event for event in events if event["ph"] == "X"]
        self._workers: dict[int, str] = {}
        self._rows: dict[_Row, str] = {}
        for event in events:
            if event["name"] == "process_name":
                self._workers[event["pid"]] = event["args"]["name"]
            elif event["name"] == "thread_name":
                self._rows[event["pid"], event["tid"]] = event["args"]["name"]
        starts = {event["id"]: event["ts"] for event in events if event["ph"] == "s"}
        sent: dict[_Row, list[tuple[float, float]]] = defaultdict(list)
        for event in events:
            if event["ph"] == "f":
                row = event["pid"], event["tid"]
                sent[row].append((event["ts"], starts[event["id"]]))
        self._sent: Mapping[_Row, list[tuple[float, float]]] = {
            row: sorted(found) for row, found in sent.items()
        }

    def step(self) -> MeasuredStep:
        """The step of median length."""
        steps: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for event in self._slices:
            steps[event["args"]["step"]].append(event)
        ordered = sorted(steps.values(), key=lambda it: _end(it) - _start(it))
        chosen = ordered[(len(ordered) - 1) // 2]
        start, end = _start(chosen), _end(chosen)
        spans: list[StepSpan] = []
        for process, worker in self._workers.items():
            mine = [it for it in chosen if it["pid"] == process]
            spans += self._filled(worker, sorted(mine, key=lambda it: it["ts"]), start, end)
        return MeasuredStep(
            timeline=Timeline(spans=tuple(spans), seconds=(end - start) * _MICRO),
            workers=tuple(sorted(self._workers.values(), key=_in_order)),
            steps=len(steps),
        )

    def _filled(
        self, worker: str, events: Sequence[dict[str, Any]], start: float, end: float
    ) -> list[StepSpan]:
        """The spans of a worker with its waits."""
        spans: list[StepSpan] = []
        free = start

        def wait(until: float) -> None:
            if until > free + _NOISE:
                spans.append(
                    StepSpan(
                        mesh=worker,
                        activity="bubble",
                        start=(free - start) * _MICRO,
                        end=(until - start) * _MICRO,
                    )
                )

        for event in events:
            begin, stop = max(free, event["ts"]), event["ts"] + event["dur"]
            if event["cat"] == "receive":
                begin = min(max(begin, self._ready(event)), stop)
            if stop <= begin:
                continue
            wait(begin)
            name = self._rows[event["pid"], event["tid"]]
            spans.append(
                StepSpan(
                    mesh=worker,
                    activity=_activity(event["cat"], name),
                    start=(begin - start) * _MICRO,
                    end=(stop - start) * _MICRO,
                    name=name,
                    micro_batch=event["args"]["micro_batch"],
                )
            )
            free = stop
        wait(end)
        return spans

    def _ready(self, event: dict[str, Any]) -> float:
        """When the last sender of a receive was ready."""
        arrows = self._sent.get((event["pid"], event["tid"]), [])
        stop = event["ts"] + event["dur"]
        first = bisect_left(arrows, (stop - _NOISE, 0.0))
        found = [sent for ended, sent in arrows[first:] if ended <= stop + _NOISE]
        return max(found, default=event["ts"])


def _in_order(worker: str) -> list[tuple[bool, int, str]]:
    """mesh_2 before mesh_10."""
    parts = re.split(r"(\d+)", worker)
    return [(it.isdigit(), int(it) if it.isdigit() else 0, it) for it in parts]


def _start(events: Sequence[dict[str, Any]]) -> float:
    return min(event["ts"] for event in events)


def _end(events: Sequence[dict[str, Any]]) -> float:
    return max(event["ts"] + event["dur"] for event in events)


def _activity(category: str, row: str) -> Activity:
    if category in ("send", "receive"):
        return "transfer"
    part = row.rpartition(".")[2]
    if part.startswith("update"):
        return "update"
    if part.startswith("forward") and "backward" not in part:
        return "forward"
    return "backward" if "backward" in part else "call"
