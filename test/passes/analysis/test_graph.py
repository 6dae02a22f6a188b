from __future__ import annotations

import dataclasses

from alpa.dialects import body, ir, main_function, parse
from alpa.passes.analysis.graph import Graph, element_bytes

MODULES: list[ir.Module] = []  # an op does not keep its module alive


def graph_of(arguments: str, text: str) -> Graph:
    MODULES.append(parse(f"func.func @main({arguments}) {{\n{text}\nreturn\n}}"))
    return Graph.of(body(main_function(MODULES[-1])))


def test_values_that_regions_capture_are_operands() -> None:
    graph = graph_of(
        "%p: tensor<i1>, %x: tensor<4xf32>, %y: tensor<4xf32>",
        """
        %0 = "stablehlo.if"(%p) ({
          %1 = stablehlo.add %x, %x : tensor<4xf32>
          stablehlo.return %1 : tensor<4xf32>
        }, {
          stablehlo.return %y : tensor<4xf32>
        }) : (tensor<i1>) -> tensor<4xf32>
        """,
    )
    assert graph.operands == [[0, 1, 2]]
    assert graph.users == [[0], [0], [0], []]
    assert graph.producer == [-1, -1, -1, 0]
    assert graph.bytes == [1, 16, 16, 16]


def test_operands_as_they_are() -> None:
    graph = graph_of(
        "%x: tensor<4xf32>, %y: tensor<2xi32>", "%0 = stablehlo.add %x, %x : tensor<4xf32>"
    )
    assert (graph.read, graph.operands) == ([[0, 0]], [[0]])
    assert graph.types == [value.type for value in graph.values]


def test_more_ops_behind_others() -> None:
    whole = graph_of(
        "%x: tensor<4xf32>",
        """
        %0 = stablehlo.tanh %x : tensor<4xf32>
        %1 = stablehlo.add %x, %0 : tensor<4xf32>
        """,
    )
    block = whole.ops[0].operation.block
    end = block.operations[2]
    empty = dataclasses.replace(
        whole.part([]),
        values=whole.values[:1],
        types=whole.types[:1],
        producer=[-1],
        users=[[]],
        bytes=whole.bytes[:1],
        num_arguments=1,
    )
    first = empty.with_ops(whole.ops[:1], end)
    assert first.users == [[0], []]
    assert first.with_ops(whole.ops[1:], end) == whole
    assert first.users == [[0], []]


def test_cone_and_depends() -> None:
    graph = graph_of(
        "%x: tensor<4xf32>, %y: tensor<4xf32>",
        """
        %0 = stablehlo.tanh %x : tensor<4xf32>
        %1 = stablehlo.tanh %y : tensor<4xf32>
        %2 = stablehlo.add %0, %1 : tensor<4xf32>
        %3 = stablehlo.sine %0 : tensor<4xf32>
        """,
    )
    assert graph.cone([5]) == {0, 3}
    assert graph.cone([5], 1) == {3}
    assert graph.depends([1]) == [False, True, False, True, True, False]


def test_first_equal() -> None:
    graph = graph_of(
        "%x: tensor<4xf32>, %y: tensor<4xf32>",
        """
        %zero = stablehlo.constant dense<0.0> : tensor<f32>
        %0 = stablehlo.tanh %x : tensor<4xf32>
        %1 = stablehlo.reduce(%0 init: %zero) applies stablehlo.add across dimensions = [0]
          : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
        %2:2 = stablehlo.optimization_barrier %y, %x : tensor<4xf32>, tensor<4xf32>
        %null = stablehlo.constant dense<0.0> : tensor<f32>
        %3 = stablehlo.tanh %2#1 {alpa.follow = 0 : i64} : tensor<4xf32>
        %4 = stablehlo.tanh %2#0 : tensor<4xf32>
        %5 = stablehlo.reduce(%3 init: %null) applies stablehlo.add across dimensions = [0]
          : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
        %6 = stablehlo.reduce(%3 init: %null) applies stablehlo.maximum across dimensions = [0]
          : (tensor<4xf32>, tensor<f32>) -> tensor<f32>
        """,
    )
    # x, y | zero, tanh, sum | barrier | null, tanh, tanh, sum, maximum
    assert graph.first_equal == [0, 1, 2, 3, 4, 1, 0, 2, 3, 9, 4, 11]


def test_first_equal_but_for_positions() -> None:
    graph = graph_of(
        "%x: tensor<4xf32>, %i: tensor<i32>",
        """
        %one = stablehlo.constant dense<1> : tensor<i32>
        %0 = stablehlo.dynamic_slice %x, %one, sizes = [2] : (tensor<4xf32>, tensor<i32>)
          -> tensor<2xf32>
        %1:2 = stablehlo.optimization_barrier %x, %one : tensor<4xf32>, tensor<i32>
        %two = stablehlo.add %1#1, %1#1 : tensor<i32>
        %2 = stablehlo.dynamic_slice %1#0, %two, sizes = [2] : (tensor<4xf32>, tensor<i32>)
          -> tensor<2xf32>
        %3 = stablehlo.dynamic_slice %1#0, %i, sizes = [2] : (tensor<4xf32>, tensor<i32>)
          -> tensor<2xf32>
        """,
    )
    # x, i | one, slice | barrier | two, slice, slice
    assert graph.first_equal == [0, 1, 2, 3, 0, 2, 2, 3, 8]


def test_bytes_of_elements() -> None:
    module = parse(
        "func.func @main(%a: tensor<complex<f32>>, %b: tensor<i1>, %c: tensor<bf16>, "
        "%d: tensor<i4>) { return }"
    )
    types = main_function(module).type.inputs
    sizes = [element_bytes(ir.RankedTensorType(type_).element_type) for type_ in types]
    assert sizes == [8, 1, 2, 1]
