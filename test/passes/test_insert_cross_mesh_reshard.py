from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import alpa.passes
import alpa.runtime
from alpa.dialects import body, ir, main_function, mpmd, sdy, stablehlo
from alpa.dialects.attributes import SECONDS, read_float
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.plan import Plan, Reshard
from alpa.dialects.sharding import Sharding
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.cost.reshard import Layout, ReshardTable, enumerate_layouts, only_cuts
from alpa.passes.solve.transfers.cross_mesh import Problem, solve
from alpa.passes.solve.transfers.tiles import TiledMesh

AXES = {"mesh_0": ("axis0", "axis1"), "mesh_1": ("rows", "model")}
CLUSTER = Cluster.parse("cpu:4x2")


def names_of(mesh: str, layout: Layout) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(AXES[mesh][axis] for axis in axes) for axes in layout)


def text_of(mesh: str, layout: Layout) -> str:
    names = names_of(mesh, layout)
    dims = ("{" + ", ".join(f'"{axis}"' for axis in axes) + "}" for axes in names)
    return f"[{', '.join(dims)}]"


def crossing(shape: tuple[int, ...], source: Layout, target: Layout, *, returned: bool) -> str:
    """y = tanh(x) on mesh_0, z = y + y on mesh_1; optionally y is returned where it lands."""
    tensor = f"tensor<{'x'.join(map(str, (*shape, 'f32')))}>"

    def on(mesh: str, layout: Layout) -> str:
        return f'!mpmd.mesh_tensor<"{mesh}", {tensor}, sharding=<@{mesh}, {text_of(mesh, layout)}>>'

    def per_value(mesh: str, layout: Layout) -> str:
        return f"sdy.sharding = #sdy.sharding_per_value<[<@{mesh}, {text_of(mesh, layout)}>]>"

    here, there = on("mesh_0", source), on("mesh_1", target)
    results, values = (f"{there}, {there}", "%z, %l") if returned else (there, "%z")
    meshes = ", ".join(
        f"""{{name = "mesh_{i}", hosts = array<i64: {2 * i}, {2 * i + 1}>,
              devices = array<i64: {", ".join(str(4 * i + d) for d in range(4))}>,
              logical_shape = array<i64: 2, 2>}}"""
        for i in range(2)
    )
    axes = {name: f'<["{one}"=2, "{other}"=2]>' for name, (one, other) in AXES.items()}
    return f"""module {{
      sdy.mesh @mesh_0 = {axes["mesh_0"]}
      sdy.mesh @mesh_1 = {axes["mesh_1"]}
      func.func public @main(%x: {here}) -> ({results}) attributes {{
          topology = #mpmd.topology<<"mesh_0" : {axes["mesh_0"]}>,
                                   <"mesh_1" : {axes["mesh_1"]}>>,
          alpa.meshes = [{meshes}],
          alpa.plan = {{cluster = "cpu:4x2", num_micro_batches = 1 : i64, schedule = "gpipe",
            predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}}}} {{
        %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)], stage=0> (%x)
            {{alpa.part = "forward", alpa.seconds = 1.0 : f64}} (%a: {tensor}) {{
          %0 = stablehlo.tanh %a {{{per_value("mesh_0", source)}}} : {tensor}
          mpmd.return %0 : {tensor}
        }} : ({here}) -> {here}
        %l = mpmd.transfer %y : ({here}) -> {there}
        %z = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(0)], stage=1> (%l)
            {{alpa.part = "forward", alpa.seconds = 1.0 : f64}} (%a: {tensor}) {{
          %0 = stablehlo.add %a, %a {{{per_value("mesh_1", target)}}} : {tensor}
          mpmd.return %0 : {tensor}
        }} : ({there}) -> {there}
        return {values} : {results}
      }}
    }}"""


def reshard(text: str) -> tuple[ir.Module, mpmd.TransferOp, mpmd.FragmentOp]:
    module = alpa.passes.run(text, "insert-cross-mesh-reshard")
    ops = list(body(main_function(module)).operations)
    return module, ops[1], ops[2]


SHAPES = st.sampled_from([(8, 12), (8,), (2, 3), (6, 2), (3, 5), (3,), (1, 4, 2)])


@settings(max_examples=80, deadline=None)
@given(shape=SHAPES, data=st.data(), returned=st.booleans())
def test_methods_landings_and_bytes(shape, data, returned):
    def divides(layout: Layout) -> bool:
        return all(n % 2 ** len(axes) == 0 for n, axes in zip(shape, layout, strict=True))

    layouts = [*filter(divides, enumerate_layouts(2, len(shape), any_order=True))]
    source, target = (data.draw(st.sampled_from(layouts)) for _ in range(2))
    module, transfer, reader = reshard(crossing(shape, source, target, returned=returned))
    best = solve(
        Problem(
            shape=shape,
            itemsize=4,
            source=TiledMesh.of(CLUSTER, (0, 1, 2, 3), (2, 2), source),
            target=TiledMesh.of(CLUSTER, (4, 5, 6, 7), (2, 2), target),
            slow=CLUSTER.inter_host,
            fast=CLUSTER.intra_host,
            readers=0 if returned else 1,
            landings=landings(shape, source, target),
        )
    )
    moved = best.transfers
    assert Reshard.read(transfer) == Reshard(
        method=best.method, slow_bytes=moved.slow_bytes, fast_bytes=moved.fast_bytes
    )
    assert read_float(transfer, SECONDS) == moved.seconds
    assert read_float(reader, SECONDS) == 1 + best.gathers.seconds
    plan = Plan.read(main_function(module))
    assert plan is not None
    assert plan.predicted_step_seconds == pytest.approx(2 + best.total.seconds)
    # The destination's two hosts hold nothing yet, and need all that they read.
    size = 4 * prod(shape)
    assert best.total.slow_bytes == (size if split_by_hosts(target) else 2 * size)
    landed = MeshTensor.from_type(transfer.results[0].type).sharding
    assert landed is not None
    assert landed.axis_names == names_of("mesh_1", best.landing)
    first, second, *_ = body(reader).operations
    if best.method not in ("local_all_gather", "local_reshard"):
        assert best.landing == target
        assert isinstance(first, stablehlo.AddOp)
        return
    assert isinstance(first, sdy.ShardingConstraintOp)
    assert Sharding.from_attr(first.sharding).axis_names == names_of("mesh_1", target)
    assert second.operands[0] == first.results[0]


def landings(
    shape: tuple[int, ...], source: Layout, target: Layout
) -> tuple[tuple[Layout, float], ...]:
    """The source's layout, if the destination reshards it inside its hosts, along axis 1 alone."""
    mesh = LogicalMesh.of(CLUSTER, 2, 2, (2, 2))
    steps = ReshardTable(mesh, len(shape)).path(source, target, shape, 4)
    kinds = {step.kind for step in steps}
    if kinds <= {"slice"} or only_cuts(target, source) or any(0 in step.axes for step in steps):
        return ()
    return ((source, sum(step.seconds for step in steps)),)


def split_by_hosts(layout: Layout) -> bool:
    """Whether the two hosts of a mesh, along axis 0, need different parts."""
    return any(0 in axes for axes in layout)


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (((0,), (1,)), ((1,), (0,))),
        (((0, 1), ()), ((), (1,))),
        (((), ()), ((), ())),
        (((1, 0), ()), ((), (0, 1))),
        (((0,), (1,)), ((0, 1), ())),
    ],
)
def test_received_values_equal_sent_values(source, target, returned):
    module, _, _ = reshard(crossing((8, 12), source, target, returned=returned))
    x = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    first, *others = alpa.runtime.load(str(module))(x)
    np.testing.assert_allclose(np.asarray(first), 2 * np.tanh(x), rtol=1e-6)
    for other in others:
        np.testing.assert_allclose(np.asarray(other), np.tanh(x), rtol=1e-6)


def test_a_tensor_lands_as_it_lies_and_is_resharded_inside_the_hosts():
    """Each device gets one message, not two of other hosts."""
    source, target = ((0,), (1,)), ((0, 1), ())
    text = crossing((8, 12), source, target, returned=False)
    module, transfer, reader = reshard(text)
    assert 'method = "local_reshard"' in str(module)
    landed = MeshTensor.from_type(transfer.results[0].type).sharding
    assert landed is not None
    assert landed.axis_names == names_of("mesh_1", source)
    constraint, *_ = body(reader).operations
    assert Sharding.from_attr(constraint.sharding).axis_names == names_of("mesh_1", target)
    # Between hosts it would need more messages inside the destination, too.
    other, _, _ = reshard(crossing((8, 12), ((1,), (0,)), target, returned=False))
    assert 'method = "send_recv"' in str(other)
    kept, _, _ = reshard(crossing((8, 12), source, target, returned=True))
    assert 'method = "send_recv"' in str(kept)


def test_running_it_twice_gathers_once():
    module, _, _ = reshard(crossing((8, 12), ((0,), ()), ((), ()), returned=False))
    once = str(module)
    assert once.count("sdy.sharding_constraint") == 1
    assert "local_all_gather" in once
    again, _, _ = reshard(once)
    assert str(again) == once
