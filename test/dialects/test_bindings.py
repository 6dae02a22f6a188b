"""How long a module lives, and walks over its ops."""

from __future__ import annotations

from alpa.dialects import attributes_of, body, ops_where, parse, stablehlo, walk
from alpa.dialects.bindings import main_function


def test_the_main_function_keeps_its_module_alive() -> None:
    """An op that outlives its module is memory in other use: reading it ended the process."""
    function = main_function(parse("func.func @main() attributes {alpa.a = 1 : i64} { return }"))
    assert function.context._get_live_module_count() == 1
    assert str(function.attributes["alpa.a"]) == "1 : i64"


def test_equal_complex_constants_have_equal_attributes() -> None:
    """jaxlib cannot read them, so they are compared as text, in which no number may differ."""
    module = parse("""
        func.func @main() -> (tensor<complex<f32>>, tensor<complex<f32>>, tensor<complex<f32>>) {
          %a = stablehlo.constant dense<(0.0, 1.0)> : tensor<complex<f32>>
          %b = stablehlo.constant dense<(0.0, 1.0)> : tensor<complex<f32>>
          %c = stablehlo.constant dense<(1.0, 1.0)> : tensor<complex<f32>>
          return %a, %b, %c : tensor<complex<f32>>, tensor<complex<f32>>, tensor<complex<f32>>
        }
    """)
    a, b, c, _ = (attributes_of(op) for op in body(main_function(module)).operations)
    assert a == b != c


def test_wanted_ops_at_any_depth() -> None:
    module = parse(
        """
        func.func @main(%x: tensor<4xf32>, %p: tensor<i1>) -> tensor<4xf32> {
          %0 = stablehlo.tanh %x : tensor<4xf32>
          %1 = "stablehlo.if"(%p) ({
            %2 = stablehlo.tanh %0 : tensor<4xf32>
            stablehlo.return %2 : tensor<4xf32>
          }, {
            stablehlo.return %x : tensor<4xf32>
          }) : (tensor<i1>) -> tensor<4xf32>
          return %1 : tensor<4xf32>
        }
        """
    )
    found = ops_where(module, lambda op: op.name == "stablehlo.tanh")
    assert [isinstance(op, stablehlo.TanhOp) for op in found] == [True, True]
    assert found[1].operands[0] == found[0].results[0]
    every = [op.operation.name for op in ops_where(main_function(module), lambda _: True)]
    assert every == [op.operation.name for op in walk(body(main_function(module)))]
