from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from alpa.dialects import ir, main_function, parse
from alpa.dialects.attributes import signature_attrs
from alpa.dialects.plan import read_meshes
from alpa.runtime.ahead_of_time.compilation import missing_packages
from alpa.runtime.compare_programs import compare_programs
from alpa.runtime.planning import PlanningError
from alpa.tools.plan_ranking.__main__ import main, summary
from alpa.tools.plan_ranking.plans import RankedPlan, distinct_plans, randomly_sharded
from alpa.tools.plan_ranking.programs import FOR_CPU, FOR_GPUS, MLPConfig, RankedProgram
from alpa.tools.plan_ranking.scores import Ranking, Times
from alpa.tools.plan_ranking.times import (
    measured_seconds,
    predicted_in_turns,
    predicted_seconds,
    roofline_seconds,
)

TINY = RankedProgram(name="tiny", model=MLPConfig(hidden_size=16, num_layers=2), micro_batch_size=8)


@pytest.fixture(scope="module")
def program() -> ir.Module:
    return parse(TINY.training().lower(TINY.micro_batch_size))


@pytest.fixture(scope="module")
def plans(program: ir.Module) -> list[RankedPlan]:
    return distinct_plans(program, "cpu:1x4", TINY.num_micro_batches)


def test_ten_plans_differ(plans: list[RankedPlan]) -> None:
    assert len({plan.key for plan in plans}) == len({plan.name for plan in plans}) == 10
    assert plans[0].name == "auto"
    assert any(plan.name.startswith("random") for plan in plans)


def on_meshes(*meshes: tuple[str, str, str]) -> RankedPlan:
    """A plan with an argument on each mesh: its shape, its axes, and the argument's sharding."""
    types = [
        f'!mpmd.mesh_tensor<"mesh_{n}", tensor<8xf32>, sharding=<@mesh_{n}, [{sharding}]>>'
        for n, (_, _, sharding) in enumerate(meshes)
    ]
    placed = [
        f"""{{devices = array<i64: 0, 1, 2, 3, 4, 5, 6, 7>, hosts = array<i64: {n}>,
              logical_shape = array<i64: {shape}>, name = "mesh_{n}"}}"""
        for n, (shape, _, _) in enumerate(meshes)
    ]
    topology = [f'<"mesh_{n}" : <[{axes}]>>' for n, (_, axes, _) in enumerate(meshes)]
    arguments = [f"%{n}: {type_}" for n, type_ in enumerate(types)]
    values = [f"%{n}" for n in range(len(types))]
    text = f"""
        func.func @main({", ".join(arguments)}) -> ({", ".join(types)}) attributes {{
          alpa.meshes = [{", ".join(placed)}],
          topology = #mpmd.topology<{", ".join(topology)}>}} {{
          return {", ".join(values)} : {", ".join(types)}
        }}"""
    return RankedPlan(name="some", module=parse(text))


WIDE, HIGH = ("2, 4", '"axis0"=2, "axis1"=4'), ("4, 2", '"axis0"=4, "axis1"=2')
FLAT = ("8", '"axis0"=8')
TOGETHER, ONE = '{"axis0", "axis1"}', '{"axis0"}'


def test_axes_that_are_used_together_are_one() -> None:
    flat = on_meshes((*FLAT, ONE))
    wide, high = on_meshes((*WIDE, TOGETHER)), on_meshes((*HIGH, TOGETHER))
    assert wide.key == high.key == flat.key
    assert on_meshes((*WIDE, "{}")).key == on_meshes((*HIGH, "{}")).key != flat.key
    assert on_meshes((*WIDE, ONE)).key != on_meshes((*HIGH, ONE)).key
    assert on_meshes((*WIDE, '{"axis1", "axis0"}')).key != high.key


def test_an_axis_of_one_mesh_is_not_all_of_another() -> None:
    flat = (*FLAT, ONE)
    keys = [on_meshes(flat, (*WIDE, used)).key for used in (ONE, TOGETHER)]
    assert keys[0] != keys[1]
    assert on_meshes(flat, (*WIDE, ONE)).key != on_meshes(flat, (*HIGH, ONE)).key


def test_plans_have_one_stage_or_two(plans: list[RankedPlan]) -> None:
    stages = {plan.name: len(read_meshes(main_function(plan.module))) for plan in plans}
    assert stages["2 stages"] == 2
    assert {n for name, n in stages.items() if name not in ("auto", "2 stages")} == {1}


def test_meshes_of_the_local_executor_take_turns(plans: list[RankedPlan]) -> None:
    by_name = {plan.name: plan for plan in plans}
    data, stages = by_name["data-parallel"], by_name["2 stages"]
    assert predicted_in_turns(data) == pytest.approx(predicted_seconds(data))
    assert predicted_in_turns(stages) > predicted_seconds(stages)


def test_random_plans_compute_the_program(program: ir.Module, plans: list[RankedPlan]) -> None:
    random = next(plan for plan in plans if plan.name.startswith("random"))
    assert not compare_programs(program, random.module).is_fault


def test_equal_seeds_draw_equal_shardings(program: ir.Module) -> None:
    texts = [str(randomly_sharded(program, 4, np.random.default_rng(seed))) for seed in (3, 3, 4)]
    assert texts[0] == texts[1] != texts[2]


def test_arguments_of_one_type_are_sharded_alike(program: ir.Module) -> None:
    function = main_function(randomly_sharded(program, 4, np.random.default_rng(3)))
    types = function.type.inputs
    found: dict[str, set[str]] = {}
    for type_, attrs in zip(types, signature_attrs(function, "arg_attrs", len(types)), strict=True):
        found.setdefault(str(type_), set()).add(str(attrs.get("sdy.sharding")))
    assert all(len(shardings) == 1 for shardings in found.values())


def test_a_program_without_enough_plans_is_refused(program: ir.Module) -> None:
    with pytest.raises(ValueError, match=r"has \d+ different plans, not 10"):
        distinct_plans(program, "cpu:1x1", TINY.num_micro_batches, tries=1)


def test_a_program_that_cannot_be_planned_is_refused(program: ir.Module) -> None:
    with pytest.raises(PlanningError, match=r"memory|needs at least|hold"):
        distinct_plans(program, "cpu:1x4,memory=1KiB", TINY.num_micro_batches)


def test_a_roofline_gives_each_plan_its_seconds(plans: list[RankedPlan], tmp_path: Path) -> None:
    some = [plans[0], plans[1], plans[0]]
    first = roofline_seconds(some, processes=1, cache=tmp_path)
    assert min(first) > 0
    assert first[0] == first[2]
    written = sorted(tmp_path.iterdir())
    assert all(path.name.endswith(".hlo.gz") for path in written)
    assert roofline_seconds(some, processes=1, cache=tmp_path) == first
    assert sorted(tmp_path.iterdir()) == written


@pytest.mark.skipif(missing_packages() != [], reason="needs the extra gpu-aot")
def test_a_roofline_over_what_the_compiler_of_gpus_makes(
    program: ir.Module, tmp_path: Path
) -> None:
    plans = distinct_plans(program, "h100:1x2", TINY.num_micro_batches, count=2)
    seconds = roofline_seconds(plans, processes=1, cache=tmp_path)
    # All of it is launching kernels and starting collectives.
    ratios = [real / predicted_seconds(plan) for real, plan in zip(seconds, plans, strict=True)]
    assert all(0.5 < ratio < 2 for ratio in ratios)


def test_steps_are_measured(plans: list[RankedPlan]) -> None:
    assert min(measured_seconds(TINY, plans[:2], runs=1)) > 0


def test_twelve_programs_of_seven_families() -> None:
    for programs in (FOR_GPUS, FOR_CPU):
        names = [program.name for program in programs]
        assert len(set(names)) == len(names) == 12
        assert len({name.partition("-")[0] for name in names}) == 7
        assert [program.training().name for program in programs] == names


def test_an_unknown_program_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gpt-128", "--cluster", "h100:1x8"]) == 1
    assert capsys.readouterr().err.startswith("error: no program gpt-128; there are gpt-1024")


def test_an_unknown_cluster_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--cluster", "h1000:1x8"]) == 1
    assert "unknown cluster 'h1000'" in capsys.readouterr().err


def test_the_summary() -> None:
    plans = (Times(name="a", predicted=1.0, real=2.0), Times(name="b", predicted=2.0, real=1.0))
    worse = Ranking(program="p", plans=plans)
    assert summary([worse]) == "MRR 0.500, Acc@1 0.00, Acc@5 1.00, 1 programs"
