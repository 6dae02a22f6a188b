"""Programs that `jax.export` wrote with symbolic dimensions are refined, planned and run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import alpa.passes
from alpa.dialects import ir, main_function
from alpa.runtime import load
from alpa.runtime.comparison import compare

WIDTHS = {"a": (8, 16), "b": (16, 4)}


def step(weights: dict[str, jax.Array], x: jax.Array, y: jax.Array) -> tuple[Any, jax.Array]:
    def loss(weights: dict[str, jax.Array]) -> jax.Array:
        hidden = jax.nn.gelu(x @ weights["a"], approximate=False)
        return jnp.mean(jnp.square(hidden @ weights["b"] - y))

    value, gradients = jax.value_and_grad(loss)(weights)
    return jax.tree.map(lambda w, g: w - 0.1 * g, weights, gradients), value


def exported(function: Callable[..., Any], *arguments: Any) -> bytes:
    return export.export(jax.jit(function))(*arguments).mlir_module_serialized


def symbolic_step() -> bytes:
    (b,) = export.symbolic_shape("b")
    weights = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in WIDTHS.items()}
    batch = (jax.ShapeDtypeStruct((b, size), jnp.float32) for size in (8, 4))
    return exported(step, weights, *batch)


def several() -> bytes:
    """Two names, and dimensions that are expressions of them."""
    b, c = export.symbolic_shape("b, c", constraints=["b >= 4", "mod(b, 2) == 0"])
    shapes = (b, 2 * c), (c + b // 2, 4), (b**2, b - 3)
    return exported(
        lambda x, y, z: x.reshape(-1).sum() + y * z.sum() + jnp.arange(x.shape[1]).sum(),
        *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes),
    )


def shapes_of(module: ir.Module) -> list[list[int]]:
    arguments = main_function(module).entry_block.arguments
    return [list(ir.RankedTensorType(argument.type).shape) for argument in arguments]


def test_a_symbolic_training_step_is_planned_and_equals_plain_jax() -> None:
    artifact = symbolic_step()
    for size in (4, 8):
        pipeline = f"refine-dimensions{{sizes=b={size}}},"
        pipeline += "alpa{cluster=cpu:1x2 num-micro-batches=2}"
        program = load(alpa.passes.run(artifact, pipeline))
        draw = np.random.default_rng(size).normal
        weights = {name: draw(size=shape).astype("f") for name, shape in WIDTHS.items()}
        x, y = (draw(size=(2 * size, width)).astype("f") for width in (8, 4))
        expected = jax.tree.leaves(jax.jit(step)(weights, x, y))
        found = program(*map(jnp.asarray, (*weights.values(), x, y)))
        assert all(row.ok for row in compare([np.asarray(a) for a in found], expected))


@pytest.mark.parametrize(
    "function",
    [
        lambda x: jnp.cumsum(x, 0),
        lambda x: x + jax.random.normal(jax.random.key(0, impl="rbg"), x.shape),
        lambda x: jax.lax.approx_max_k(x, 2),
    ],
    ids=["cumsum", "rbg", "approx_max_k"],
)
def test_custom_calls_of_any_size_equal_plain_jax(function: Callable[..., Any]) -> None:
    (b,) = export.symbolic_shape("b")
    artifact = exported(function, jax.ShapeDtypeStruct((b, 4), jnp.float32))
    module = alpa.passes.run(artifact, "refine-dimensions{sizes=b=8}")
    (argument,) = main_function(module).entry_block.arguments
    assert str(argument.location) == 'loc("x")'
    assert all("test_refine_dimensions.py" in str(op.location) for op in computing(module))
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("f")
    found = load(alpa.passes.run(module, "alpa{cluster=cpu:1x2}"))(jnp.asarray(x))
    expected = jax.tree.leaves(jax.jit(function)(x))
    assert all(row.ok for row in compare([np.asarray(a) for a in found], expected))


MESH = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
ROWS = jax.sharding.NamedSharding(MESH, jax.P("d", None))


def constrained(x: jax.Array) -> jax.Array:
    return jnp.tanh(jax.lax.with_sharding_constraint(x, ROWS))


def constrained_beside_dynamic_calls(x: jax.Array) -> jax.Array:
    return jnp.cumsum(constrained(x), 0)


def constrained_in_a_loop(x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda carry, _: (constrained(carry), None), x, length=3)[0]


def sharded_map(x: jax.Array) -> jax.Array:
    total = jax.shard_map(
        lambda x: jax.lax.psum(jnp.tanh(x), "d"), mesh=MESH, in_specs=jax.P("d"), out_specs=jax.P()
    )
    return total(x)


@pytest.mark.parametrize(
    "function",
    [constrained, constrained_beside_dynamic_calls, constrained_in_a_loop, sharded_map],
)
def test_ops_of_shardy_of_any_size_equal_plain_jax(function: Callable[..., Any]) -> None:
    (b,) = export.symbolic_shape("b", constraints=["mod(b, 2) == 0"])
    artifact = exported(function, jax.ShapeDtypeStruct((b, 4), jnp.float32))
    module = alpa.passes.run(artifact, "refine-dimensions{sizes=b=8}")
    text = str(module)
    assert "sdy." in text
    assert "?" not in text
    assert "polymorphism" not in text
    assert all("test_refine_dimensions.py" in str(op.location) for op in computing(module))
    x = np.random.default_rng(0).normal(size=(8, 4)).astype("f")
    found = load(alpa.passes.run(module, "alpa{cluster=cpu:1x2}"))(jnp.asarray(x))
    expected = jax.tree.leaves(jax.jit(function)(x))
    assert all(row.ok for row in compare([np.asarray(a) for a in found], expected))
    with pytest.raises(ir.MLIRError, match="b=7 is not what the program expects"):
        alpa.passes.run(artifact, "refine-dimensions{sizes=b=7}")


def computing(module: ir.Module) -> list[ir.OpView]:
    *ops, _ = main_function(module).entry_block.operations
    return [op for op in ops if op.name != "stablehlo.constant"]


def test_assertions_are_checked_beside_custom_calls_of_any_size() -> None:
    (b,) = export.symbolic_shape("b", constraints=["b >= 4"])
    artifact = exported(lambda x: jnp.cumsum(x, 0), jax.ShapeDtypeStruct((b, 4), jnp.float32))
    with pytest.raises(ir.MLIRError, match="b=2 is not what the program expects"):
        alpa.passes.run(artifact, "refine-dimensions{sizes=b=2}")


def test_arguments_keep_their_names_and_nothing_symbolic_is_left() -> None:
    module = alpa.passes.run(symbolic_step(), "refine-dimensions{sizes=b=6}")
    assert shapes_of(module) == [[8, 16], [16, 4], [6, 8], [6, 4]]
    places = [str(a.location) for a in main_function(module).entry_block.arguments]
    assert places == [f'loc("{name}")' for name in ("weights['a']", "weights['b']", "x", "y")]
    text = str(module)
    assert "?" not in text
    assert "shape_assertion" not in text
    assert "polymorphism" not in text


def test_expressions_of_several_names() -> None:
    module = alpa.passes.run(several(), "refine-dimensions{sizes=b=4,c=3}")
    assert shapes_of(module) == [[4, 6], [5, 4], [16, 1]]
    assert "?" not in str(module)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ("b=4", "dimension 1 of argument 0 is '2*c' (args[0].shape[1]), and 'c' has no size; give"),
        ("b=4,c=3,d=1", "no symbolic dimension is called 'd'; the program has b, c"),
        (
            "b=2,c=3",
            "dimension 1 of argument 2 is 'b - 3' (args[2].shape[1]), which is -1 for",
        ),
        ("b=3,c=3", "b=3,c=3 is not what the program expects: Input shapes do not match the "),
        ("b=5,c=3", "b=5,c=3 is not what the program expects: Input shapes do not match the "),
        ("b=4,c=0", "b=4,c=0 is not what the program expects: Expected value >= 1 for dimension "),
        ("b=4,b=5", "refine-dimensions: option 'sizes' is 'b=4,b=5': 'b' has two sizes"),
        (
            "b=4,c=2147483648",
            "refine-dimensions: option 'sizes' is 'b=4,c=2147483648': 'c' is too large; a size is "
            "at most 2147483647",
        ),
        (f"b=4,c={'9' * 5000}", "refine-dimensions: option 'sizes' is 'b=4,c=99"),
        (
            "b=4,c=2147483647",
            "dimension 1 of argument 0 is '2*c' (args[0].shape[1]), which is 4294967294 for the "
            "given sizes; a dimension is at most 2147483647",
        ),
        ("b=-1", "refine-dimensions: option 'sizes' is 'b=-1'; expected NAME=SIZE,NAME=SIZE"),
    ],
)
def test_sizes_that_do_not_fit(sizes: str, message: str) -> None:
    said: list[alpa.passes.PassError] = []
    with pytest.raises(ir.MLIRError):
        alpa.passes.run(several(), f"refine-dimensions{{sizes={sizes}}}", on_error=said.append)
    assert said[0].message.startswith(message)
    if "option" not in message:
        assert "test_refine_dimensions.py" in str(said[0].location)


def test_the_assertion_that_sizes_break_is_quoted_with_its_numbers() -> None:
    said: list[alpa.passes.PassError] = []
    with pytest.raises(ir.MLIRError):
        alpa.passes.run(several(), "refine-dimensions{sizes=b=5,c=3}", on_error=said.append)
    assert said[0].message.endswith("to be equal to 0, but found -1; choose another size")


def test_without_a_size_the_dimension_and_the_option_are_named() -> None:
    with pytest.raises(ir.MLIRError) as caught:
        alpa.passes.run(symbolic_step(), "alpa{cluster=cpu:1x2}")
    assert (
        "dimension 0 of argument 2 is 'b' (args[1].shape[0]), of any size; give it one by --refine "
        "b=SIZE, or by the pass refine-dimensions{sizes=b=SIZE}"
    ) in str(caught.value)
    assert "test_refine_dimensions.py" in str(caught.value)


def test_without_assertions_a_dimension_has_no_name() -> None:
    type_ = "tensor<4x?xf32>"
    text = f"func.func @main(%x: {type_}) -> {type_} {{\n  return %x : {type_}\n}}"
    message = "dimension 1 of argument 0 has no name in the program, so it cannot be given a size"
    with pytest.raises(ir.MLIRError, match=message):
        alpa.passes.run(text, "refine-dimensions{sizes=b=4}")


def test_a_program_of_one_size_is_refused() -> None:
    program = jax.jit(jnp.tanh).lower(jnp.ones(4)).as_text()
    with pytest.raises(ir.MLIRError, match="the program has no symbolic dimension: all sizes are"):
        alpa.passes.run(program, "refine-dimensions{sizes=b=4}")
