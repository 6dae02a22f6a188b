"""`split-loops` on scans that JAX lowers: equal numbers, and stacks of layers are cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa import passes
from alpa.dialects import body, ir, main_function, walk
from alpa.dialects.attributes import Slice, read_arguments, read_results
from alpa.runtime.reference import run_unplanned


def random(seed: int, *shape: int) -> jax.Array:
    return 0.5 * jax.random.normal(jax.random.PRNGKey(seed), shape)


def forwards(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, p: (jnp.tanh(h @ p), None), x, w)[0]


def backwards(w: jax.Array, x: jax.Array) -> jax.Array:
    return jax.lax.scan(lambda h, p: (jnp.tanh(h @ p), None), x, w, reverse=True)[0]


def with_results_per_trip(w: jax.Array, x: jax.Array) -> Any:
    h, norms = jax.lax.scan(lambda h, p: (jnp.tanh(h @ p), (p * p).sum(0)), x, w)
    return h, norms, norms.sum(), norms.max(0), norms[::-1] + 1


def reading_its_number(w: jax.Array, x: jax.Array) -> jax.Array:
    numbers = jnp.arange(len(w))
    return jax.lax.fori_loop(0, len(w), lambda i, h: jnp.tanh(h @ w[i]) * (1 + i) + numbers[i], x)


def two_loops_over_one_stack(w: jax.Array, x: jax.Array) -> jax.Array:
    return backwards(w * 2, forwards(w, x))


def a_loop_in_a_loop(w: jax.Array, x: jax.Array) -> jax.Array:
    def layer(h: jax.Array, p: jax.Array) -> tuple[jax.Array, None]:
        return jax.lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ p) * (i + 1), h), None

    return jax.lax.scan(layer, x, w)[0]


def trained(w: jax.Array, x: jax.Array) -> Any:
    loss, gradient = jax.value_and_grad(lambda w: (forwards(w, x) ** 2).mean())(w)
    scale = jnp.minimum(1, 0.1 / jnp.sqrt((gradient**2).sum()))
    return w - scale * gradient, loss


def trained_on_columns(w: jax.Array, x: jax.Array) -> Any:
    """The layers are the last dimension of the state."""
    new, loss = trained(w.transpose(2, 0, 1), x)
    return new.transpose(1, 2, 0), loss


def rows(array: Any, part: Slice | None) -> Any:
    if part is None:
        return array
    return array[(*[slice(None)] * part.dim, slice(part.start, part.stop))]


def split(program: Callable[..., Any], arguments: list[Any], num_layers: int | str) -> ir.Module:
    text = jax.jit(program, keep_unused=True).lower(*arguments).as_text()
    return passes.run(text, f"simplify-trivial-ops,split-loops{{num-layers={num_layers}}}")


def run(module: ir.Module, arguments: list[Any]) -> list[np.ndarray]:
    """The given program's results, with split arguments cut before and joined after the call."""
    main = main_function(module)
    given = [
        rows(arguments[i if a.input is None else a.input], a.slice)
        for i, a in enumerate(read_arguments(main))
    ]
    parts: dict[int, list[np.ndarray]] = {}
    dims: dict[int, int] = {}
    results = zip(run_unplanned(module, given), read_results(main), strict=True)
    for i, (array, result) in enumerate(results):
        number = i if result.output is None else result.output
        parts.setdefault(number, []).append(np.asarray(array))
        dims[number] = result.slice.dim if result.slice else 0
    return [
        np.concatenate(parts[n], dims[n]) if len(parts[n]) > 1 else parts[n][0]
        for n in sorted(parts)
    ]


@pytest.mark.parametrize("num_layers", [2, 3, "auto"])
@pytest.mark.parametrize(
    "program",
    [
        forwards,
        backwards,
        with_results_per_trip,
        reading_its_number,
        two_loops_over_one_stack,
        a_loop_in_a_loop,
        trained,
        trained_on_columns,
    ],
)
def test_the_numbers_stay(program: Callable[..., Any], num_layers: int | str) -> None:
    layers = random(0, 4, 4, 5) if program is trained_on_columns else random(0, 5, 4, 4)
    arguments = [layers, random(1, 3, 4)]
    module = split(program, arguments, num_layers)
    assert any(a.slice for a in read_arguments(main_function(module)))
    expected = [np.asarray(leaf) for leaf in jax.tree.leaves(jax.jit(program)(*arguments))]
    for mine, theirs in zip(run(module, arguments), expected, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("num_layers", "loops"), [(1, 2), (2, 4), (3, 4), (5, 0)])
def test_forward_and_backward_are_cut_at_the_same_trips(num_layers: int, loops: int) -> None:
    """Five trips stay whole in one part, are loops of 2 and 3 in two, of 1, 2 and 2 in three."""
    module = split(trained, [random(0, 5, 4, 4), random(1, 3, 4)], num_layers)
    main = main_function(module)
    names = [op.operation.name for op in walk(body(main))]
    assert names.count("stablehlo.while") == loops
    assert "stablehlo.concatenate" not in names
    slices = [a.slice for a in read_arguments(main) if a.slice]
    assert slices == [r.slice for r in read_results(main) if r.slice]
    assert len(slices) == (num_layers if num_layers > 1 else 0)


def test_the_size_of_a_program_does_not_grow_with_its_depth() -> None:
    sizes: list[int] = []
    for depth in (8, 64):
        module = split(trained, [random(0, depth, 4, 4), random(1, 3, 4)], 4)
        sizes.append(len(list(walk(module.body))))
    assert sizes[0] == sizes[1]


def test_loops_of_different_depth_share_the_parts() -> None:
    def program(w: jax.Array, v: jax.Array, x: jax.Array) -> jax.Array:
        return forwards(v, forwards(w, x))

    module = split(program, [random(0, 2, 4, 4), random(1, 6, 4, 4), random(2, 3, 4)], 4)
    inputs = [a.input for a in read_arguments(main_function(module)) if a.slice]
    assert inputs == [1, 1, 1]  # 8 trips in 4 parts: one of 2 trips, three of 2


def test_a_dimension_that_the_program_shards_is_not_cut() -> None:
    text = """
        sdy.mesh @mesh = <["x"=2]>
        func.func public @main(%w: tensor<2x4xf32>
            {sdy.sharding = #sdy.sharding<@mesh, [{"x"}, {}]>}, %x: tensor<4xf32>)
            -> tensor<4xf32> {
          %zero = stablehlo.constant dense<0> : tensor<i32>
          %r:3 = stablehlo.while(%i = %zero, %h = %x, %p = %w)
              : tensor<i32>, tensor<4xf32>, tensor<2x4xf32>
          cond {
            %n = stablehlo.constant dense<2> : tensor<i32>
            %0 = stablehlo.compare LT, %i, %n : (tensor<i32>, tensor<i32>) -> tensor<i1>
            stablehlo.return %0 : tensor<i1>
          } do {
            %one = stablehlo.constant dense<1> : tensor<i32>
            %0 = stablehlo.dynamic_slice %p, %i, %zero, sizes = [1, 4]
              : (tensor<2x4xf32>, tensor<i32>, tensor<i32>) -> tensor<1x4xf32>
            %1 = stablehlo.reshape %0 : (tensor<1x4xf32>) -> tensor<4xf32>
            %2 = stablehlo.dot_general %h, %1, contracting_dims = [0] x [0]
              : (tensor<4xf32>, tensor<4xf32>) -> tensor<f32>
            %3 = stablehlo.broadcast_in_dim %2, dims = [] : (tensor<f32>) -> tensor<4xf32>
            %4 = stablehlo.add %i, %one : tensor<i32>
            stablehlo.return %4, %3, %p : tensor<i32>, tensor<4xf32>, tensor<2x4xf32>
          }
          return %r#1 : tensor<4xf32>
        }"""
    said: list[str] = []
    module = passes.run(text, "split-loops", on_remark=lambda _, sentence: said.append(sentence))
    assert not any(a.slice for a in read_arguments(main_function(module)))
    assert len(said) == 1
    assert "the program shards its trips, dimension 0" in said[0]
