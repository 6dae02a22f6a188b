"""Programs that return gradients, and programs that only look like it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa import passes
from alpa.dialects import body, func, main_function, parse
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.returned_gradients import returned_gradients
from alpa.passes.analysis.roles import infer_roles
from alpa.passes.analysis.step_parts import split_step
from alpa.runtime.compare_programs import compare_programs


def shape(*sizes: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


def text_of(function: Any, *arguments: Any) -> str:
    """The program without JAX's names."""
    return jax.jit(function, keep_unused=True).lower(*arguments).as_text()


def simplified(function: Any, *arguments: Any) -> func.FuncOp:
    text = text_of(function, *arguments)
    return main_function(passes.run(text, "simplify-trivial-ops", on_remark=lambda *_: None))


def found(function: Any, *arguments: Any) -> dict[int, int]:
    """By result the argument whose gradient it is."""
    graph = Graph.of(body(simplified(function, *arguments)))
    return returned_gradients(graph, {})


MLP = {
    "b": shape(16),
    "scale": shape(16),
    "u": shape(8, 16),
    "v": shape(16, 16),
    "w": shape(16, 4),
}
X, Y = shape(32, 8), shape(32, 4)


def loss_of_mlp(p: Any, x: Any, y: Any) -> Any:
    h = jnp.tanh(x @ p["u"] + p["b"])
    h = (h / jnp.sqrt(jnp.mean(h**2, -1, keepdims=True) + 1e-6)) * p["scale"]
    return jnp.mean((jax.nn.relu(h @ p["v"]) @ p["w"] - y) ** 2)


def loss_of_convolutions(p: Any, x: Any, y: Any) -> Any:
    def convolved(x: Any, w: Any) -> Any:
        return jax.lax.conv_general_dilated(x, w, (2, 2), "SAME")

    h = jax.nn.relu(convolved(convolved(x, p[0]), p[1]) + p[2])
    return jnp.mean((h.mean((2, 3)) - y) ** 2)


def loss_of_embeddings(p: Any, tokens: Any) -> Any:
    h = jnp.tanh(p["table"][tokens] @ p["w"])
    logits = jax.nn.log_softmax(h @ p["table"].T)
    return -jnp.take_along_axis(logits, tokens[..., None], -1).mean()


def loss_in_bfloat16(p: Any, x: Any, y: Any) -> Any:
    low = jax.tree.map(lambda w: w.astype(jnp.bfloat16), p)
    return loss_of_mlp(low, x.astype(jnp.bfloat16), y).astype(jnp.float32)


CONVOLUTIONS = [shape(8, 3, 3, 3), shape(16, 8, 3, 3), shape(16, 1, 1)]
LOSSES = {
    "mlp": (loss_of_mlp, (MLP, X, Y)),
    "convolutions": (
        loss_of_convolutions,
        (CONVOLUTIONS, shape(4, 3, 16, 16), shape(4, 16)),
    ),
    "tied embeddings": (
        loss_of_embeddings,
        (
            {"table": shape(64, 16), "w": shape(16, 16)},
            jax.ShapeDtypeStruct((4, 8), jnp.int32),
        ),
    ),
    "bfloat16": (loss_in_bfloat16, (MLP, X, Y)),
    "rematerialised": (jax.checkpoint(loss_of_mlp), (MLP, X, Y)),
}


@pytest.mark.parametrize("name", LOSSES)
def test_each_gradient_is_found_with_the_loss_and_without(name: str) -> None:
    loss, arguments = LOSSES[name]
    number = len(jax.tree.leaves(arguments[0]))
    both = {n + 1: n for n in range(number)}
    assert found(jax.value_and_grad(loss), *arguments) == both
    assert found(jax.grad(loss), *arguments) == {n: n for n in range(number)}


def encoder(p: Any, x: Any) -> Any:
    return jnp.tanh(x @ p["u"] + p["b"]) * p["scale"]


def gated(w: Any, x: Any) -> Any:
    """The result has the type of the arguments, and the product of its factors."""
    return jnp.tanh(x * w) * x


def two_streams(p: Any, a: Any, b: Any) -> Any:
    """What goes in comes out, of the same type."""
    for w, v in p:
        a, b = a + jnp.tanh(b @ w), b + jnp.tanh(a @ v)
    return a, b


def keys_and_values(p: Any, x: Any) -> Any:
    return x @ p["k"], x @ p["v"]


SQUARE = shape(8, 8)


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (encoder, (MLP, X)),
        (gated, (SQUARE, SQUARE)),
        (two_streams, ([(SQUARE, SQUARE)] * 4, SQUARE, SQUARE)),
        (keys_and_values, ({"k": SQUARE, "v": SQUARE}, SQUARE)),
    ],
)
def test_inference_returns_no_gradients(function: Any, arguments: Any) -> None:
    assert found(function, *arguments) == {}


def test_new_states_are_no_gradients() -> None:
    def step(p: Any, x: Any, y: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of_mlp)(p, x, y)
        return loss, jax.tree.map(lambda w, g: w - 0.1 * g, p, grads), grads

    graph = Graph.of(body(simplified(step, MLP, X, Y)))
    number = len(MLP)
    pairs = {n + 1: n for n in range(number)}
    assert returned_gradients(graph, pairs) == {}


def test_products_with_parameters_are_forward_and_those_with_cotangents_backward() -> None:
    function = simplified(jax.value_and_grad(loss_of_mlp), MLP, X, Y)
    graph = Graph.of(body(function))
    parts = split_step(graph, infer_roles(function, graph)).part
    dots = [part for op, part in zip(graph.ops, parts, strict=True) if "dot" in op.name]
    assert dots == ["forward"] * 3 + ["backward"] * 5


@pytest.mark.parametrize("stages", ["1", "2"])
def test_a_plan_returns_the_same_gradients(stages: str) -> None:
    source = parse(text_of(jax.value_and_grad(loss_of_mlp), MLP, X, Y))
    options = f"alpa{{cluster=cpu:1x4 num-stages={stages} num-layers={stages}}}"
    planned = passes.run(str(source), options, on_remark=lambda *_: None)
    text = str(planned)
    assert text.count('"layer_0"(1)') >= 1
    assert not compare_programs(source, planned).is_fault
