from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from alpa.dialects.sharding import ShardingRule
from alpa.passes.cost.reshard import Layout
from alpa.passes.sharding.padding import is_even
from alpa.passes.sharding.strategies import (
    Strategy,
    enumerate_strategies,
    follow,
    local_elements,
    meet,
    strategy_of,
    tensor_layouts,
)

SIZES = st.sampled_from([(2,), (4,), (2, 2), (1, 4), (2, 4), (3, 2), (2, 2, 2)])
LAYOUTS_2D = st.sampled_from(tensor_layouts((24, 24), (2, 2, 2)))
DOT = ShardingRule(
    (8, 4, 2), (((0,), (2,)), ((2,), (1,))), (((0,), (1,)),), reduction=frozenset({2})
)


@st.composite
def rules(draw: st.DrawFn) -> ShardingRule:
    """Each tensor has some of the factors, in any order, sometimes several in a dimension."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), min_size=1, max_size=4))
    factors = range(len(sizes))

    def tensor() -> tuple[tuple[int, ...], ...]:
        order = draw(st.permutations(factors))[: draw(st.integers(0, len(sizes)))]
        dims: list[tuple[int, ...]] = []
        for factor in order:
            if dims and draw(st.booleans()):
                dims[-1] = (*dims[-1], factor)
            else:
                dims.append((factor,))
        return tuple(dims)

    operands = tuple(tensor() for _ in range(draw(st.integers(1, 3))))
    results = tuple(tensor() for _ in range(draw(st.integers(1, 2))))
    used = {f for t in (*operands, *results) for dim in t for f in dim}
    assume(used == set(factors))
    in_results = {f for t in results for dim in t for f in dim}
    fixed = draw(st.sets(st.sampled_from(list(factors)), max_size=1))
    permuted = draw(st.sets(st.sampled_from(list(factors)), max_size=1))
    return ShardingRule(
        tuple(sizes),
        operands,
        results,
        reduction=frozenset(used - in_results),
        need_replication=frozenset(fixed),
        permutation=frozenset(permuted),
    )


def blocks(layout: Layout, shape: tuple[int, ...], sizes: tuple[int, ...]) -> list[list[range]]:
    """For each device the range of each dimension that it holds, by the meaning of a layout."""
    found: list[list[range]] = []
    for device in product(*(range(n) for n in sizes)):
        ranges: list[range] = []
        for length, axes in zip(shape, layout, strict=True):
            index, ways = 0, 1
            for axis in axes:
                index, ways = index * sizes[axis] + device[axis], ways * sizes[axis]
            ranges.append(range(index * length // ways, (index + 1) * length // ways))
        found.append(ranges)
    return found


def by_meaning(rule: ShardingRule, sizes: tuple[int, ...]) -> set[Strategy]:
    """Every assignment of axes to factors under which each device holds exactly the part of each
    tensor that its blocks of the factors need.
    """
    free = [
        f
        for f in range(len(rule.factor_sizes))
        if f not in rule.need_replication | rule.permutation
    ]
    found: set[Strategy] = set()
    for choice in product(*([None, *free] if n > 1 else [None] for n in sizes)):
        on = [
            tuple(a for a in range(len(sizes)) if choice[a] == f)
            for f in range(len(rule.factor_sizes))
        ]
        ways = [prod(sizes[a] for a in axes) for axes in on]
        if any(n % w for n, w in zip(rule.factor_sizes, ways, strict=True)):
            continue
        layouts = [
            tuple(tuple(a for f in dim for a in on[f]) for dim in tensor)
            for tensor in (*rule.operands, *rule.results)
        ]
        tensors = (*rule.operands, *rule.results)
        if all(
            _holds_its_factors(rule, sizes, on, tensor, layout)
            for tensor, layout in zip(tensors, layouts, strict=True)
        ):
            count = len(rule.operands)
            reduced = tuple(sorted(a for f in rule.reduction for a in on[f]))
            found.add(Strategy(tuple(layouts[:count]), tuple(layouts[count:]), reduced, prod(ways)))
    return found


def _holds_its_factors(rule, sizes, on, tensor, layout) -> bool:
    factors = blocks(tuple(on), rule.factor_sizes, sizes)
    shape = tuple(prod(rule.factor_sizes[f] for f in dim) for dim in tensor)
    for device, held in enumerate(blocks(layout, shape, sizes)):
        for dim, indices in zip(tensor, held, strict=True):
            needed = [0]
            for f in dim:
                needed = [i * rule.factor_sizes[f] + j for i in needed for j in factors[device][f]]
            if needed != list(indices):
                return False
    return True


@settings(max_examples=60, deadline=None)
@given(rule=rules(), sizes=SIZES)
def test_strategies_are_those_by_the_meaning_of_the_rule(rule, sizes):
    strategies = enumerate_strategies(rule, sizes)
    assert len(set(strategies)) == len(strategies)
    assert set(strategies) == by_meaning(rule, sizes)
    first = strategies[0]
    assert (first.shards, first.reduced) == (1, ())
    assert not any(axes for layout in (*first.operands, *first.results) for axes in layout)


def test_strategies_of_a_matrix_product():
    found = {(s.operands, s.results, s.reduced) for s in enumerate_strategies(DOT, (2, 4))}
    assert ((((0,), ()), ((), (1,))), (((0,), (1,)),), ()) in found  # data and tensor parallel
    assert ((((), (0,)), ((0,), ())), (((), ()),), (0,)) in found  # the contraction is split
    assert ((((0, 1), ()), ((), ())), (((0, 1), ()),), ()) in found
    # The contraction of 2 cannot be split 4 ways: 3 * 4 choices, less k8 = {0, 1} and k = 1.
    assert len(found) == 4 * 4 - 4 - 1


@settings(max_examples=60, deadline=None)
@given(rule=rules(), sizes=SIZES, data=st.data())
def test_follow_agrees_with_enumerate(rule, sizes, data):
    strategy = data.draw(st.sampled_from(enumerate_strategies(rule, sizes)))
    operand = data.draw(st.integers(0, len(rule.operands) - 1))
    layout = strategy.operands[operand]
    followed = follow(rule, sizes, operand, layout)
    if prod(sizes[a] for axes in layout for a in axes) == strategy.shards:
        assert followed == strategy
    assert followed in by_meaning(rule, sizes)


@settings(max_examples=60, deadline=None)
@given(rule=rules(), sizes=SIZES, data=st.data())
def test_follow_takes_over_what_it_can_and_gathers_the_rest(rule, sizes, data):
    operand = data.draw(st.integers(0, len(rule.operands) - 1))
    shape = tuple(prod(rule.factor_sizes[f] for f in dim) for dim in rule.operands[operand])
    layout = data.draw(st.sampled_from(tensor_layouts(shape, sizes)))
    followed = follow(rule, sizes, operand, layout)
    assert followed in by_meaning(rule, sizes)
    for kept, given_ in zip(followed.operands[operand], layout, strict=True):
        assert kept == given_[: len(kept)]
    # No strategy that uses the same axes or fewer keeps more of the layout, unless the other
    # tensors would have to be cut at a minor factor.
    if not any(len(dim) > 1 for tensor in (*rule.operands, *rule.results) for dim in tensor):
        better = [
            s
            for s in by_meaning(rule, sizes)
            if all(
                kept == given_[: len(kept)]
                for kept, given_ in zip(s.operands[operand], layout, strict=True)
            )
            and sum(map(len, s.operands[operand])) > sum(map(len, followed.operands[operand]))
        ]
        assert not better


@pytest.mark.parametrize(
    ("layout", "kept", "result"),
    [
        (((0,), ()), ((0,), ()), ((0,),)),
        (((0, 1), ()), ((0, 1), ()), ((0, 1),)),
        (((0,), (1,)), ((0,), ()), ((0,),)),  # a minor factor under an open major one
        (((), (1,)), ((), ()), ((),)),
    ],
)
def test_follow_through_a_reshape_that_merges(layout, kept, result):
    merge = ShardingRule((8, 4), (((0,), (1,)),), (((0, 1),),))
    followed = follow(merge, (2, 2), 0, layout)
    assert (followed.operands, followed.results) == ((kept,), (result,))


def test_a_factor_that_must_be_whole_is_gathered():
    rule = ShardingRule((8, 4), (((0,), (1,)),), (((0,), (1,)),), need_replication=frozenset({1}))
    assert follow(rule, (2, 2), 0, ((0,), (1,))).operands == (((0,), ()),)


def test_strategy_of_refuses_axes_that_do_not_divide():
    assert strategy_of(DOT, (2, 4), ((), (), (1,))) is None
    assert strategy_of(DOT, (2, 4), ((1,), (), (0,))) == Strategy(
        (((1,), (0,)), ((0,), ())), (((1,), ()),), (0,), 8
    )


@given(shape=st.lists(st.sampled_from([1, 2, 3, 4, 6, 8]), max_size=3), sizes=SIZES)
def test_tensor_layouts_are_those_that_divide(shape, sizes):
    def divides(layout: Layout) -> bool:
        return all(
            n % prod(sizes[a] for a in axes) == 0 for n, axes in zip(shape, layout, strict=True)
        )

    axes = [a for a in range(len(sizes)) if sizes[a] > 1]
    every = {
        tuple(
            tuple(a for a, d in zip(axes, dims, strict=True) if d == dim)
            for dim in range(len(shape))
        )
        for dims in product([None, *range(len(shape))], repeat=len(axes))
    }
    layouts = tensor_layouts(tuple(shape), sizes)
    assert layouts[0] == ((),) * len(shape)
    assert len(set(layouts)) == len(layouts)
    assert set(layouts) == {layout for layout in every if divides(layout)}
    for layout in layouts:
        held = blocks(layout, tuple(shape), sizes)[0]
        assert local_elements(shape, sizes, layout) == prod(len(part) for part in held)


def test_tensors_without_elements_are_replicated():
    assert tensor_layouts((0, 4), (2, 2)) == (((), ()),)
    assert not is_even((0, 4), (2, 2), ((), (0,)))
    assert not is_even((4, 0), (2, 2), ((), (), (0,)))  # a partial sum


def is_shard_of(fine: Layout, coarse: Layout) -> bool:
    """Whether slices alone lead from one layout to the other."""
    return all(f[: len(c)] == c for f, c in zip(fine, coarse, strict=True))


@given(first=LAYOUTS_2D, second=LAYOUTS_2D)
def test_meet_is_the_finest_layout_that_both_are_slices_of(first, second):
    common = meet(first, second)
    both = [
        layout
        for layout in tensor_layouts((24, 24), (2, 2, 2))
        if is_shard_of(first, layout) and is_shard_of(second, layout)
    ]
    assert common in both
    assert all(is_shard_of(common, layout) for layout in both)


def padded(rule: ShardingRule) -> ShardingRule:
    return replace(rule, padded=frozenset(range(len(rule.factor_sizes))))


def test_an_axis_cuts_a_factor_unevenly_alone():
    dot = padded(replace(DOT, factor_sizes=(10, 6, 4)))
    found = enumerate_strategies(dot, (7,), frozenset({0}))
    # 4 and 6 have fewer elements than the axis has devices.
    assert [(s.operands[0], s.shards, s.padded) for s in found] == [
        (((), ()), 1, False),
        (((0,), ()), 5, True),
    ]
    assert len(enumerate_strategies(dot, (7,))) == 1
    assert strategy_of(dot, (2, 3), ((0, 1), (), ())) is None
    both = strategy_of(dot, (4, 5), ((0,), (1,), ()))
    assert both is not None
    assert (both.shards, both.padded) == (10 / 3 * 6 / 2, True)


def test_followers_take_over_uneven_shards_of_padded_factors_only():
    rule = ShardingRule((10, 4), (((0,), (1,)),), (((0,), (1,)),))
    layout = ((0,), ())
    assert follow(rule, (7,), 0, layout).results == (((), ()),)
    followed = follow(padded(rule), (7,), 0, layout)
    assert (followed.results, followed.shards) == ((layout,), 5)


def test_local_elements_have_their_padding():
    assert local_elements((10, 4), (7,), ((0,), ())) == 8
