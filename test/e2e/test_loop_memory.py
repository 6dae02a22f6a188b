"""Memory of programs with loops: what the search and the prediction count, and XLA's peak."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from alpa import passes, runtime
from alpa.dialects import ir, main_function
from alpa.dialects.plan import Plan
from alpa.runtime.ahead_of_time.module_check import ModuleCheck
from alpa.tools.check_plan import check

WIDTH, ROWS, LAYERS, SAMPLES, LENGTH = 512, 64, 8, 64, 64
STACK = 4 * LAYERS * WIDTH * WIDTH
SMALLER = STACK / 4 * 1.3
"""Bytes that the stack of weights only fits into if it is cut over all four devices"""


def f32(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def scan(weights, x):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, weights)[0]


def residual(weights, x):
    return jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), x, weights)[0]


def stacked(weights, x):
    return jax.lax.scan(lambda h, w: ((out := jnp.tanh(h @ w)), out), x, weights)


def masked(weights, x):
    mask = jnp.full(x.shape, -1e9)
    return jax.lax.scan(lambda h, w: (jnp.where(h > 0.5, jnp.tanh(h @ w), mask), None), x, weights)[
        0
    ]


def causal(weights, x):
    rows, columns = (jnp.arange(size) for size in x.shape)
    mask = rows[:, None] >= columns[None]
    return jax.lax.scan(lambda h, w: (jnp.where(mask, jnp.tanh(h @ w), 0), None), x, weights)[0]


def decode(cache, weight, x):
    """Writes a row of the cache in each trip, and reads all of it."""

    def token(number, state):
        cache, x = state
        cache = jax.lax.dynamic_update_slice(cache, (x @ weight)[:, None], (0, number, 0))
        scores = jnp.einsum("bd,btd->bt", x, cache)
        return cache, jnp.einsum("bt,btd->bd", jax.nn.softmax(scores), cache)

    return jax.lax.fori_loop(0, cache.shape[1], token, (cache, x))


DECODE = (f32(SAMPLES, LENGTH, WIDTH), f32(WIDTH, WIDTH), f32(SAMPLES, WIDTH))
LAYERED = (f32(LAYERS, WIDTH, WIDTH), f32(ROWS, WIDTH))


def planned(program, arguments, cluster, donate: tuple[int, ...] = ()) -> ir.Module:
    text = jax.jit(program, donate_argnums=donate).lower(*arguments).as_text()
    return passes.run(text, f"alpa{{cluster={cluster} num-layers=1 num-stages=1}}")


def counted(module: ir.Module) -> tuple[int, ModuleCheck]:
    """The peak that the search counts, and the module of the whole program."""
    plan = Plan.read(main_function(module))
    assert plan is not None
    (peak,) = plan.predicted_peak_bytes
    (found,) = check(module, jax.devices())
    return peak, found


@pytest.mark.parametrize("memory", ["1GiB", f"{round(SMALLER)}B"])
@pytest.mark.parametrize("program", [scan, residual])
def test_a_loop_over_layers_is_counted_as_xla_does(small_cluster, program, memory):
    peak, found = counted(planned(program, LAYERED, small_cluster(memory)))
    whole = found.real.peak >= STACK
    assert whole == (memory == "1GiB")
    assert peak == pytest.approx(found.real.peak, rel=0.05)
    assert found.memory.peak == pytest.approx(found.real.peak, rel=0.05)


@pytest.mark.parametrize("program", [masked, causal])
def test_what_a_loop_only_reads_is_written_before_it(small_cluster, program):
    """And in shards, though the search is not short of memory."""
    x = f32(2 * WIDTH, WIDTH)
    peak, found = counted(planned(program, (LAYERED[0], x), small_cluster()))
    assert peak == pytest.approx(found.real.peak, rel=0.05)
    assert found.memory.peak == pytest.approx(found.real.peak, rel=0.05)
    assert found.real.temporaries < 4 * WIDTH * WIDTH + 4 * (4 * 2 * WIDTH * WIDTH / 4)


def test_a_loop_fills_its_result(small_cluster):
    peak, found = counted(planned(stacked, LAYERED, small_cluster()))
    assert peak == pytest.approx(found.real.peak, rel=0.05)
    assert found.memory.peak == pytest.approx(found.real.peak, rel=0.05)


@pytest.mark.parametrize("donate", [(), (0,)])
def test_a_decoder_with_a_cache_is_planned_within_its_compiled_peak(small_cluster, donate):
    peak, found = counted(planned(decode, DECODE, small_cluster(), donate))
    assert found.memory.peak == pytest.approx(found.real.peak, rel=0.05)
    assert peak <= 1.05 * found.real.peak
    cache = 4 * SAMPLES * LENGTH * WIDTH / 4
    assert (found.real.aliased >= cache) == bool(donate)
    limit = round(1.05 * found.real.peak)
    again, fitting = counted(planned(decode, DECODE, small_cluster(f"{limit}B"), donate))
    assert fitting.real.peak <= limit
    assert again <= limit


def test_a_decoder_extends_its_cache_in_place(small_cluster):
    module = planned(decode, DECODE, small_cluster(), (0,))
    step = runtime.load(module, executor="local")
    keys = jax.random.split(jax.random.key(0), 3)
    cache, weight, x = (
        jax.random.normal(key, it.shape, it.dtype) / 16
        for key, it in zip(keys, DECODE, strict=True)
    )
    wanted = (cache, x)
    found = (jnp.copy(cache), x)
    for _ in range(2):
        wanted = jax.jit(decode)(wanted[0], weight, wanted[1])
        given, _ = found
        found = step(given, weight, found[1])
    assert given.is_deleted()
    for ours, theirs in zip(found, wanted, strict=True):
        theirs = np.asarray(theirs)
        assert np.abs(np.asarray(ours) - theirs).max() <= 1e-4 * np.abs(theirs).max()
