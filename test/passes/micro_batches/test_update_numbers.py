"""The gradients of `x.at[i].set(y)` in micro-batches equal plain JAX's, or are refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa
from alpa.dialects import ir, parse
from alpa.passes.micro_batches.update_numbers import number_updates_by_sample
from alpa.runtime.planning import PlanningError

B = 8
RANDOM = np.random.default_rng(0)
W = RANDOM.normal(size=(6, 4)).astype(np.float32)
X = RANDOM.normal(size=(B, 6)).astype(np.float32)
I = RANDOM.integers(0, 4, B).astype(np.int32)  # noqa: E741
Places = Callable[[Any, Any], Any]
"""Writes to places of each row of an array [B, 4], which integers [B] choose."""


def of_each(write: Callable[[Any, Any], Any]) -> Places:
    return jax.vmap(write)


def two(i: Any, size: int = 4) -> Any:
    """Two places; they are the same for i = 0."""
    return jnp.stack([i, (2 * i) % size], -1)


def in_a_loop(h: Any, i: Any) -> Any:
    write = of_each(lambda r, i: r.at[two(i)].set(jnp.sin(r[:2])))
    return jax.lax.scan(lambda h, _: (write(h, i), None), h, length=2)[0]


EXACT: dict[str, Places] = {
    "one place of each row": lambda h, i: (
        jnp.ones_like(h).at[jnp.arange(h.shape[0]), i].set(h[:, 0])
    ),
    "two places of each row": lambda h, i: (
        jnp.ones_like(h).at[jnp.arange(h.shape[0])[:, None], two(i)].set(h[:, 2:])
    ),
    "under vmap": of_each(lambda r, i: r.at[two(i)].set(r[2:])),
    "always the same place": of_each(lambda r, i: r.at[jnp.stack([i, i])].set(r[2:])),
    "windows": of_each(lambda r, i: jnp.ones((4, 2)).at[two(i)].set(r.reshape(2, 2))),
    "out of bounds": of_each(lambda r, i: r.at[two(i, 6)].set(r[2:], mode="drop")),
    "clipped": of_each(lambda r, i: r.at[two(i, 6)].set(r[2:], mode="clip")),
    "in a loop": in_a_loop,
}


def step_of(places: Places) -> Callable[..., Any]:
    def loss(w: Any, x: Any, i: Any) -> Any:
        return (jnp.sin(places(jnp.tanh(x @ w), i)) ** 2).mean()

    def step(w: Any, x: Any, i: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(w, x, i)
        return w - 0.1 * gradient, value

    return step


def parallelize(step: Callable[..., Any], number: int) -> Any:
    return alpa.parallelize(step, cluster="cpu:1x2", num_micro_batches=number, batch_argnums=(1, 2))


@pytest.mark.parametrize("number", [2, B])
@pytest.mark.parametrize("name", EXACT)
def test_samples_that_write_to_places_of_their_own_are_exact(name: str, number: int) -> None:
    step = step_of(EXACT[name])
    planned = parallelize(step, number)
    for ours, theirs in zip(planned(W, X, I), jax.jit(step)(W, X, I), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=1e-6)
    assert planned.prepare(W, X, I).plan.micro_batches == "exact"


REFUSED: dict[str, tuple[Places, str]] = {
    "rows that samples share": (
        lambda h, i: jnp.zeros((4, 4)).at[i].set(h),
        "writes what several samples may write to one place",
    ),
    "one row for all": (
        lambda h, _: jnp.zeros((4, 4)).at[jnp.zeros(h.shape[0], int)].set(h) + h.sum(0),
        "writes what several samples may write to one place",
    ),
    "rows of the next sample": (
        lambda h, i: jnp.ones_like(h).at[(jnp.arange(h.shape[0]) + 1) % h.shape[0], i].set(h[:, 0]),
        "arange",
    ),
    "rows that other samples choose": (
        lambda h, i: jnp.ones_like(h).at[i, 0].set(h[:, 0]),
        "add computes with the size of the batch, such as a place among the samples",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_samples_that_may_write_to_the_same_places_are_refused(name: str) -> None:
    places, said = REFUSED[name]
    with pytest.raises(PlanningError, match=rf"\.py:\d+:\d+: error: .*{said}"):
        parallelize(step_of(places), 2)(W, X, I)


_NUMBERS = """
func.func public @main(%i: tensor<4x1xi32>) -> {result} {{
  %one = stablehlo.constant {one} : tensor<4xui32>
  %zero = stablehlo.constant {zero} : tensor<9xui32>
  %0 = stablehlo.iota dim = 0 {{alpa.whole = {{types = [tensor<8xui32>]}}}} : tensor<4xui32>
  %1 = stablehlo.add %0, %one {{alpa.whole = {{types = [tensor<8xui32>]}}}} : tensor<4xui32>
  %2 = "stablehlo.scatter"(%zero, %i, %1) <{{scatter_dimension_numbers =
      #stablehlo.scatter<inserted_window_dims = [0], scatter_dims_to_operand_dims = [0],
      index_vector_dim = 1>}}> ({{
    ^bb0(%old: tensor<ui32>, %new: tensor<ui32>):
      stablehlo.return %new : tensor<ui32>
    }}) : (tensor<9xui32>, tensor<4x1xi32>, tensor<4xui32>) -> tensor<9xui32>
  %3 = "stablehlo.gather"(%2, %i) <{{dimension_numbers =
      #stablehlo.gather<collapsed_slice_dims = [0], start_index_map = [0], index_vector_dim = 1>,
      slice_sizes = array<i64: 1>}}>
    : (tensor<9xui32>, tensor<4x1xi32>) -> tensor<4xui32>
  %4 = stablehlo.compare {direction}, %3, %{against}
    : (tensor<4xui32>, tensor<4xui32>) -> tensor<4xi1>
  return {returned} : {result}
}}"""
_PLAIN = {
    "one": "dense<1>",
    "zero": "dense<0>",
    "direction": "EQ",
    "against": "1",
    "returned": "%4",
    "result": "tensor<4xi1>",
}


@pytest.mark.parametrize(
    ("changed", "is_rewritten"),
    [
        ({}, True),
        ({"one": "dense<2>"}, False),
        ({"one": "{alpa.whole = {value = dense<0> : tensor<8xui32>}} dense<1>"}, False),
        ({"zero": "dense<1>"}, False),
        ({"direction": "LT"}, False),
        ({"against": "one"}, False),
        ({"returned": "%1", "result": "tensor<4xui32>"}, False),
        ({"returned": "%2", "result": "tensor<9xui32>"}, False),
        ({"returned": "%3", "result": "tensor<4xui32>"}, False),
    ],
)
def test_numbers_that_mean_more_than_equality_stay(
    changed: dict[str, str], is_rewritten: bool
) -> None:
    with ir.Context():
        module = parse(_NUMBERS.format(**(_PLAIN | changed)))
        before = str(module)
        (main,) = module.body.operations
        number_updates_by_sample(main)
        assert module.operation.verify()
        assert (str(module) != before) == is_rewritten
