"""`soak`: the records of a run, and its verdict."""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
import pytest
import ray

import alpa
from alpa.runtime.process_usage import ProcessUsage
from alpa.tools import zoo
from stress.soak.__main__ import main, table, watch
from stress.soak.samples import Sample
from stress.soak.training import SoakError, Training
from stress.soak.turns import Round, Runner, Turn, rounds
from stress.soak.verdict import FEWEST, FEWEST_ROUNDS, judge_rounds, theil_sen, verdicts

MIB = 1 << 20
USAGE = ProcessUsage(
    resident_bytes=300 * MIB,
    shared_out_bytes=250 * MIB,
    own_bytes=200 * MIB,
    open_files=40,
    sockets=10,
    threads=50,
    processor_seconds=1.0,
)


def run(
    count: int = 360,
    own: np.ndarray | None = None,
    files: np.ndarray | None = None,
    store: np.ndarray | None = None,
) -> list[Sample]:
    """Half an hour, a sample every five seconds, ten steps per second; flat except for noise."""
    noise = np.random.default_rng(0).normal(size=count)
    own = 200.0 * MIB + 0.2 * MIB * noise if own is None else own
    files = np.full(count, 40) if files is None else files
    store = np.zeros(count) if store is None else store
    return [
        Sample(
            seconds=5.0 * n,
            steps=50 * n,
            processes={
                "caller": USAGE,
                "mesh_0": replace(
                    USAGE,
                    own_bytes=int(own[n]),
                    open_files=int(files[n]),
                ),
            },
            object_store_bytes=float(store[n]),
            checkpoint_files=12,
            step_seconds=0.1,
            slow_step_seconds=0.2,
        )
        for n in range(count)
    ]


def growing(samples: list[Sample]) -> list[str]:
    found = verdicts(samples)
    assert len(found) == 2 * 4 + 2
    assert all(it.grows is not None for it in found)
    return [it.name for it in found if it.grows]


def test_noise_is_flat() -> None:
    assert growing(run()) == []


def test_a_leak_of_memory_is_found() -> None:
    # 400 bytes in each step, under noise of 0.2 MiB.
    noise = np.random.default_rng(1).normal(size=360)
    leak = 200 * MIB + 50 * 400 * np.arange(360) + 0.2 * MIB * noise
    assert growing(run(own=leak)) == ["mesh_0: own memory"]
    (found,) = [it for it in verdicts(run(own=leak)) if it.grows]
    assert found.per_step == pytest.approx(400, rel=0.05)
    assert found.per_hour == pytest.approx(720 * 50 * 400, rel=0.05)


def test_a_staircase_of_a_leak_is_found() -> None:
    # 2 MiB with each checkpoint, one in 100 seconds.
    steps = 200.0 * MIB + 2 * MIB * (np.arange(360) // 20)
    assert growing(run(own=steps)) == ["mesh_0: own memory"]


def test_memory_that_fills_at_first_is_not_a_leak() -> None:
    filling = 200 * MIB * (1 - np.exp(-np.arange(360) / 30))
    assert growing(run(own=filling)) == []


def test_an_outlier_and_a_jump_that_stays_one_are_no_leak() -> None:
    own = np.full(360, 200.0 * MIB)
    own[200] = own[300] = 900 * MIB
    for at in (200, 240, 270, 300, 340):
        assert growing(run(own=own + 3 * MIB * (np.arange(360) >= at))) == []
        assert growing(run(files=40 + np.arange(360) % 2 + (np.arange(360) >= at))) == []


def test_open_files_are_counted() -> None:
    # One more in five minutes, and in six.
    assert growing(run(files=40 + np.arange(360) // 72)) == ["mesh_0: open files"]
    assert growing(run(files=40 + np.arange(360) // 60)) == ["mesh_0: open files"]
    # One that comes and goes.
    assert growing(run(files=40 + np.arange(360) % 2)) == []


def test_the_object_store_is_watched() -> None:
    assert growing(run(store=np.arange(360) * 0.1 * MIB)) == ["object store"]


def taken(fresh: list[float], old: list[float]) -> list[Round]:
    """Rounds with steps of this many seconds, each taking as much processor time again."""
    return [
        Round(
            old=Turn(step_seconds=late, processor_seconds=late),
            fresh=Turn(step_seconds=early, processor_seconds=early),
        )
        for early, late in zip(fresh, old, strict=True)
    ]


def test_slower_steps_are_found() -> None:
    pace = [0.1, 0.15, 0.09, 0.12, 0.2]  # of the machine, from round to round
    same = judge_rounds(taken(pace, [1.05 * it for it in pace]), slower=0.1)
    assert [it.grows for it in same] == [False, False]
    later = judge_rounds(taken(pace, [1.11 * it for it in pace]), slower=0.1)
    assert [(it.name, it.grows) for it in later] == [
        ("step, fresh and old", True),
        ("processor time per step, fresh and old", True),
    ]
    assert later[0].begin == 0.12
    assert later[0].end == pytest.approx(1.11 * 0.12)
    assert judge_rounds(taken(pace, [1.11 * it for it in pace]), slower=0.2)[0].grows is False


def test_a_round_that_other_work_disturbs_is_no_verdict() -> None:
    assert judge_rounds(taken([0.1] * 5, [0.1, 0.9, 0.1, 0.1, 0.8]), slower=0.1)[0].grows is False


def test_more_work_for_each_step_is_found() -> None:
    more = Round(
        old=Turn(step_seconds=0.1, processor_seconds=0.3),
        fresh=Turn(step_seconds=0.1, processor_seconds=0.2),
    )
    step, processor = judge_rounds([more] * FEWEST_ROUNDS, slower=0.1)
    assert not step.grows
    assert processor.grows
    assert [it.grows for it in judge_rounds([more] * (FEWEST_ROUNDS - 1), slower=0.1)] == [None] * 2
    assert judge_rounds([], slower=0.1) == []


def test_a_process_that_came_late_is_left_out() -> None:
    samples = run()
    samples[-1] = replace(samples[-1], processes={**samples[-1].processes, "late": USAGE})
    assert growing(samples) == []


def test_a_short_run_has_no_verdict() -> None:
    found = verdicts(run(count=FEWEST))
    assert [it.grows for it in found] == [None] * len(found)
    assert verdicts(run(count=1)) == []


def test_the_slope_is_the_median_of_all() -> None:
    x, y = np.array([0.0, 1.0, 1.0, 3.0]), np.array([0.0, 2.0, 4.0, 6.0])
    # 2, 4, 2, 2, 1; two points of one x have none.
    assert theil_sen(x, y) == 2
    assert theil_sen(np.zeros(3), np.arange(3.0)) == 0


def test_the_table_says_what_grows() -> None:
    leak = 200.0 * MIB + MIB * np.arange(360)
    rows = [line.strip("| ").split(" | ") for line in table(verdicts(run(own=leak)))]
    by_name = {row[0]: row[1:] for row in rows[2:]}
    assert by_name["mesh_0: own memory"] == ["410 MiB", "530 MiB", "+720 MiB", "+20 MiB", "GROWS"]
    assert by_name["mesh_0: threads"] == ["50", "50", "0", "0", "flat"]


def small_training(folder: Path) -> Training:
    config = {"num_layers": 2, "hidden_size": 16, "vocab_size": 32, "sequence_length": 8}
    return Training(
        program=zoo.get("gpt-tiny", optimizer="sgd", **config),
        batch_size=8,
        executor="ray",
        cluster="cpu:2x1",
        mesh_shape="1x1",
        num_micro_batches=2,
        seed=0,
        folder=folder,
        save_every=2,
        evaluate_every=3,
    )


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_few_steps_are_recorded(tmp_path: Path) -> None:
    training = small_training(tmp_path)
    assert len(training.executable.program.meshes) == 2
    samples = list(watch(training, training.steps(), steps=7, seconds=60, every=0))
    assert [sample.steps for sample in samples] == list(range(1, 8))
    last = samples[-1]
    assert {"caller", "mesh_0 on host 0", "mesh_1 on host 1"} <= last.processes.keys()
    assert {"gcs_server", "raylet"} <= last.processes.keys()  # Ray runs in this process
    for usage in last.processes.values():
        assert MIB < usage.own_bytes <= usage.resident_bytes
        assert 0 < usage.sockets < usage.open_files
    assert last.object_store_bytes is not None
    # The eighth step of all was called, and not saved; two checkpoints remain once the last save in
    # the background has ended.
    alpa.wait_for_saves()
    assert alpa.latest_step(tmp_path) == 6
    assert len([it for it in tmp_path.iterdir() if it.is_dir()]) == 2
    files = [it for it in tmp_path.rglob("*") if it.is_file()]
    now = Sample.of(training.executable, tmp_path, seconds=1.0, steps=7, window=[1.0])
    assert now.checkpoint_files == len(files)
    training.close()
    # Ray's head keeps nothing of its calls, which would grow with each step.
    assert not [name for name in records_of_ray() if "Worker" in name]


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_twenty_minutes_are_flat() -> None:
    # Other load on the machine changes times, not memory and files.
    assert main(["--minutes", "20", "--rounds", "0"]) == 0


def records_of_ray() -> list[str]:
    """The calls that Ray's head has recorded, with one new call."""

    def marker() -> None: ...

    remote: Any = ray.remote
    ray.get(remote(marker).remote())
    deadline = time.monotonic() + 60
    names: list[str] = []
    while not any("marker" in name for name in names):
        assert time.monotonic() < deadline
        time.sleep(0.2)
        names = [event["cat"] for event in ray.timeline()]
    return names


def test_wrong_arguments_are_a_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt-tinny"]) == 1
    assert "no program is called 'gpt-tinny'; try gpt-tiny" in capsys.readouterr().err
    assert main(["gpt-tiny-dropout"]) == 1
    assert "draws random numbers" in capsys.readouterr().err
    assert len(jax.devices()) == 8  # JAX makes them on first use
    assert main(["--executor", "local", "--cluster", "cpu:4x4"]) == 1
    assert "the cluster has 16 devices, jax has made 8" in capsys.readouterr().err
    assert main(["--json", str(tmp_path / "no" / "soak.json")]) == 1
    assert "there is no such folder" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "python -m stress.soak --minutes 30" in capsys.readouterr().out


@pytest.mark.slow
def test_a_run_too_short_to_say(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "soak.json"
    arguments = ["--executor", "local", "--cluster", "cpu:2x1", "--mesh-shape", "1x1"]
    arguments += ["--steps", "3", "--every", "0", "--save-every", "2", "--rounds", "2"]
    assert main([*arguments, "--json", str(path)]) == 0
    captured = capsys.readouterr()
    assert captured.out.splitlines()[-1] == "too short to say"
    assert captured.err == ""  # quiet when the output is no terminal
    record = json.loads(path.read_text())
    assert [sample["steps"] for sample in record["samples"]] == [1, 2, 3]
    assert {it["grows"] for it in record["verdicts"]} == {None}
    # A fresh run in a process of its own has alternated with this one.
    assert len(record["rounds"]) == 2
    for turn in (turn for one in record["rounds"] for turn in one.values()):
        assert 0 < turn["step_seconds"] < 10
        assert 0 <= turn["processor_seconds"] < 20


def test_a_fresh_run_that_cannot_go_on_says_why() -> None:
    class Old:
        def turn(self) -> Turn:
            return Turn(step_seconds=0.1, processor_seconds=0.1)

    options = argparse.Namespace(cluster="cpu:2x1", model="gpt-tiny-dropout")
    with pytest.raises(SoakError, match="the fresh run: gpt-tiny-dropout draws random numbers"):
        list(rounds(cast(Runner, Old()), options, 1))
