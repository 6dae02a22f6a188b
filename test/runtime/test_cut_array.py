"""The arrays of a state that is cut between meshes."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa import passes, runtime
from alpa.dialects.attributes import Slice
from alpa.runtime.cut_array import CutArray, part_of
from alpa.runtime.mesh_array import MeshArray

WHOLE = np.arange(24.0, dtype=np.float32).reshape(2, 6, 2)
FIRST, SECOND = Slice(1, 0, 2), Slice(1, 2, 6)


def cut() -> CutArray:
    devices = jax.devices()
    return CutArray(
        {
            SECOND: jax.device_put(WHOLE[:, 2:], devices[1]),
            FIRST: jax.device_put(WHOLE[:, :2], devices[0]),
        }
    )


def test_it_is_the_array_that_its_parts_make() -> None:
    array = cut()
    assert (array.shape, array.ndim, array.dtype) == (WHOLE.shape, 3, WHOLE.dtype)
    np.testing.assert_array_equal(np.asarray(array), WHOLE)
    np.testing.assert_array_equal(np.asarray(array, np.float64), WHOLE.astype(np.float64))
    np.testing.assert_array_equal(jnp.asarray(array) + 1, WHOLE + 1)
    assert jax.block_until_ready(array) is array
    with pytest.raises(ValueError, match="fetched by copying"):
        np.asarray(array, copy=False)


def test_a_step_takes_its_parts_as_they_are() -> None:
    array = cut()
    assert part_of(array, SECOND) is array.parts[SECOND]


@pytest.mark.parametrize("whole", [WHOLE, jnp.asarray(WHOLE), cut])
def test_any_array_has_any_part(whole: object) -> None:
    array = cut() if whole is cut else whole
    np.testing.assert_array_equal(part_of(array, Slice(1, 1, 4)), WHOLE[:, 1:4])


def test_it_knows_that_a_part_was_donated() -> None:
    array = cut()
    assert not array.is_deleted()
    array.parts[FIRST].delete()
    assert array.is_deleted()


def test_it_says_with_the_words_of_jax_that_it_was_deleted() -> None:
    array = cut()
    array.delete()
    for use in (np.asarray, jnp.sum, jax.jit(jnp.sin), jax.block_until_ready):
        with pytest.raises(
            RuntimeError, match=r"Array has been deleted with shape=float32\[2,6,2\]"
        ):
            use(array)


def test_it_lies_on_several_meshes() -> None:
    with pytest.raises(
        AttributeError, match="no `sharding`: it lies in 2 parts on devices of this process"
    ):
        cut().sharding  # noqa: B018
    assert cut().is_fully_addressable


def on_meshes(
    *parts: slice,
    specs: Sequence[PartitionSpec] = (PartitionSpec("a", None, "b"),),
    shapes: Sequence[tuple[int, int]] = ((2, 1),),
    firsts: Sequence[int] = (0, 2, 4),
    names: tuple[str, str] = ("a", "b"),
) -> CutArray:
    """Rows of dimension 1, each of two devices."""
    cut = {}
    for number, part in enumerate(parts):
        devices = jax.devices()[firsts[number] : firsts[number] + 2]
        mesh = Mesh(np.array(devices).reshape(shapes[number % len(shapes)]), names)
        sharding = NamedSharding(mesh, specs[number % len(specs)])
        cut[Slice(1, part.start, part.stop)] = jax.device_put(WHOLE[:, part], sharding)
    return CutArray(cut)


def pointers(array: jax.Array) -> list[int]:
    return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (PartitionSpec("a", None, "b"), PartitionSpec("a", "mesh", "b")),
        (PartitionSpec(), PartitionSpec(None, "mesh", None)),
        (PartitionSpec(None, "a"), PartitionSpec(None, ("mesh", "a"), None)),
        (PartitionSpec(None, ("b", "a")), PartitionSpec(None, ("mesh", "b", "a"), None)),
    ],
)
def test_equal_parts_are_one_array_of_jax(spec: PartitionSpec, expected: PartitionSpec) -> None:
    parts = on_meshes(slice(2, 4), slice(0, 2), slice(4, 6), specs=[spec])
    array = parts.shared()
    assert array is not None
    assert not isinstance(array, MeshArray)
    np.testing.assert_array_equal(array, WHOLE)
    assert array.sharding.spec == expected
    assert array.sharding.mesh.shape == {"mesh": 3, "a": 2, "b": 1}
    assert pointers(array) == [p for part in parts.parts.values() for p in pointers(part)]
    np.testing.assert_allclose(jnp.sum(array, axis=1), WHOLE.sum(axis=1))
    for slice_, part in parts.parts.items():
        taken = part_of(array, slice_, part.sharding)
        assert (taken.sharding, pointers(taken)) == (part.sharding, pointers(part))
    for part in parts.parts.values():
        part.delete()  # as a step does when the array is donated to it
    with pytest.raises(RuntimeError, match=r"Array has been deleted with shape=float32\[2,6,2\]"):
        np.asarray(array)


@pytest.mark.parametrize(
    ("parts", "mesh"),
    [
        (
            on_meshes(slice(0, 1), slice(1, 3), slice(3, 5), slice(5, 6), firsts=[0, 0, 2, 2]),
            {"mesh": 2, "a": 2, "b": 1},
        ),
        (on_meshes(slice(0, 2), slice(2, 6), firsts=[4, 4]), {"a": 2, "b": 1}),
        (
            on_meshes(slice(0, 3), slice(3, 6), specs=[PartitionSpec("a"), PartitionSpec()]),
            {"mesh": 2, "a": 2, "b": 1},
        ),
    ],
    ids=["several on a mesh", "one mesh", "shardings"],
)
def test_other_parts_are_joined_on_their_devices(parts: CutArray, mesh: dict[str, int]) -> None:
    assert parts.shared() is None
    assert parts.committed
    assert parts.sharding.mesh.shape == mesh
    first, *_ = parts.parts.values()
    assert parts.sharding.shard_shape(parts.shape)[0] == first.sharding.shard_shape(first.shape)[0]
    assert len(parts.addressable_shards) == parts.sharding.num_devices == len(parts.devices())
    for result in (parts + 1, jax.jit(lambda x: x + 1)(parts), jnp.add(parts, parts / parts.max())):
        assert not isinstance(result, MeshArray)
        assert result.sharding.device_set == parts.sharding.device_set
    np.testing.assert_array_equal(parts + 1, WHOLE + 1)
    np.testing.assert_array_equal(parts, WHOLE)
    np.testing.assert_array_equal(copy.deepcopy(parts), WHOLE)
    again = jax.device_put(parts, parts.sharding)
    assert again.sharding == parts.sharding
    np.testing.assert_array_equal(again, WHOLE)


@pytest.mark.parametrize(
    "parts",
    [
        cut(),
        on_meshes(slice(0, 2), slice(2, 6)),
        on_meshes(slice(0, 3), slice(3, 6), shapes=[(2, 1), (1, 2)]),
        on_meshes(slice(0, 3), slice(3, 6), firsts=[0, 1]),
        on_meshes(slice(0, 3), slice(3, 6), names=("a", "mesh"), specs=[PartitionSpec("a")]),
        on_meshes(slice(0, 2), slice(2, 4), slice(4, 6), firsts=[0, 2, 0]),
        CutArray({Slice(1, 0, 6): cut()}),
    ],
    ids=["no mesh", "rows", "axes", "devices", "name", "back again", "elsewhere"],
)
def test_others_are_fetched(parts: CutArray) -> None:
    assert parts.shared() is None
    assert not hasattr(parts, "sharding")
    result = jnp.add(parts, 1)
    assert result.devices() == {jax.devices()[0]}
    np.testing.assert_array_equal(result, WHOLE + 1)


@pytest.mark.parametrize(
    "sharding",
    [
        NamedSharding(Mesh(np.array(jax.devices()[2:4]), ("a",)), PartitionSpec()),
        NamedSharding(Mesh(np.array(jax.devices()[3:1:-1]), ("a",)), PartitionSpec("a")),
        NamedSharding(Mesh(np.array(jax.devices()[4:6]), ("a",)), PartitionSpec("a")),
    ],
    ids=["replicated", "another order", "other devices"],
)
def test_a_part_that_is_wanted_otherwise_is_sliced(sharding: NamedSharding) -> None:
    array = on_meshes(slice(0, 2), slice(2, 4)).shared()
    part = part_of(array, Slice(1, 2, 4), sharding)
    np.testing.assert_array_equal(part, WHOLE[:, 2:4])
    np.testing.assert_array_equal(jax.device_put(part, sharding), WHOLE[:, 2:4])


def step(w: jax.Array, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One step of gradient descent; the layers are rows of `w`."""

    def loss_fn(w: jax.Array) -> jax.Array:
        y, _ = jax.lax.scan(lambda x, layer: (jnp.tanh(x @ layer), None), x, w)
        return jnp.sum(y * y)

    loss, gradient = jax.value_and_grad(loss_fn)(w)
    return w - 0.1 * gradient, loss


@pytest.mark.parametrize(
    ("layers", "stages", "devices", "parts"),
    [
        pytest.param(2, 2, 2, None, id="one layer per mesh"),
        pytest.param(4, 2, 4, 4, id="several layers per mesh"),
        pytest.param(4, 1, 8, 4, id="one mesh"),
        pytest.param(3, 2, 2, 3, id="uneven"),
    ],
)
def test_steps_take_a_stacked_state_where_it_lies(
    layers: int, stages: int, devices: int, parts: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state of a scanned model.

    Each case has other devices, because JAX 0.10 confuses meshes with different axes on the same
    devices.
    """
    draw = np.random.default_rng(0).normal
    weights = draw(scale=0.3, size=(layers, 16, 16)).astype(np.float32)
    batch = draw(size=(8, 16)).astype(np.float32)
    lowered = jax.jit(step, donate_argnums=0).lower(weights, batch)
    options = f"cluster=cpu:1x{devices} num-layers={layers} num-stages={stages}"
    planned = runtime.load(passes.run(lowered.as_text(), f"alpa{{{options}}}"))
    first, _ = planned(weights, batch)
    with monkeypatch.context() as patch:
        patch.setattr(CutArray, "fetch", lambda _: pytest.fail("fetched"))
        second, loss = planned(first, batch)
    assert first.is_deleted()  # its own buffers were taken
    with pytest.raises(RuntimeError, match=rf"deleted with shape=float32\[{layers},16,16\]"):
        planned(first, batch)
    expected, _ = jax.jit(step)(weights, batch)
    expected, expected_loss = jax.jit(step)(expected, batch)
    assert isinstance(second, jax.Array)
    assert (len(second.parts) if isinstance(second, CutArray) else None) == parts
    assert hasattr(second, "sharding") == (layers != 3)
    np.testing.assert_allclose(second, expected, atol=1e-4 * np.abs(expected).max())
    assert float(loss) == pytest.approx(float(expected_loss), rel=1e-4)
    norm = optax.tree.norm({"w": second})
    assert float(norm) == pytest.approx(float(optax.tree.norm({"w": expected})), rel=1e-4)
    for copied in (copy.deepcopy(second), pickle.loads(pickle.dumps(second))):
        assert not isinstance(copied, MeshArray)
        np.testing.assert_array_equal(copied, second)
    _, again = planned(copy.deepcopy(second), batch)
    _, after = planned(second, batch)
    assert float(after) == float(again)
