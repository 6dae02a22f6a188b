"""Fold classes of programs of a few ops, of which every test says what is equal and what is not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from alpa import passes
from alpa.dialects import ir, main_function, parse
from alpa.passes.analysis.fold_classes import (
    FoldTable,
    fold_classes,
    is_clustered,
    part_ops,
)
from alpa.passes.analysis.repeats import maximal_repeats

# An op does not keep its module alive.
MODULES: list[ir.Module] = []
T = "tensor<4x4xf32>"
HEAD = "x = tanh x"
TAIL = "x = negate x"
LAYER = ("y = dot x w", "y = add y b", "x = maximum x y")


def program(lines: Sequence[str]) -> str:
    """A program of `result = op operands` lines.

    The last value of a name counts, and a name that nothing defines is an argument, a new one at
    each use. `0` is a constant, written down anew, and `0*` one that all its users share.
    """
    values: dict[str, str] = {}
    arguments: list[str] = []
    body: list[str] = []

    def operand(name: str) -> str:
        if name == "0":
            body.append(f"%c{len(body)} = stablehlo.constant dense<0.0> : {T}")
            return f"%c{len(body) - 1}"
        if name == "0*":
            return "%zero"
        if name not in values:
            arguments.append(f"%arg{len(arguments)}")
            return arguments[-1]
        return values[name]

    for number, line in enumerate(lines):
        result, text = line.split(" = ")
        op, *names = text.split()
        operands = [operand(name) for name in names]
        if op == "dot":
            written = f"stablehlo.dot {', '.join(operands)} : ({T}, {T}) -> {T}"
        elif op == "transpose":
            written = f"stablehlo.transpose {operands[0]}, dims = [1, 0] : ({T}) -> {T}"
        else:
            written = f"stablehlo.{op} {', '.join(operands)} : {T}"
        values[result] = f"%v{number}"
        body.append(f"%v{number} = {written}")
    declared = ", ".join(f"{argument}: {T}" for argument in arguments)
    inner = "\n  ".join([f"%zero = stablehlo.constant dense<0.0> : {T}", *body])
    return (
        f"func.func @main({declared}) -> {T} {{\n  {inner}\n"
        f'  return %v{len(lines) - 1} : {T} loc("end")\n}}'
    )


def folded(text: str, min_share: float = 0.01) -> FoldTable:
    MODULES.append(parse(text))
    ops = part_ops(main_function(MODULES[-1]))
    return fold_classes(ops.ops, ops.same, min_share=min_share)


def classes(lines: Sequence[str]) -> list[tuple[int, int]]:
    """Members and ops each."""
    return [(c.members, c.size) for c in folded(program(lines)).classes]


@pytest.mark.parametrize("depth", [2, 3, 10, 100])
def test_equal_layers_between_two_ends_are_three_classes(depth: int) -> None:
    found = folded(program([HEAD, *LAYER * depth, TAIL]))
    assert [(c.members, c.size) for c in found.classes] == [(1, 1), (depth, 3), (1, 1)]
    assert found.classes[1].starts == tuple(range(1, 1 + 3 * depth, 3))
    assert found.folded_ops == 5
    assert found.share == pytest.approx(3 * depth / (3 * depth + 2))
    layer = 2 * 4**3 + 2 * 4**2
    assert found.classes[1].flops == layer
    assert found.flops_share == pytest.approx(depth * layer / (depth * layer + 2 * 4**2))


def test_two_stacks_with_a_middle_are_five_classes() -> None:
    other = ("y = dot x w", "x = subtract y x")
    lines = [HEAD, *LAYER * 6, "x = sqrt x", *other * 6, TAIL]
    assert classes(lines) == [(1, 1), (6, 3), (1, 1), (6, 2), (1, 1)]


def test_equal_stacks_and_equal_stretches_between_them_share_a_class() -> None:
    lines = [HEAD, *LAYER * 3, TAIL, HEAD, *LAYER * 3, TAIL]
    assert classes([TAIL, *lines]) == [(2, 2), (6, 3), (1, 1)]


def test_nothing_is_folded_where_nothing_is_equal() -> None:
    found = folded(program([HEAD, *LAYER, TAIL]))
    assert [(c.members, c.size) for c in found.classes] == [(1, 5)]
    assert found.share == found.flops_share == 0


def test_no_ops_have_no_classes() -> None:
    found = folded(f"func.func @main(%x: {T}) -> {T} {{ return %x : {T} }}")
    assert found.classes == ()
    assert found.share == found.flops_share == 0


def test_a_layer_with_another_op_is_another_class() -> None:
    lines = [*LAYER * 3, "y = dot x w", "y = add y b", "x = minimum x y", *LAYER * 3]
    assert classes(lines) == [(6, 3), (1, 3)]


def test_other_attributes_keep_layers_apart_but_shardings_and_alpa_s_do_not() -> None:
    def layers(attribute: str) -> list[int]:
        text = "\n".join(
            f'%{n + 1} = "stablehlo.tanh"(%{n}) {{{attribute % n}}} : ({T}) -> {T}'
            for n in range(4)
        )
        mesh = 'sdy.mesh @mesh = <["x"=2]>'
        head = f"func.func @main(%0: {T}) -> {T}"
        return [
            c.members for c in folded(f"{mesh}\n{head} {{\n{text}\nreturn %4 : {T}\n}}").classes
        ]

    assert layers("alpa.follow = %d : i64") == [4]
    assert layers("mhlo.kind = %d : i64") == [1]
    axes = "sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{}, {}]>]>, alpa.a = %d : i64"
    assert layers(axes) == [4]


def test_a_layer_of_another_width_is_not_folded() -> None:
    def layer(n: int, before: int, after: int) -> str:
        kinds = f"tensor<4x{before}xf32>, tensor<{before}x{after}xf32>"
        return f"%{n + 1} = stablehlo.dot %{n}, %w{n} : ({kinds}) -> tensor<4x{after}xf32>"

    widths = [4, 4, 4, 4, 8, 8, 8]
    pairs = list(pairwise(widths))
    weights = ", ".join(f"%w{n}: tensor<{a}x{b}xf32>" for n, (a, b) in enumerate(pairs))
    lines = "\n".join(layer(n, a, b) for n, (a, b) in enumerate(pairs))
    text = (
        f"func.func @main(%0: tensor<4x4xf32>, {weights}) -> tensor<4x8xf32> "
        f"{{\n{lines}\nreturn %{len(pairs)} : tensor<4x8xf32>\n}}"
    )
    assert [(c.members, c.size) for c in folded(text).classes] == [(3, 1), (1, 1), (2, 1)]


def test_names_locations_and_the_order_of_arguments_do_not_count() -> None:
    text = program([HEAD, *LAYER * 4, TAIL])
    expected = [(1, 1), (4, 3), (1, 1)]
    lines = text.splitlines()
    lines[1:-2] = [f'{line} loc("layer_{n}/op")' for n, line in enumerate(lines[1:-2])]
    assert [(c.members, c.size) for c in folded("\n".join(lines)).classes] == expected
    head, *rest = lines
    arguments = head.removeprefix("func.func @main(").split(") -> ")[0].split(", ")
    shuffled = head.replace(", ".join(arguments), ", ".join(reversed(arguments)))
    assert shuffled != head
    assert [(c.members, c.size) for c in folded("\n".join([shuffled, *rest])).classes] == expected


def test_constants_count_by_what_they_hold_and_not_where_they_stand() -> None:
    own = ("y = dot x w", "y = maximum y 0", "x = add x y")
    shared = ("y = dot x w", "y = maximum y 0*", "x = add x y")
    assert classes([HEAD, *own * 2, *shared * 2, TAIL]) == [(1, 1), (4, 3), (1, 1)]
    text = program([HEAD, *own * 4, TAIL])
    assert text.count("dense<0.0>") == 5
    other = text.replace("dense<0.0>", "dense<1.0>").replace("dense<1.0>", "dense<0.0>", 4)
    assert [(c.members, c.size) for c in folded(other).classes] == [(1, 1), (3, 3), (1, 4)]


def test_a_value_that_all_layers_share_is_external() -> None:
    layer = ("y = dot x w", "y = add y bias", "x = maximum x y")
    lines = [HEAD, "bias = exponential x", *layer * 4, TAIL]
    assert classes(lines) == [(1, 2), (4, 3), (1, 1)]


def test_what_is_made_in_the_first_layer_only_keeps_it_apart() -> None:
    first = ("bias = exponential x", "y = dot x w", "y = add y bias", "x = maximum x y")
    layer = ("y = dot x w", "y = add y bias", "x = maximum x y")
    assert classes([HEAD, *first, *layer * 4, TAIL]) == [(1, 2), (5, 3), (1, 1)]


def test_layers_that_are_wired_in_another_way_are_not_equal() -> None:
    layer = ("y = dot x w", "z = tanh y", "x = add x z")
    other = ("y = dot x w", "z = tanh y", "x = add y z")
    assert classes([HEAD, *layer * 3, *other * 3, TAIL]) == [(1, 1), (3, 3), (3, 3), (1, 1)]


def test_what_comes_from_outside_of_a_layer_counts_by_its_type() -> None:
    reads_first = ("y = dot first w", "y = add y b", "x = maximum x y")
    assert classes(["first = tanh x", *LAYER * 3, *reads_first * 3, TAIL]) == [
        (1, 1),
        (6, 3),
        (1, 1),
    ]


def test_a_repeat_begins_where_its_first_member_is_wired_as_the_others() -> None:
    # The first dot does not read its own tanh: layers are cut before the dot, not before the tanh.
    first = ("z = tanh x", "y = dot x w", "x = add x y")
    layer = ("z = tanh x", "y = dot z w", "x = add z y")
    assert classes([*first, *layer * 4]) == [(1, 1), (4, 3), (1, 2)]


def test_a_repeat_that_saves_too_little_is_no_class() -> None:
    text = program([HEAD, TAIL, "x = sqrt x", "x = sqrt x", "x = cosine x", "x = sine x"])
    assert [c.members for c in folded(text).classes] == [1, 2, 1]
    assert [c.members for c in folded(text, min_share=0.3).classes] == [1]


def test_loops_are_equal_if_their_bodies_are() -> None:
    def loop(n: int, op: str) -> str:
        return (
            f"%{n + 1} = stablehlo.while(%i{n} = %{n}) : {T}\n"
            f"  cond {{ %p{n} = stablehlo.constant dense<true> : tensor<i1>\n"
            f"    stablehlo.return %p{n} : tensor<i1> }}\n"
            f"  do {{ %r{n} = stablehlo.{op} %i{n}, %w{n} : {T}\n"
            f"    stablehlo.return %r{n} : {T} }}"
        )

    def members(*kinds: str) -> list[int]:
        weights = ", ".join(f"%w{n}: {T}" for n in range(len(kinds)))
        loops = "\n".join(loop(n, op) for n, op in enumerate(kinds))
        end = f"return %{len(kinds)} : {T}"
        text = f"func.func @main(%0: {T}, {weights}) -> {T} {{\n{loops}\n{end}\n}}"
        return [c.members for c in folded(text).classes]

    assert members("add", "add", "add") == [3]
    assert members("add", "add", "subtract", "subtract", "subtract") == [2, 3]


def test_fragments_are_read_as_one_graph_and_by_part() -> None:
    text = program([HEAD, *LAYER * 8, TAIL])
    pipeline = (
        "simplify-trivial-ops,layer-cluster{num-layers=2},"
        "stage-mesh-partition{cluster=cpu:1x2 num-stages=2}"
    )
    MODULES.append(passes.run(text, "simplify-trivial-ops"))
    assert not is_clustered(MODULES[-1])
    MODULES.append(passes.run(text, pipeline))
    assert is_clustered(MODULES[-1])
    function = main_function(MODULES[-1])
    assert str(function).count("mpmd.fragment<") == 2
    for part in ("forward", None):
        ops = part_ops(function, part)
        found = fold_classes(ops.ops, ops.same)
        assert [(c.members, c.size) for c in found.classes] == [(1, 1), (8, 3), (1, 1)]
    assert part_ops(function, "backward").ops == []


def test_backward_is_unknown_before_clustering() -> None:
    MODULES.append(parse(program([HEAD, TAIL])))
    with pytest.raises(ValueError, match="backward part is known after layer-cluster"):
        part_ops(main_function(MODULES[-1]), "backward")


def brute_force(letters: Sequence[int]) -> set[tuple[int, int, int]]:
    found: set[tuple[int, int, int]] = set()
    for period in range(1, len(letters) // 2 + 1):
        start = 0
        for stop in range(period, len(letters) + 1):
            if stop == len(letters) or letters[stop] != letters[stop - period]:
                if stop - start >= 2 * period:
                    found.add((start, stop, period))
                start = stop - period + 1
    return found


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 2), max_size=40))
def test_repeats_are_those_that_comparing_everything_finds(letters: list[int]) -> None:
    found = maximal_repeats(np.array(letters, dtype=np.int64))
    assert {tuple(row) for row in found.tolist()} == brute_force(letters)


@settings(max_examples=50, deadline=None)
@given(
    segment=st.lists(
        st.tuples(
            st.sampled_from(["add", "multiply", "maximum", "minimum", "divide", "power", "dot"]),
            st.integers(0, 3),
            st.integers(0, 3),
        ),
        min_size=1,
        unique_by=lambda op: op[0],
    ),
    count=st.integers(2, 12),
)
def test_copies_of_a_segment_fold_to_their_number(
    segment: list[tuple[str, int, int]], count: int
) -> None:
    """Operands 0 to 2 are values of this copy or, carried on, of the one before; 3 an argument."""
    copy = [f"v{n % 3} = {op} v{a} v{b}" for n, (op, a, b) in enumerate(segment)]
    # The first copy's operands are made before it, as those of the others are.
    head = [f"v{n} = sine x" for n in range(3)]
    copy = [line.replace("v3", "w") for line in [*copy, "v0 = tanh v0"]]
    found = folded(program([*head, *copy * count]))
    best = max(found.classes, key=lambda c: c.members * c.size)
    assert (best.members, best.size) == (count, len(copy))
