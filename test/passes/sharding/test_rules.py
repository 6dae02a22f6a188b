from __future__ import annotations

import re
from collections.abc import Iterator

import pytest

from alpa.dialects import body, ir, main_function, parse, walk
from alpa.dialects.sharding import ShardingRule
from alpa.passes.base import PassError
from alpa.passes.sharding.rules import (
    CUSTOM_CALL_RULES,
    populated,
    register_sharding_rule,
    rule_of,
)


@pytest.fixture
def target() -> Iterator[str]:
    yield "my.kernel"
    CUSTOM_CALL_RULES.pop("my.kernel", None)


def module_of(arguments: str, *ops: str) -> ir.Module:
    lines = "\n".join(ops)
    return parse(f"func.func @main({arguments}) {{\n{lines}\nreturn\n}}")


def rule_of_last(module: ir.Module) -> ShardingRule | None:
    *_, op, _return = body(main_function(module)).operations
    with populated(module) as rules:
        return rules(op)


def text_of(rule: ShardingRule | None, module: ir.Module) -> str:
    """The rule as Shardy prints it, which also verifies it, without the prefix and suffix."""
    assert rule is not None
    with module.context:
        return str(rule.to_attr()).removeprefix("#sdy.op_sharding_rule<").removesuffix(", custom>")


@pytest.mark.parametrize(
    ("arguments", "op", "expected"),
    [
        (
            "%x: tensor<4x8xf32>",
            "%0 = chlo.erf %x : tensor<4x8xf32> -> tensor<4x8xf32>",
            "([i, j])->([i, j]) {i=4, j=8}",
        ),
        (
            "%x: tensor<4x8xf32>",
            '%0 = "chlo.broadcast_add"(%x, %x) '
            ": (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x8xf32>",
            "([i, j], [i, j])->([i, j]) {i=4, j=8}",
        ),
        (
            "%x: tensor<4x8xf32>",
            "%0:2 = chlo.top_k(%x, k = 2) : tensor<4x8xf32> -> (tensor<4x2xf32>, tensor<4x2xi32>)",
            "([i, j])->([i, j], [i, j]) {i=4, j=8} need_replication={j} blocked_propagation={j}",
        ),
        (
            "%x: tensor<4x8xf32>, %y: tensor<2xi32>",
            "%0:2 = stablehlo.optimization_barrier %x, %y : tensor<4x8xf32>, tensor<2xi32>",
            "([i, j], [k])->([i, j], [k]) {i=4, j=8, k=2}",
        ),
        ("", "%0 = stablehlo.iota dim = 0 : tensor<4x8xi32>", "([])->([i, j]) {i=4, j=8}"),
        ("", "%0 = stablehlo.constant dense<1.0> : tensor<4xf32>", "([])->([i]) {i=4}"),
        ("", "%0 = sdy.constant dense<1.0> : tensor<4xf32>", "([])->([i]) {i=4}"),
        (
            "%a: tensor<f32>, %n: tensor<2xi64>",
            "%0 = stablehlo.rng %a, %a, %n, distribution = UNIFORM "
            ": (tensor<f32>, tensor<f32>, tensor<2xi64>) -> tensor<4x8xf32>",
            "([], [], [i])->([j, k]) {i=2, j=4, k=8} need_replication={i, j, k}",
        ),
        (
            "%x: tensor<4x8xf32>, %w: tensor<3x8x5xf32>, %g: tensor<3xi32>",
            '%0 = "chlo.ragged_dot"(%x, %w, %g) {ragged_dot_dimension_numbers = '
            "#chlo.ragged_dot<lhs_batching_dimensions = [], rhs_batching_dimensions = [], "
            "lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [1], "
            "lhs_ragged_dimensions = [0], rhs_group_dimensions = [0]>} "
            ": (tensor<4x8xf32>, tensor<3x8x5xf32>, tensor<3xi32>) -> tensor<4x5xf32>",
            "([i, j], [k, j, l], [k])->([i, l]) {i=4, j=8, k=3, l=5} "
            "reduction={j} need_replication={i, k}",
        ),
    ],
    ids=lambda value: match[0] if (match := re.search(r"(?<== )[\w.\"]+", value)) else None,
)
def test_our_rules(arguments: str, op: str, expected: str):
    module = module_of(arguments, op)
    rule = rule_of_last(module)
    if expected.startswith("([])->"):  # a source has no operands at all
        expected = "()->" + expected.removeprefix("([])->")
    assert text_of(rule, module) == expected


def test_shardy_gives_the_others():
    module = module_of(
        "%x: tensor<4x8xf32>",
        "%0 = stablehlo.dot_general %x, %x, contracting_dims = [1] x [1] "
        ": (tensor<4x8xf32>, tensor<4x8xf32>) -> tensor<4x4xf32>",
    )
    rule = rule_of_last(module)
    assert rule is not None
    (contracted,) = rule.reduction
    assert rule.factor_sizes[contracted] == 8
    assert rule.operands[0][1] == rule.operands[1][1] == (contracted,)


def test_populated_leaves_the_module_as_it_was():
    module = module_of(
        "%x: tensor<4xf32>",
        "%0 = stablehlo.tanh %x : tensor<4xf32>",
        "%1 = stablehlo.custom_call @foo(%0) {sdy.sharding_rule = "
        "#sdy.op_sharding_rule<([i])->([i]) {i=4}, custom>} : (tensor<4xf32>) -> tensor<4xf32>",
    )
    before = str(module)
    with populated(module) as rules:
        assert [rules(op) is not None for op in walk(body(main_function(module)))] == [
            True,
            True,
            False,
        ]
        assert str(module) != before
    assert str(module) == before


def test_populated_removes_registered_rules():
    module = module_of("%x: tensor<4x8xf32>", CALL)
    before = str(module)
    register_sharding_rule("my.kernel", ShardingRule((4, 8), (((0,), (1,)),), (((0,), (1,)),)))
    try:
        with populated(module):
            assert str(module) != before
    finally:
        CUSTOM_CALL_RULES.pop("my.kernel")
    assert str(module) == before


def test_populated_cleans_up_after_an_error():
    module = module_of("%x: tensor<4xf32>", "%0 = stablehlo.tanh %x : tensor<4xf32>")
    before = str(module)
    with pytest.raises(KeyError), populated(module):
        raise KeyError
    assert str(module) == before


CALL = "%0 = stablehlo.custom_call @my.kernel(%x) : (tensor<4x8xf32>) -> tensor<4x8xf32>"


def test_unknown_custom_call_has_no_rule():
    assert rule_of_last(module_of("%x: tensor<4x8xf32>", CALL)) is None


def test_registered_function(target: str):
    def rows(op: ir.OpView) -> ShardingRule:
        sizes = tuple(ir.RankedTensorType(op.operands[0].type).shape)
        return ShardingRule(
            sizes, (((0,), (1,)),), (((0,), (1,)),), need_replication=frozenset({1})
        )

    register_sharding_rule(target, rows)
    module = module_of("%x: tensor<4x8xf32>", CALL)
    rule = rule_of_last(module)
    assert text_of(rule, module) == "([i, j])->([i, j]) {i=4, j=8} need_replication={j}"


def test_rule_on_the_op_comes_before_the_registered_one(target: str):
    register_sharding_rule(target, ShardingRule((4, 8), (((0,), (1,)),), (((0,), (1,)),)))
    rule = "{sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([k, j]) {i=4, j=8, k=4}, custom>}"
    module = module_of("%x: tensor<4x8xf32>", CALL.replace(" :", f" {rule} :", 1))
    expected = "([i, j])->([k, j]) {i=4, j=8, k=4} need_replication={i, k}"
    assert text_of(rule_of_last(module), module) == expected


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (
            ShardingRule((4,), (((0,),),), (((0,),),)),
            r"@my\.kernel is for operands of ranks \[1\], this call has ranks \[2\]",
        ),
        (
            ShardingRule((4, 8), (((0,), (1,)),), ()),
            r"@my\.kernel is for results of ranks \[\], this call has ranks \[2\]",
        ),
        (
            ShardingRule((4,), (((0,), (1,)),), (((0,), (1,)),)),
            r"@my\.kernel uses factor 1 in its operands but has 1 factor sizes",
        ),
        (
            ShardingRule((4, 16), (((0,), (1,)),), (((0,), (1,)),)),
            r"@my\.kernel gives dimension 1 of operand 0 a factor of size 16, and it has 8; make",
        ),
        (
            ShardingRule((0, 8), (((0,), (1,)),), (((0,), (1,)),)),
            r"@my\.kernel gives dimension 0 of operand 0 a factor of size 0, and it has 4",
        ),
    ],
)
def test_registered_rule_that_does_not_fit(target: str, rule: ShardingRule, message: str):
    register_sharding_rule(target, rule)
    module = module_of("%x: tensor<4x8xf32>", CALL)
    with pytest.raises(PassError, match=message):
        rule_of(body(main_function(module)).operations[0])


def test_sizes_of_a_rule_on_the_op_that_do_not_fit() -> None:
    rule = "{sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) {i=3, j=8}, custom>}"
    module = module_of("%x: tensor<4x8xf32>", CALL.replace(" :", f" {rule} :", 1))
    with pytest.raises(PassError, match="dimension 0 of operand 0 a factor of size 3, and it has"):
        rule_of(body(main_function(module)).operations[0])


def test_sizes_of_what_is_never_cut_may_differ() -> None:
    rule = (
        "{sdy.sharding_rule = #sdy.op_sharding_rule<([i, j])->([i, j]) {i=2, j=5} "
        "need_replication={j}, custom>}"
    )
    module = module_of("%x: tensor<4x8xf32>", CALL.replace(" :", f" {rule} :", 1))
    expected = "([i, j])->([i, j]) {i=2, j=5} need_replication={j}"
    assert text_of(rule_of_last(module), module) == expected


def test_loops_and_branches_have_no_rule():
    module = module_of(
        "%x: tensor<4xf32>, %p: tensor<i1>",
        "%0 = stablehlo.while(%y = %x) : tensor<4xf32> "
        "cond { stablehlo.return %p : tensor<i1> } do { stablehlo.return %y : tensor<4xf32> }",
    )
    assert rule_of_last(module) is None


def test_a_dimension_that_a_custom_call_needs_whole_is_never_cut():
    """jax's rule of a QR: the batch passes through, the matrix is read and written as a whole."""
    module = module_of(
        "%x: tensor<8x4x4xf32>",
        "%0:2 = stablehlo.custom_call @qr(%x) {sdy.sharding_rule = #sdy.op_sharding_rule<"
        "([i, j, k])->([i, l, m], [i, n]) {i=8, j=4, k=4, l=4, m=4, n=4}, custom>} "
        ": (tensor<8x4x4xf32>) -> (tensor<8x4x4xf32>, tensor<8x4xf32>)",
    )
    rule = rule_of_last(module)
    assert rule is not None
    assert rule.need_replication == {1, 2, 3, 4, 5}


def test_what_a_function_raises_is_named_at_its_call(target: str) -> None:
    def boom(op: ir.OpView) -> ShardingRule:
        raise KeyError("boom")

    module = module_of(
        "%x: tensor<4xf32>",
        f"%0 = stablehlo.custom_call @{target}(%x) : (tensor<4xf32>) -> tensor<4xf32>",
    )
    register_sharding_rule(target, boom)
    with pytest.raises(PassError, match=r"@my.kernel: KeyError: 'boom' \(.*test_rules.py:\d+\)"):
        rule_of_last(module)
    register_sharding_rule(target, lambda op: None)  # pyright: ignore[reportArgumentType]
    with pytest.raises(PassError, match="TypeError: what it returns is None"):
        rule_of_last(module)


def test_what_is_no_rule_is_refused(target: str) -> None:
    with pytest.raises(TypeError, match="rule is 7"):
        register_sharding_rule(target, 7)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="target is None"):
        register_sharding_rule(None, lambda op: op)  # pyright: ignore[reportArgumentType]
    assert target not in CUSTOM_CALL_RULES


def routine(target: str, types: str, config: str = "") -> str:
    number = types.split("->")[1].count("tensor")
    arguments = ", ".join(["%x"] * types.split("->")[0].count("tensor"))
    return (
        f'%0:{number} = "stablehlo.custom_call"({arguments}) <{{call_target_name = "{target}", '
        f'backend_config = "{config}"}}> : {types}'
    )


EIGH = "(tensor<2x8x4x4xf32>) -> (tensor<2x8x4x4xf32>, tensor<2x8x4xf32>, tensor<2x8xi32>)"


@pytest.mark.parametrize(
    "target", ["lapack_ssyevd_ffi", "cusolver_syevd_ffi", "hipsolver_syevd_ffi", "lapack_sgeev_ffi"]
)
def test_matrices_of_a_routine_stay_whole_and_their_batch_passes_through(target: str) -> None:
    module = module_of("%x: tensor<2x8x4x4xf32>", routine(target, EIGH))
    expected = (
        "([i, j, k, l])->([i, j, m, n], [i, j, o], [i, j]) "
        "{i=2, j=8, k=4, l=4, m=4, n=4, o=4} need_replication={k, l, m, n, o}"
    )
    assert text_of(rule_of_last(module), module) == expected


def test_a_routine_of_vectors() -> None:
    types = "(tensor<8x4xi32>) -> tensor<8x6xi32>"
    call = routine("cu_lu_pivots_to_permutation", types).replace("%0:1", "%0")
    module = module_of("%x: tensor<8x4xi32>", call)
    expected = "([i, j])->([i, k]) {i=8, j=4, k=6} need_replication={j, k}"
    assert text_of(rule_of_last(module), module) == expected


def test_older_calls_of_a_routine_hold_their_batch_size_and_have_no_rule() -> None:
    text = routine("cu_lu_pivots_to_permutation", "(tensor<8x4xi32>) -> tensor<8x6xi32>", "8, 4")
    assert rule_of_last(module_of("%x: tensor<8x4xi32>", text.replace("%0:1", "%0"))) is None
    other = routine("lapack_ssyevd", EIGH)
    assert rule_of_last(module_of("%x: tensor<2x8x4x4xf32>", other)) is None
