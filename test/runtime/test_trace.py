"""Traces of steps: what is in the file, and how a step's seconds are split."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import alpa.runtime
from alpa.runtime import Executable, WorkerOptions
from alpa.runtime.instructions import Move, meshes_of, write_script
from alpa.runtime.trace import Span as RecordedSpan
from alpa.runtime.trace import Split, Trace, WorkerSpans


def arguments() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    return [generator.normal(size=n).astype(np.float32) for n in (4, 4, 4, 12)]


def traced(step: Executable, path: Path, steps: int) -> tuple[Trace, list[dict[str, Any]]]:
    """Some traced steps, and the events of the file."""
    step(*arguments())
    with step.trace(path) as trace:
        for _ in range(steps):
            step(*arguments())
    step(*arguments())
    return trace, json.loads(path.read_text())["traceEvents"]


def check_events(step: Executable, events: list[dict[str, Any]], steps: int) -> None:
    """Processes are the meshes, rows what they do, and arrows go from sends to receives."""
    processes = [e for e in events if e["name"] == "process_name"]
    names = {e["pid"]: e["args"]["name"].removesuffix(" on host 0") for e in processes}
    assert sorted(names.values()) == ["mesh_0", "mesh_1"]
    rows = {
        (names[e["pid"]], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    assert sorted(name for (mesh, _), name in rows.items() if mesh == "mesh_1") == [
        "arguments",
        "layer_1.forward",
        "receive from mesh_0",
        "results",
        "send to mesh_0",
        "sums",
        "update_1.update",
    ]
    slices = [e for e in events if e["ph"] == "X"]
    runs = Counter(rows[names[e["pid"]], e["tid"]] for e in slices)
    assert runs["layer_0.forward"] == runs["layer_1.forward"] == 3 * steps
    assert runs["update_1.update"] == steps
    script = write_script(step.program)
    moves = [
        i
        for i in script.instructions
        if isinstance(i, Move) and len(meshes_of(step.program, i)) == 2
    ]
    starts = {e["id"]: e for e in events if e["ph"] == "s"}
    ends = {e["id"]: e for e in events if e["ph"] == "f"}
    assert starts.keys() == ends.keys()
    assert len(starts) == len(moves) * steps
    for number, start in starts.items():
        end = ends[number]
        assert start["ts"] <= end["ts"]
        assert rows[names[start["pid"]], start["tid"]] == f"send to {names[end['pid']]}"
        assert rows[names[end["pid"]], end["tid"]] == f"receive from {names[start['pid']]}"
    for flow in (*starts.values(), *ends.values()):
        assert any(
            (s["pid"], s["tid"]) == (flow["pid"], flow["tid"])
            and s["ts"] <= flow["ts"] <= s["ts"] + s["dur"] + 1e-3
            for s in slices
        )


def test_local_steps(moves: str, tmp_path: Path) -> None:
    step = alpa.runtime.load(moves)
    trace, events = traced(step, tmp_path / "step.json", 2)
    assert len(trace.steps) == 2
    check_events(step, events, 2)
    text = trace.table().splitlines()
    assert [line.split()[0] for line in text] == ["worker", "mesh_0", "mesh_1"]
    whole = [max(w.end for w in them) - min(w.begin for w in them) for them in trace.steps]
    for split in trace.splits().values():
        assert split.total == pytest.approx(sum(whole) / 2, rel=0.02)
        assert min(split.compute, split.transfer) > 0
    # One after another in one process: no mesh computes while another one does.
    assert sum(split.compute for split in trace.splits().values()) <= 1.02 * sum(whole) / 2


@pytest.mark.usefixtures("ray_cluster")
def test_steps_on_ray(moves: str, tmp_path: Path) -> None:
    workers = WorkerOptions(cache_directory=None, timeout_seconds=60)
    with alpa.runtime.load(moves, executor="ray", workers=workers) as step:
        trace, events = traced(step, tmp_path / "step.json", 2)
        check_events(step, events, 2)
        whole = [max(w.end for w in them) - min(w.begin for w in them) for them in trace.steps]
        for split in trace.splits().values():
            assert split.total == pytest.approx(sum(whole) / 2, rel=0.02)


def span(kind: Any, begin: float, end: float, move: int | None = None) -> RecordedSpan:
    keys = None if move is None else ((move, 0), (move + 1, 0))
    return RecordedSpan(row=kind, kind=kind, begin=begin, end=end, move=keys)


def test_waiting_for_a_sender_is_idle() -> None:
    trace = Trace()
    first = [span("arguments", 0, 1), span("compute", 1, 5), span("send", 5, 6, move=7)]
    # Waits from 1 to 5, and has what was sent at 8.
    second = [span("receive", 1, 8, move=7), span("compute", 8, 10)]
    trace.add(
        [
            WorkerSpans(name="a", mesh="a", begin=0, end=6, spans=tuple(first)),
            WorkerSpans(name="b", mesh="b", begin=0.5, end=10, spans=tuple(second)),
        ]
    )
    assert trace.splits() == {
        "a": Split(compute=4, transfer=2, idle=4),
        "b": Split(compute=2, transfer=3, idle=5),
    }


def test_what_cannot_be_traced(moves: str, tmp_path: Path) -> None:
    step = alpa.runtime.load(moves)
    nowhere = tmp_path / "none" / "step.json"
    with pytest.raises(FileNotFoundError, match="there is no such folder"), step.trace(nowhere):
        pass
    with (
        step.trace() as trace,
        pytest.raises(RuntimeError, match="being recorded already"),
        step.trace(),
    ):
        pass
    with pytest.raises(ValueError, match="no step was recorded"):
        trace.splits()
