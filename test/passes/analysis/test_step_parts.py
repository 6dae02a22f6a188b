"""Forward, backward and update in programs where they are hard to tell apart."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from alpa import passes
from alpa.dialects import body, func, main_function, parse
from alpa.dialects.attributes import GRADIENT, marker_of
from alpa.passes.analysis.graph import Graph, replace_op
from alpa.passes.analysis.roles import infer_roles
from alpa.passes.analysis.step_parts import split_step
from alpa.tools import zoo


def parts_of(text: str, *, exact: bool = False) -> dict[str, list[str | None]]:
    """For each op name its parts, in program order."""
    module = parse(text)
    function = main_function(module)
    graph = Graph.of(body(function))
    part = split_step(graph, infer_roles(function, graph), exact=exact).part
    found: dict[str, list[str | None]] = {}
    for op, its in zip(graph.ops, part, strict=True):
        found.setdefault(op.name.removeprefix("stablehlo."), []).append(its)
    return found


def test_a_value_recomputed_in_another_way_is_not_left_to_the_update() -> None:
    """An average of activations times one of gradients is not the average of the products."""
    parts = parts_of("""
    func.func @main(%w: tensor<4x4xf32>, %v: tensor<4x4xf32> {alpa.role = "state"},
        %x: tensor<8x4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
        -> (tensor<4x4xf32> {alpa.result = "state:1"}, tensor<f32> {alpa.result = "mean"}) {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %u = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
          : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
      %h = stablehlo.tanh %u : tensor<8x4xf32>
      %y = stablehlo.dot_general %h, %v, contracting_dims = [1] x [0]
          : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
      %square = stablehlo.multiply %y, %y : tensor<8x4xf32>
      %loss = stablehlo.reduce(%square init: %zero) applies stablehlo.add across dimensions = [0, 1]
          : (tensor<8x4xf32>, tensor<f32>) -> tensor<f32>
      %dy = stablehlo.add %y, %y : tensor<8x4xf32>
      %again = stablehlo.optimization_barrier %h : tensor<8x4xf32>
      %minus = stablehlo.negate %again : tensor<8x4xf32>
      %plus = stablehlo.negate %minus : tensor<8x4xf32>
      %dv = stablehlo.dot_general %plus, %dy, contracting_dims = [0] x [0]
          : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      %squared = stablehlo.divide %dv, %dv : tensor<4x4xf32>
      %new = stablehlo.subtract %v, %squared : tensor<4x4xf32>
      return %new, %loss : tensor<4x4xf32>, tensor<f32>
    }""")
    assert parts["negate"] == ["backward", "backward"]
    assert parts["dot_general"] == ["forward", "forward", "backward"]
    assert parts["divide"] == parts["subtract"] == ["update"]


def test_the_square_in_front_of_a_marker_is_not_left_to_the_update() -> None:
    """The mean of squares is not the square of the mean, though it has one operand."""
    parts = parts_of(
        """
    func.func @main(%w: tensor<4x4xf32> {alpa.role = "state"},
        %x: tensor<8x4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
        -> (tensor<4x4xf32> {alpa.result = "state:0"}, tensor<f32> {alpa.result = "mean"}) {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %u = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
          : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
      %y = stablehlo.tanh %u : tensor<8x4xf32>
      %loss = stablehlo.reduce(%y init: %zero) applies stablehlo.add across dimensions = [0, 1]
          : (tensor<8x4xf32>, tensor<f32>) -> tensor<f32>
      %dw = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0]
          : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
      %square = stablehlo.multiply %dw, %dw : tensor<4x4xf32>
      %g = stablehlo.custom_call @alpa.gradient(%square) : (tensor<4x4xf32>) -> tensor<4x4xf32>
      %new = stablehlo.subtract %w, %g : tensor<4x4xf32>
      return %new, %loss : tensor<4x4xf32>, tensor<f32>
    }""",
        exact=True,
    )
    assert parts["multiply"] == ["backward"]
    assert parts["subtract"] == ["update"]


def test_a_loop_that_multiplies_by_a_recomputed_value_is_not_left_to_the_update() -> None:
    parts = parts_of("""
    func.func @main(%w: tensor<4x4xf32> {alpa.role = "state"},
        %x: tensor<8x4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
        -> (tensor<4x4xf32> {alpa.result = "state:0"}, tensor<f32> {alpa.result = "mean"}) {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %start = stablehlo.constant dense<0> : tensor<i32>
      %zeros = stablehlo.constant dense<0.0> : tensor<4x4xf32>
      %u = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
          : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
      %y = stablehlo.tanh %u : tensor<8x4xf32>
      %loss = stablehlo.reduce(%y init: %zero) applies stablehlo.add across dimensions = [0, 1]
          : (tensor<8x4xf32>, tensor<f32>) -> tensor<f32>
      %dy = stablehlo.multiply %y, %y : tensor<8x4xf32>
      %again = stablehlo.optimization_barrier %u : tensor<8x4xf32>
      %minus = stablehlo.negate %again : tensor<8x4xf32>
      %plus = stablehlo.abs %minus : tensor<8x4xf32>
      %0:4 = stablehlo.while(%i = %start, %h = %plus, %d = %dy, %sum = %zeros)
          : tensor<i32>, tensor<8x4xf32>, tensor<8x4xf32>, tensor<4x4xf32>
        cond {
          %two = stablehlo.constant dense<2> : tensor<i32>
          %more = stablehlo.compare LT, %i, %two : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %more : tensor<i1>
        } do {
          %one = stablehlo.constant dense<1> : tensor<i32>
          %next = stablehlo.add %i, %one : tensor<i32>
          %dw = stablehlo.dot_general %h, %d, contracting_dims = [0] x [0]
              : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
          %added = stablehlo.add %sum, %dw : tensor<4x4xf32>
          stablehlo.return %next, %h, %d, %added
              : tensor<i32>, tensor<8x4xf32>, tensor<8x4xf32>, tensor<4x4xf32>
        }
      %new = stablehlo.subtract %w, %0#3 : tensor<4x4xf32>
      return %new, %loss : tensor<4x4xf32>, tensor<f32>
    }""")
    assert parts["abs"] == parts["while"] == ["backward"]
    assert parts["subtract"] == ["update"]


def test_a_stack_of_one_gradient_that_is_returned_is_no_loss() -> None:
    parts = parts_of("""
    func.func @main(%w: tensor<1x4xf32> {alpa.role = "state"},
        %x: tensor<8x4xf32> {alpa.role = "batch", alpa.batch_dim = 0 : i64})
        -> (tensor<1x4xf32> {alpa.result = "state:0"}, tensor<f32> {alpa.result = "mean"},
            tensor<1x4xf32> {alpa.result = "mean"}) {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %row = stablehlo.reshape %w : (tensor<1x4xf32>) -> tensor<4xf32>
      %rows = stablehlo.broadcast_in_dim %row, dims = [1] : (tensor<4xf32>) -> tensor<8x4xf32>
      %y = stablehlo.multiply %x, %rows : tensor<8x4xf32>
      %loss = stablehlo.reduce(%y init: %zero) applies stablehlo.add across dimensions = [0, 1]
          : (tensor<8x4xf32>, tensor<f32>) -> tensor<f32>
      %wave = stablehlo.cosine %y : tensor<8x4xf32>
      %dw = stablehlo.reduce(%wave init: %zero) applies stablehlo.add across dimensions = [0]
          : (tensor<8x4xf32>, tensor<f32>) -> tensor<4xf32>
      %stack = stablehlo.broadcast_in_dim %dw, dims = [1] : (tensor<4xf32>) -> tensor<1x4xf32>
      %new = stablehlo.subtract %w, %stack : tensor<1x4xf32>
      return %new, %loss, %stack : tensor<1x4xf32>, tensor<f32>, tensor<1x4xf32>
    }""")
    assert parts["reduce"] == ["forward", "backward"]
    assert parts["cosine"] == ["backward"]


def parts_of_function(function: func.FuncOp) -> list[tuple[str, str | None]]:
    """The name and the part of each op, markers apart."""
    graph = Graph.of(body(function))
    part = split_step(graph, infer_roles(function, graph)).part
    found = zip(graph.ops, part, strict=True)
    return [(op.name, its) for op, its in found if marker_of(op) is None]


@pytest.mark.parametrize("name", [name for name in zoo.names() if name.endswith("-tiny")])
def test_parts_are_the_same_without_the_markers_that_names_give(name: str) -> None:
    """JAX's names of differentiated ops give the markers of zoo programs."""
    text = zoo.get(name).lower(micro_batch_size=4)
    marked = passes.run(text, "simplify-trivial-ops", on_remark=lambda *_: None)
    expected = parts_of_function(main_function(marked))
    for op in list(body(main_function(marked)).operations):
        if marker_of(op) == GRADIENT:
            replace_op(op, op.operands)
    assert parts_of_function(main_function(marked)) == expected
    assert {part for _, part in expected} >= {"forward", "backward", "update"}


def test_averages_that_only_their_own_new_values_read_do_not_hide_the_loss() -> None:
    """A batch norm that trains; the gradient of its scale is divided by a deviation."""

    def step(params: Any, averages: Any, x: Any, y: Any) -> Any:
        def loss(params: Any) -> Any:
            h = x @ params["w"]
            mean, variance = h.mean(0), h.var(0)
            h = (h - mean) * jax.lax.rsqrt(variance + 1e-5) * params["scale"] + params["b"]
            value = jnp.mean((jax.nn.relu(h) @ params["v"] - y) ** 2)
            return value, {"mean": mean, "variance": variance}

        (value, now), grads = jax.value_and_grad(loss, has_aux=True)(params)
        new = jax.tree.map(lambda w, g: w - 0.1 * g, params, grads)
        return new, jax.tree.map(lambda a, b: 0.9 * a + 0.1 * b, averages, now), value

    shapes = {"w": (8, 16), "scale": (16,), "b": (16,), "v": (16, 4)}
    params = {key: jnp.zeros(shape) for key, shape in shapes.items()}
    averages = {"mean": jnp.zeros(16), "variance": jnp.ones(16)}
    arguments = (params, averages, jnp.zeros((32, 8)), jnp.zeros((32, 4)))
    text = jax.jit(step).lower(*arguments).as_text()
    function = main_function(passes.run(text, "simplify-trivial-ops", on_remark=lambda *_: None))
    parts = parts_of_function(function)
    dots = [part for name, part in parts if name == "stablehlo.dot_general"]
    assert dots == ["forward", "forward", "backward", "backward", "backward"]
    assert "update" in {part for _, part in parts}


def test_sums_of_gradients_that_equal_forward_values_are_update() -> None:
    """A penalty of the gradients computes them in the forward part, too."""

    def mean(params: Any, x: Any) -> Any:
        return jnp.mean(jnp.tanh(jnp.tanh(x @ params["v"]) @ params["w"]) ** 2)

    def step(params: Any, x: Any) -> Any:
        def loss(params: Any) -> Any:
            return mean(params, x) + jnp.sum(jax.grad(mean)(params, x)["w"] ** 2)

        value, grads = jax.value_and_grad(loss)(params)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    arguments = ({"v": jnp.zeros((6, 6)), "w": jnp.zeros((6, 6))}, jnp.zeros((8, 6)))
    text = jax.jit(step).lower(*arguments).as_text()
    function = main_function(passes.run(text, "simplify-trivial-ops", on_remark=lambda *_: None))
    graph = Graph.of(body(function))
    part = split_step(graph, infer_roles(function, graph)).part
    sums = [
        its
        for op, its in zip(graph.ops, part, strict=True)
        if op.name == "stablehlo.add" and str(op.results[0].type) == "tensor<6x6xf32>"
    ]
    assert sums == ["update", "update"]


def test_a_column_of_a_large_gradient_is_cut_out_where_the_gradient_is_made() -> None:
    """The gradient of an attention sink is one column of that of the scores."""

    def loss(params: Any, x: Any) -> Any:
        column = jnp.broadcast_to(params["sink"], (*x.shape[:-1], 1))
        scores = jnp.concatenate([x @ params["w"], column], -1)
        return jnp.mean(jax.nn.softmax(scores)[..., :-1] ** 2)

    def step(params: Any, x: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    arguments = ({"w": jnp.zeros((8, 64)), "sink": jnp.zeros(1)}, jnp.zeros((32, 16, 8)))
    text = jax.jit(step).lower(*arguments).as_text()
    function = main_function(passes.run(text, "simplify-trivial-ops", on_remark=lambda *_: None))
    parts = parts_of_function(function)
    assert {part for name, part in parts if name == "stablehlo.slice"} == {"forward", "backward"}
