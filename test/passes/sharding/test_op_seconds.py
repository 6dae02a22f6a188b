"""The work of ops, found once for equal blocks and equal loops."""

from __future__ import annotations

import pytest

from alpa.dialects import body, ir, main_function, make_context, parse
from alpa.passes.analysis.graph import inner_blocks
from alpa.passes.analysis.op_work import Work
from alpa.passes.cost.cluster import Cluster
from alpa.passes.sharding.op_seconds import Works, block_works

DEVICE = Cluster.parse("h100:1x8").device

LOOP = """
  %c0 = stablehlo.constant dense<0> : tensor<i32>
  %c1 = stablehlo.constant dense<1> : tensor<i32>
  %n = stablehlo.constant dense<{trips}> : tensor<i32>
  %loop:3 = stablehlo.while(%i = %c0, %k = %n, %v = %{of})
    : tensor<i32>, tensor<i32>, tensor<8x8xf32>
  cond {{
    %less = stablehlo.compare LT, %i, %k : (tensor<i32>, tensor<i32>) -> tensor<i1>
    stablehlo.return %less : tensor<i1>
  }} do {{
    %one = stablehlo.constant dense<1> : tensor<i32>
    %next = stablehlo.add %i, %one : tensor<i32>
    %dot = stablehlo.dot_general %v, %v, contracting_dims = [1] x [0]
      : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    {inside}
    stablehlo.return %next, %k, %made : tensor<i32>, tensor<i32>, tensor<8x8xf32>
  }}
"""
ALONE = "%made = stablehlo.tanh %dot : tensor<8x8xf32>"


@pytest.fixture
def context() -> ir.Context:
    return make_context()


def program(
    context: ir.Context, arguments: str, before: str, of: str, inside: str = ALONE, trips: int = 4
) -> ir.Module:
    return parse(
        f"func.func public @main({arguments}) -> tensor<8x8xf32> {{ {before}"
        f"{LOOP.format(trips=trips, of=of, inside=inside)}"
        "  return %loop#2 : tensor<8x8xf32> }",
        context,
    )


def found(works: Works, module: ir.Module) -> tuple[list[Work], list[list[Work] | None]]:
    """The work of @main's ops, and that of the blocks in its regions."""
    block, nested = body(main_function(module)), dict[ir.Block, list[Work]]()
    return works.of(block, DEVICE, nested), list(map(nested.get, inner_blocks(block)))


def anew(module: ir.Module) -> tuple[list[Work], list[list[Work] | None]]:
    block, known = body(main_function(module)), dict[ir.Block, list[Work]]()
    works = block_works(block, DEVICE, known)
    return works, list(map(known.get, inner_blocks(block)))


def test_a_loop_in_another_block_is_read_once(context: ir.Context) -> None:
    works = Works()
    first = program(context, "%x: tensor<8x8xf32>", "", "x")
    other = program(
        context, "%x: tensor<8x8xf32>", "%y = stablehlo.negate %x : tensor<8x8xf32>", "y"
    )
    *_, loop = found(works, first)[1]
    *_, same = found(works, other)[1]
    assert loop is not None
    assert same is loop
    assert found(works, other) == anew(other)


def test_trips_are_those_of_each_loop(context: ir.Context) -> None:
    works = Works()
    few, many = (program(context, "%x: tensor<8x8xf32>", "", "x", trips=trips) for trips in (4, 40))
    assert found(works, few) == anew(few)
    assert found(works, many) == anew(many)
    assert max(found(works, many)[0]).flops == 10 * max(found(works, few)[0]).flops


@pytest.mark.parametrize("rows", [16, 4096])
def test_a_loop_that_reads_around_it_is_read_for_itself(context: ir.Context, rows: int) -> None:
    """Its text does not show the types of what it reads."""
    inside = (
        "%sum = stablehlo.reduce(%w init: %zero) applies stablehlo.add across dimensions = [0]"
        " : (tensor<{0}x8x8xf32>, tensor<f32>) -> tensor<8x8xf32>"
        "%made = stablehlo.add %sum, %dot : tensor<8x8xf32>"
    )
    zero = "%zero = stablehlo.constant dense<0.0> : tensor<f32>"
    works = Works()
    for size in (32, rows):
        arguments = f"%x: tensor<8x8xf32>, %w: tensor<{size}x8x8xf32>"
        module = program(context, arguments, zero, "x", inside.format(size))
        assert found(works, module) == anew(module)
