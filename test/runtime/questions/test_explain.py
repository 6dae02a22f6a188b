"""Answers about plans agree with the solver, and name what a program lacks."""

from __future__ import annotations

import re
from functools import cache
from itertools import pairwise
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa.dialects import parse
from alpa.passes.pipelines.clock import Clock
from alpa.passes.plan.report import PlanReport
from alpa.runtime.planning import Planned, Settings, plan
from alpa.runtime.questions.explain import QuestionError, explain
from alpa.runtime.questions.explanation import Alternative, Explanation
from alpa.runtime.questions.variants import Variants, chosen_stages
from test.runtime.questions.test_hints import CHAIN

SIZES = (6, 8, 16, 32, 64)


@cache
def random_plan(seed: int, meshes: str = "auto") -> tuple[Planned, tuple[str, ...]]:
    """A plan of the training step of a random chain, and the names of its arguments."""
    rng = np.random.default_rng(seed)
    widths = [int(rng.choice(SIZES)) for _ in range(3 + seed % 2)]
    activation = [jnp.tanh, jax.nn.softmax, lambda h: h * h][seed % 3]

    def step(params: dict[str, jax.Array], x: jax.Array) -> tuple[dict[str, jax.Array], jax.Array]:
        def loss(params: dict[str, jax.Array]) -> jax.Array:
            h = x
            for w in params.values():
                h = activation(h @ w)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    shapes = list(pairwise(widths))
    params = {f"w{n}": jax.ShapeDtypeStruct(it, jnp.float32) for n, it in enumerate(shapes)}
    x = jax.ShapeDtypeStruct((int(rng.choice(SIZES)), widths[0]), jnp.float32)
    text = jax.jit(step, donate_argnums=0).lower(params, x).as_text(debug_info=True)
    cluster = "cpu:1x4" if seed % 2 else "cpu:2x2"
    settings = Settings(cluster=cluster, num_layers=2, meshes=meshes)
    planned = plan(parse(text), settings, Clock(), keep=True)
    return planned, tuple(f"params['{name}']" for name in params)


def variants(planned: Planned) -> Variants:
    assert planned.kept is not None
    return Variants(kept=planned.kept, clock=Clock())


def check_bound(planned: Planned, explanation: Explanation, it: Alternative) -> None:
    """Another choice is no better than what is proven of the mesh."""
    report = PlanReport.of(planned.module)
    assert report.solver is not None
    base = explanation.chosen.objective
    mesh = next(one for one in report.solver.meshes if one.objective == base)
    assert it.objective is not None
    if mesh.problem == "whole":
        assert it.objective >= mesh.bound * (1 - 1e-6)
        if mesh.status == "optimal":
            assert it.objective >= mesh.objective * (1 - 1e-6)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 24))]
)
def test_no_other_sharding_is_better_than_is_proven(seed: int) -> None:
    planned, names = random_plan(seed)
    for what in names[:1] if seed < 2 else names:
        for explanation in explain(what, planned, Clock()):
            possible = [it for it in explanation.alternatives if not it.refused]
            assert possible, "other shardings of a matrix are possible"
            for it in possible:
                check_bound(planned, explanation, it)


@pytest.mark.parametrize(
    "seed", [0, 1, *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 12))]
)
def test_the_stages_that_were_chosen_give_the_plan_again(seed: int) -> None:
    planned, _ = random_plan(seed)
    report = PlanReport.of(planned.module)
    again = variants(planned).of_stages([it for it in chosen_stages(report) if it is not None])
    assert again.report is not None, again.refused
    assert again.report.predicted_step_seconds == pytest.approx(report.predicted_step_seconds)
    assert again.report.meshes == report.meshes


def test_nothing_changed_gives_the_plan_again() -> None:
    planned, _ = random_plan(0)
    again = variants(planned).of_shardings(lambda _: None)
    assert again.report is not None
    assert again.report.to_json() == PlanReport.of(planned.module).to_json()


def test_a_line() -> None:
    planned, _ = random_plan(1)
    lines = Path(__file__).read_text().splitlines()
    line = 1 + next(n for n, text in enumerate(lines) if "activation(h @ w)" in text)
    (explanation,) = explain(f"test_explain.py:{line}", planned, Clock())
    assert "in the forward part" in explanation.subject
    assert explanation.alternatives
    for it in explanation.alternatives:
        if not it.refused:
            check_bound(planned, explanation, it)


def test_a_stage() -> None:
    planned, _ = random_plan(0)
    (explanation,) = explain("stage 0", planned, Clock())
    report = PlanReport.of(planned.module)
    assert explanation.chosen.step_seconds == report.predicted_step_seconds
    text = str(explanation)
    assert text.startswith(f"stage 0 of {len(report.stages)}\n")
    steps = [it.step_seconds for it in explanation.alternatives if not it.refused]
    assert steps == sorted(steps, key=lambda it: it or 0.0)


def test_a_stage_that_shares_its_mesh() -> None:
    program = parse(CHAIN)
    settings = Settings(cluster="cpu:2x2", num_layers=5, num_micro_batches=2, schedule="zb-v")
    planned = plan(program, settings, Clock(), keep=True)
    report = PlanReport.of(planned.module)
    assert [stage.numbers for stage in report.stages] == [(0, 3), (1, 2)]
    layers = list[str]()
    for number in range(4):
        (explanation,) = explain(f"stage {number}", planned, Clock())
        assert str(explanation).startswith(f"stage {number} of 4\n")
        assert "the schedule (zb-v) has 2 stages on each" in explanation.notes[0]
        assert "none of them can be forced" in explanation.notes[0]
        chosen = re.fullmatch(r"layers? (\S+) on 1x2 as 2, (.+)", explanation.chosen.choice)
        assert chosen is not None
        mesh, other = number in (1, 2), (3, 2, 1, 0)[number]
        assert chosen[2] == f"mesh_{mesh:d}, with stage {other}"
        first, _, last = chosen[1].partition("-")
        layers += map(str, range(int(first), int(last or first) + 1))
    assert layers == ["0", "1", "2", "3", "4"]
    with pytest.raises(QuestionError, match="no stage 4 to explain; the plan has 4, counted from"):
        explain("stage 4", planned, Clock())


@pytest.mark.parametrize(
    ("what", "problem"),
    [
        ("stage 7", "there is no stage 7 to explain; the plan has"),
        ("params['w9']", r"cannot be explained: no argument is called params\['w9'\]"),
        ("params*", "params\\* is 2 arguments, params\\['w0'\\], params\\['w1'\\], ...; name one"),
        ("test_explain.py:1", "no op of the plan is from test_explain.py:1; the nearest lines"),
        ("model.py:1", "no op is from model.py"),
    ],
)
def test_what_a_plan_lacks(what: str, problem: str) -> None:
    with pytest.raises(QuestionError, match=problem):
        explain(what, random_plan(0)[0], Clock())


def test_stages_on_given_meshes_have_no_others() -> None:
    planned, names = random_plan(0, meshes="0:1,1:1,2:1,3:1")
    stages = chosen_stages(PlanReport.of(planned.module))
    assert None in stages, "four meshes for two layers"
    with pytest.raises(QuestionError, match=r"the plan's meshes were given \(0:1,1:1,2:1,3:1\)"):
        explain("stage 0", planned, Clock())
    assert explain(names[0], planned, Clock())


def test_the_plan_is_made_again_under_a_schedule_that_splits_backwards() -> None:
    """Else each other choice would wait for whole backward parts."""

    def step(params: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(params: list[jax.Array]) -> jax.Array:
            h = x
            for w in params:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        value, grads = jax.value_and_grad(loss)(params)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], value

    square = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    text = jax.jit(step, donate_argnums=0).lower([square] * 4, square).as_text(debug_info=True)
    text = text.replace("tensor<f32> {jax", 'tensor<f32> {alpa.result = "mean", jax')
    settings = Settings(
        cluster="cpu:1x2", num_layers=4, num_stages=2, num_micro_batches=4, schedule="zb-h1"
    )
    planned = plan(parse(text), settings, Clock(), keep=True)
    same = variants(planned).of_shardings(lambda _: None)
    assert same.report is not None
    found = PlanReport.of(planned.module)
    assert same.report.predicted_step_seconds == found.predicted_step_seconds
    fragments = [str(it).count("mpmd.fragment") for it in (same.module, planned.module)]
    assert fragments[0] == fragments[1]
