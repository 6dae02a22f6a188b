"""An array on meshes behaves as a `jax.Array`: which operations fetch it, and which do not."""

from __future__ import annotations

import copy
import math
import pickle
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from alpa.dialects.attributes import Slice
from alpa.runtime.cut_array import CutArray
from alpa.runtime.mesh_array import MeshArray

NUMBERS = np.linspace(-1, 2, 6, dtype=np.float32).reshape(2, 3)


class Elsewhere(MeshArray):
    """An array that counts how often it is fetched."""

    def __init__(self, numbers: np.ndarray) -> None:
        super().__init__(numbers.shape, numbers.dtype)
        self._numbers = numbers
        self.fetches = 0

    def fetch(self) -> np.ndarray:
        self.fetches += 1
        return self._numbers.copy()

    def check_workers(self) -> None:
        pass

    def is_deleted(self) -> bool:
        return False

    def where(self) -> str:
        return "elsewhere"


def cut(numbers: np.ndarray) -> CutArray:
    """Along the first dimension, in rows of two devices."""
    first, second = jax.devices()[:2]
    return CutArray(
        {
            Slice(0, 0, 1): jax.device_put(numbers[:1], first),
            Slice(0, 1, len(numbers)): jax.device_put(numbers[1:], second),
        }
    )


@pytest.fixture(params=[Elsewhere, cut])
def array(request: pytest.FixtureRequest) -> MeshArray:
    return request.param(NUMBERS)


def loss(tree: Any) -> jax.Array:
    return jnp.sum(jnp.tanh(tree["a"]) ** 2)


def update(tree: Any) -> Any:
    optimizer = optax.adam(0.1)
    updates, _ = optimizer.update(tree, optimizer.init(tree), tree)
    return optax.apply_updates(tree, updates)


def on_two_devices() -> jax.Array:
    mesh = Mesh(np.array(jax.devices()[2:4]), ("i",))
    return jax.device_put(np.ones(3, np.float32), NamedSharding(mesh, PartitionSpec()))


USES: dict[str, Callable[[Any], Any]] = {
    "jnp.mean": jnp.mean,
    "jnp.sum(axis)": lambda x: jnp.sum(x, axis=0),
    "jnp.where": lambda x: jnp.where(x > 0, x, 0),
    "jnp.stack": lambda x: jnp.stack([x, x]),
    "jnp.concatenate": lambda x: jnp.concatenate([x, jnp.ones((1, 3))]),
    "jnp.einsum": lambda x: jnp.einsum("ij,kj->ik", x, x),
    "jnp.linalg.norm": jnp.linalg.norm,
    "jnp.zeros_like": jnp.zeros_like,
    "jnp.asarray": jnp.asarray,
    "jnp.array": lambda x: jnp.array([x, x]),
    "jnp.allclose": lambda x: jnp.allclose(x, NUMBERS),
    "jax.lax": lambda x: jax.lax.add(x, x),
    "jax.nn": jax.nn.relu,
    "jit": jax.jit(lambda x: x + 1),
    "jit of a tree": lambda x: jax.jit(loss)({"a": x}),
    "jit of a constant": lambda x: jax.jit(lambda y: x + y)(2.0),
    "jit that donates": jax.jit(lambda x: x + 1, donate_argnums=0),
    "jit and operators": lambda x: jax.jit(lambda y: x @ y)(jnp.ones((3, 1))),
    "lower": lambda x: jax.jit(lambda x: x + 1).lower(x).compile()(x),
    "grad": lambda x: jax.grad(loss)({"a": x}),
    "vmap": jax.vmap(lambda row: row.sum()),
    "vjp": lambda x: jax.vjp(jnp.sin, x)[1](x),
    "checkpoint": jax.checkpoint(lambda x: jnp.sin(x).sum()),
    "scan": lambda x: jax.lax.scan(lambda c, row: (c + row, row * 2), jnp.zeros(3), x),
    "fori_loop": lambda x: jax.lax.fori_loop(0, 3, lambda _, y: y + 1, x),
    "cond": lambda x: jax.lax.cond(True, lambda y: y + 1, lambda y: y, x),
    "jax.tree.map": lambda x: jax.tree.map(jnp.add, {"a": x}, {"a": x}),
    "jax.tree.reduce": lambda x: jax.tree.reduce(lambda a, b: a + b.sum(), [x, x], 0.0),
    "jax.tree.leaves": lambda x: len(jax.tree.leaves({"a": x})),
    "jax.device_put": jax.device_put,
    "jax.device_put(tree)": lambda x: jax.device_put({"a": x}, jax.devices()[1]),
    "jax.device_get": lambda x: jax.device_get([x]),
    "jax.eval_shape": lambda x: jax.eval_shape(loss, {"a": x}).shape,
    "jax.typeof": lambda x: str(jax.typeof(x)),
    "optax.global_norm": lambda x: optax.global_norm({"a": x, "b": x}),
    "optax.adam": lambda x: update({"a": x}),
    "eqx.is_array": eqx.is_array,
    "eqx.filter_jit": eqx.filter_jit(lambda x: x * 2),
    "eqx.filter_grad": lambda x: eqx.filter_grad(loss)({"a": x}),
    "eqx.apply_updates": lambda x: eqx.apply_updates({"a": x}, {"a": x}),
    ".mean()": lambda x: x.mean(),
    ".sum(axis)": lambda x: x.sum(axis=1, keepdims=True),
    ".astype": lambda x: x.astype(jnp.bfloat16),
    ".reshape": lambda x: x.reshape(3, -1),
    ".ravel": lambda x: x.ravel(),
    ".T": lambda x: x.T,
    ".at": lambda x: x.at[0].set(1),
    ".copy": lambda x: x.copy(),
    ".tolist": lambda x: x.tolist(),
    ".item": lambda x: x.item(4),
    ".tobytes": lambda x: x.tobytes(),
    "sizes": lambda x: (x.shape, x.ndim, x.size, x.itemsize, x.nbytes, len(x), x.weak_type),
    "indices": lambda x: [x[0], x[-1, 1], x[:, 1:], x[jnp.array([1, 0])], x[..., None]],
    "rows": lambda x: [*x, *reversed(x)],
    "x + x": lambda x: x + x,
    "x * array": lambda x: x * jnp.arange(3.0),
    "array - x": lambda x: jnp.arange(3.0) - x,
    "x / numpy": lambda x: x / np.full(3, 2, np.float32),
    "numpy * x": lambda x: np.full((2, 3), 2, np.float32) * x,
    "2 ** x": lambda x: 2**x,
    "x @ x.T": lambda x: x @ x.T,
    "-abs(x)": lambda x: -abs(x),
    "comparisons": lambda x: [x == x, x != 0, x < 1, x <= 1, x > jnp.ones(3)],
    "numpy": lambda x: [np.asarray(x), np.asarray(x, np.float64), np.array(x), np.add(x, 1)],
    "np.sum": lambda x: np.sum(x, axis=0),
    "numbers": lambda x: (float(x.sum()), bool(x.any())),
    "text": str,
    "pickle": lambda x: pickle.loads(pickle.dumps({"a": x})),
    "deepcopy": lambda x: copy.deepcopy({"a": x}),
    "copy": copy.copy,
}


@pytest.mark.parametrize("name", USES)
def test_uses_give_what_they_give_of_a_plain_array(name: str, array: MeshArray) -> None:
    assert_same(USES[name](array), USES[name](jnp.asarray(NUMBERS)))


def assert_same(ours: Any, theirs: Any) -> None:
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert type(a) is type(b)
        if isinstance(a, jax.Array | np.ndarray):
            assert (a.dtype, a.shape) == (b.dtype, b.shape)
            np.testing.assert_array_equal(a, b)
        else:
            assert a == b


def test_it_is_an_array_and_a_leaf_of_its_own_kind(array: MeshArray) -> None:
    assert isinstance(array, jax.Array)
    assert jax.tree.leaves({"a": array})[0] is array
    assert eqx.partition({"a": array, "f": jax.nn.relu}, eqx.is_array)[0]["a"] is array
    with pytest.raises(TypeError, match="unhashable"):
        hash(array)
    with pytest.raises(TypeError, match="immutable"):
        array[0] = 1
    with pytest.raises(ValueError, match="fetched by copying"):
        np.asarray(array, copy=False)


def test_types_are_known_without_a_fetch() -> None:
    array = Elsewhere(NUMBERS)
    jax.eval_shape(loss, {"a": array})
    jax.make_jaxpr(loss)({"a": array})
    jax.jit(loss).lower({"a": array})
    jnp.zeros_like(array)
    jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), [array])
    assert array.fetches == 0
    jax.jit(loss)({"a": array})
    assert array.fetches == 1


def test_it_goes_where_the_other_arguments_are(array: MeshArray) -> None:
    other = on_two_devices()
    for result in (array + other, other + array, jax.jit(jnp.add)(array, other)):
        assert result.sharding.device_set == other.sharding.device_set
        np.testing.assert_array_equal(result, NUMBERS + 1)
    moved = jax.device_put(array, other.sharding)
    assert moved.sharding == other.sharding


@pytest.mark.parametrize(
    "name", ["sharding", "devices", "addressable_shards", "device", "addressable_data"]
)
def test_it_says_that_it_is_on_no_device_of_this_process(name: str) -> None:
    array = Elsewhere(NUMBERS)
    assert not hasattr(array, name)
    said = rf"Elsewhere float32\[2,3\] has no `{name}`: it lies elsewhere, .* jax.device_put\(x\)"
    with pytest.raises(AttributeError, match=said):
        getattr(array, name)
    assert (array.committed, array.is_fully_addressable) == (False, False)
    assert array.fetches == 0


@pytest.mark.parametrize("dtype", [np.float64, np.int64, np.uint32, jnp.bfloat16, np.bool_])
def test_numbers_keep_their_width(dtype: Any) -> None:
    numbers = np.arange(3).astype(dtype)
    array = Elsewhere(numbers)
    fetched = jnp.asarray(array)
    assert fetched.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(fetched, numbers)
    with jax.enable_x64(True):
        added = jax.jit(lambda x: x[::-1])(array)
    assert added.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(added, numbers[::-1])


def test_a_single_number_is_one_of_python() -> None:
    one = Elsewhere(np.array(2.5, np.float32))
    assert (float(one), int(one), complex(one), bool(one)) == (2.5, 2, 2.5 + 0j, True)
    assert f"{one:.3f}" == "2.500"
    assert math.sqrt(Elsewhere(np.array(4))) == 2
    assert [*range(Elsewhere(np.array(3)))] == [0, 1, 2]
    with pytest.raises(TypeError, match="unsized"):
        len(one)


def test_random_keys_are_made_of_its_words() -> None:
    words = Elsewhere(np.array([0, 7], np.uint32))
    key = jax.random.wrap_key_data(words)
    np.testing.assert_array_equal(jax.random.key_data(key), [0, 7])
    expected = jax.random.split(jnp.array([0, 7], jnp.uint32))
    np.testing.assert_array_equal(jax.random.split(words), expected)
