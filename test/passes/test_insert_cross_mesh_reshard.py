from __future__ import annotations

from math import prod

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import alpa.passes
import alpa.runtime
from alpa.dialects import body, ir, main_function, mpmd, sdy, stablehlo
from alpa.dialects.attributes import Reshard
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.sharding import Sharding
from alpa.passes.cost.reshard import Layout, enumerate_layouts

AXES = {"mesh_0": (2, 2), "mesh_1": (2, 2)}


def text_of(layout: Layout) -> str:
    dims = ("{" + ", ".join(f'"axis{axis}"' for axis in axes) + "}" for axes in layout)
    return f"[{', '.join(dims)}]"


def crossing(shape: tuple[int, ...], source: Layout, target: Layout, *, returned: bool) -> str:
    """y = tanh(x) on mesh_0, z = y + y on mesh_1; y is returned as it lands, if wanted."""
    tensor = f"tensor<{'x'.join(map(str, (*shape, 'f32')))}>"

    def on(mesh: str, layout: Layout) -> str:
        return f'!mpmd.mesh_tensor<"{mesh}", {tensor}, sharding=<@{mesh}, {text_of(layout)}>>'

    def per_value(mesh: str, layout: Layout) -> str:
        return f"sdy.sharding = #sdy.sharding_per_value<[<@{mesh}, {text_of(layout)}>]>"

    here, there = on("mesh_0", source), on("mesh_1", target)
    results, values = (f"{there}, {there}", "%z, %l") if returned else (there, "%z")
    meshes = ", ".join(
        f"""{{name = "mesh_{i}", hosts = array<i64: {2 * i}, {2 * i + 1}>,
              devices = array<i64: {", ".join(str(4 * i + d) for d in range(4))}>,
              logical_shape = array<i64: 2, 2>}}"""
        for i in range(2)
    )
    axes = '<["axis0"=2, "axis1"=2]>'
    return f"""module {{
      sdy.mesh @mesh_0 = {axes}
      sdy.mesh @mesh_1 = {axes}
      func.func public @main(%x: {here}) -> ({results}) attributes {{
          topology = #mpmd.topology<<"mesh_0" : {axes}>, <"mesh_1" : {axes}>>,
          alpa.meshes = [{meshes}],
          alpa.plan = {{cluster = "cpu:4x2", num_micro_batches = 1 : i64, schedule = "gpipe",
            predicted_step_seconds = 0.0 : f64, predicted_peak_bytes = array<i64: 0, 0>}}}} {{
        %y = mpmd.fragment<mesh="mesh_0", origin=["layer_0"(0)], stage=0> (%x)
            {{alpa.part = "forward"}} (%a: {tensor}) {{
          %0 = stablehlo.tanh %a {{{per_value("mesh_0", source)}}} : {tensor}
          mpmd.return %0 : {tensor}
        }} : ({here}) -> {here}
        %l = mpmd.transfer %y : ({here}) -> {there}
        %z = mpmd.fragment<mesh="mesh_1", origin=["layer_1"(0)], stage=1> (%l)
            {{alpa.part = "forward"}} (%a: {tensor}) {{
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


def has_replicas(layout: Layout) -> bool:
    return len({axis for axes in layout for axis in axes}) < 2


def shards(layout: Layout) -> int:
    return 2 ** sum(map(len, layout))


SHAPES = st.sampled_from([(8, 12), (8,), (2, 3), (6, 2), (3, 5), (3,), (1, 4, 2)])


@settings(max_examples=80, deadline=None)
@given(shape=SHAPES, data=st.data(), returned=st.booleans())
def test_methods_landings_and_bytes(shape, data, returned):
    def divides(layout: Layout) -> bool:
        return all(n % 2 ** len(axes) == 0 for n, axes in zip(shape, layout, strict=True))

    layouts = [*filter(divides, enumerate_layouts(2, len(shape), any_order=True))]
    source, target = (data.draw(st.sampled_from(layouts)) for _ in range(2))
    _module, transfer, reader = reshard(crossing(shape, source, target, returned=returned))
    plan = Reshard.read(transfer)
    landed = MeshTensor.from_type(transfer.results[0].type).sharding
    assert plan is not None
    assert landed is not None
    landing = tuple(tuple(int(a[4:]) for a in axes) for axes in landed.axis_names)
    size = 4 * prod(shape)
    # The destination's two hosts hold nothing yet: each receives what its two devices want, once.
    received = plan.slow_bytes + plan.fast_bytes
    assert received == 4 * size // shards(landing)
    assert size <= plan.slow_bytes <= received
    first, *_ = body(reader).operations
    if plan.method == "local_all_gather":
        assert has_replicas(target)
        assert not has_replicas(landing)
        assert all(
            axes[: len(wanted)] == wanted for axes, wanted in zip(landing, target, strict=True)
        )
        assert all(n % 2 ** len(axes) == 0 for n, axes in zip(shape, landing, strict=True))
        assert plan.slow_bytes == size
        assert not returned
        assert isinstance(first, sdy.ShardingConstraintOp)
        assert text_of(target) in str(first)
        assert Sharding.from_attr(first.sharding).axis_names == tuple(
            tuple(f"axis{axis}" for axis in axes) for axes in target
        )
        assert body(reader).operations[1].operands[0] == first.results[0]
        return
    assert landing == target
    assert isinstance(first, stablehlo.AddOp)
    assert plan.method == ("broadcast" if has_replicas(target) else "send_recv")
    if plan.method == "broadcast" and not returned:
        finest = max(shards(fine) for fine in layouts if _refines(fine, target))
        assert finest < 4


def _refines(fine: Layout, coarse: Layout) -> bool:
    return all(f[: len(c)] == c for f, c in zip(fine, coarse, strict=True))


@pytest.mark.parametrize("returned", [False, True])
@pytest.mark.parametrize(
    ("source", "target"),
    [
        (((0,), (1,)), ((1,), (0,))),
        (((0, 1), ()), ((), (1,))),
        (((), ()), ((), ())),
        (((1, 0), ()), ((), (0, 1))),
    ],
)
def test_what_lands_is_what_was_sent(source, target, returned):
    module, _, _ = reshard(crossing((8, 12), source, target, returned=returned))
    x = np.random.default_rng(0).normal(size=(8, 12)).astype(np.float32)
    first, *others = alpa.runtime.load(str(module))(x)
    np.testing.assert_allclose(np.asarray(first), 2 * np.tanh(x), rtol=1e-6)
    for other in others:
        np.testing.assert_allclose(np.asarray(other), np.tanh(x), rtol=1e-6)


def test_running_it_twice_gathers_once():
    module, _, _ = reshard(crossing((8, 12), ((0,), ()), ((), ()), returned=False))
    once = str(module)
    assert once.count("sdy.sharding_constraint") == 1
    assert "local_all_gather" in once
    again, _, _ = reshard(once)
    assert str(again).count("sdy.sharding_constraint") == 1
