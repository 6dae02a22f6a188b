"""Traces of steps: the events of the file, and the parts of a step's seconds."""

from __future__ import annotations

import json
import re
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import alpa.runtime
from alpa import passes
from alpa.passes.plan.instructions import Move, meshes_of, write_script
from alpa.runtime import Executable, WorkerOptions
from alpa.runtime.trace import Span as RecordedSpan
from alpa.runtime.trace import Split, Trace, WorkerSpans
from alpa.tools import zoo


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
    """Processes are meshes, rows are their activities, and arrows lead from sends to receives."""
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
    check_flows(step, events, steps)


def check_flows(step: Executable, events: list[dict[str, Any]], steps: int) -> None:
    """An arrow for each move between meshes, from a slice of a send to one of a receive."""
    names = names_of("process", events)
    rows = names_of("thread", events)
    slices = [e for e in events if e["ph"] == "X"]
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
        assert (start["name"], start["cat"]) == (end["name"], end["cat"])  # else they are no pair
        assert rows[start["pid"], start["tid"]] == f"send to {names[end['pid'], 0]}"
        assert rows[end["pid"], end["tid"]] == f"receive from {names[start['pid'], 0]}"
        assert end["bp"] == "e"  # it belongs to the slice around it, not to the next one
    for flow in (*starts.values(), *ends.values()):
        assert any(
            (s["pid"], s["tid"]) == (flow["pid"], flow["tid"])
            and s["ts"] <= flow["ts"] <= s["ts"] + s["dur"] + 1e-3
            for s in slices
        )


def names_of(what: str, events: list[dict[str, Any]]) -> dict[tuple[int, int], str]:
    """The names of processes or threads; a process is thread 0 of itself."""
    return {
        (e["pid"], e["tid"]): re.sub(r" on host \d+$", "", e["args"]["name"])
        for e in events
        if e["name"] == f"{what}_name"
    }


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
    # The meshes run one after another in one process: none computes while another one does.
    assert sum(split.compute for split in trace.splits().values()) <= 1.02 * sum(whole) / 2


@pytest.mark.slow  # the training step below is traced on Ray in the default tier
@pytest.mark.usefixtures("ray_cluster")
def test_steps_on_ray(moves: str, tmp_path: Path) -> None:
    workers = WorkerOptions(cache_directory=None, timeout_seconds=300)
    with alpa.runtime.load(moves, executor="ray", workers=workers) as step:
        trace, events = traced(step, tmp_path / "step.json", 2)
        check_events(step, events, 2)
        labels = [e["args"]["labels"] for e in events if e["name"] == "process_labels"]
        assert labels == ["tiles travel by shared memory"] * 2
        whole = [max(w.end for w in them) - min(w.begin for w in them) for them in trace.steps]
        for split in trace.splits().values():
            assert split.total == pytest.approx(sum(whole) / 2, rel=0.02)


PIPELINE = "cluster=cpu:2x1 num-layers=2 num-stages=2 num-micro-batches=4 schedule=1f1b"


@pytest.mark.usefixtures("ray_cluster")
def test_a_training_step_under_1f1b_on_ray(tmp_path: Path) -> None:
    sizes = {"num_layers": 2, "hidden_size": 16, "vocab_size": 32, "sequence_length": 8}
    program = zoo.get("gpt-tiny", optimizer="sgd", **sizes)
    planned = passes.run(program.lower(2), f"alpa{{{PIPELINE}}}")
    batch = jax.tree.leaves(program.random_batch(0, 8))
    state: list[Any] = [np.asarray(leaf) for leaf in jax.tree.leaves(program.init_state())]
    path = tmp_path / "step.json"
    workers = WorkerOptions(cache_directory=None, timeout_seconds=300)
    with alpa.runtime.load(planned, executor="ray", workers=workers) as step:
        *state, _ = step(*state, *batch)
        with step.trace(path) as trace:
            begin = time.perf_counter()
            *state, _ = step(*state, *batch)
            seconds = time.perf_counter() - begin
    events = json.loads(path.read_text(), parse_constant=pytest.fail)["traceEvents"]
    check_flows(step, events, 1)
    (workers_spans,) = trace.steps
    whole = max(w.end for w in workers_spans) - min(w.begin for w in workers_spans)
    assert whole <= seconds
    processes, rows = names_of("process", events), names_of("thread", events)
    assert sorted(processes.values()) == ["mesh_0", "mesh_1"]
    splits = trace.splits()
    for (process, _), name in processes.items():
        slices = sorted(
            (e for e in events if e["ph"] == "X" and e["pid"] == process), key=lambda e: e["ts"]
        )
        check_order(name, [(rows[e["pid"], e["tid"]], e["args"]["micro_batch"]) for e in slices])
        # A worker does one thing at a time. No time counts twice, in microseconds.
        busy = 0.0
        for one, later in pairwise(slices):
            assert one["ts"] + one["dur"] <= later["ts"] + 1e-3 * one["dur"] + 1
        for kind in ("arguments", "compute", "send", "receive"):
            busy += sum(e["dur"] for e in slices if e["cat"] == kind)
        assert busy == pytest.approx(sum(e["dur"] for e in slices))
        assert slices[0]["ts"] >= 0
        assert slices[-1]["ts"] + slices[-1]["dur"] <= 1.001e6 * whole + 1
        (split,) = [it for worker, it in splits.items() if worker.startswith(name)]
        compute = sum(e["dur"] for e in slices if e["cat"] == "compute")
        assert split.compute == pytest.approx(1e-6 * compute, rel=1e-3)
        assert split.compute + split.transfer <= 1e-6 * busy * 1.001
        assert split.compute + split.transfer + split.idle == pytest.approx(whole, rel=0.02)


def check_order(mesh: str, slices: list[tuple[str, int | None]]) -> None:
    """For four micro-batches under 1F1B: the first stage is one forward ahead of the last one."""
    runs = [
        (row.rpartition(".")[2], m) for row, m in slices if row.endswith("ward") and m is not None
    ]
    f, b = [[(kind, m) for m in range(4)] for kind in ("forward", "backward")]
    if mesh == "mesh_0":
        assert runs == [f[0], f[1], b[0], f[2], b[1], f[3], b[2], b[3]]
    else:
        assert runs == [("forward_backward", m) for m in range(4)]


def span(kind: Any, begin: float, end: float, move: int | None = None) -> RecordedSpan:
    keys = None if move is None else ((move, 0), (move + 1, 0))
    return RecordedSpan(row=kind, kind=kind, begin=begin, end=end, move=keys)


def test_waiting_for_a_sender_is_idle() -> None:
    trace = Trace()
    first = [span("arguments", 0, 1), span("compute", 1, 5), span("send", 5, 6, move=7)]
    # Waits from 1 to 5, and receives the message at 8.
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


def test_the_way_of_tiles_is_in_a_trace() -> None:
    trace = Trace()
    spans = (span("compute", 0, 1),)
    trace.add(
        [
            WorkerSpans(name=name, mesh=name, begin=0, end=1, spans=spans, transport="pigeon")
            for name in ("a", "b")
        ]
    )
    assert trace.table().splitlines()[-1] == "tiles travel by pigeon"
    labels = [it["args"]["labels"] for it in trace.events() if it["name"] == "process_labels"]
    assert labels == ["tiles travel by pigeon"] * 2


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
