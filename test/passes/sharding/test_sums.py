from __future__ import annotations

from itertools import product
from math import inf, prod

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from alpa.dialects import body, main_function, parse
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh, all_gather, all_reduce, reduce_scatter
from alpa.passes.cost.reshard import ReshardTable
from alpa.passes.sharding import sums
from alpa.passes.sharding.strategies import Strategy, tensor_layouts

MESH = LogicalMesh.of(Cluster.parse("v100-16gb:2x2"), 2, 2, (2, 2))
SHAPE = (8, 4)
LAYOUTS = tensor_layouts(SHAPE, MESH.sizes)
UNREDUCED = [
    (*layout, axes)
    for axes in ((0,), (1,), (0, 1))
    for layout in LAYOUTS
    if not {a for dim in layout for a in dim} & set(axes)
]
STATES = [*LAYOUTS, *UNREDUCED]


def test_all_reduces_of_partial_results_are_added_up():
    partial = Strategy((((0, 1),),), ((), ()), (0, 1), 4)
    assert sums.sum_seconds(MESH, partial, [1e6, 4.0]) == pytest.approx(
        all_reduce(MESH, (0, 1), 1e6) + all_reduce(MESH, (0, 1), 4.0)
    )
    whole = Strategy((((),),), ((), ()), (), 1)
    assert sums.sum_seconds(MESH, whole, [1e6, 4.0]) == 0.0


def test_a_sum_is_scattered_over_each_dimension_that_divides():
    strategy = Strategy((((1,), (0,)),), (((), (1,)),), (0,), 4)
    found = {s.results[0]: s for s in sums.scatters(strategy, (8, 4), (2, 2))}
    # axis 0 after axis 1 in dimension 1 would be out of order
    assert set(found) == {((0,), (1,))}
    assert found[(0,), (1,)].scattered == ((0, 0),)
    assert found[(0,), (1,)].computed == (((), (1,)),)
    assert list(sums.scatters(strategy, (7, 4), (2, 2))) == []


def test_a_scatter_costs_half_an_all_reduce_and_reduces_the_rest():
    strategy = Strategy((), (((), ()),), (0, 1), 4)
    found = {s.results[0]: s for s in sums.scatters(strategy, (8, 4), (2, 2))}
    one = sums.sum_seconds(MESH, found[(0,), ()], [1e6])
    assert one == reduce_scatter(MESH, 0, 1e6) + all_reduce(MESH, (1,), 5e5)
    both = sums.sum_seconds(MESH, found[(0,), (1,)], [1e6])
    assert both == reduce_scatter(MESH, 0, 1e6) + reduce_scatter(MESH, 1, 5e5)


def test_at_once_only_a_sum_that_cuts_one_dimension_is_scattered():
    strategy = Strategy((), (((), ()),), (0, 1), 4)
    found = {s.results[0]: s for s in sums.scatters(strategy, (8, 4), (2, 2))}
    whole = all_reduce(MESH, (0, 1), 1e6)
    assert sums.seconds_at_once(MESH, found[(0,), (1,)], [1e6]) == whole
    assert sums.seconds_at_once(MESH, found[(0,), ()], [1e6]) == whole
    both = found[(0, 1), ()]
    assert sums.seconds_at_once(MESH, both, [1e6]) == sums.sum_seconds(MESH, both, [1e6]) < whole
    one = Strategy((), (((), ()),), (0,), 2)
    (scattered,) = (s for s in sums.scatters(one, (8, 4), (2, 2)) if s.results[0] == ((0,), ()))
    assert sums.seconds_at_once(MESH, scattered, [1e6]) == reduce_scatter(MESH, 0, 1e6)


def test_unreduced_values_cost_nothing_at_once():
    strategy = sums.unreduced(Strategy((), (((), (1,)),), (0,), 4), (0,))
    assert strategy.results == (((), (1,), (0,)),)
    assert strategy.computed == (((), (1,)),)
    assert sums.sum_seconds(MESH, strategy, [1e6]) == 0.0


def matrix() -> np.ndarray:
    return sums.matrix_with_sums(ReshardTable(MESH, 2), STATES, STATES, SHAPE, 4)


def test_reducing_later_is_a_shortest_path():
    costs = matrix()
    assert (np.diagonal(costs) == 0).all()
    for i, j, k in product(range(len(STATES)), repeat=3):
        assert costs[i, k] <= costs[i, j] + costs[j, k] + 1e-12


def test_reducing_later_costs_what_the_collectives_do():
    costs = matrix()
    at = {state: i for i, state in enumerate(STATES)}
    source = at[(), (1,), (0,)]
    half = prod(SHAPE) * 4 / 2
    assert costs[source, at[(), (1,)]] == pytest.approx(all_reduce(MESH, 0, half))
    assert costs[source, at[(0,), (1,)]] == pytest.approx(reduce_scatter(MESH, 0, half))
    gathered = all_reduce(MESH, 0, half) + all_gather(MESH, 1, 2 * half)
    assert costs[source, at[(), ()]] <= gathered + 1e-12


@given(st.sampled_from(STATES), st.sampled_from(UNREDUCED))
def test_no_sum_becomes_its_parts_again(source, target):
    costs = matrix()[STATES.index(source), STATES.index(target)]
    assert costs == (0.0 if source == target else inf)


GRADIENTS = """
func.func @main(%x: tensor<8x4xf32>, %y: tensor<8x2xf32>, %z: tensor<4x2xf32>)
    -> (tensor<2x4xf32>, tensor<4x2xf32>, tensor<4x2xf32>, tensor<4x2xf32>) {
  %c = stablehlo.constant dense<2.0> : tensor<4x2xf32>
  %kept = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0]
      : (tensor<8x4xf32>, tensor<8x2xf32>) -> tensor<4x2xf32>
  %scaled = stablehlo.multiply %c, %kept : tensor<4x2xf32>
  %turned = stablehlo.transpose %scaled, dims = [1, 0] : (tensor<4x2xf32>) -> tensor<2x4xf32>
  %used = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0]
      : (tensor<8x4xf32>, tensor<8x2xf32>) -> tensor<4x2xf32>
  %root = stablehlo.sqrt %used : tensor<4x2xf32>
  %moved = stablehlo.add %used, %c : tensor<4x2xf32>
  %two = stablehlo.multiply %z, %z : tensor<4x2xf32>
  return %turned, %root, %moved, %two
      : tensor<2x4xf32>, tensor<4x2xf32>, tensor<4x2xf32>, tensor<4x2xf32>
}
"""


def test_only_what_flows_through_linear_ops_into_gradients_stays_unreduced():
    module = parse(GRADIENTS)
    block = body(main_function(module))
    found = sums.deferrable(block, [0, 1, 2, 3])
    ops = list(block.operations)
    names = [op.operation.name for op in ops if op.results and op.results[0] in found]
    # the sum itself, its multiple and its transpose; not %used; what is returned is always fine
    assert names == [
        "stablehlo.dot_general",
        "stablehlo.multiply",
        "stablehlo.transpose",
        "stablehlo.sqrt",
        "stablehlo.add",
        "stablehlo.multiply",
    ]
    assert ops[1].results[0] in found
    assert ops[4].results[0] not in found
    assert ops[3].results[0] not in sums.deferrable(block, [1, 2, 3])


def test_a_value_that_a_branch_returns_unchanged_is_used() -> None:
    module = parse("""
    func.func @main(%x: tensor<8x4xf32>, %n: tensor<i32>) -> tensor<4xf32> {
      %zero = stablehlo.constant dense<0.0> : tensor<f32>
      %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0]
          : (tensor<8x4xf32>, tensor<f32>) -> tensor<4xf32>
      %1 = "stablehlo.case"(%n) ({
        stablehlo.return %0 : tensor<4xf32>
      }, {
        %2 = stablehlo.constant dense<0.0> : tensor<4xf32>
        stablehlo.return %2 : tensor<4xf32>
      }) : (tensor<i32>) -> tensor<4xf32>
      return %1 : tensor<4xf32>
    }""")
    block = body(main_function(module))
    assert list(block.operations)[1].results[0] not in sums.deferrable(block, [0])


REDUCTIONS = """
func.func @main(%x: tensor<8x4xf32>) -> (tensor<4xf32>, tensor<4xf32>, tensor<4xf32>) {{
  %zero = stablehlo.constant dense<0.0> : tensor<f32>
  %one = stablehlo.constant dense<1.0> : tensor<f32>
  %0 = stablehlo.reduce(%x init: %{init}) applies stablehlo.{op} across dimensions = [0]
      : (tensor<8x4xf32>, tensor<f32>) -> tensor<4xf32>
  return %0, %0, %0 : tensor<4xf32>, tensor<4xf32>, tensor<4xf32>
}}
"""


@pytest.mark.parametrize(
    ("op", "init", "keeps"),
    [("add", "zero", True), ("add", "one", False), ("maximum", "zero", False)],
)
def test_only_sums_from_zero_are_kept(op, init, keeps):
    module = parse(REDUCTIONS.format(op=op, init=init))
    reduce = list(body(main_function(module)).operations)[2]
    strategy = Strategy((((0,), ()), ()), (((),),), (0,), 2)
    assert sums.starts_sums(reduce) is keeps
    assert sums.may_stay_unreduced(reduce, strategy)
    assert not sums.may_stay_unreduced(reduce, Strategy((((), (0,)), ()), (((0,),),), (), 2))
