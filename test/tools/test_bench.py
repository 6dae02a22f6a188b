from __future__ import annotations

from dataclasses import replace
from math import inf

import numpy as np
import pytest

from alpa.passes.solve.sharding.problem import Edge, Problem, Usage
from alpa.passes.solve.sharding.settings import Tuning
from alpa.tools.bench.__main__ import main
from alpa.tools.bench.ablation import NUMBERS, Run, varied
from alpa.tools.bench.cases import Case, load, save
from alpa.tools.bench.summary import Summary
from alpa.tools.solve import CaseError


@pytest.fixture
def case() -> Case:
    rng = np.random.default_rng(0)
    held = rng.uniform(1, 9, (3, 2))
    nodes = (rng.random(3), np.array([0.5, inf]), rng.random(4), rng.random(3))
    return Case(
        name="small",
        kind="memory",
        problem=Problem(
            node_costs=nodes,
            edges=tuple(
                Edge(u, v, rng.random((nodes[u].size, nodes[v].size)))
                for u, v in ((0, 1), (2, 0), (2, 3), (3, 0), (2, 1), (3, 1))
            ),
            usages=(
                Usage(nodes=(0, 1), bytes=held, start=0, stop=3),
                Usage(nodes=(0, 1), bytes=held, start=5, stop=6),
                Usage(nodes=(2,), bytes=np.array([9.0, 6.0, 4.0, 2.0]), start=1, stop=2),
            ),
            memory_limit=12.0,
        ),
        gap=0.02,
        prices=(1.0, 10.0),
        enough=5.0,
    )


def test_a_saved_problem_is_read_as_it_was(tmp_path, case):
    again = load(save(case, tmp_path))
    for field in ("name", "kind", "gap", "prices", "enough"):
        assert getattr(again, field) == getattr(case, field)
    for old, new in zip(case.problem.node_costs, again.problem.node_costs, strict=True):
        np.testing.assert_array_equal(old, new)
    for old, new in zip(case.problem.edges, again.problem.edges, strict=True):
        assert (old.source, old.target) == (new.source, new.target)
        np.testing.assert_array_equal(old.costs, new.costs)
    for old, new in zip(case.problem.usages, again.problem.usages, strict=True):
        assert (old.nodes, old.start, old.stop) == (new.nodes, new.start, new.stop)
        np.testing.assert_array_equal(old.bytes, new.bytes)
    first, second, _ = again.problem.usages
    assert first.bytes is second.bytes
    assert again.problem.memory_limit == 12.0


STEPS = ["elimination", "elimination+ascent", "ascent"]


@pytest.mark.parametrize("prices", [(), (1.0,)])
def test_the_table_has_a_row_per_step_that_was_reached(tmp_path, capsys, case, prices):
    path = save(replace(case, prices=prices, enough=inf), tmp_path)
    assert main(["solver", str(path), "--steps", *STEPS, "--runs", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("| case | class | variant | objective")
    assert lines[2].startswith("| small | memory | (default) |")
    empty = lines.index("")
    assert [line.split("|")[3].strip() for line in lines[3:empty]] == STEPS[:2]
    # There is no row of ascent alone: presolve solves this.
    assert lines[empty + 1].startswith("| variant | memory | objective |")
    assert [line.split("|")[1].strip(" `") for line in lines[empty + 3 :]] == STEPS[:2]


def test_numbers_that_the_search_reads_are_varied(tmp_path, capsys, case):
    path = save(replace(case, prices=()), tmp_path)
    numbers = ["series_pairs", "combination_nodes"]
    assert main(["tuning", str(path), "--numbers", *numbers, "--factors", "0.5", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = lines[3 : lines.index("")]
    assert [row.split("|")[3].strip() for row in rows] == ["series_pairs=2048", "series_pairs=8192"]
    assert {row.split("|")[4] for row in rows} == {lines[2].split("|")[4]}


@pytest.mark.parametrize(
    ("name", "factor", "value"),
    [("sweeps", 0.5, 100), ("patience", 0.1, 1), ("level", 2.0, 0.8), ("far", 2.0, 3.0)],
)
def test_a_varied_number(name, factor, value):
    variant = varied(name, factor)
    assert getattr(variant.settings.tuning, name) == pytest.approx(value)
    assert replace(variant.settings.tuning, **{name: NUMBERS[name]}) == Tuning()


def test_the_summary_has_means_by_class(case):
    summary = Summary()
    base = Run(objective=2.0, bound=2.0, seconds=1.0)
    slow = Run(objective=2.1, bound=2.0, seconds=4.0)
    lost = Run(objective=inf, bound=-inf, seconds=1.0)
    summary.add(case, {"": base, "x": slow})
    summary.add(case, {"": base, "x": lost})
    assert summary.lines()[-1] == "| `x` | +100% (+0% to +300%), 2, 1 unsolved | small: +5.00% |"


def test_an_unknown_step_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["solver", "case.npz", "--steps", "level+magic"])
    assert "there is no step 'magic'; the steps are" in capsys.readouterr().err


@pytest.mark.slow
def test_posing_a_tiny_program(tmp_path, capsys):
    assert main(["pose", str(tmp_path), "--only", "wresnet-tiny"]) == 0
    assert "wresnet-tiny-cpu-1x8-mesh: free" in capsys.readouterr().out
    case = load(tmp_path / "wresnet-tiny-cpu-1x8-mesh.npz")
    assert case.gap == 0.02
    assert len(case.problem.usages) > 100
    assert case.problem.memory_limit < inf
    tight = load(tmp_path / "wresnet-tiny-cpu-1x8-tight10.npz")
    assert tight.kind == "memory"
    assert 0 < tight.problem.memory_limit < case.problem.memory_limit


def test_a_file_of_something_else_is_refused(tmp_path, capsys):
    path = tmp_path / "other.npz"
    np.savez(path, numbers=np.zeros(3))
    with pytest.raises(CaseError, match="not a saved problem"):
        load(path)
    assert main(["solver", str(path)]) == 1
    assert "not a saved problem" in capsys.readouterr().err
