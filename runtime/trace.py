"""Traces the instructions of a step on each worker, as a table and as a file.

The file is in Chrome's trace format, which https://ui.perfetto.dev opens. It has a process for each
worker, a row for each instruction (a fragment, the moves to or from another mesh, sums), and an
arrow for each move between meshes. Traced steps wait for every instruction and run one at a time.
On accelerators, where instructions are otherwise only dispatched, traced steps take longer.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax

from alpa.passes.plan.instructions import Instruction, Move, Run, Script, meshes_of, reads, writes
from alpa.passes.plan.versions import Key

Kind = Literal["arguments", "compute", "send", "receive"]


@dataclass(frozen=True, kw_only=True)
class Span:
    """An activity of a worker; `begin` and `end` are seconds since the epoch.

    `row` describes it. `move` identifies a move between meshes by its source and target.
    """

    row: str
    kind: Kind
    begin: float
    end: float
    micro_batch: int | None = None
    move: tuple[Key, Key] | None = None


@dataclass(frozen=True, kw_only=True)
class WorkerSpans:
    """A worker's part of one step, in seconds since the epoch.

    `transport` says how tiles travel between the workers; it is empty in one process.
    """

    name: str
    mesh: str
    begin: float
    end: float
    spans: tuple[Span, ...]
    transport: str = ""


@dataclass(frozen=True, kw_only=True)
class Split:
    """The parts of a step's seconds, from its start on the first worker to its end on the last one.

    `transfer` are sends, receives after the sender was ready, and the placement of arguments on
    devices. `idle` is the rest, which includes waiting for a sender.
    """

    compute: float
    transfer: float
    idle: float

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.compute + self.transfer + self.idle


class Recorder:
    """Records the time when each instruction ends; called by `Interpreter.run`."""

    def __init__(self, script: Script, *, settle: bool) -> None:
        """With `settle`, it waits until an instruction's results are computed."""
        self._script, self._settle = script, settle
        self._epoch = time.time() - time.perf_counter()
        self._timed: list[tuple[Instruction, float, float]] = []
        self._begin = self._last = self._first = time.perf_counter()

    def start(self) -> None:
        """Records that the arguments are on the devices."""
        self._first = self._last = time.perf_counter()

    def __call__(self, instruction: Instruction, store: Mapping[Key, jax.Array]) -> None:
        """Records that an instruction has ended."""
        if self._settle:
            jax.block_until_ready([store[key] for key in writes(instruction) if key in store])
        now = time.perf_counter()
        self._timed.append((instruction, self._last, now))
        self._last = now

    def seconds(self, mesh: str) -> dict[str, float]:
        """The seconds of one mesh by activity: run, send, receive."""
        sums = {"run": 0.0, "send": 0.0, "receive": 0.0}
        for instruction, begin, end in self._timed:
            kind = self._kind(instruction, mesh)
            sums["run" if kind == "compute" else kind] += end - begin
        return sums

    def of(self, mesh: str, name: str, transport: str = "") -> WorkerSpans:
        """A mesh's spans up to now; the step's results must be the last thing that it made."""
        end = time.perf_counter()
        spans = [self._span("arguments", "arguments", self._begin, self._first)]
        for instruction, begin, done in self._timed:
            if mesh in meshes_of(self._script.program, instruction):
                spans.append(self._instruction(instruction, mesh, begin, done))
        spans.append(self._span("results", "compute", self._last, end))
        return WorkerSpans(
            name=name,
            mesh=mesh,
            begin=self._begin + self._epoch,
            end=end + self._epoch,
            spans=tuple(spans),
            transport=transport,
        )

    def _kind(self, instruction: Instruction, mesh: str) -> Literal["compute", "send", "receive"]:
        meshes = meshes_of(self._script.program, instruction)
        if len(meshes) == 1:
            return "compute"
        return "receive" if mesh == meshes[1] else "send"

    def _instruction(self, instruction: Instruction, mesh: str, begin: float, end: float) -> Span:
        kind = self._kind(instruction, mesh)
        micro_batch = next((m for _, m in reads(instruction) if m is not None), None)
        if isinstance(instruction, Run):
            row = instruction.fragment.name.removeprefix(f"{mesh}.")
        elif not isinstance(instruction, Move):
            row = "sums"
        elif kind == "compute":
            row = "copies"
        else:
            source, target = meshes_of(self._script.program, instruction)
            row = f"receive from {source}" if kind == "receive" else f"send to {target}"
            move = (instruction.source, instruction.target)
            return self._span(row, kind, begin, end, micro_batch, move)
        return self._span(row, kind, begin, end, micro_batch)

    def _span(
        self,
        row: str,
        kind: Kind,
        begin: float,
        end: float,
        micro_batch: int | None = None,
        move: tuple[Key, Key] | None = None,
    ) -> Span:
        return Span(
            row=row,
            kind=kind,
            begin=begin + self._epoch,
            end=end + self._epoch,
            micro_batch=micro_batch,
            move=move,
        )


class Trace:
    """The recorded steps, each with the spans of its workers."""

    def __init__(self) -> None:
        self.steps: list[tuple[WorkerSpans, ...]] = []

    def add(self, workers: Sequence[WorkerSpans]) -> None:
        """Adds a step."""
        self.steps.append(tuple(workers))

    def splits(self) -> dict[str, Split]:
        """The mean split of all steps, by worker.

        Raises:
            ValueError: no step was recorded.
        """
        if not self.steps:
            raise ValueError("no step was recorded: call the function inside `with ...trace(...)`")
        found: dict[str, list[Split]] = defaultdict(list)
        for workers in self.steps:
            begin, end = min(w.begin for w in workers), max(w.end for w in workers)
            sent = _sent(workers)
            for worker in workers:
                found[worker.name].append(_split(worker, sent, end - begin))
        return {name: _mean(splits) for name, splits in found.items()}

    def table(self) -> str:
        """`splits` in milliseconds, as text."""
        splits = self.splits()
        width = max(len("worker"), *map(len, splits))
        lines = [f"{'worker':{width}}  {'step':>9}  {'compute':>9}  {'transfer':>9}  {'idle':>9}"]
        for name, split in splits.items():
            numbers = (split.total, split.compute, split.transfer, split.idle)
            cells = "  ".join(f"{1e3 * it:6.1f} ms" for it in numbers)
            lines.append(f"{name:{width}}  {cells}")
        ways = {worker.transport for worker in self.steps[0]} - {""}
        return "\n".join([*lines, *(f"tiles travel by {way}" for way in sorted(ways))])

    def events(self) -> list[dict[str, Any]]:
        """The events of Chrome's trace format; their times are microseconds from the first."""
        if not self.steps:
            return []
        start = min(worker.begin for workers in self.steps for worker in workers)
        processes: dict[str, int] = {}
        rows: dict[tuple[str, str], int] = {}
        events: list[dict[str, Any]] = []
        flows = 0

        def at(worker: WorkerSpans, span: Span, seconds: float, **more: Any) -> dict[str, Any]:
            if worker.name not in processes:
                number = processes[worker.name] = len(processes)
                events.append(_named("process", worker.name, number, 0))
                if worker.transport:
                    labels = {"labels": f"tiles travel by {worker.transport}"}
                    row = {"ph": "M", "name": "process_labels", "pid": number, "tid": 0}
                    events.append({**row, "args": labels})
            process = processes[worker.name]
            if (worker.name, span.row) not in rows:
                rows[worker.name, span.row] = len(rows)
                events.append(_named("thread", span.row, process, rows[worker.name, span.row]))
            row = rows[worker.name, span.row]
            return {"pid": process, "tid": row, "ts": 1e6 * (seconds - start), **more}

        for step, workers in enumerate(self.steps):
            sends: dict[tuple[Key, Key], list[tuple[WorkerSpans, Span]]] = defaultdict(list)
            for worker in workers:
                for span in worker.spans:
                    if span.kind == "send" and span.move is not None:
                        sends[span.move].append((worker, span))
            for worker in workers:
                for span in worker.spans:
                    events.append(
                        at(
                            worker,
                            span,
                            span.begin,
                            ph="X",
                            name=_label(span),
                            cat=span.kind,
                            dur=1e6 * (span.end - span.begin),
                            args={"step": step, "micro_batch": span.micro_batch},
                        )
                    )
                    if span.kind != "receive" or span.move is None:
                        continue
                    for sender, send in sends[span.move]:
                        flow = {"name": "move", "cat": "move", "id": flows}
                        events.append(at(sender, send, send.begin, ph="s", **flow))
                        events.append(at(worker, span, span.end, ph="f", bp="e", **flow))
                        flows += 1
        return events

    def write(self, path: str | Path) -> None:
        """Writes a file for Perfetto and chrome://tracing."""
        text = json.dumps({"traceEvents": self.events(), "displayTimeUnit": "ms"})
        Path(path).write_text(text, encoding="utf-8")


def _named(what: str, name: str, process: int, thread: int) -> dict[str, Any]:
    return {
        "ph": "M",
        "name": f"{what}_name",
        "pid": process,
        "tid": thread,
        "args": {"name": name},
    }


def _label(span: Span) -> str:
    return span.row if span.micro_batch is None else f"{span.row} {span.micro_batch}"


def _sent(workers: Sequence[WorkerSpans]) -> dict[tuple[Key, Key], float]:
    """The time when the last sender of each move was ready."""
    begins: dict[tuple[Key, Key], float] = {}
    for worker in workers:
        for span in worker.spans:
            if span.kind == "send" and span.move is not None:
                begins[span.move] = max(begins.get(span.move, span.begin), span.begin)
    return begins


def _split(worker: WorkerSpans, sent: Mapping[tuple[Key, Key], float], total: float) -> Split:
    compute = transfer = 0.0
    for span in worker.spans:
        seconds = span.end - span.begin
        if span.kind == "compute":
            compute += seconds
            continue
        if span.kind == "receive" and span.move is not None:
            # Until its sender was ready, it waited. Clocks of several hosts may disagree.
            waited = sent.get(span.move, span.begin) - span.begin
            seconds -= min(max(waited, 0.0), seconds)
        transfer += seconds
    return Split(compute=compute, transfer=transfer, idle=max(0.0, total - compute - transfer))


def _mean(splits: Sequence[Split]) -> Split:
    count = len(splits)
    return Split(
        compute=sum(split.compute for split in splits) / count,
        transfer=sum(split.transfer for split in splits) / count,
        idle=sum(split.idle for split in splits) / count,
    )
