"""A program means the same without locations: it is cut into the same layers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import alpa
from alpa import passes
from alpa.dialects import ir, parse
from alpa.passes.pipeline import load_pass
from alpa.passes.pipelines.text import element_text
from stress.random_programs import options
from stress.random_programs.draw import draw

STEPS = ("combine-micro-batches", "simplify-trivial-ops", "split-loops", "layer-cluster")


def layers(text: str, given: dict[str, str], *, stripped: bool) -> str:
    """The program cut into layers, as text without locations; or the passes' error."""
    words = ["strip-debuginfo"] if stripped else []
    for name in STEPS:
        known = load_pass(name).options()
        words.append(element_text(name, {k: v for k, v in given.items() if k in known}))
    try:
        module = passes.run(text, ",".join(words), on_remark=lambda _, message: None)
    except ir.MLIRError as error:
        return error.error_diagnostics[0].message
    return str(module.operation.get_asm(enable_debug_info=False))


def lowered(seed: int) -> tuple[str, dict[str, str]] | None:
    """A random program with its locations, and options; None where it is rejected earlier."""
    program = draw(seed)
    given = options.draw(program)
    layout = program.features.layout
    state: Any = None
    if layout.said:
        state = 0 if program.training else ()
    step = alpa.parallelize(
        program.function(),
        cluster=given["cluster"],
        num_micro_batches=program.micro_batches,
        micro_batches=program.features.mode,
        batch_argnums=layout.batch_argnums,
        state_argnums=state,
        donate_argnums=0 if program.training else None,
    )
    try:
        return step.lower(*program.arguments(0)).as_text(), given
    except ValueError:
        return None


@pytest.mark.parametrize(
    "seeds", [range(37, 39), pytest.param(range(100, 180), marks=pytest.mark.slow)]
)
def test_random_programs(seeds: range) -> None:
    planned = 0
    for seed in seeds:
        found = lowered(seed)
        if found is not None:
            with_locations = layers(*found, stripped=False)
            assert layers(*found, stripped=True) == with_locations, seed
            planned += with_locations.startswith("module")
    assert planned >= (len(seeds) + 2) // 3


def step(params: Any, x: Any, running: Any) -> Any:
    """A running mean that the forward part writes, beside a parameter."""

    def loss(params: Any) -> Any:
        h = jnp.tanh(x @ params)
        return jnp.mean((h - running) ** 2), jnp.mean(h, axis=0)

    (value, mean), grads = jax.value_and_grad(loss, has_aux=True)(params)
    return params - 0.1 * grads, 0.9 * running + 0.1 * mean, value


def file_of_step() -> str:
    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 8), (4, 8), (8,))]
    text = jax.jit(step, donate_argnums=(0, 2), keep_unused=True).lower(*shapes)
    module = parse(text.as_text(debug_info=True))
    roles = '{alpa.role = "batch", alpa.batch_dim = 0 : i64}'
    said = str(module.operation.get_asm(enable_debug_info=True))
    return said.replace("%arg1: tensor<4x8xf32>", f"%arg1: tensor<4x8xf32> {roles}", 1)


@pytest.mark.parametrize("number", ["1", "4"])
def test_a_file_of_jax(number: str) -> None:
    given = {"num-micro-batches": number, "num-layers": "1"}
    with_locations = layers(file_of_step(), given, stripped=False)
    assert with_locations.startswith("module") or number != "1"
    assert layers(file_of_step(), given, stripped=True) == with_locations


def test_independent_micro_batches_need_names_or_markers() -> None:
    given = {"num-micro-batches": "4", "micro-batches": "independent", "num-layers": "1"}
    assert layers(file_of_step(), given, stripped=False).startswith("module")
    refused = layers(file_of_step(), given, stripped=True)
    assert refused.startswith("nothing says which values are gradients")
    assert "mark the gradients with alpa.grad" in refused
