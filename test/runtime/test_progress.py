"""A terminal sees what is planned, compiled and waited for; files and pipes do not."""

from __future__ import annotations

import gc
import re
import sys
import time
from textwrap import dedent
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import rich.console
import rich.progress

import alpa
import alpa.runtime
from alpa.runtime import ClusterSizeError, WorkerError, WorkerOptions
from alpa.runtime.progress import Show, progress
from alpa.runtime.workers import waiting
from alpa.runtime.workers.waiting import Waiting
from test.terminal import new_terminal

WORKERS = WorkerOptions(cache_directory=None, timeout_seconds=300)


def into(heard: list[str]) -> Show:
    """Adds what is shown to a list, without the numbers."""
    return lambda what, done=0, total=0: heard.append(what)


def double(x: Any) -> Any:
    return x * 2


def test_a_line_counts_the_seconds_and_is_gone_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = new_terminal(monkeypatch)
    with progress("begin") as show:
        time.sleep(1.1)
        show("next [of all]")
        assert sys.stderr is not terminal  # What is written meanwhile stands above the line.
        sys.stderr.write("a warning\n")
    assert sys.stderr is terminal
    assert terminal.shown == ["begin", "next [of all]"]
    assert "a warning\n" in terminal.getvalue()
    assert any(
        re.search(r"^next \[of all\] ━+ 0:00:0[1-9] *$", line, re.M) for line in terminal.lines
    )
    assert terminal.getvalue().endswith("\r\x1b[1A\x1b[2K")


def test_what_is_counted_has_an_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = new_terminal(monkeypatch)
    now = 100.0
    monkeypatch.setattr(rich.progress.TimeRemainingColumn, "max_refresh", None)
    monkeypatch.setattr(rich.console, "monotonic", lambda: now)

    def times(line: str) -> list[str]:
        return re.findall(r"[-\d]:[-\d]{2}:[-\d]{2}", line)

    def last() -> list[str]:
        return times([line for line in terminal.lines if line.strip()][-1])

    with progress("begin") as show:
        show("stage 3 of 10", 2, 10)  # Two are from a cache.
        assert last() == ["0:00:00", "-:--:--"]
        now = 103.0
        show("stage 4 of 10", 3, 10)
        now = 106.0
        show("stage 5 of 10", 4, 10)
        assert last() == ["0:00:06", "0:00:18"]  # 3 s for each
        now = 1006.0
        show("stage 6 of 10", 5, 10)
        assert last() == ["0:15:06", "0:37:38"]  # 903 s for two
        show("stage 1 of 10", 0, 10)  # of another plan
        assert last() == ["0:15:06", "-:--:--"]
        show("load")
        assert last() == ["0:15:06"]


def test_a_long_line_is_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = new_terminal(monkeypatch)
    monkeypatch.setenv("COLUMNS", "60")
    with progress("begin") as show:
        show("0123456789" * 10)
    assert all(len(line.rstrip("\n")) <= 60 for line in terminal.lines)


def test_a_notebook_has_a_widget() -> None:
    manager = pytest.importorskip("jupyter_client.manager")
    code = """
        import time
        from alpa.runtime.progress import progress
        with progress("work") as show:
            show("stage 1 of 2", 1, 2)
            time.sleep(0.5)
    """
    messages: list[dict[str, Any]] = []
    # Its sockets block. Those of nbclient are asyncio's, which slept beside a second test
    # process until the time limit, with the reply there.
    with manager.run_kernel(kernel_name="python3") as kernel:
        cell = kernel.execute(dedent(code))
        while not messages or messages[-1]["content"].get("execution_state") != "idle":
            message = kernel.get_iopub_msg(timeout=60)
            if message["parent_header"].get("msg_id") == cell:
                messages.append(message)
    assert any(
        "application/vnd.jupyter.widget-view+json" in message["content"].get("data", {})
        for message in messages
        if message["msg_type"] == "display_data"
    )
    assert any("stage 1 of 2" in str(message["content"]) for message in messages)


def test_planning_and_compiling_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = new_terminal(monkeypatch)
    alpa.parallelize(double, cluster="cpu:1x1")(jnp.ones(4))
    assert "plan double: simplify-trivial-ops" in terminal.shown
    assert "plan double: ilp-shard-annotate: 0 of 1 meshes" in terminal.shown
    assert any(re.fullmatch(r"compile \S+ \(1 of 1\)", line) for line in terminal.shown)
    assert terminal.getvalue().endswith("\x1b[2K")


def test_without_a_terminal_nothing_is_shown(capfd: pytest.CaptureFixture[str]) -> None:
    alpa.parallelize(double, cluster="cpu:1x1")(jnp.ones(4))
    assert capfd.readouterr() == ("", "")


def test_a_caller_hears_it_instead(moves: str, monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = new_terminal(monkeypatch)
    heard: list[str] = []
    alpa.runtime.load(moves, on_progress=heard.append)
    assert heard[0] == "compile mesh_0.layer_0.forward (1 of 3)"
    assert len(heard) == 3
    assert terminal.getvalue() == ""


def test_a_long_wait_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    heard: list[str] = []
    wait = Waiting(600, into(heard))
    wait.say("1 worker to start: mesh_1 on host 1")
    wait.say("1 worker to start: mesh_1 on host 1")
    assert heard == ["waiting for 1 worker to start: mesh_1 on host 1"]
    assert caplog.text == ""
    monkeypatch.setattr(waiting, "_LONG", 0.0)
    wait.say("1 worker to start: mesh_1 on host 1")
    assert "waiting for 1 worker to start: mesh_1 on host 1: 0 s of at most 600" in caplog.text
    silent = Waiting(600, None)
    silent.say("a step")
    assert "a step" not in caplog.text


@pytest.mark.usefixtures("ray_cluster")
class TestOnRay:
    def test_workers_that_start_and_compile_are_shown(
        self, moves: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        terminal = new_terminal(monkeypatch)
        with alpa.runtime.load(moves, executor="ray", workers=WORKERS) as step:
            shown = terminal.shown
            step(*(np.ones(4, np.float32),) * 3, np.ones(12, np.float32))
            assert terminal.shown == shown  # steps are not shown
        both = "mesh_0 on host 0, mesh_1 on host 0"
        assert f"waiting for 2 workers to start: {both}" in shown
        assert f"waiting for 2 workers to compile: {both}" in shown

    def test_a_start_that_hangs_says_for_what_it_waits(self) -> None:
        import ray  # noqa: PLC0415 - a slow import

        from alpa.runtime.workers.cluster import Post  # noqa: PLC0415 - it imports Ray
        from alpa.runtime.workers.group import Call  # noqa: PLC0415 - it imports Ray

        class Group:
            options = WorkerOptions(timeout_seconds=0.5)
            watches: dict[Any, Post] = {}  # noqa: RUF012 - none

            def check_alive(self) -> None: ...

            def fail(self, reason: str) -> WorkerError:
                return WorkerError(reason)

        hangs = ray.remote(lambda: time.sleep(30)).remote()
        post = Post(rank=0, mesh="mesh_1", host=1, devices=(0,), process=0, processes=1, core=0)
        heard: list[str] = []
        group: Any = Group()
        with pytest.raises(WorkerError, match=r"^mesh_1 on host 1: no answer while it started for"):
            Call(group, "endpoint", [post], [hangs]).wait(show=into(heard))
        assert heard == ["waiting for 1 worker to start: mesh_1 on host 1"]
        ray.cancel(hangs, force=True)

    def test_devices_that_others_use_are_waited_for(self) -> None:
        from ray.util.placement_group import remove_placement_group  # noqa: PLC0415 - a slow import

        from alpa.runtime.workers.cluster import Post, reserve  # noqa: PLC0415 - it imports Ray

        gc.collect()  # The workers of functions that other tests left behind end.
        devices = tuple(range(16))
        post = Post(rank=0, mesh="mesh_0", host=0, devices=devices, process=0, processes=1, core=0)
        group, _ = reserve([post], "cpu", WORKERS)
        heard: list[str] = []
        try:
            with pytest.raises(ClusterSizeError, match=r"0 CPU of 16 are free after 1\.5 s"):
                reserve([post], "cpu", WorkerOptions(timeout_seconds=1.5), into(heard))
        finally:
            remove_placement_group(group)
        assert heard == ["waiting for 1 host with 16 CPU of Ray, which others use"]
