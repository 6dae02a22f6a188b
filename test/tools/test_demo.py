"""The demo runs, detects wrong results, and reports wrong arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from alpa.tools import demo
from alpa.tools.demo import Run, loss_rows, main, reference_step, state_rows
from alpa.tools.zoo import Input, TrainingProgram, TrainState
from alpa.tools.zoo.program import KEY

TINY = {
    "num_layers": 1,
    "hidden_size": 16,
    "num_heads": 2,
    "vocab_size": 32,
    "sequence_length": 8,
}
SMALL = ["--cluster=cpu:1x4", "--micro-batch-size=2", "--num-micro-batches=2", "--num-layers=2"]


@pytest.fixture(autouse=True)
def tiny_model(monkeypatch: pytest.MonkeyPatch) -> None:
    jax.devices()  # the demo makes its own devices unless there are some; all tests share these
    monkeypatch.setattr(demo, "GPT_3M", TINY)


@pytest.mark.parametrize(
    ("optimizer", "rule"),
    [
        ("sgd", "rule for losses and the state: max|a-b| <= 1e-4 max|ref|"),
        pytest.param(
            "adam",
            "rule for the state: at most 4 times as far from a run in 64 bits as plain JAX",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_a_plan_equals_plain_jax(
    optimizer: str, rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*SMALL, "--steps", "3", "--optimizer", optimizer]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert lines[0] == (
        f"gpt-3m: 3,952 parameters, {optimizer}, 2 micro-batches of 2 samples, "
        "4 virtual CPU devices"
    )
    assert lines[2].startswith("plan for cpu:1x4 (1 host x 4 CPU): 2 stages, 2 micro-batches")
    assert [line.split()[0] for line in lines if line[:4].strip().isdigit()][-3:] == list("123")
    assert rule in lines
    assert lines[-1].startswith("EQUAL: all 3 losses and ")
    assert captured.err == ""  # only errors go there unless it is a terminal


@pytest.mark.slow
@pytest.mark.usefixtures("ray_cluster")
def test_a_plan_on_ray_equals_plain_jax(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--steps", "2", "--executor", "ray"]) == 0
    assert capsys.readouterr().out.splitlines()[-1].startswith("EQUAL: all 2 losses and ")


def test_another_program_is_found_to_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def other(program, batches):
        step = reference_step(program, batches)

        def wrong(state, batch):
            new, loss = step(state, batch)
            params = jax.tree.map(lambda a: a * 1.001, new.params)
            return TrainState(params, new.opt_state, new.model_state), loss

        return wrong

    monkeypatch.setattr(demo, "reference_step", other)
    assert main([*SMALL, "--steps", "1"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last == "DIFFERENT: 16 of 1 losses and 32 tensors of the state"


def state(weight: float) -> TrainState:
    return TrainState({"w": np.array([1.0, weight], np.float32)}, (), {})


def test_sgd_is_held_against_the_size_of_the_tensor() -> None:
    plain = Run(losses=[2.0], state=state(4.0))
    (good,) = state_rows(Run(losses=[2.0], state=state(4.0003)), plain, None, "float32")
    (bad,) = state_rows(Run(losses=[2.0], state=state(4.0005)), plain, None, "float32")
    assert good.name == "params/w"
    assert good.bound == pytest.approx(4e-4)
    assert (good.ok, bad.ok) == (True, False)
    (half,) = state_rows(Run(losses=[2.0], state=state(4.05)), plain, None, "float16")
    assert half.ok


def test_adam_is_held_against_the_distance_of_plain_jax() -> None:
    exact = Run(losses=[2.0], state=state(4.0))
    plain = Run(losses=[2.0], state=state(4.01))
    (good,) = state_rows(Run(losses=[2.0], state=state(3.961)), plain, exact, "float32")
    (bad,) = state_rows(Run(losses=[2.0], state=state(3.959)), plain, exact, "float32")
    assert (good.ok, bad.ok) == (True, False)
    # Where plain JAX happens to be exact, a different last bit is no mistake.
    (lucky,) = state_rows(Run(losses=[2.0], state=state(4.0000005)), exact, exact, "float32")
    assert lucky.ok


def test_losses_are_compared_one_by_one() -> None:
    rows = loss_rows(
        Run(losses=[2.0, 2.0], state=state(1.0)),
        Run(losses=[2.0001, 2.001], state=state(1.0)),
        "float32",
    )
    assert [row.ok for row in rows] == [True, False]


def test_what_the_forward_pass_writes_goes_from_micro_batch_to_micro_batch() -> None:
    def loss(params, model_state, batch):
        seen = model_state["seen"] + batch["x"].shape[0]
        noise = jax.random.uniform(batch["key"])  # the same in each micro-batch
        return noise * seen * (params["w"] * batch["x"]).mean(), {"seen": seen}

    state = TrainState({"w": jnp.ones(())}, optax.sgd(0.5).init({"w": 0.0}), {"seen": jnp.ones(())})
    program = SimpleNamespace(
        config=SimpleNamespace(inputs=lambda: {"x": Input(), "key": KEY}),
        state_shapes=lambda: state,
        loss=loss,
        optimizer=optax.sgd(0.5),
    )
    batch = {"x": jnp.array([1.0, 3.0, 5.0, 7.0]), "key": np.array([0, 7], np.uint32)}
    new, mean = reference_step(cast(TrainingProgram, program), 2)(state, batch)
    noise = float(jax.random.uniform(batch["key"]))
    gradient = noise * (3 * 2 + 5 * 6) / 2  # samples seen, times the mean of x
    assert float(mean) == pytest.approx(gradient)
    assert float(new.params["w"]) == pytest.approx(1 - 0.5 * gradient)
    assert float(new.model_state["seen"]) == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["gpt-4m"], "error: no model is called 'gpt-4m'; try gpt-3m"),
        (["--cluster", "cpu"], "error: cluster 'cpu': the shape is missing; write hosts x"),
        (["--cluster", "cpu:1x99"], "error: the cluster has 99 devices, jax has made 8"),
        (
            [*SMALL, "--num-stages", "3"],
            "error: cannot make 3 stages of 2 layer(s) on 4 device(s); num-stages can be at most 2",
        ),
        (["gpt-39b"], "error: gpt-39b has "),
        (["gpt-tiny-dropout", "--optimizer", "adam"], "error: gpt-tiny-dropout draws random"),
    ],
)
def test_errors_are_sentences(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 1
    assert capsys.readouterr().err.startswith(message)


def test_counts_are_positive(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["--steps", "0"])
    assert stopped.value.code == 2
    assert "argument --steps: 0 is less than 1" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(("options", "steps"), [("", 5), ("--executor ray --steps 24", 24)])
def test_in_a_process_of_its_own(options: str, steps: int) -> None:
    """It makes its own devices and its own Ray cluster, and writes into a pipe."""
    command = f"python -m alpa.tools.demo {options}".rstrip()
    assert command in README.read_text() or not options
    # A user's shell lacks the variables that JAX and these tests set for themselves.
    ours = ("TF_CPP_MIN_LOG_LEVEL", "XLA_FLAGS", "JAX_PLATFORMS")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    words = [sys.executable, *command.split()[1:]]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0
    assert options or not done.stderr  # Ray prints notices of its own
    assert done.stdout.splitlines()[-1].startswith(f"EQUAL: all {steps} losses and 152 tensors")


README = Path(__file__).parents[2] / "README.md"


def test_the_readme_names_one_test_command() -> None:
    _, _, rest = README.read_text().partition("<!-- test-command -->")
    lines = rest.partition("<!-- /test-command -->")[0].split("\n")
    (command,) = [line for line in lines if line.strip() and not line.startswith("```")]
    assert command.endswith("python -m pytest -n 2")
