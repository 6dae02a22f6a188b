"""The collectives of a change of layout, and that XLA runs the written ones."""

from __future__ import annotations

import jax
import pytest

from alpa.dialects import main_function, parse, sdy, walk
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.device import Link
from alpa.passes.cost.reshard import Layout, ReshardTable
from alpa.passes.sharding.reshard_steps import exchanges
from alpa.passes.write_reshard_steps import write_steps
from alpa.runtime.truth import truth

LINKS = (Link(bandwidth=1.0, latency=0.0),) * 2
MESH = LogicalMesh(axis_names=("x", "y"), sizes=(2, 4), links=LINKS)
BYTES = 16 * 32 * 64 * 4

CASES: dict[str, tuple[Layout, Layout, list[tuple[str, tuple[int, ...], int]]]] = {
    "equal": (((0,), (), ()), ((0,), (), ()), []),
    "a cut": (((0,), (), ()), ((0,), (1,), ()), []),
    "one gather for one dimension": (((0, 1), (), ()), ((), (), ()), [("all-gather", (0, 1), 1)]),
    "one exchange for two axes": (
        ((0, 1), (), ()),
        ((), (0, 1), ()),
        [("all-to-all", (0, 1), 8)],
    ),
    "two exchanges": (
        ((0, 1), (), ()),
        ((), (0,), (1,)),
        [("all-to-all", (1,), 8), ("all-to-all", (0,), 8)],
    ),
    "another order": (
        ((0, 1), (), ()),
        ((1, 0), (), ()),
        [("collective-permute", (0, 1), 8)],
    ),
    "another order, then an exchange": (
        ((0, 1), (), ()),
        ((1,), (0,), ()),
        [("collective-permute", (0, 1), 8), ("all-to-all", (0,), 8)],
    ),
    "an exchange, then a gather": (
        ((0, 1), (), ()),
        ((), (1,), ()),
        [("all-to-all", (1,), 8), ("all-gather", (0,), 4)],
    ),
}


@pytest.mark.parametrize(("source", "target", "expected"), CASES.values(), ids=CASES)
def test_collectives(
    source: Layout, target: Layout, expected: list[tuple[str, tuple[int, ...], int]]
) -> None:
    steps = exchanges(ReshardTable(MESH, 3), source, target, (16, 32, 64), 4)
    assert [(s.kind, s.axes, BYTES // s.bytes) for s in steps] == expected
    if steps:
        assert steps[-1].layout == target


def text(layout: Layout) -> str:
    dims = (", ".join(f'"{"xy"[a]}"' for a in axes) for axes in layout)
    return f"<@m, [{', '.join(f'{{{dim}}}' for dim in dims)}]>"


def written(source: Layout, target: Layout) -> str:
    return f"""sdy.mesh @m = <["x"=2, "y"=4]>
    func.func public @main(
        %a: tensor<16x32x64xf32> {{sdy.sharding = #sdy.sharding{text(source)}}})
        -> (tensor<16x32x64xf32> {{sdy.sharding = #sdy.sharding{text(target)}}}) {{
      %0 = sdy.sharding_constraint %a {text(target)} : tensor<16x32x64xf32>
      %1 = stablehlo.tanh %0 : tensor<16x32x64xf32>
      return %1 : tensor<16x32x64xf32>
    }}"""


@pytest.mark.parametrize("case", CASES)
def test_xla_runs_what_is_written(case: str) -> None:
    source, target, expected = CASES[case]
    module = parse(written(source, target))
    with module.context:
        write_steps(main_function(module), MESH)
    ops = [op for op in walk(module.body) if isinstance(op, sdy.ShardingConstraintOp)]
    assert len(ops) == max(1, len(expected))
    real = truth(module, jax.devices()).collectives
    found = sorted((c.kind, BYTES // c.bytes) for c in real for _ in range(c.count))
    assert found == sorted((kind, part) for kind, _, part in expected)


def test_xla_replicates_without_constraints_on_the_path() -> None:
    """The case that needs `write_steps`. When XLA handles it, this test and the pass may go."""
    module = parse(written(*CASES["two exchanges"][:2]))
    (gather,) = truth(module, jax.devices()).collectives
    assert (gather.kind, gather.bytes) == ("all-gather", BYTES)


UNEVEN: list[tuple[tuple[int, ...], tuple[int, ...], Layout, Layout]] = [
    ((7,), (10, 30), ((0,), ()), ((), (0,))),
    ((7,), (10, 14), ((0,), ()), ((), (0,))),
    ((7,), (14, 10), ((0,), ()), ((), (0,))),
    ((2, 3), (8, 10), ((0,), (1,)), ((0,), ())),
    ((2, 3), (24, 10), ((0,), (1,)), ((0, 1), ())),
    ((2, 3), (24, 10), ((0,), (1,)), ((1,), (0,))),
    ((2, 3), (10, 10), ((), ()), ((1,), (0,))),
    ((2, 3), (10, 10), ((0,), (1,)), ((1,), (0,))),
    ((2, 3), (10, 8, 4), ((0,), (1,), ()), ((0,), (), (1,))),
    ((2, 3), (7, 8, 4), ((0,), (1,), ()), ((1,), (0,), ())),
    ((2, 3), (7, 7), ((0,), (1,)), ((), (0,))),
    ((2, 3), (7, 6), ((1,), ()), ((), (0, 1))),
    ((2, 3), (12, 10), ((0, 1), ()), ((), (1,))),
]


@pytest.mark.parametrize(("sizes", "shape", "source", "target"), UNEVEN)
def test_xla_pads_uneven_shards_as_predicted(
    sizes: tuple[int, ...], shape: tuple[int, ...], source: Layout, target: Layout
) -> None:
    """To the source, from there to the target, and from there to replicas."""
    mesh = LogicalMesh(axis_names=("x", "y")[: len(sizes)], sizes=sizes, links=LINKS[: len(sizes)])
    whole: Layout = ((),) * len(shape)
    type_ = f"tensor<{'x'.join(map(str, shape))}xf32>"
    axes = ", ".join(f'"{name}"={size}' for name, size in zip("xy", sizes, strict=False))
    module = parse(f"""sdy.mesh @m = <[{axes}]>
    func.func public @main(%a: {type_}) -> {type_} {{
      %0 = sdy.sharding_constraint %a {text(source)} : {type_}
      %1 = stablehlo.tanh %0 : {type_}
      %2 = sdy.sharding_constraint %1 {text(source)} : {type_}
      %3 = sdy.sharding_constraint %2 {text(target)} : {type_}
      %4 = stablehlo.cosine %3 : {type_}
      %5 = sdy.sharding_constraint %4 {text(target)} : {type_}
      %6 = sdy.sharding_constraint %5 {text(whole)} : {type_}
      return %6 : {type_}
    }}""")
    with module.context:
        write_steps(main_function(module), mesh)
    table = ReshardTable(mesh, len(shape))
    predicted = [
        (step.kind, step.bytes)
        for before, after in ((source, target), (target, whole))
        for step in exchanges(table, before, after, shape, 4)
    ]
    real = truth(module, jax.devices()[: mesh.num_devices]).collectives
    assert sorted(predicted) == sorted((c.kind, c.bytes) for c in real for _ in range(c.count))
