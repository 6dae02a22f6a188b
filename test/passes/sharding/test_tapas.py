"""Shardings by `intra=tapas`: how near they are to the optimum, and what the pass says."""

from __future__ import annotations

import re
from collections.abc import Generator
from contextlib import contextmanager
from functools import cache, partial

import jax
import pytest

from alpa import passes
from alpa.dialects import ir, main_function
from alpa.dialects.plan import read_meshes, read_solver_reports
from alpa.passes.pipelines.text import PipelineError
from alpa.passes.plan.attribute import plan_and_cluster
from alpa.passes.sharding.mesh_problem import MeshProblem
from alpa.passes.sharding.rules import populated
from alpa.passes.sharding.tapas import decisions, tensors
from alpa.passes.solve.sharding import ilp
from alpa.passes.solve.tapas.mining import mine
from alpa.passes.solve.tapas.search import solve
from alpa.passes.solve.tapas.settings import Settings
from alpa.tools import zoo

ONE_MESH = (
    "simplify-trivial-ops,layer-cluster{{num-layers=1}},"
    "stage-mesh-partition{{cluster={} num-stages=1}},place-gradient-reductions"
)
WITHIN = 1.015
"""Of the exhaustive search, as the paper has it (section 5.3)."""
EXHAUSTIVE = Settings(variant="exhaustive")


@contextmanager
def posed(program: str, cluster: str) -> Generator[MeshProblem]:
    module = passes.run(program, ONE_MESH.format(cluster))
    function = main_function(module)
    plan, found = plan_and_cluster(function)
    (assignment,) = read_meshes(function)
    with populated(module) as rule_of:
        yield MeshProblem.of(function, assignment, found, plan, rule_of)


SMALL = [
    "gpt-tiny",
    *(
        pytest.param(f"{name}-tiny", marks=pytest.mark.slow)
        for name in ("wresnet", "llama", "moe", "t5", "unet")
    ),
    pytest.param("gpt-tiny-dropout", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("name", SMALL)
def test_pruned_costs_little_more_than_exhaustive(name: str) -> None:
    with posed(zoo.get(name).lower(8), "cpu:1x8") as mesh:
        search = partial(solve, mesh.problem, decisions=decisions(mesh), tensors=tensors(mesh))
        pruned, whole = search(), search(settings=EXHAUSTIVE)
        lowest = ilp.solve(mesh.problem, branch_gap=1e-4, time_limit=60.0)
    # The exhaustive search proves its first strategy; the bound of the ILP is another proof.
    assert whole.solution.status == "optimal"
    assert whole.solution.bound == whole.solution.objective
    assert lowest.bound * (1 - 1e-9) <= whole.solution.objective <= lowest.objective * (1 + 1e-9)
    assert whole.solution.objective * (1 - 1e-9) <= pruned.solution.objective
    assert pruned.solution.objective <= WITHIN * whole.solution.objective
    for place, one in enumerate(whole.ranked):
        assert one.seconds <= pruned.ranked[place].seconds * (1 + 1e-9)
    assert pruned.searched_nodes < 0.9 * whole.searched_nodes
    assert whole.searched_nodes == len(mesh.problem.node_costs)
    for found in (pruned, whole):
        assert len(found.ranked) == Settings().ranked
        assert len({tuple(one.choice[v] for v in decisions(mesh)) for one in found.ranked}) == 10


@pytest.mark.slow
def test_the_forward_part_of_t5_large_has_five_classes() -> None:
    program = zoo.get("t5-large")
    state, batch = program.state_shapes(), program.batch_shapes(8)
    step = jax.jit(lambda params, batch: program.loss(params, state.model_state, batch)[0])
    text = step.trace(state.params, batch).lower(lowering_platforms=("cpu",)).as_text()
    with posed(text, "v100-16gb:1x8") as mesh:
        mined = mine(mesh.problem, tensors=tensors(mesh))
    # The layers of the encoder and of the decoder; around them two parts that share the embedding.
    assert mined.num_unique == 5
    assert [one.support for one in mined.subgraphs] == [23, 23]
    assert (mined.layers, mined.min_support) == (24, 22)


@cache
def partitioned() -> str:
    return str(passes.run(zoo.get("gpt-tiny").lower(4), ONE_MESH.format("cpu:1x4")))


def searched(module: ir.Module | str, options: str = "") -> tuple[ir.Module, list[str]]:
    """The annotated module, and what the pass says."""
    said: list[str] = []
    pipeline = f"ilp-shard-annotate{{intra=tapas {options}}}"
    return passes.run(module, pipeline, on_remark=lambda _, text: said.append(text)), said


def test_the_pass_reports_what_was_searched() -> None:
    module, said = searched(partitioned())
    (report,) = read_solver_reports(main_function(module))
    assert (report.intra, report.status, report.problem) == ("tapas", "optimal", "folded")
    assert report.objective == report.folded_objective
    found = re.fullmatch(
        r"mesh_0: tapas took candidate 1 of 10 for (\d+) nodes of (\d+) unique subgraphs, mined in "
        r"\S+ s with min-support=4; (\d+) candidates, (\d+) valid, (\d+) pruned",
        said[-1],
    )
    assert found is not None, said
    nodes, unique, candidates, valid, pruned = map(int, found.groups())
    assert nodes > unique > 1
    assert candidates > valid > 0
    assert candidates > pruned > 0


def test_the_exhaustive_variant_says_what_proves_its_list() -> None:
    module, said = searched(partitioned(), "tapas-variant=exhaustive")
    (report,) = read_solver_reports(main_function(module))
    assert (report.intra, report.status, report.problem) == ("tapas", "optimal", "whole")
    assert re.search(
        r"candidate 1 of 10 for \d+ nodes of the whole problem, proven with a width of \d+; "
        r"\d+ candidates, \d+ valid, \d+ pruned",
        said[-1],
    )


def test_an_exhaustive_search_without_time_is_an_error() -> None:
    with pytest.raises(
        ir.MLIRError,
        match=r"the exhaustive search of mesh_0 proves no ranked list: time ended at node \d+ of "
        r"\d+; it found no strategy before; raise time-limit if time ended, or take "
        "tapas-variant=pruned, or intra=auto",
    ):
        searched(partitioned(), "tapas-variant=exhaustive time-limit=0")


def test_the_pass_says_that_the_ends_differ() -> None:
    module = passes.run(zoo.get("gpt-tiny", num_layers=6).lower(4), ONE_MESH.format("cpu:1x2"))
    _, said = searched(module, "min-size=100")
    assert "(6 layers, but the first and the last one differ from the others)" in said[-1]


def test_a_support_is_as_given() -> None:
    _, said = searched(partitioned(), "min-support=2 tapas-variant=pruned")
    assert "with min-support=2;" in said[-1]


def objective(options: str) -> float:
    module = passes.run(partitioned(), f"ilp-shard-annotate{{intra=data-parallel {options}}}")
    (report,) = read_solver_reports(main_function(module))
    return report.objective


@pytest.mark.slow
def test_gamma_discounts_the_messages_of_gradients() -> None:
    one, half, tenth = (objective(f"costs=tapas gamma={gamma}") for gamma in (1.0, 0.5, 0.1))
    # Data parallelism has messages in backward and update. Their latency is not discounted.
    assert one > half > tenth > 0
    assert one - half == pytest.approx(5 / 4 * (half - tenth), rel=1e-3)
    # All of them are all-reduces: half of their efficiency is half of gamma, but for the loss.
    epsilon = objective("costs=tapas epsilon=all-reduce:0.5")
    assert epsilon == pytest.approx(half, rel=1e-3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("costs=tapas gamma=0", "gamma must be greater than 0 and at most 1, not 0"),
        ("costs=tapas epsilon=all-reduce", "'all-reduce' is no coefficient of a collective"),
        ("min-support=1", "min-support is 1; at least 2"),
        ("min-size=0", "min-size is 0; at least 2"),
        ("tapas-variant=all", "tapas-variant"),
    ],
)
def test_options_are_checked(options: str, message: str) -> None:
    with pytest.raises((ir.MLIRError, PipelineError), match=message):
        passes.run(partitioned(), f"ilp-shard-annotate{{intra=tapas {options}}}")


def test_memory_that_no_candidate_fits_is_an_error() -> None:
    text = partitioned().replace('"cpu:1x4"', '"cpu:1x4,memory=1.9MiB"')
    with pytest.raises(
        ir.MLIRError,
        match=r"none of 10 ranked candidates fits on mesh_0: the smallest needs .* per device, "
        r".* has 1.9 MiB; intra=auto searches",
    ):
        passes.run(text, "ilp-shard-annotate{intra=tapas}")
