"""Inferred roles of training steps, compared with the pytrees that JAX was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import alpa.passes
from alpa.dialects import body, main_function, parse
from alpa.passes.analysis.graph import Graph
from alpa.passes.analysis.roles import Roles, infer_roles
from alpa.passes.base import PassError

OPTIMIZERS: dict[str, Callable[[], optax.GradientTransformation]] = {
    "sgd": lambda: optax.sgd(0.1),
    "momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(1e-2),
    "adamw": lambda: optax.adamw(1e-2),
    "lion": lambda: optax.lion(1e-2),
    "clip": lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adam(1e-2)),
    "lamb": lambda: optax.lamb(1e-2),
}


def loss_fn(params: Any, x: jax.Array) -> jax.Array:
    for layer in params:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    return jnp.mean(x**2)


def roles_of(step: Callable[..., Any], *arguments: Any, donate: bool) -> Roles:
    jitted = jax.jit(step, donate_argnums=(0,) if donate else (), keep_unused=True)
    module = alpa.passes.run(jitted.lower(*arguments).as_text(), "simplify-trivial-ops")
    function = main_function(module)
    return infer_roles(function, Graph.of(body(function)))


@pytest.mark.parametrize("donate", [True, False], ids=["donation", "data flow"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_batch_and_loss(name: str, donate: bool) -> None:
    optimizer = OPTIMIZERS[name]()

    def step(state: Any, x: jax.Array) -> Any:
        loss, grads = jax.value_and_grad(loss_fn)(state[0], x)
        updates, opt_state = optimizer.update(grads, state[1], state[0])
        return (optax.apply_updates(state[0], updates), opt_state), loss

    params = [{"w": jnp.ones((8, 8)), "b": jnp.ones(8)} for _ in range(3)]
    state = (params, optimizer.init(params))
    roles = roles_of(step, state, jnp.ones((4, 8)), donate=donate)
    count = len(jax.tree.leaves(state))
    assert roles.state_pairs() == {i: i for i in range(count)}
    assert [argument.role for argument in roles.arguments] == ["state"] * count + ["batch"]
    assert roles.arguments[-1].batch_dim == 0
    assert str(roles.results[-1].role) == "mean"
    assert not roles.ambiguous


def test_shardings_do_not_hide_the_state() -> None:
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    places = [
        {"w": NamedSharding(mesh, PartitionSpec("a")), "b": NamedSharding(mesh, PartitionSpec())}
    ] * 2

    def step(params: Any, x: jax.Array) -> Any:
        params = jax.lax.with_sharding_constraint(params, places)
        grads = jax.grad(loss_fn)(params, x)
        new = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return jax.lax.with_sharding_constraint(new, places)

    params = [{"w": jnp.ones((8, 8)), "b": jnp.ones(8)} for _ in range(2)]
    roles = roles_of(step, params, jnp.ones((4, 8)), donate=False)
    assert roles.state_pairs() == {i: i for i in range(4)}


def test_equal_distances_are_ambiguous() -> None:
    def step(a: jax.Array, b: jax.Array) -> jax.Array:
        return a + b

    roles = roles_of(step, jnp.ones(4), jnp.ones(4), donate=False)
    assert roles.ambiguous == ("result 0 could be the new value of argument 0 or 1",)


def test_batches_that_disagree_on_their_size_have_no_batch_dimension() -> None:
    def step(w: jax.Array, x: jax.Array, y: jax.Array) -> Any:
        return w - x.sum() * y.sum(), x

    roles = roles_of(step, jnp.ones(3), jnp.ones((4, 8)), jnp.ones((5, 8)), donate=True)
    assert [argument.role for argument in roles.arguments] == ["state", None, None]


def test_inference_has_no_state() -> None:
    roles = roles_of(lambda w, x: jnp.tanh(x @ w), jnp.ones((8, 2)), jnp.ones((4, 8)), donate=False)
    assert roles.state_pairs() == {}
    assert [argument.role for argument in roles.arguments] == [None, None]


def test_a_loss_that_jax_gives_a_donated_scalar_is_no_state() -> None:
    """JAX pairs donated buffers with results by their types, in order: the loss comes first."""

    def step(state: Any, x: jax.Array) -> Any:
        loss, grad = jax.value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(state["w"])
        return loss, {"decay": state["decay"] * 0.5, "w": state["w"] - state["decay"] * grad}

    state = {"decay": jnp.ones(()), "w": jnp.ones((8, 2))}
    roles = roles_of(step, state, jnp.ones((4, 8)), donate=True)
    assert roles.state_pairs() == {1: 0, 2: 1}
    assert str(roles.results[0].role) == "mean"


def in_layouts(old: str, new: str) -> Roles:
    module = alpa.passes.run(
        f"""
        sdy.mesh @m = <["a"=2, "b"=2, "one"=1]>
        func.func @main(%x: tensor<4x4xf32> {{sdy.sharding = #sdy.sharding<@m, {old}>}})
            -> (tensor<4x4xf32> {{sdy.sharding = #sdy.sharding<@m, {new}>}}) {{
          %0 = stablehlo.tanh %x : tensor<4x4xf32>
          return %0 : tensor<4x4xf32>
        }}""",
        "simplify-trivial-ops",
    )
    function = main_function(module)
    return infer_roles(function, Graph.of(body(function)))


def test_a_result_in_another_layout_is_not_a_state() -> None:
    assert in_layouts('[{"a"}, {}]', '[{}, {"b"}]').state_pairs() == {}
    assert in_layouts('[{"a"}, {}]', '[{"a"}, {"one"}]').state_pairs() == {0: 0}
    assert in_layouts('[{"a"}, {?}]', '[{"a"}, {"b"}]').state_pairs() == {0: 0}


def test_a_composite_hides_no_name() -> None:
    """Its attribute `name` does not name its kind of op."""
    text = """
    func.func public @main(%w: tensor<4xf32>, %x: tensor<4xf32>) -> tensor<4xf32> {
      %0 = stablehlo.composite "my.op" %w {decomposition = @f} : (tensor<4xf32>) -> tensor<4xf32>
      return %0 : tensor<4xf32>
    }
    func.func private @f(%x: tensor<4xf32>) -> tensor<4xf32> { return %x : tensor<4xf32> }
    """
    module = parse(text)
    function = main_function(module)
    assert infer_roles(function, Graph.of(body(function))).state_pairs() == {}


BATCH_IN_PLACE = """
func.func public @main(
    %w: tensor<4x4xf32>, %x: tensor<8x4xf32> {{tf.aliasing_output = 1 : i32, alpa.role = "{role}"}})
    -> (tensor<4x4xf32> {{alpa.result = "state:0"}}, tensor<8x4xf32>{result}) {{
  %y = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
       : (tensor<8x4xf32>, tensor<4x4xf32>) -> tensor<8x4xf32>
  %g = stablehlo.dot_general %x, %y, contracting_dims = [0] x [0]
       : (tensor<8x4xf32>, tensor<8x4xf32>) -> tensor<4x4xf32>
  %new = stablehlo.subtract %w, %g : tensor<4x4xf32>
  return %new, %y : tensor<4x4xf32>, tensor<8x4xf32>
}}
"""


def roles_in(text: str) -> Roles:
    function = main_function(parse(text))
    return infer_roles(function, Graph.of(body(function)))


@pytest.mark.parametrize("role", ["batch", "constant", "state"])
def test_donation_alone_makes_no_state_of_an_argument_with_another_role(role: str) -> None:
    roles = roles_in(BATCH_IN_PLACE.format(role=role, result=""))
    assert roles.state_pairs() == ({0: 0, 1: 1} if role == "state" else {0: 0})
    assert roles.arguments[1].role == role
    assert (roles.results[1].state is None) == (role != "state")


@pytest.mark.parametrize("role", ["batch", "constant"])
def test_a_new_value_of_what_is_no_state_is_refused(role: str) -> None:
    text = BATCH_IN_PLACE.format(role=role, result=' {alpa.result = "state:1"}')
    message = rf"result 1 is the new value of argument 1, whose role is {role}; give .* state"
    with pytest.raises(PassError, match=message):
        roles_in(text)
