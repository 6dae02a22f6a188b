"""Collectives read off annotated fragments, against closed forms."""

from __future__ import annotations

import pytest

from alpa.dialects import parse
from alpa.passes import PassError
from alpa.passes.plan.predicted_collectives import Collective, predicted_collectives

X, Y = '"x"', '"y"'
DOT = "contracting_dims = [1] x [0] : (tensor<64x32xf32>, tensor<32x16xf32>) -> tensor<64x16xf32>"


def sharding(*dims: str, unreduced: str = "") -> str:
    inner = ", ".join(f"{{{dim}}}" for dim in dims)
    return f"<@mesh_0, [{inner}]{f', unreduced={{{unreduced}}}' if unreduced else ''}>"


def annotated(*dims: str, unreduced: str = "") -> str:
    per_value = f"#sdy.sharding_per_value<[{sharding(*dims, unreduced=unreduced)}]>"
    return f"{{sdy.sharding = {per_value}}}"


def tensor(shape: str, *dims: str, unreduced: str = "") -> str:
    given = sharding(*dims, unreduced=unreduced)
    return f'!mpmd.mesh_tensor<"mesh_0", tensor<{shape}>, sharding={given}>'


def fragment(ops: str, arguments: list[tuple[str, str]], returned: str, result: str) -> str:
    """A planned module of one fragment on a 2x4 mesh; arguments are (type, mesh tensor)."""
    outer = ", ".join(f"%a{i}: {outer}" for i, (_, outer) in enumerate(arguments))
    inner = ", ".join(f"%{i}: {inner}" for i, (inner, _) in enumerate(arguments))
    names = ", ".join(f"%a{i}" for i in range(len(arguments)))
    types = ", ".join(outer for _, outer in arguments)
    return f"""
    sdy.mesh @mesh_0 = <["x"=2, "y"=4]>
    func.func public @main({outer}) -> {result} attributes {{
        topology = #mpmd.topology<<"mesh_0" : <["x"=2, "y"=4]>>>,
        alpa.meshes = [{{name = "mesh_0", hosts = array<i64: 0>,
          devices = array<i64: 0, 1, 2, 3, 4, 5, 6, 7>, logical_shape = array<i64: 2, 4>}}],
        alpa.plan = {{num_micro_batches = 1 : i64, schedule = "gpipe", cluster = "cpu:1x8",
          predicted_step_seconds = 1.0 : f64, predicted_peak_bytes = array<i64: 0>}}}} {{
      %f = mpmd.fragment<mesh="mesh_0", origin=["layer_0"], stage=0> ({names})
          {{alpa.part = "forward"}} ({inner}) {{
        {ops}
        mpmd.return %r : {returned}
      }} : ({types}) -> {result}
      func.return %f : {result}
    }}"""


def found(text: str) -> list[tuple[str, tuple[str, ...], int, int]]:
    module = parse(text)
    (collectives,) = predicted_collectives(module)
    return [(c.kind, c.axes, c.bytes, c.count) for c in collectives]


def dot(result: str, after: str = "", returned: str = "") -> str:
    """x[64, 32] w[32, 16] with the contracted dimension on both axes."""
    first = "r" if not after else "d"
    ops = f"%{first} = stablehlo.dot_general %0, %1, {DOT}"
    ops = ops.replace(" : (", f" {result} : (")
    arguments = [
        ("tensor<64x32xf32>", tensor("64x32xf32", "", '"x", "y"')),
        ("tensor<32x16xf32>", tensor("32x16xf32", '"x", "y"', "")),
    ]
    return fragment(
        f"{ops}\n{after}", arguments, "tensor<64x16xf32>", returned or tensor("64x16xf32", "", "")
    )


FULL = 64 * 16 * 4


def test_a_split_sum_is_one_all_reduce_over_its_axes() -> None:
    assert found(dot(annotated("", ""))) == [("all-reduce", ("x", "y"), FULL, 1)]


def test_a_sum_that_a_constraint_cuts_is_reduce_scattered() -> None:
    cut = f"%r = sdy.sharding_constraint %d {sharding(X, Y)} : tensor<64x16xf32>"
    text = dot(annotated("", ""), cut, tensor("64x16xf32", X, Y))
    assert found(text) == [("reduce-scatter", ("x", "y"), FULL, 1)]


def test_axes_that_are_not_scattered_are_all_reduced_afterwards() -> None:
    cut = f"%r = sdy.sharding_constraint %d {sharding(Y, '')} : tensor<64x16xf32>"
    text = dot(annotated("", ""), cut, tensor("64x16xf32", Y, ""))
    assert found(text) == [
        ("all-reduce", ("x",), FULL // 4, 1),
        ("reduce-scatter", ("y",), FULL, 1),
    ]


def test_a_second_user_needs_the_whole_sum() -> None:
    after = f"""%c = sdy.sharding_constraint %d {sharding(X, Y)} : tensor<64x16xf32>
      %r = stablehlo.negate %d {annotated("", "")} : tensor<64x16xf32>"""
    assert found(dot(annotated("", ""), after)) == [("all-reduce", ("x", "y"), FULL, 1)]


def test_an_unreduced_sum_is_reduced_by_its_constraint() -> None:
    kept = annotated("", "", unreduced='"x", "y"')
    back = f"%r = sdy.sharding_constraint %d {sharding('', '')} : tensor<64x16xf32>"
    assert found(dot(kept, back)) == [("all-reduce", ("x", "y"), FULL, 1)]
    cut = f"%r = sdy.sharding_constraint %d {sharding(X, Y)} : tensor<64x16xf32>"
    text = dot(kept, cut, tensor("64x16xf32", X, Y))
    assert found(text) == [
        ("reduce-scatter", ("x",), FULL, 1),
        ("reduce-scatter", ("y",), FULL // 2, 1),
    ]


def test_an_unreduced_sum_that_stays_one_costs_nothing() -> None:
    kept = annotated("", "", unreduced='"x", "y"')
    after = f"%r = stablehlo.negate %d {kept} : tensor<64x16xf32>"
    assert found(dot(kept, after, tensor("64x16xf32", "", "", unreduced='"x", "y"'))) == []


def constraint(source: tuple[str, str], *targets: tuple[str, str]) -> str:
    ops, last = "", "0"
    for i, target in enumerate(targets):
        name = "r" if i + 1 == len(targets) else f"c{i}"
        ops += f"%{name} = sdy.sharding_constraint %{last} {sharding(*target)} : tensor<64x16xf32>"
        ops, last = f"{ops}\n", name
    inputs = [("tensor<64x16xf32>", tensor("64x16xf32", *source))]
    return fragment(ops, inputs, "tensor<64x16xf32>", tensor("64x16xf32", *targets[-1]))


RESHARDS = {
    "slice": (("", ""), (X, Y), []),
    "gather": ((X, ""), ("", ""), [("all-gather", ("x",), FULL, 1)]),
    "both axes of one dimension": (
        ('"x", "y"', ""),
        ("", ""),
        [("all-gather", ("x", "y"), FULL, 1)],
    ),
    "one dimension after the other": (
        (X, Y),
        ("", ""),
        [("all-gather", ("y",), FULL, 1), ("all-gather", ("x",), FULL // 4, 1)],
    ),
    "exchange": ((X, ""), ("", X), [("all-to-all", ("x",), FULL // 2, 1)]),
    "another order": (
        ('"x", "y"', ""),
        ('"y", "x"', ""),
        [("collective-permute", ("x", "y"), FULL // 8, 1)],
    ),
    "exchange of both axes": (
        ('"x", "y"', ""),
        ("", '"x", "y"'),
        [("all-to-all", ("x", "y"), FULL // 8, 1)],
    ),
}


@pytest.mark.parametrize(("source", "target", "expected"), RESHARDS.values(), ids=RESHARDS)
def test_reshards(
    source: tuple[str, str],
    target: tuple[str, str],
    expected: list[tuple[str, tuple[str, ...], int, int]],
) -> None:
    assert sorted(found(constraint(source, target))) == sorted(expected)


def test_a_result_in_another_layout_is_gathered() -> None:
    text = fragment(
        f"%r = stablehlo.negate %0 {annotated(X, '')} : tensor<64x16xf32>",
        [("tensor<64x16xf32>", tensor("64x16xf32", X, ""))],
        "tensor<64x16xf32>",
        tensor("64x16xf32", "", ""),
    )
    assert found(text) == [("all-gather", ("x",), FULL, 1)]


def test_an_operand_in_another_layout_is_gathered_once() -> None:
    text = fragment(
        f"""%n = stablehlo.negate %0 {annotated("", "")} : tensor<64x16xf32>
        %r = stablehlo.add %n, %0 {annotated("", "")} : tensor<64x16xf32>""",
        [("tensor<64x16xf32>", tensor("64x16xf32", X, ""))],
        "tensor<64x16xf32>",
        tensor("64x16xf32", "", ""),
    )
    assert found(text) == [("all-gather", ("x",), FULL, 1)]


def test_the_body_of_a_loop_counts_as_often_as_it_runs() -> None:
    replicated = annotated("", "")
    scalar = "{sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, []>]>}"
    pair = f"{{sdy.sharding = #sdy.sharding_per_value<[<@mesh_0, []>, {sharding('', '')}]>}}"
    text = fragment(
        f"""%zero = stablehlo.constant {scalar} dense<0> : tensor<i32>
        %one = stablehlo.constant {scalar} dense<1> : tensor<i32>
        %five = stablehlo.constant {scalar} dense<5> : tensor<i32>
        %i, %r = stablehlo.while(%j = %zero, %s = %0) : tensor<i32>, tensor<16x16xf32>
          attributes {pair}
        cond {{
          %c = stablehlo.compare LT, %j, %five {scalar}
            : (tensor<i32>, tensor<i32>) -> tensor<i1>
          stablehlo.return %c : tensor<i1>
        }} do {{
          %left = sdy.sharding_constraint %s {sharding("", X)} : tensor<16x16xf32>
          %right = sdy.sharding_constraint %s {sharding(X, "")} : tensor<16x16xf32>
          %d = stablehlo.dot_general %left, %right, contracting_dims = [1] x [0] {replicated}
            : (tensor<16x16xf32>, tensor<16x16xf32>) -> tensor<16x16xf32>
          %k = stablehlo.add %j, %one {scalar} : tensor<i32>
          stablehlo.return %k, %d : tensor<i32>, tensor<16x16xf32>
        }}""",
        [("tensor<16x16xf32>", tensor("16x16xf32", "", ""))],
        "tensor<16x16xf32>",
        tensor("16x16xf32", "", ""),
    )
    assert found(text) == [("all-reduce", ("x",), 16 * 16 * 4, 5)]


def test_an_axis_that_the_mesh_does_not_have() -> None:
    module = parse(constraint(('"y":(1)2', ""), ("", "")))
    with pytest.raises(PassError, match=r"a part of axis y on @mesh_0.*axes x, y"):
        predicted_collectives(module)


def test_bytes_on_a_ring_do_not_depend_on_how_a_sum_is_divided() -> None:
    def sent(kind: str, devices: int, size: int) -> float:
        return Collective(kind=kind, axes=(), devices=devices, bytes=size, count=3).sent  # type: ignore[arg-type]

    assert sent("all-reduce", 8, 800) == 3 * 2 * 700
    assert sent("all-reduce", 8, 800) == pytest.approx(
        sent("reduce-scatter", 2, 800) + sent("all-reduce", 4, 400) + sent("all-gather", 2, 800)
    )
    assert sent("collective-permute", 2, 800) == 2400
