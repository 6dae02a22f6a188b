from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from alpa.passes.cost.cluster import Cluster
from alpa.tools.cost_ablation.__main__ import main
from alpa.tools.cost_ablation.candidates import (
    BY_EQUATION,
    GAMMAS,
    Strategies,
    equations,
)
from alpa.tools.cost_ablation.conditions import Conditions, text
from alpa.tools.cost_ablation.programs import PROGRAMS
from alpa.tools.cost_ablation.table import Measured, table
from alpa.tools.plan_ranking.programs import MLPConfig, RankedProgram

CLUSTER = """
hosts = 1
devices_per_host = 4
[device]
name = "CPU"
memory = "1GiB"
peak_flops = { f32 = 1e10 }
memory_bandwidth = 1e10
[intra_host]
bandwidth = 1e9
latency = 1e-5
[intra_host.collectives]
all-reduce.4 = { alpha = 1e-5, beta = 1e9 }
all-gather.4 = { alpha = 1e-5, beta = 2e9 }
[inter_host]
bandwidth = 1e9
latency = 1e-4
"""
TINY = RankedProgram(
    name="tiny",
    model=MLPConfig(hidden_size=16, num_layers=2),
    micro_batch_size=8,
    num_micro_batches=1,
)


@pytest.fixture
def cluster(tmp_path: Path) -> str:
    file = tmp_path / "cluster.toml"
    file.write_text(CLUSTER)
    return str(file)


def test_there_are_as_many_architectures_as_in_the_paper() -> None:
    names = [program.name for program in PROGRAMS]
    kinds = [name.partition("-")[0] for name in names]
    assert len(set(names)) == 15
    assert {kind: kinds.count(kind) for kind in kinds} == {
        "t5": 5,
        "wresnet": 4,
        "unet": 2,
        "moe": 4,
    }


def test_the_models_of_the_table(cluster: str) -> None:
    models = equations(Cluster.parse(cluster))
    assert models["alpa"] is None
    baseline, filtered, best = models["baseline"], models["CF"], models["EC 0.5"]
    assert baseline is not None
    assert filtered is not None
    assert best is not None
    assert (baseline.constants, filtered.constants, best.constants) == (True, False, False)
    assert (best.gamma, dict(best.epsilon)) == (0.5, {"all-reduce": 1.0, "all-gather": 0.5})
    assert [model for model in models if model.startswith("GO")] == [f"GO {g:g}" for g in GAMMAS]


def test_strategies_differ_and_each_model_prices_them(cluster: str) -> None:
    program = TINY.training().lower(TINY.micro_batch_size)
    found = Strategies.of(program, cluster, shape="2x2", count=6, seed=0)
    names = list(found.choices)
    assert names[0] == "tapas"
    assert "data-parallel" in names
    assert len(set(found.choices.values())) == len(names) == 6
    costs = found.costs
    assert {model: list(by_name) for model, by_name in costs.items()} == dict.fromkeys(
        equations(Cluster.parse(cluster)), names
    )
    for name in names:
        # The filter leaves messages out, and coefficients make them cheaper.
        assert costs["baseline"][name] >= costs["CF"][name] == costs["GO 1"][name]
        assert costs["GO 1"][name] >= costs["GO 0.5"][name] >= costs["EC 0.5"][name] > 0
    assert min(costs["alpa"], key=lambda name: costs["alpa"][name]) == "tapas"
    assert len({plan.key for plan in found.plans()}) == 6


def measured(program: str, best: str, **orders: list[str]) -> Measured:
    """Seconds of a, b and c: `best` is fastest. The models rank them in the given orders."""
    seconds = {name: 1.0 if name == best else 2.0 for name in "abc"}
    models = ("baseline", "CF", "alpa", *(f"{m} {g:g}" for m in ("GO", "EC") for g in GAMMAS))
    costs = {
        model: {name: float(place) for place, name in enumerate(orders.get(model, list("abc")))}
        for model in models
    }
    return Measured(program=program, costs=costs, seconds=seconds)


def test_the_table_scores_each_model() -> None:
    rows = table([measured("one", "a"), measured("two", "b"), measured("three", "c")])
    assert rows.splitlines() == [
        "| cost model | Acc@1 | Acc@5 | MRR | gamma |",
        "| --- | --- | --- | --- | --- |",
        "| baseline | 0.33 | 1.00 | 0.61 |  |",
        "| + CF | 0.33 | 1.00 | 0.61 |  |",
        "| + GO | 0.33 | 1.00 | 0.61 | 1 |",
        "| + EC | 0.33 | 1.00 | 0.61 | 1 |",
        "| Alpa's | 0.33 | 1.00 | 0.61 |  |",
    ]


def test_the_conditions_of_all_programs_are_one_line() -> None:
    quiet = Conditions(cores=2, load=0.5, jax="0.10.2")
    busy = Conditions(cores=8, load=7.25, jax="0.10.2")
    assert text([quiet, busy]) == (
        "2 programs on 2, 8 cores, jax 0.10.2; the load before each was 0.5 to 7.2"
    )
    now = Conditions.now()
    assert now.cores >= 1
    assert now.load >= 0


def test_the_strategy_of_the_least_messages_can_be_left_out() -> None:
    one = Measured(
        program="one",
        costs={"alpa": {"tapas": 2.0, BY_EQUATION: 1.0}},
        seconds={"tapas": 1.0, BY_EQUATION: 2.0},
    )
    assert one.ranking("alpa").rank == 2
    assert one.without_least_messages().ranking("alpa").rank == 1


def test_gamma_is_chosen_by_the_other_programs() -> None:
    # Only gamma = 0.1 ranks "two" and "three" right, so that "one" is ranked by it; the others
    # have "one", which is right with each gamma, and each other.
    right, wrong = ["b", "a", "c"], ["c", "a", "b"]
    orders = {"GO 0.1": right} | {f"GO {g:g}": wrong for g in GAMMAS if g != 0.1}
    programs = [
        measured("one", "a"),
        measured("two", "b", **orders),
        measured("three", "b", **orders),
    ]
    row = table(programs).splitlines()[4]
    assert row == "| + GO | 1.00 | 1.00 | 1.00 | 0.1 |"


def test_a_link_that_was_not_measured_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--cluster", "cpu:1x4", "--work", str(tmp_path)]) == 1
    assert "no measured collectives; run alpa-calibrate" in capsys.readouterr().err
    assert main(["t6", "--cluster", "cpu:1x4", "--work", str(tmp_path)]) == 1
    assert "no program t6; there are t5-64" in capsys.readouterr().err


def test_what_is_in_the_folder_is_not_made_again(cluster: str, tmp_path: Path) -> None:
    one = measured("t5-64", "b")
    folder = tmp_path / "t5-64"
    folder.mkdir()
    (folder / "costs.json").write_text(json.dumps(one.costs))
    conditions = {"cores": 2, "load": 1.25, "jax": "0.10.2"}
    times = {"conditions": conditions, "seconds": one.seconds}
    (folder / "times.json").write_text(json.dumps(times))
    # A process of its own: JAX has its devices already in this one.
    command = [sys.executable, "-m", "alpa.tools.cost_ablation", "t5-64", "--cluster", cluster]
    done = subprocess.run(
        [*command, "--work", str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert "| Alpa's | 0.00 | 1.00 | 0.50 |  |" in done.stdout
    conditions_line = "1 programs on 2 cores, jax 0.10.2; the load before each was 1.2 to 1.2\n"
    assert done.stdout.startswith(conditions_line)
