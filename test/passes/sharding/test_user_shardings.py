"""The shardings that a program carries are kept, and it computes the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import alpa.passes
import alpa.runtime
from alpa.dialects import body, ir, main_function, parse, sdy, walk
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.sharding import AxisRef, Sharding
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.pipelines.diagnostics import format_error
from alpa.passes.sharding.user_shardings import layouts_within
from alpa.runtime.reference import compare, random_arguments, run_unplanned

AXES = ("a", "b")
PIPELINE = "alpa{cluster=cpu:1x4 num-layers=1}"
STEP = """
module {{
  sdy.mesh @mesh = <["a"=2, "b"=2]>
  func.func public @main(
      %w: tensor<16x8xf32> {{alpa.role = "state", {0}tf.aliasing_output = 0 : i32}},
      %x: tensor<8x16xf32> {{{1}alpa.role = "batch"}})
      -> (tensor<16x8xf32> {{{2}alpa.result = "state:0"}},
          tensor<8x8xf32> {{{3}alpa.result = "concat:0"}}) {{
    %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<8x16xf32>, tensor<16x8xf32>) -> tensor<8x8xf32>
    %c = {4}%y {5}: {6}
    %t = stablehlo.tanh %c : tensor<8x8xf32>
    %g = stablehlo.dot_general %x, %t, contracting_dims = [0] x [0]
      : (tensor<8x16xf32>, tensor<8x8xf32>) -> tensor<16x8xf32>
    %n = stablehlo.subtract %w, %g : tensor<16x8xf32>
    return %n, %t : tensor<16x8xf32>, tensor<8x8xf32>
  }}
}}"""


TWO_LAYERS = """
module {{
  sdy.mesh @mesh = <["a"=2, "b"=2]>
  func.func public @main(%w: tensor<8x8xf32> {0}, %x: tensor<8x8xf32> {1})
      -> (tensor<8x8xf32> {2}) {{
    %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
      : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %c = sdy.sharding_constraint %y {3} : tensor<8x8xf32>
    %t = stablehlo.tanh %c : tensor<8x8xf32>
    %z = stablehlo.dot_general %t, %w, contracting_dims = [1] x [0]
      : (tensor<8x8xf32>, tensor<8x8xf32>) -> tensor<8x8xf32>
    %d = sdy.sharding_constraint %z {3} : tensor<8x8xf32>
    %u = stablehlo.cosine %d : tensor<8x8xf32>
    return %u : tensor<8x8xf32>
  }}
}}"""


@st.composite
def shardings(draw: st.DrawFn) -> Sharding:
    """Of a matrix: each axis on one dimension, in either order, banned, or left to the search."""
    dims: list[tuple[AxisRef, ...]] = [(), ()]
    banned: list[AxisRef] = []
    for axis in draw(st.permutations(AXES)):
        place = draw(st.sampled_from([0, 1, "banned", "free"]))
        if isinstance(place, int):
            dims[place] = (*dims[place], AxisRef(axis))
        elif place == "banned":
            banned.append(AxisRef(axis))
    open_dims = frozenset(draw(st.sets(st.sampled_from([0, 1]))))
    order = {AxisRef(axis): n for n, axis in enumerate(AXES)}
    return Sharding("mesh", tuple(dims), open_dims, tuple(sorted(banned, key=order.__getitem__)))


def admits(wanted: Sharding, found: Sharding) -> bool:
    """Whether a sharding fixes a layout, restated independently."""
    for d, (axes, given_) in enumerate(zip(found.dims, wanted.dims, strict=True)):
        if axes[: len(given_)] != given_ or (d not in wanted.open_dims and axes != given_):
            return False
    return not {a for dim in found.dims for a in dim} & {*wanted.replicated}


def planned_and_equal(text: str, pipeline: str = PIPELINE) -> ir.Module:
    """The planned module, whose run equals the program's own."""
    module = parse(text)
    arguments = random_arguments(module, seed=0)
    planned = alpa.passes.run(text, pipeline)
    found = alpa.runtime.load(str(planned), executor="local")(*arguments)
    expected = run_unplanned(module, arguments)
    assert all(one.ok for one in compare(found, expected))
    return planned


@settings(max_examples=12)
@given(shardings(), shardings(), shardings(), shardings())
def test_the_plan_keeps_them_all_and_computes_the_same(w, x, y, c):
    with parse("module {}").context:
        w_, x_, y_ = (f"sdy.sharding = {s.to_attr()}, " for s in (w, x, y))
        constraint = str(c.to_attr()).removeprefix("#sdy.sharding")
    text = STEP.format(
        w_, x_, "", y_, "sdy.sharding_constraint ", f"{constraint} ", "tensor<8x8xf32>"
    )
    planned = planned_and_equal(text)
    main = main_function(planned)
    kept = [MeshTensor.from_type(type_).sharding for type_ in main.type.inputs]
    kept += [MeshTensor.from_type(main.type.results[1]).sharding]
    for wanted, found in zip((w, x, y), kept, strict=True):
        assert found is not None
        assert admits(wanted, found), (wanted, found)
    constraints = [
        Sharding.from_attr(op.attributes["sharding"])
        for op in walk(body(main))
        if isinstance(op, sdy.ShardingConstraintOp)
    ]
    assert any(admits(c, found) for found in constraints)


@settings(max_examples=8)
@given(shardings(), shardings(), shardings(), shardings())
def test_stages_keep_them_all_and_compute_the_same(w, x, y, c):
    with parse("module {}").context:
        w_, x_, y_ = (f"{{sdy.sharding = {s.to_attr()}}}" for s in (w, x, y))
        constraint = str(c.to_attr()).removeprefix("#sdy.sharding")
    text = TWO_LAYERS.format(w_, x_, y_, constraint)
    planned = planned_and_equal(text, "alpa{cluster=cpu:1x8 num-layers=2 num-stages=2}")
    main = main_function(planned)
    types = [MeshTensor.from_type(type_) for type_ in (*main.type.inputs, main.type.results[0])]
    assert [it.mesh for it in types] == ["mesh_0", "mesh_1", "mesh_0", "mesh_1"]
    for wanted, it in zip((w, w, x, y), types, strict=True):
        assert it.sharding is not None
        assert admits(wanted, it.sharding), (wanted, it.sharding)
    constraints = {
        sharding
        for op in walk(body(main))
        if isinstance(op, sdy.ShardingConstraintOp)
        for sharding in [Sharding.from_attr(op.attributes["sharding"])]
    }
    for name in ("mesh_0", "mesh_1"):
        assert any(it.mesh == name and admits(c, it) for it in constraints)


def test_the_layouts_within_an_open_sharding():
    wanted = Sharding("m", ((AxisRef("b"),), ()), frozenset({0}))
    layouts = [((), ()), ((1,), ()), ((1, 0), ()), ((0, 1), ()), ((1,), (0,))]
    mesh = LogicalMesh.of(Cluster.parse("cpu:1x4"), 1, 4, (2, 2), AXES)
    assert layouts_within(wanted, layouts, mesh) == (((1,), ()), ((1, 0), ()))


def test_an_axis_of_one_device_is_in_no_layout():
    wanted = Sharding("m", ((AxisRef("b"),), (AxisRef("a"),)))
    mesh = LogicalMesh.of(Cluster.parse("cpu:1x4"), 1, 4, (4, 1), AXES)
    assert layouts_within(wanted, [], mesh) == (((), (0,)),)


def test_a_result_gives_its_layout_to_the_state_that_it_is():
    mine = 'sdy.sharding = #sdy.sharding<@mesh, [{}, {"b"}]>, '
    text = STEP.format("", "", mine, "", "stablehlo.negate ", "", "tensor<8x8xf32>")
    sharding = MeshTensor.from_type(main_function(planned_and_equal(text)).type.inputs[0]).sharding
    assert sharding is not None
    assert sharding.axis_names == ((), ("b",))


def test_the_cluster_has_a_mesh_for_each_stage():
    mine = 'sdy.sharding = #sdy.sharding<@mesh, [{}, {"b"}]>, '
    text = STEP.format(mine, "", "", "", "stablehlo.negate ", "", "tensor<8x8xf32>")
    with pytest.raises(ir.MLIRError, match="for each of 2 stages, and the cluster has 4"):
        alpa.passes.run(text, "alpa{cluster=cpu:1x4 num-layers=2 num-stages=2}")


@pytest.mark.parametrize("intra", ["data-parallel", "zero3", "heuristic", "megatron", "none"])
def test_baselines_keep_them_too(intra):
    mine = 'sdy.sharding = #sdy.sharding<@mesh, [{}, {"b"}]>, '
    text = STEP.format(mine, "", "", "", "stablehlo.negate ", "", "tensor<8x8xf32>")
    planned = planned_and_equal(text, f"alpa{{cluster=cpu:1x4 num-layers=1 intra={intra}}}")
    sharding = MeshTensor.from_type(main_function(planned).type.inputs[0]).sharding
    assert sharding is not None
    assert sharding.axis_names == ((), ("b",))


def mesh() -> jax.sharding.Mesh:
    return jax.make_mesh(
        (2, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2, devices=jax.devices()[:4]
    )


def by_shards(w: jax.Array, x: jax.Array) -> jax.Array:
    """A matrix product written by hand, a position on the mesh in it; then a constraint."""

    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.psum(x @ w, "model") * (1 + jax.lax.axis_index("data"))

    specs = (PartitionSpec("model", None), PartitionSpec("data", "model"))
    y = jax.shard_map(local, mesh=mesh(), in_specs=specs, out_specs=PartitionSpec("data"))(w, x)
    y = jax.lax.with_sharding_constraint(y, NamedSharding(mesh(), PartitionSpec("data", "model")))
    return jnp.tanh(y).sum(0)


def by_shards_of_one_axis(w: jax.Array, x: jax.Array) -> jax.Array:
    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.psum(jnp.sin(x) @ w, "model")

    specs = (PartitionSpec("model", None), PartitionSpec(None, "model"))
    one = jax.shard_map(
        local, mesh=mesh(), in_specs=specs, out_specs=PartitionSpec(), axis_names={"model"}
    )
    return one(w, jnp.cos(x)).sum(0)


def gradients(function):
    return jax.value_and_grad(lambda w, x: (function(w, x) ** 2).sum(), argnums=(0, 1))


@pytest.mark.parametrize("function", [by_shards, by_shards_of_one_axis])
@pytest.mark.parametrize("transformed", [lambda f: f, gradients], ids=["forward", "gradients"])
def test_shard_map(function, transformed):
    arguments = (np.ones((8, 16), np.float32), np.arange(32, dtype=np.float32).reshape(4, 8) / 32)
    step = jax.jit(transformed(function))
    text = step.lower(*arguments).as_text()
    assert "sdy.manual_computation" in text
    planned_and_equal(text)
    found = alpa.runtime.load(str(alpa.passes.run(text, PIPELINE)), executor="local")(*arguments)
    assert all(one.ok for one in compare(found, jax.tree.leaves(step(*arguments))))


def test_a_mesh_of_three_axes():
    """FSDP over two axes and tensor parallelism over the third, as JAX users write it."""
    weights = 'sdy.sharding = #sdy.sharding<@mesh, [{"a", "b"}, {"c"}]>, '
    batch = 'sdy.sharding = #sdy.sharding<@mesh, [{"a", "b"}, {?}]>, '
    text = STEP.format(weights, batch, "", "", "stablehlo.negate ", "", "tensor<8x8xf32>")
    text = text.replace('<["a"=2, "b"=2]>', '<["a"=2, "b"=2, "c"=2]>')
    planned = planned_and_equal(text, "alpa{cluster=cpu:2x4 num-layers=1}")
    kept = [MeshTensor.from_type(type_).sharding for type_ in main_function(planned).type.inputs]
    assert kept[0] is not None
    assert kept[0].axis_names == (("a", "b"), ("c",))
    assert kept[1] is not None
    assert kept[1].axis_names[0] == ("a", "b")


def asked(*axes: str | tuple[str, ...] | None) -> NamedSharding:
    return NamedSharding(mesh(), PartitionSpec(*axes))


DATA, MODEL = asked("data"), asked(None, "model")
APART = {
    "a result": (lambda x, y: x * y, (DATA, DATA), MODEL, ()),
    "a returned argument": (lambda x, y: (x, y, x), (DATA, MODEL), (MODEL, MODEL, DATA), ()),
    "a value twice": (lambda x, y: (x + y,) * 2, (None, None), (DATA, MODEL), ()),
    # JAX donates x's buffer to the first result of its type and sharding.
    "another state": (lambda x, y: (y * 1, x * 2), (DATA, MODEL), (DATA, MODEL), (0, 1)),
}


@pytest.mark.parametrize("case", APART)
def test_arguments_and_results_lie_where_they_are_asked_to(case: str):
    function, inputs, outputs, donated = APART[case]
    step = jax.jit(function, donate_argnums=donated, in_shardings=inputs, out_shardings=outputs)
    x = np.arange(16, dtype=np.float32).reshape(4, 4)
    planned = planned_and_equal(step.lower(x, x).as_text())
    for wanted, types in (
        (inputs, main_function(planned).type.inputs),
        (jax.tree.leaves(outputs), main_function(planned).type.results),
    ):
        for one, type_ in zip(wanted, types, strict=True):
            found = MeshTensor.from_type(type_).sharding
            if one is not None:
                assert found is not None
                assert found.axis_names == tuple((axis,) if axis else () for axis in padded(one))


def padded(sharding: NamedSharding) -> tuple[str | None, ...]:
    return (*sharding.spec, *[None] * (2 - len(sharding.spec)))


def test_an_axis_of_one_device_makes_no_other_layout():
    state, new = '[{"a"}, {}]', '[{"a"}, {"c"}]'
    text = STEP.format(
        f"sdy.sharding = #sdy.sharding<@mesh, {state}>, ",
        "",
        f"sdy.sharding = #sdy.sharding<@mesh, {new}>, ",
        "",
        "stablehlo.negate ",
        "",
        "tensor<8x8xf32>",
    ).replace('<["a"=2, "b"=2]>', '<["a"=2, "b"=2, "c"=1]>')
    planned_and_equal(text)


def test_an_error_at_a_mesh_of_jax_has_a_place():
    """JAX gives meshes and functions no location; the error takes an op's instead."""
    step = jax.jit(lambda x: jax.lax.with_sharding_constraint(x + 1, DATA))
    text = step.lower(np.ones((4, 4), np.float32)).as_text(debug_info=True)
    with pytest.raises(ir.MLIRError) as raised:
        alpa.passes.run(text, "alpa{cluster=cpu:1x8}")
    place, _, message = format_error(raised.value).partition(": error: ")
    assert message.startswith("the program's shardings are over @mesh, which has 4 device(s)")
    assert place.rpartition("/")[2].startswith("test_user_shardings.py:")


def test_a_shard_map_over_one_device_runs_on_several():
    """JAX writes only the body, where each device would read its own number."""
    one = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])

    def local(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x @ x, "x") + jax.lax.axis_index("x")

    spec = PartitionSpec("x")
    step = jax.jit(jax.shard_map(local, mesh=one, in_specs=spec, out_specs=spec))
    text = step.lower(np.ones((8, 8), np.float32)).as_text()
    assert "stablehlo.partition_id" in text
    planned_and_equal(text)
