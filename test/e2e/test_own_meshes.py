"""Programs with meshes and shardings of their own, in stages: each stage is on such a mesh.

The mesh has the axes data, tensor and expert, of 2x2x1 or 2x1x2 devices; with two stages that takes
eight. What a step computes equals plain JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import alpa
from alpa.dialects import body, ir, main_function, sdy, walk
from alpa.dialects.mpmd_types import MeshTensor
from alpa.dialects.sharding import Sharding
from alpa.runtime.comparison import compare
from alpa.runtime.planning import PlanningError

AXES = ("data", "tensor", "expert")
RULES = {"batch": "data", "heads": "tensor", "mlp": "tensor", "experts": "expert"}
"""Names of dimensions, and the axes of the mesh that split them, as MaxText and Flax have them."""
BATCH, LENGTH, WIDTH, HEADS, EXPERTS, LAYERS = 8, 4, 16, 4, 4, 2
CLUSTER = "cpu:1x8"
Params = list[dict[str, jax.Array]]
DIMS = {
    "qkv": (None, None, "heads", None),
    "out": ("heads", None, None),
    "router": (None, "experts"),
    "up": ("experts", None, "mlp"),
    "down": ("experts", "mlp", None),
}
"""The names of the dimensions of each parameter of a layer."""


def mesh_of(*sizes: int) -> Mesh:
    """A mesh of one stage, on the first devices."""
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Auto,) * 3, devices=devices)


def sharding(mesh: Mesh, *names: str | None) -> NamedSharding:
    return NamedSharding(mesh, PartitionSpec(*(RULES.get(name or "") for name in names)))


def equal(found: Any, expected: Any) -> bool:
    pairs = jax.tree.leaves(found), jax.tree.leaves(expected)
    return all(it.ok for it in compare(*([*map(np.asarray, leaves)] for leaves in pairs)))


def parameters(seed: int = 0) -> Params:
    shapes = {
        "qkv": (WIDTH, 3, HEADS, WIDTH // HEADS),
        "out": (HEADS, WIDTH // HEADS, WIDTH),
        "router": (WIDTH, EXPERTS),
        "up": (EXPERTS, WIDTH, 2 * WIDTH),
        "down": (EXPERTS, 2 * WIDTH, WIDTH),
    }
    random = np.random.default_rng(seed)
    return [
        {
            name: jnp.asarray(random.normal(size=shape) / 8, jnp.float32)
            for name, shape in shapes.items()
        }
        for _ in range(LAYERS)
    ]


def batch(seed: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(BATCH, LENGTH, WIDTH)).astype(np.float32)


Constrain = Callable[..., Any]


def attention(layer: dict[str, jax.Array], x: jax.Array, constrain: Constrain) -> jax.Array:
    q, k, v = jnp.moveaxis(jnp.einsum("blw,wchd->blchd", x, layer["qkv"]), 2, 0)
    q = constrain(q, "batch", None, "heads", None)
    scores = jax.nn.softmax(jnp.einsum("blhd,bmhd->bhlm", q, k))
    heads = jnp.einsum("bhlm,bmhd->blhd", scores, v)
    return jnp.einsum("blhd,hdw->blw", heads, layer["out"])


def mixture(layer: dict[str, jax.Array], x: jax.Array, constrain: Constrain) -> jax.Array:
    """Each sample goes to all experts, by weights."""
    weights = constrain(jax.nn.softmax(x @ layer["router"]), "batch", None, "experts")
    hidden = jax.nn.gelu(jnp.einsum("blw,ewm->belm", x, layer["up"]))
    hidden = constrain(hidden, "batch", "experts", None, "mlp")
    return jnp.einsum("belm,emw,ble->blw", hidden, layer["down"], weights)


def by_shards(layer: dict[str, jax.Array], x: jax.Array, *, mesh: Mesh) -> jax.Array:
    """The mixture by hand: each device has some experts, and some columns of each."""

    def local(x: Any, router: Any, up: Any, down: Any) -> Any:
        every = jax.lax.all_gather(x @ router, "expert", axis=2, tiled=True)
        first = jax.lax.axis_index("expert") * router.shape[1]
        weights = jax.lax.dynamic_slice_in_dim(
            jax.nn.softmax(every), first, router.shape[1], axis=2
        )
        hidden = jax.nn.gelu(jnp.einsum("blw,ewm->belm", x, up))
        made = jnp.einsum("belm,emw,ble->blw", hidden, down, weights)
        return jax.lax.psum(made, ("tensor", "expert"))

    names = ("router", "up", "down")
    specs = [sharding(mesh, *DIMS[name]).spec for name in names]
    rows = PartitionSpec("data")
    mapped = jax.shard_map(local, mesh=mesh, in_specs=(rows, *specs), out_specs=rows)
    return mapped(x, *(layer[name] for name in names))


def loss_fn(params: Params, x: jax.Array, mesh: Mesh | None, *, shards: bool) -> jax.Array:
    def constrain(value: jax.Array, *names: str | None) -> jax.Array:
        if mesh is None:
            return value
        return jax.lax.with_sharding_constraint(value, sharding(mesh, *names))

    for number, layer in enumerate(params):
        if number:
            alpa.mark_layer_boundary()
        x = constrain(x, "batch", None, None)
        x = x + attention(layer, x, constrain)
        if shards and mesh is not None:
            x = x + by_shards(layer, x, mesh=mesh)
        else:
            x = x + mixture(layer, x, constrain)
    return jnp.mean(x**2)


def train_step(
    params: Params, x: jax.Array, *, mesh: Mesh | None = None, shards: bool = False
) -> tuple[Params, jax.Array]:
    loss = partial(loss_fn, mesh=mesh, shards=shards)
    if mesh is not None:
        params = [
            {
                name: jax.lax.with_sharding_constraint(value, sharding(mesh, *DIMS[name]))
                for name, value in layer.items()
            }
            for layer in params
        ]
    value, grads = alpa.value_and_grad(loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def planned(mesh: Mesh | None, *, shards: bool = False, **options: Any) -> Any:
    given = {"cluster": CLUSTER, "num_stages": 2, **options}
    return alpa.parallelize(partial(train_step, mesh=mesh, shards=shards), **given)


def constraints(module: ir.Module) -> list[tuple[str, tuple[tuple[str, ...], ...]]]:
    """The mesh and the axes of each constraint of a plan."""
    found = [
        Sharding.from_attr(op.attributes["sharding"])
        for op in walk(body(main_function(module)))
        if isinstance(op, sdy.ShardingConstraintOp)
    ]
    return [(it.mesh, it.axis_names) for it in found]


CASES = [
    pytest.param((2, 2, 1), False, "1f1b", id="2x2x1-constraints"),
    pytest.param((2, 1, 2), True, "gpipe", id="2x1x2-shard_map", marks=pytest.mark.slow),
    pytest.param((2, 1, 2), False, "gpipe", id="2x1x2-constraints", marks=pytest.mark.slow),
    pytest.param((2, 2, 1), True, "1f1b", id="2x2x1-shard_map", marks=pytest.mark.slow),
    pytest.param((1, 2, 2), True, "1f1b", id="1x2x2-shard_map", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("sizes", "shards", "schedule"), CASES)
def test_data_tensor_and_expert_axes(sizes: tuple[int, ...], shards: bool, schedule: str) -> None:
    """Two steps of two micro-batches, and an evaluation on the meshes of the steps."""
    mesh = mesh_of(*sizes)
    step = planned(mesh, shards=shards, num_micro_batches=2, schedule=schedule)
    params, x = parameters(), batch()
    plan = step.plan(params, x)
    assert [it.logical_shape for it in plan.meshes] == [sizes] * 2
    assert [len(stage.layers) for stage in plan.stages] == [1, 1]
    assert plan.micro_batches == "exact"
    rows = ("data",) if sizes[0] > 1 else ()
    for name in ("mesh_0", "mesh_1"):
        assert (name, (rows, (), ())) in constraints(plan.module)
    # In the shardings that they are constrained to, on one mesh each.
    types = [MeshTensor.from_type(type_) for type_ in main_function(plan.module).type.inputs]
    found = [it for it in types if it.type.rank == 4]  # qkv
    heads = ("tensor",) if sizes[1] > 1 else ()
    assert {it.mesh for it in found} == {"mesh_0", "mesh_1"}
    assert [it.sharding and it.sharding.axis_names for it in found] == [((), (), heads, ())] * 2
    once = jax.jit(train_step)
    expected = once(once(params, x)[0], x)
    params, _ = step(params, x)
    params, loss = step(params, x)
    assert equal((params, loss), expected)
    evaluate = alpa.parallelize(partial(loss_fn, mesh=mesh, shards=shards), like=step)
    assert [it.logical_shape for it in evaluate.plan(params, x).meshes] == [sizes] * 2
    assert equal(evaluate(params, x), once(expected[0], x)[1])


def test_a_loop_over_stacked_layers() -> None:
    """As MaxText scans its layers: the stacks are sharded by `in_shardings`, and cut between the
    stages, so that activations and their gradients alone cross."""
    mesh = mesh_of(2, 2, 1)
    stacks = {"up": (None, None, "mlp"), "down": (None, "mlp", None)}

    def step(params: dict[str, jax.Array], x: jax.Array, *, own: bool = False) -> Any:
        def layer(x: jax.Array, params: dict[str, jax.Array]) -> tuple[jax.Array, None]:
            hidden = jnp.tanh(x @ params["up"])
            if own:
                place = sharding(mesh, "batch", None, "mlp")
                hidden = jax.lax.with_sharding_constraint(hidden, place)
            return x + hidden @ params["down"], None

        def loss_fn(params: dict[str, jax.Array]) -> jax.Array:
            return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    random, x = np.random.default_rng(0), batch()
    shapes = {"up": (4, WIDTH, 2 * WIDTH), "down": (4, 2 * WIDTH, WIDTH)}
    params = {
        name: random.normal(size=shape).astype(np.float32) / 8 for name, shape in shapes.items()
    }
    places = {name: sharding(mesh, *names) for name, names in stacks.items()}
    placed = jax.jit(
        partial(step, own=True),
        in_shardings=(places, sharding(mesh, "batch")),
        out_shardings=(places, None),
    )
    ours = alpa.parallelize(placed, cluster=CLUSTER, num_stages=2, num_micro_batches=2)
    plan = ours.plan(params, x)
    assert [(it.source, it.target) for it in plan.transfers] == [
        ("mesh_0", "mesh_1"),
        ("mesh_1", "mesh_0"),
    ]
    assert equal(ours(params, x), jax.jit(step)(params, x))


def ring_attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    """Causal attention of one device's part of the sequence; keys and values of all others come by
    in turn (Liu et al., Ring Attention with Blockwise Transformers, 2023)."""
    ways, here, rows = jax.lax.axis_size("sequence"), jax.lax.axis_index("sequence"), q.shape[1]

    def trip(carried: Any, number: jax.Array) -> tuple[Any, None]:
        k, v, largest, total, made = carried
        there = (here - number) % ways
        scores = jnp.einsum("blhd,bmhd->bhlm", q, k)
        places = jnp.arange(rows)
        seen = (here * rows + places)[:, None] >= there * rows + places
        scores = jnp.where(seen, scores, -1e9)
        new = jnp.maximum(largest, scores.max(-1))
        weights, old = jnp.exp(scores - new[..., None]), jnp.exp(largest - new)
        made = old[..., None] * made + jnp.einsum("bhlm,bmhd->bhld", weights, v)
        pairs = [(n, (n + 1) % ways) for n in range(ways)]
        k, v = jax.lax.ppermute((k, v), "sequence", pairs)
        return (k, v, new, old * total + weights.sum(-1), made), None

    heads = jnp.zeros_like(jnp.moveaxis(q, 2, 1))
    start = (k, v, heads[..., 0] - 1e9, heads[..., 0], heads)
    (*_, total, made), _ = jax.lax.scan(trip, start, jnp.arange(ways))
    return jnp.moveaxis(made / total[..., None], 1, 2)


@pytest.mark.parametrize("again", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_ring_attention(again: bool) -> None:
    """A loop in a `shard_map`, through which keys and values of split samples go round."""
    axes, kinds = ("data", "sequence"), (AxisType.Auto,) * 2
    mesh = jax.make_mesh((2, 2), axes, axis_types=kinds, devices=jax.devices()[:4])
    whole = jax.make_mesh((1, 1), axes, axis_types=kinds, devices=jax.devices()[:1])

    def loss_fn(params: Params, x: jax.Array, mesh: Mesh) -> jax.Array:
        rows = PartitionSpec(*axes)
        ring = jax.shard_map(ring_attention, mesh=mesh, in_specs=(rows,) * 3, out_specs=rows)
        ring = jax.checkpoint(ring) if again else ring
        for number, layer in enumerate(params):
            if number:
                alpa.mark_layer_boundary()
            q, k, v = jnp.moveaxis(jnp.einsum("blw,wchd->blchd", x, layer["qkv"]), 2, 0)
            x = x + jnp.einsum("blhd,hdw->blw", ring(q, k, v), layer["out"])
        return jnp.mean(x**2)

    def step(params: Params, x: jax.Array, *, mesh: Mesh) -> tuple[Params, jax.Array]:
        loss, grads = alpa.value_and_grad(partial(loss_fn, mesh=mesh))(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    params = [{name: layer[name] for name in ("qkv", "out")} for layer in parameters()]
    own = partial(step, mesh=mesh)
    ours = alpa.parallelize(own, cluster=CLUSTER, num_stages=2, num_micro_batches=2)
    plan = ours.plan(params, batch())
    assert [it.logical_shape for it in plan.meshes] == [(2, 2)] * 2
    assert plan.micro_batches == "exact"
    assert equal(ours(params, batch()), jax.jit(partial(step, mesh=whole))(params, batch()))


ERRORS: Mapping[str, tuple[tuple[int, ...], dict[str, Any], str]] = {
    "too large": (
        (2, 2, 2),
        {},
        "@mesh, which has 8 device(s), for each of 2 stages, and the cluster has 8; plan for a "
        "cluster of 16, set num-stages=1, make @mesh the 4 device(s) of one stage, or remove the "
        "shardings",
    ),
    "no stages": (
        (2, 2, 1),
        {"num_stages": "auto"},
        "@mesh, which has 4 device(s), and the cluster has 8; plan for a cluster of 4, set "
        "num-stages=2, or remove the shardings",
    ),
    "another shape": (
        (2, 2, 1),
        {"mesh_shape": "4"},
        "fix the mesh of each stage, one of 2x2x1, so mesh-shape=4 is not possible; leave out "
        "mesh-shape or the shardings",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_errors(case: str) -> None:
    sizes, options, message = ERRORS[case]
    with pytest.raises(PlanningError) as raised:
        planned(mesh_of(*sizes), **options).plan(parameters(), batch())
    assert message in str(raised.value)
    assert "test_own_meshes.py:" in str(raised.value)


def test_a_flax_model_with_logical_partitioning() -> None:
    nn = pytest.importorskip("flax.linen", reason="needs flax")
    mesh = mesh_of(2, 2, 1)
    rules = [*RULES.items(), ("embed", None)]

    def dense(features: int, names: tuple[str, str]) -> Any:
        init = nn.initializers.lecun_normal()
        return nn.Dense(
            features,
            use_bias=False,
            kernel_init=nn.with_logical_partitioning(init, names),
        )

    class Block(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            h = nn.relu(dense(4 * WIDTH, ("embed", "mlp"))(nn.LayerNorm()(x)))
            h = nn.with_logical_constraint(h, ("batch", None, "mlp"))
            return x + dense(WIDTH, ("mlp", "embed"))(h)

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x: Any) -> Any:
            for number in range(LAYERS):
                if number:
                    alpa.mark_layer_boundary()
                x = Block()(nn.with_logical_constraint(x, ("batch", None, "embed")))
            return dense(1, ("embed", None))(x)

    model, x = Model(), batch()
    boxed = model.init(jax.random.key(0), x)
    places = nn.logical_to_mesh_sharding(nn.get_partition_spec(boxed), mesh, rules)
    params = nn.unbox(boxed)

    def step(params: Any, x: Any) -> Any:
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(model.apply(p, x) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    rows = sharding(mesh, "batch")
    placed = jax.jit(step, in_shardings=(places, rows), out_shardings=(places, None))
    ours = alpa.parallelize(placed, cluster=CLUSTER, num_stages=2, num_micro_batches=2)
    with jax.set_mesh(mesh), nn.logical_axis_rules(rules):
        plan = ours.plan(params, x)
        updated = ours(params, x)
    assert [it.logical_shape for it in plan.meshes] == [(2, 2, 1)] * 2
    found = set(constraints(plan.module))
    for name in ("mesh_0", "mesh_1"):
        assert (name, (("data",), (), ("tensor",))) in found
    assert equal(updated, jax.jit(step)(params, x))


@pytest.mark.parametrize(("taken", "start", "row"), [(8, 14, 3), (8, 2, 9), (4, 30, 30)])
@pytest.mark.parametrize("kept", [1, 2])
def test_slices_of_slices_begin_within_each_of_them(
    taken: int, start: int, row: int, kept: int
) -> None:
    """Jitted, XLA (jaxlib 0.10.2) bounds the sum of both starts."""

    def sliced(x: jax.Array, start: jax.Array, row: jax.Array) -> jax.Array:
        rows = jax.lax.dynamic_slice_in_dim(x, start, taken)
        return jax.lax.dynamic_slice_in_dim(rows, row, kept)

    mesh, columns = mesh_of(1, 2, 1), PartitionSpec(None, "tensor")
    scalar = PartitionSpec()
    shards = jax.shard_map(
        sliced, mesh=mesh, in_specs=(columns, scalar, scalar), out_specs=columns, check_vma=False
    )
    x = np.arange(64, dtype=np.float32).reshape(16, 4)
    first = min(start, 16 - taken) + min(row, taken - kept)
    planned = alpa.parallelize(lambda x, *starts: 2 * shards(x, *starts), cluster="cpu:1x2")
    found = planned(x, np.int32(start), np.int32(row))
    assert np.array_equal(found, 2 * x[first : first + kept])


SLICES_OF_SLICES: dict[str, Callable[[jax.Array, jax.Array], Any]] = {
    "reshape": lambda a, j: sliced(a.reshape(4, 1, 8), (j, 0, 0), (1, 1, 8)),
    "reduce": lambda a, j: sliced(jnp.sum(a.reshape(4, 8, 1), axis=2), (j, 0), (1, 8)),
    "broadcast": lambda a, j: sliced(jnp.broadcast_to(a, (2, 4, 8)), (1, j, 0), (1, 1, 8)),
    "no change": lambda a, j: sliced(a[::-1][::-1] * 1, (j, 0), (1, 8)),
    "parts": lambda a, j: sliced(jnp.concatenate([a[:2], a[2:]]), (j, 0), (1, 8)),
    "gather": lambda a, j: rows_at(a.reshape(4, 8, 1), j),
    "scan": lambda a, j: jax.lax.scan(
        lambda c, _: (c, sliced(a, (j, 0), (1, 8))), 0.0, None, length=3
    )[1][2],
    "scan, carried": lambda a, j: jax.lax.scan(
        lambda c, _: (c, sliced(c, (j, 0), (1, 8))), a, None, length=3
    )[1][2],
    "map": lambda a, j: jax.lax.map(
        lambda k: sliced(a, (j, 0), (1, 8)) + 0 * k, jnp.arange(3, dtype=np.float32)
    )[2],
    "fori_loop": lambda a, j: (
        jax.lax.fori_loop(0, 3, lambda _, c: c + sliced(a, (j, 0), (1, 8)), jnp.zeros((1, 8))) / 3
    ),
    "cond": lambda a, j: jax.lax.cond(
        True, lambda: sliced(a, (j, 0), (1, 8)), lambda: sliced(-a, (j, 0), (1, 8))
    ),
}
"""Ways to take row j of a slice, behind which XLA (jaxlib 0.10.2) makes one slice of two."""


def sliced(x: jax.Array, starts: tuple[jax.Array | int, ...], sizes: tuple[int, ...]) -> jax.Array:
    return jax.lax.dynamic_slice(x, starts, sizes, allow_negative_indices=False)


def rows_at(x: jax.Array, index: jax.Array) -> jax.Array:
    numbers = jax.lax.GatherDimensionNumbers(
        offset_dims=(0, 1), collapsed_slice_dims=(0,), start_index_map=(0,)
    )
    return jax.lax.gather(x, index[None], numbers, (1, 8, 1), mode="promise_in_bounds")


@pytest.fixture(scope="module")
def rows_of_slices() -> Callable[..., Mapping[str, jax.Array]]:
    def step(t: jax.Array, i: jax.Array, j: jax.Array) -> Mapping[str, jax.Array]:
        a, b = sliced(t, (i, 0), (4, 8)), sliced(t[None], (0, i, 0), (1, 4, 8)).reshape(4, 8)
        found = {name: take(a, j).reshape(8) for name, take in SLICES_OF_SLICES.items()}
        return found | {"row of rows": sliced(b, (j, 0), (1, 8)).reshape(8)}

    return alpa.parallelize(step, cluster="cpu:1x4")


@pytest.mark.parametrize(("start", "row"), [(0, 9), (10, -3), (11, 5), (3, -2), (14, 2)])
def test_rows_of_slices_are_theirs(
    rows_of_slices: Callable[..., Mapping[str, jax.Array]], start: int, row: int
) -> None:
    t = np.arange(128, dtype=np.float32).reshape(16, 8)
    expected = t[min(start, 12) + min(max(row, 0), 3)]
    found = rows_of_slices(t, np.int32(start), np.int32(row))
    assert [name for name, it in found.items() if not np.array_equal(it, expected)] == []
