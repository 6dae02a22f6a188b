"""Planned training steps of the zoo compute what plain JAX computes.

Two meshes of four virtual devices. The optimizer is SGD with momentum. New parameters and gradients
are results, and each is within the bounds of "how equal is equal". Adam amplifies rounding noise,
so its parameters are compared with a float64 run, as plain JAX's are.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
import pytest

from alpa import passes, runtime
from alpa.dialects import parse
from alpa.passes.plan.data import Program
from alpa.passes.plan.instructions import Instruction
from alpa.passes.plan.report import PlanReport
from alpa.passes.schedules.planned import chunks_of
from alpa.runtime.interpreter import Interpreter, Store
from alpa.runtime.local import LocalExecutable
from alpa.runtime.placement import Placement
from alpa.runtime.reference import compare, run_unplanned
from alpa.tools import zoo
from alpa.tools.zoo.program import TrainingProgram, TrainState

MICRO_BATCH = 4
PLAN = "alpa{{cluster=cpu:2x4 num-layers=4 num-stages=2 num-micro-batches={}}}"
FAMILIES = ["gpt", "moe", "wresnet", "t5", "unet", "llama"]
SCHEDULES = ["gpipe", "1f1b", "eager-1f1b", "zb-h1"]
SHARED = ["interleaved-1f1b", "zb-v", "v-half", "v-min", "dualpipe-v"]
"""Schedules of several stages per mesh."""


def looped_step(
    program: TrainingProgram, state: TrainState, batch: dict[str, Any], num_micro_batches: int
) -> list[np.ndarray]:
    """One step of plain JAX that loops over the micro-batches and carries the model state.

    For a program whose forward pass writes no state this is one step at the full batch.
    """
    value_and_grad = jax.jit(jax.value_and_grad(program.loss, has_aux=True))
    losses: list[Any] = []
    gradients: list[Any] = []
    model_state = state.model_state
    for m in range(num_micro_batches):
        micro_batch = {
            name: np.split(np.asarray(value), num_micro_batches)[m] for name, value in batch.items()
        }
        (loss, model_state), grads = value_and_grad(state.params, model_state, micro_batch)
        losses.append(loss)
        gradients.append(grads)
    mean = jax.tree.map(lambda *g: sum(g) / num_micro_batches, *gradients)
    updates, opt_state = jax.jit(program.optimizer.update)(mean, state.opt_state, state.params)
    new = TrainState(optax.apply_updates(state.params, updates), opt_state, model_state)
    return [np.asarray(leaf) for leaf in jax.tree.leaves((new, sum(losses) / num_micro_batches))]


def run_planned(
    program: TrainingProgram, arguments: list[np.ndarray], num_micro_batches: int, pipeline: str
) -> list[np.ndarray]:
    planned = passes.run(program.lower(MICRO_BATCH), pipeline.format(num_micro_batches))
    executable = runtime.load(planned)
    return [np.asarray(result) for result in executable(*arguments)]


def leaves(tree: Any) -> list[np.ndarray]:
    return [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]


def check_sgd(family: str, num_micro_batches: int, pipeline: str = PLAN, **changes: Any) -> None:
    program = zoo.get(f"{family}-tiny", optimizer="sgd", **changes)
    state = program.init_state(0)
    batch = program.random_batch(1, MICRO_BATCH * num_micro_batches)
    expected = looped_step(program, state, batch, num_micro_batches)
    results = run_planned(program, leaves((state, batch)), num_micro_batches, pipeline)
    wrong = [row for row in compare(results, expected) if not row.ok]
    assert not wrong


def with_schedule(schedule: str, num_stages: int = 2) -> str:
    return PLAN.replace("num-stages=2", f"num-stages={num_stages} schedule={schedule}")


# Half as deep as the tiny models, which take twice as long to compile. GPT runs under both
# schedules here, and every tiny family in the slow tier.
@pytest.mark.parametrize(
    ("family", "schedule", "changes"),
    [
        ("wresnet", "1f1b", {"stage_sizes": (1, 1)}),
        pytest.param("t5", "gpipe", {"num_layers": 1}, marks=pytest.mark.slow),
        pytest.param("gpt", "zb-h1", {"num_layers": 2}, marks=pytest.mark.slow),
    ],
)
def test_four_micro_batches_equal_plain_jax(
    family: str, schedule: str, changes: dict[str, Any]
) -> None:
    check_sgd(family, 4, with_schedule(schedule), **changes)


# Four stages on two meshes; the default tier has one schedule of whole backwards on shared meshes,
# and one that splits them.
@pytest.mark.parametrize(
    "schedule",
    [
        "zb-v",
        *(pytest.param(name, marks=pytest.mark.slow) for name in SHARED if name != "zb-v"),
        pytest.param("interleaved-1f1b:1", marks=pytest.mark.slow),
    ],
)
def test_several_stages_per_mesh_equal_plain_jax(schedule: str) -> None:
    stages = 2 * chunks_of(schedule)
    check_sgd("gpt", 4, f"{with_schedule(schedule, stages)}".replace("2x4", "2x1"), num_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [*SCHEDULES, *SHARED])
def test_every_schedule_on_four_meshes_equals_plain_jax(schedule: str) -> None:
    stages = 4 * chunks_of(schedule)
    plan = with_schedule(schedule, stages).replace("num-layers=4", "num-layers=8")
    check_sgd("gpt", 8, plan.replace("2x4", "1x8"), num_layers=6)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SHARED)
@pytest.mark.parametrize("family", ["t5", "wresnet"])
def test_other_families_on_shared_meshes_equal_plain_jax(family: str, schedule: str) -> None:
    check_sgd(family, 4, with_schedule(schedule, 4))


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt", {"num_layers": 2}),
        *((family, {}) for family in FAMILIES),
    ],
)
@pytest.mark.slow
def test_shardings_by_tapas_equal_plain_jax(family: str, changes: dict[str, Any]) -> None:
    check_sgd(family, 4, PLAN.replace("num-stages=2", "num-stages=2 intra=tapas"), **changes)


def check_unequal_meshes(family: str, cluster: str, num_stages: int, **changes: Any) -> None:
    """Meshes of several sizes, one plan under each schedule."""
    program = zoo.get(f"{family}-tiny", optimizer="sgd", **changes)
    state, batch = program.init_state(0), program.random_batch(1, 4 * MICRO_BATCH)
    expected = looped_step(program, state, batch, 4)
    options = f"cluster={cluster} num-layers=6 num-stages={num_stages} num-micro-batches=4"
    planned = passes.run(program.lower(MICRO_BATCH), f"alpa{{{options}}}")
    loaded = runtime.load(planned)
    sizes = [len(mesh.devices) for mesh in loaded.program.meshes]
    assert len(sizes) == num_stages
    assert len(set(sizes)) > 1
    for schedule in SCHEDULES:
        results = with_plan(loaded, schedule=schedule)(*leaves((state, batch)))
        assert not [row for row in compare(results, expected) if not row.ok]


def with_plan(loaded: LocalExecutable, **changes: Any) -> LocalExecutable:
    """A loaded program whose plan differs from it."""
    program = loaded.program
    program = replace(program, plan=replace(program.plan, **changes))
    placement = Placement(program=program, devices=tuple(jax.devices()))
    return LocalExecutable(placement, loaded.stages)


@pytest.mark.slow
def test_meshes_of_unequal_size() -> None:
    """Meshes of two, one and one devices: four devices have no other cut in three stages."""
    check_unequal_meshes("gpt", "cpu:1x4", 3, num_layers=2)


# Three meshes of four and of eight devices, and five of eight.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("cluster", "num_stages"), [("cpu:1x4", 3), ("cpu:2x4", 3), ("cpu:2x4", 5)]
)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_on_meshes_of_unequal_size(family: str, cluster: str, num_stages: int) -> None:
    check_unequal_meshes(family, cluster, num_stages)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("num_stages", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_all_schedules_equal_plain_jax(family: str, num_stages: int, schedule: str) -> None:
    check_sgd(family, 4, with_schedule(schedule, num_stages))


# Two layers have several blocks each, which are computed again one after the other.
@pytest.mark.slow
@pytest.mark.parametrize("num_layers", [4, 2])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("family", FAMILIES)
def test_rematerialised_layers_equal_plain_jax(family: str, schedule: str, num_layers: int) -> None:
    pipeline = with_schedule(schedule).replace("{{", "{{remat=layer ", 1)
    check_sgd(family, 4, pipeline.replace("num-layers=4", f"num-layers={num_layers}"))


def kept_activations(planned: Program) -> list[set[int]]:
    """For each mesh the values that its forward parts make and its backward parts read."""
    kept: list[set[int]] = []
    for mesh in planned.meshes:
        here = [f for f in planned.fragments if f.mesh == mesh.name]
        made = {v for f in here if f.part == "forward" for v in f.outputs}
        kept.append(made & {v for f in here if f.part == "backward" for v in f.inputs})
    return kept


def watch_steps(
    monkeypatch: pytest.MonkeyPatch, after: Callable[[Instruction, Store], None]
) -> None:
    """Calls `after` behind each instruction of every step."""
    run = Interpreter.run

    def watched(self: Interpreter, store: Store, instructions: Iterable[Instruction]) -> None:
        run(self, store, instructions, after=after)

    monkeypatch.setattr(Interpreter, "run", watched)


@pytest.mark.slow
def test_rematerialised_layers_keep_less(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that wait for their backward part, counted while a step runs, and as planned."""
    program = zoo.get("gpt-tiny", optimizer="sgd", num_layers=2)
    state, batch = program.init_state(0), program.random_batch(1, 4)
    arguments, expected = leaves((state, batch)), looped_step(program, state, batch, 4)
    most = {"none": 0, "layer": 0}
    planned_bytes: dict[str, int] = {}
    kept = set[int]()
    remat = "none"

    def count(_: Instruction, store: Store) -> None:
        now = sum(array.nbytes for (value, _), array in store.items() if value in kept)
        most[remat] = max(most[remat], now)

    watch_steps(monkeypatch, count)
    for remat in most:
        options = f"cluster=cpu:1x2 num-layers=2 num-stages=2 schedule=1f1b remat={remat}"
        module = passes.run(program.lower(1), f"alpa{{{options} num-micro-batches=4}}")
        planned_bytes[remat] = PlanReport.of(module).stages[0].activation_bytes
        loaded = runtime.load(module)
        kept = set().union(*kept_activations(loaded.program))
        results = [np.asarray(result) for result in loaded(*arguments)]
        assert all(row.ok for row in compare(results, expected))
    assert most["layer"] < 0.1 * most["none"]
    assert planned_bytes["layer"] < 0.1 * planned_bytes["none"]


def test_the_executor_keeps_what_the_schedule_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations that wait for their backward, counted while a step runs."""
    program = zoo.get("gpt-tiny", optimizer="sgd", num_layers=2)
    options = "cluster=cpu:1x2 num-layers=2 num-stages=2 num-micro-batches=4"
    module = passes.run(program.lower(1), f"alpa{{{options}}}")
    loaded = runtime.load(module)
    planned = loaded.program
    kept = kept_activations(planned)
    peaks = [0, 0]

    def count(_: Instruction, store: Store) -> None:
        for s, values in enumerate(kept):
            peaks[s] = max(peaks[s], len({m for value, m in store if value in values}))

    watch_steps(monkeypatch, count)
    # Those of the last stage are inside of its module.
    for schedule, expected in (("gpipe", [4, 0]), ("1f1b", [2, 0])):
        peaks[:] = [0, 0]
        step = with_plan(loaded, schedule=schedule)
        step(*leaves((program.init_state(0), program.random_batch(1, 4))))
        assert peaks == expected


def test_one_micro_batch_equals_plain_jax() -> None:
    check_sgd("gpt", 1, num_layers=2)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("num_micro_batches", [1, 2])
@pytest.mark.parametrize("num_stages", ["auto", "1", "2", "4"])
def test_every_number_of_stages_equals_plain_jax(
    family: str, num_micro_batches: int, num_stages: str
) -> None:
    plan = PLAN.replace("num-stages=2", f"num-stages={num_stages}")
    check_sgd(family, num_micro_batches, plan)


def float64_text(text: str) -> str:
    """A module's text in float64: its types, and its constants that are written as bits."""

    def widen(match: re.Match[str]) -> str:
        (value,) = struct.unpack(">f", bytes.fromhex(match[1]))
        return "0x" + struct.pack(">d", value).hex().upper()

    wide = re.sub(r"\b0x([0-9A-Fa-f]{8})\b(?=[^\n]*f32)", widen, text)
    return re.sub(r"\bf32\b|(?<=x)f32\b", "f64", wide)


@pytest.mark.slow  # the demo's plan under Adam is in the default tier
def test_adam_is_as_close_to_float64_as_plain_jax() -> None:
    program = zoo.get("gpt-tiny", optimizer="adamw-clip")
    text = program.lower(MICRO_BATCH)
    mine = runtime.load(passes.run(text, PLAN.format(1)))
    plain = jax.jit(program.train_step)
    start = program.init_state(0)
    batches = [program.random_batch(seed, MICRO_BATCH) for seed in range(3)]

    state, treedef = start, jax.tree.structure(start)
    for batch in batches:
        state, _ = plain(state, batch)
    theirs = leaves(state)

    results = leaves(start)
    for batch in batches:
        results = list(mine(*results, *leaves(batch)))[: treedef.num_leaves]

    with jax.enable_x64(True):
        module = parse(float64_text(text))
        exact = [a.astype(np.float64) if a.dtype == np.float32 else a for a in leaves(start)]
        for batch in batches:
            exact = list(run_unplanned(module, [*exact, *leaves(batch)]))[: treedef.num_leaves]
        exact = leaves(exact)

    # A gradient that is zero but for noise makes the distance of its tensor random. So the distance
    # is taken over all parameters, and over all moments.
    for part in ("params", "opt_state"):
        a, b, true = (
            np.concatenate([leaf.ravel() for leaf in leaves(getattr(treedef.unflatten(s), part))])
            for s in (results, theirs, exact)
        )
        assert np.linalg.norm(a - true) <= 4 * np.linalg.norm(b - true)
