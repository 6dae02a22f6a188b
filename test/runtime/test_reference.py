from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa.dialects import main_function, parse
from alpa.runtime.reference import compare, index_bounds, random_arguments, run_unplanned


def lower(function, *arguments, **options):
    return parse(jax.jit(function, **options).lower(*arguments).as_text())


def test_a_program_with_shardings_and_markers_runs_on_one_device() -> None:
    module = parse("""
      module attributes {mhlo.num_partitions = 4 : i32} {
        sdy.mesh @mesh = <["a"=4]>
        func.func public @forward(
            %x: tensor<8xi64> {sdy.sharding = #sdy.sharding<@mesh, [{"a"}]>,
                               jax.buffer_donor = true})
            -> tensor<8xi64> {
          %0 = stablehlo.add %x, %x
            {sdy.sharding = #sdy.sharding_per_value<[<@mesh, [{"a"}]>]>} : tensor<8xi64>
          %1 = sdy.sharding_constraint %0 <@mesh, [{"a"}]> : tensor<8xi64>
          %2 = stablehlo.custom_call @alpa.gradient(%1) : (tensor<8xi64>) -> tensor<8xi64>
          stablehlo.custom_call @alpa.layer_boundary() {has_side_effect = true} : () -> ()
          %3 = stablehlo.custom_call @Sharding(%2) {mhlo.sharding = "{devices=[4]0,1,2,3}"}
            : (tensor<8xi64>) -> tensor<8xi64>
          return %3 : tensor<8xi64>
        }
      }""")
    before = str(module)
    (result,) = run_unplanned(module, [np.arange(8)])
    assert result.dtype == np.int64
    np.testing.assert_array_equal(np.asarray(result), 2 * np.arange(8))
    assert str(module) == before


def take(table, i):
    return table[i + 0]


def one_hot(table, i):
    return jax.nn.one_hot(i, 7)


def window(table, i):
    return jax.lax.dynamic_slice(table, (i[0], 0), (4, 2))


def write(table, i):
    return jax.lax.dynamic_update_slice(table, table[:3], (i[0], jnp.int32(0)))


def scatter(table, i):
    return table.at[jnp.concatenate([i, i])].add(1.0)


def loop(table, i):
    return jax.lax.fori_loop(0, 3, lambda _, s: (s[0], s[1] + table[s[0]].sum()), (i, 0.0))


def nothing(table, i):
    return table * i[0]


@pytest.mark.parametrize(
    ("function", "bound"),
    [(take, 11), (one_hot, 7), (window, 8), (write, 9), (scatter, 11), (loop, 11), (nothing, None)],
)
def test_integers_stay_in_range_for_what_they_index(function, bound) -> None:
    module = lower(function, np.zeros((11, 2), np.float32), np.zeros(100, np.int32))
    index = main_function(module).entry_block.arguments[-1]
    assert min(index_bounds(index), default=None) == bound
    values = random_arguments(module, 0)[-1]
    assert values.min() == 0
    assert values.max() == (2 if bound is None else bound) - 1
    assert random_arguments(module, 0, integer_range=(5, 6))[-1].max() == 5


def test_random_arguments_are_small_repeatable_and_positive_below_a_root() -> None:
    def adam(variance, weight, keep):
        return weight / (jnp.sqrt(0.9 * variance + 0.1) + 1e-8), keep

    given = np.zeros(50, np.float32), np.zeros(50, jnp.bfloat16), np.zeros(50, bool)
    module = lower(adam, *given, keep_unused=True)
    first, again = random_arguments(module, 3), random_arguments(module, 3)
    for a, b, like in zip(first, again, given, strict=True):
        np.testing.assert_array_equal(a, b)
        assert a.dtype == like.dtype
    assert first[0].min() >= 0.1
    assert first[1].min() < 0
    assert set(first[2].tolist()) == {False, True}


def test_random_arguments_keep_a_program_well_conditioned() -> None:
    """A ReLU below zero would make all activations equal; a divisor must not vanish."""

    def bounded(x, most, divisor, ceiling, scale, variance):
        y = jax.lax.clamp(jnp.float32(0), x, most) / divisor
        return jnp.minimum(y, ceiling) * scale / jnp.sqrt(variance + 1e-5)

    array, number = np.zeros(50, np.float32), np.float32(0)
    module = lower(bounded, array, number, array, number, array, array)
    for seed in range(5):
        x, most, divisor, ceiling, scale, variance = random_arguments(module, seed)
        assert x.min() < 0
        assert scale.min() < 0
        assert min(most, divisor.min(), ceiling) >= 1
        assert variance.min() >= 0.1


def test_how_equal_is_equal() -> None:
    reference = np.array([1.0, -100.0], np.float32)
    assert compare([reference + 0.009], [reference])[0].ok
    row = compare([reference + 0.02], [reference])[0]
    assert not row.ok
    assert row.error == pytest.approx(0.02, rel=1e-3)
    assert row.bound == pytest.approx(0.01)
    half = reference.astype(jnp.bfloat16)
    assert compare([half.astype(np.float32) + 1.5], [half])[0].ok
    assert not compare([half.astype(np.float32) + 2.5], [half])[0].ok
    assert compare([reference + 1.5], [reference], dtype="bfloat16")[0].ok
    assert [row.ok for row in compare([[1, 2], [1, 3]], [[1, 2], [1, 2]])] == [True, False]
    assert not compare([[np.nan]], [[1.0]])[0].ok
    with pytest.raises(ValueError, match=r"result 0 has shape \(2,\), its reference \(1,\)"):
        compare([[1.0, 2.0]], [[1.0]])
