"""Forward, backward and update in programs where they are hard to tell apart."""

from __future__ import annotations

from alpa.dialects import body, main_function, parse
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.roles import infer_roles
from alpa.passes.analysis.step_parts import split_step


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
