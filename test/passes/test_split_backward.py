"""Split backward fragments run as whole ones do: the same bits, kept values counted as memory."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa.passes
import alpa.runtime
from alpa.dialects import body, ir, main_function, mpmd, parse, walk
from alpa.dialects.attributes import SECONDS, read_float, read_half, read_part
from alpa.passes.plan.backward_halves import halves_of
from alpa.passes.plan.instructions import write_script
from alpa.passes.plan.reader import read_planned
from alpa.runtime.script_checks import verify
from alpa.tools import zoo

OPTIONS = "cluster=cpu:1x4 num-layers=2 num-stages=2 num-micro-batches=4 schedule=1f1b"
KINDS = ("straight", "scan", "remat", "scan of remat")


def arguments() -> list[np.ndarray]:
    generator = np.random.default_rng(0)
    sizes = ((4, 8, 8), (4, 8), (16, 8))
    return [generator.normal(size=size).astype(np.float32) for size in sizes]


@cache
def lowered(kind: str) -> str:
    """A step of four layers with biases, at the size of a micro-batch; it returns new weights."""

    def layer(h: jax.Array, weights: tuple[jax.Array, jax.Array]) -> jax.Array:
        return jnp.tanh(h @ weights[0] + weights[1])

    each = jax.checkpoint(layer) if "remat" in kind else layer

    def loss_of(params: tuple[jax.Array, jax.Array], x: jax.Array) -> jax.Array:
        if "scan" in kind:
            h, _ = jax.lax.scan(lambda h, w: (each(h, w), None), x, params)
        else:
            h = x
            for n in range(4):
                h = each(h, (params[0][n], params[1][n]))
        return jnp.mean(h**2)

    def step(weights: jax.Array, biases: jax.Array, x: jax.Array) -> tuple[jax.Array, ...]:
        loss, (dw, db) = jax.value_and_grad(loss_of)((weights, biases), x)
        return weights - dw, biases - db, loss

    shapes = [jax.ShapeDtypeStruct(it.shape, it.dtype) for it in arguments()]
    shapes[2] = jax.ShapeDtypeStruct((4, 8), np.float32)
    text = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes).as_text()
    return text.replace(
        "tensor<f32> {jax.result_info", 'tensor<f32> {alpa.result = "mean", jax.result_info'
    )


@cache
def planned(kind: str) -> str:
    return str(alpa.passes.run(lowered(kind), f"alpa{{{OPTIONS}}}"))


def split(text: str) -> tuple[str, list[str]]:
    """The split plan, and the remarks."""
    remarks: list[str] = []
    module = alpa.passes.run(
        text, "split-backward", on_remark=lambda _, message: remarks.append(message)
    )
    return str(module), remarks


def backwards(module: ir.Module) -> list[mpmd.FragmentOp]:
    ops = body(main_function(module)).operations
    return [op for op in ops if isinstance(op, mpmd.FragmentOp) and read_part(op) == "backward"]


def bits(results: Sequence[jax.Array]) -> list[bytes]:
    return [np.asarray(result).tobytes() for result in results]


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_have_the_same_bits(kind: str) -> None:
    whole = alpa.runtime.load(planned(kind))(*arguments())
    text, remarks = split(planned(kind))
    (remark,) = remarks
    assert remark.startswith("stage 1: ")
    parts = alpa.runtime.load(text)(*arguments())
    assert bits(parts) == bits(whole)


@pytest.mark.parametrize("kind", KINDS)
def test_the_second_part_has_the_products_of_weights(kind: str) -> None:
    """A layer of the second stage multiplies once for each gradient; the first stage hands none."""
    module = alpa.passes.run(planned(kind), "split-backward")
    last, weights, first = backwards(module)
    assert [read_half(op) for op in (last, weights, first)] == ["input", "weight", "weight"]
    products = [
        sum(op.name == "stablehlo.dot_general" for op in walk(body(part)))
        for part in (last, weights)
    ]
    assert products[1] == (1 if "scan" in kind else 2)
    whole = alpa.passes.run(planned(kind), "canonicalize")
    assert sum(read_float(op, SECONDS) or 0.0 for op in backwards(module)) == pytest.approx(
        sum(read_float(op, SECONDS) or 0.0 for op in backwards(whole)), rel=0.2
    )


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_kept_is_known_before(kind: str) -> None:
    """`backward_halves` says of whole fragments what is then read of split ones."""
    module = parse(planned(kind))
    with module.context:
        before = [it for it in halves_of(module).values() if it.made]
    program = read_planned(alpa.passes.run(planned(kind), "split-backward"))
    first, second = (
        next(it for it in program.fragments if it.half == half) for half in ("input", "weight")
    )
    kept = [program.values[v].shape for v in {*first.outputs} & {*second.inputs}]
    (found,) = before
    shapes = [(rows, tuple(ir.RankedTensorType(v.type).shape)) for v, rows in found.made]
    assert sorted(kept) == sorted(
        (rows, *shape) if "scan" in kind else shape for rows, shape in shapes
    )
    outside = {*second.inputs} - {*first.outputs}
    assert len(outside) == len(found.read)


def test_what_is_kept_is_memory() -> None:
    """The gradient of an activation stays for the second part."""
    before, after = (
        verify(write_script(read_planned(alpa.passes.run(text, "canonicalize"))))
        for text in (planned("straight"), split(planned("straight"))[0])
    )
    assert after.peak_bytes["mesh_1"] > before.peak_bytes["mesh_1"]
    assert after.in_flight == before.in_flight


def test_a_plan_is_split_once_only() -> None:
    text, _ = split(planned("straight"))
    with pytest.raises(ir.MLIRError, match="split already; run split-backward once only"):
        alpa.passes.run(text, "split-backward")


@pytest.mark.parametrize(
    "family",
    [
        "gpt-tiny",
        "t5-tiny",
        pytest.param("moe-tiny", marks=pytest.mark.slow),
        pytest.param("wresnet-tiny", marks=pytest.mark.slow),
    ],
)
def test_every_stage_of_a_model_is_split(family: str) -> None:
    program = zoo.get(family, optimizer="sgd")
    options = "cluster=cpu:1x4 num-stages=4 num-micro-batches=2 schedule=1f1b mesh-shape=1"
    module = alpa.passes.run(program.lower(2), f"alpa{{{options}}},split-backward")
    halves = [read_half(op) for op in backwards(module)]
    assert halves == ["input", "weight"] * 3 + ["weight"]
