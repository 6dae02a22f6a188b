"""The option `fixed-stages`: its text, and the problem of the stages that it leaves."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from alpa import passes
from alpa.passes.base import OptionError
from alpa.passes.cost.cluster import Cluster
from alpa.passes.solve.stages import stage_dp
from alpa.passes.solve.stages.placement import Group
from alpa.passes.solve.stages.problem import Problem
from alpa.passes.stages.class_problem import Submesh
from alpa.passes.stages.fixed_stages import (
    FixedStage,
    check_fixed,
    parse_stages,
    restricted,
    with_shapes,
)


@pytest.mark.parametrize(
    ("text", "stage"),
    [
        ("0-7:1x8", FixedStage(first=0, last=7, submesh=(1, 8))),
        ("3:2x4:4x2", FixedStage(first=3, last=3, submesh=(2, 4), shape=(4, 2))),
    ],
)
def test_a_stage(text: str, stage: FixedStage) -> None:
    assert FixedStage.parse(text) == stage
    assert FixedStage.parse(str(stage)) == stage


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0-7", "holds '0-7'; expected the first and last layer"),
        ("0-7:0x8", "holds '0-7:0x8'; expected the first and last layer"),
        ("4-2:1x8", "whose last layer comes before the first"),
        ("0-7:1x8:2x2", "that is a shape of 4 for 8 device"),
        ("0-7:1x8,7-9:1x4", "gives layer 7 to two stages"),
    ],
)
def test_what_is_no_stage(text: str, problem: str) -> None:
    with pytest.raises(OptionError, match=problem):
        parse_stages(text)


def test_stages_are_in_the_order_of_their_layers() -> None:
    assert [stage.first for stage in parse_stages("4-5:1x4,0-1:1x4")] == [0, 4]
    assert parse_stages("") == ()


def test_a_stage_that_program_or_cluster_lacks() -> None:
    cluster = Cluster.parse("cpu:2x4")
    with pytest.raises(OptionError, match=r"is cut into 4 layer\(s\), .* num-layers sets"):
        check_fixed(parse_stages("2-4:1x4"), 4, cluster)
    with pytest.raises(OptionError, match="the cluster's submeshes are 1x1, 1x2, 1x4, 2x4"):
        check_fixed(parse_stages("2-3:1x3"), 4, cluster)


def test_a_fixed_shape_is_offered() -> None:
    offered = [(0, (1, 4, (2, 2))), (0, (1, 2, (2,)))]
    stages = parse_stages("0-1:1x4:1x4")
    assert with_shapes(offered, stages) == [*offered, (0, (1, 4, (1, 4)))]


@pytest.mark.parametrize("seed", range(8))
def test_the_best_cut_with_a_stage_is_that_of_brute_force(seed: int) -> None:
    """Among all cuts of the free problem, those with the stage, the shortest step."""
    rng, layers = np.random.default_rng(seed), 4
    submeshes: list[Submesh] = [(1, 1, (1,)), (1, 2, (2,)), (1, 4, (2, 2)), (1, 4, (4,))]
    shape = (layers, layers, len(submeshes))
    problem = Problem(
        groups=(Group(0, 2, 4),),
        submeshes=tuple((n, m) for n, m, _ in submeshes),
        t=rng.uniform(1, 2, shape) * (1 + np.arange(layers))[None, :, None],
        u=rng.uniform(0, 0.1, shape),
        max_in_flight=np.full(shape, 99),
        c=np.zeros((layers, len(submeshes), 2)),
        back=np.zeros((layers, len(submeshes), 2)),
        num_micro_batches=4,
        schedule="1f1b",
    )
    first = int(rng.integers(layers))
    last = int(rng.integers(first, layers))
    fixed = FixedStage(first=first, last=last, submesh=(1, 4), shape=(2, 2))
    one = stage_dp.solve(restricted(problem, [fixed], submeshes))
    stage = next(it for it in one.stages if it.first == first)
    assert (stage.last, submeshes[stage.submesh][2]) == (last, (2, 2))
    # All cuts of four layers on eight devices.
    best = np.inf
    for count in range(1, layers + 1):
        for ends in itertools.combinations(range(layers - 1), count - 1):
            bounds = list(itertools.pairwise([-1, *ends, layers - 1]))
            for chosen in itertools.product(range(len(submeshes)), repeat=count):
                cut = tuple(
                    stage_dp.Stage(first=a + 1, last=b, submesh=m)
                    for (a, b), m in zip(bounds, chosen, strict=True)
                )
                devices = sum(problem.sizes[m] for m in chosen)
                has = any(
                    (s.first, s.last) == (first, last) and submeshes[s.submesh] == submeshes[2]
                    for s in cut
                )
                if devices == 8 and has:
                    best = min(best, problem.step_seconds(cut))
    assert one.objective == pytest.approx(best, rel=1e-9)


CHAIN = """
func.func public @main(%x: tensor<64x64xf32> {{alpa.role = "batch"}}, {arguments})
    -> tensor<64x64xf32> {{
  {body}
  return %h4 : tensor<64x64xf32>
}}
""".format(
    arguments=", ".join(f"%w{n}: tensor<64x64xf32>" for n in range(4)),
    body="\n".join(
        f"%h{n + 1} = stablehlo.dot_general {'%x' if not n else f'%h{n}'}, %w{n}, "
        "contracting_dims = [1] x [0] "
        ": (tensor<64x64xf32>, tensor<64x64xf32>) -> tensor<64x64xf32>"
        for n in range(4)
    ),
)


def planned(fixed: str) -> str:
    options = f"cluster=cpu:1x4 num-layers=4 fixed-stages={fixed}"
    return str(passes.run(CHAIN, f"alpa{{{options}}}").operation)


def test_a_plan_has_the_stage() -> None:
    text = planned("1-2:1x2")
    assert 'origin=["layer_1", "layer_2"]' in text
    assert text.count("mpmd.fragment<") == 3


def test_no_plan_has_the_stage() -> None:
    with pytest.raises(Exception, match="no cut has the stages fixed-stages=0-3:1x2"):
        planned("0-3:1x2")
