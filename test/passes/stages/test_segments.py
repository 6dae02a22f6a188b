"""Layers of several blocks that are computed again block by block."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, combinations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import alpa.passes
import alpa.runtime
from alpa.dialects import body, ir, main_function, mpmd, parse, stablehlo
from alpa.dialects.mpmd_types import Origin
from alpa.passes.analysis.graph import Graph
from alpa.passes.stages import segments
from alpa.passes.stages.remat import rematerialise
from alpa.runtime.reference import random_arguments

BLOCKS, WIDE = 4, 512


def step_text(blocks: int = BLOCKS, width: int = WIDE) -> str:
    """A training step: blocks that are narrow at their ends, and hold `width` columns inside."""

    def loss(params: list[tuple[jax.Array, jax.Array]], x: jax.Array) -> jax.Array:
        for wide, narrow in params:
            x = x + jnp.sin(jnp.tanh(x @ wide)) @ narrow
        return jnp.mean(x**2)

    def step(params: list[tuple[jax.Array, jax.Array]], x: jax.Array):
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    params = [(jnp.zeros((16, width)), jnp.zeros((width, 16)))] * blocks
    return jax.jit(step, donate_argnums=0).lower(params, jnp.zeros((64, 16))).as_text()


def part(module: ir.Module, name: str) -> ir.OpView:
    (found,) = [
        op
        for op in body(main_function(module)).operations
        if isinstance(op, mpmd.NamedComputationOp) and Origin.of(op).part == name
    ]
    return found


def most_wide(ops: Sequence[ir.OpView]) -> int:
    """The most values with wide rows that are alive at a time, in the order of the ops."""
    place = {op: n for n, op in enumerate(ops)}
    lives: list[tuple[int, int]] = []
    for op, made in place.items():
        for value in op.results:
            wide = value.type.shape == [64, WIDE] and not isinstance(op, stablehlo.BroadcastInDimOp)
            uses = [place[use.owner] for use in value.uses if use.owner in place]
            if wide and uses and not isinstance(op, stablehlo.OptimizationBarrierOp):
                lives.append((made, max(uses)))
    return max(sum(made <= now < last for made, last in lives) for now in range(len(ops)))


def remade(text: str) -> ir.Module:
    """One layer, rematerialised."""
    module = alpa.passes.run(text, "simplify-trivial-ops,layer-cluster{num-layers=1}")
    with module.context:
        rematerialise(main_function(module))
    return module


def test_one_block_is_alive_at_a_time() -> None:
    modules = [remade(step_text(blocks)) for blocks in (1, BLOCKS)]
    alone, whole = (list(body(part(module, "backward")).operations) for module in modules)
    assert most_wide(whole) == most_wide(alone)
    barriers = [op for op in whole if isinstance(op, stablehlo.OptimizationBarrierOp)]
    assert len(barriers) == BLOCKS - 1
    for barrier in barriers:
        # Something entered the block, and a cotangent: both are read through the barrier.
        assert len(barrier.results) >= 2
        assert all(list(result.uses) for result in barrier.results)


def test_a_layer_waits_for_the_layers_behind_it() -> None:
    """Otherwise a compiler may compute the first blocks of all layers of a stage at its start."""
    module = alpa.passes.run(step_text(), "simplify-trivial-ops,layer-cluster{num-layers=2}")
    with module.context:
        rematerialise(main_function(module))
    parts = {
        Origin.of(op): op
        for op in body(main_function(module)).operations
        if isinstance(op, mpmd.NamedComputationOp)
    }
    early, late = (parts[Origin(f"layer_{layer}", 1)] for layer in (0, 1))
    gate, *ops = body(early).operations
    assert isinstance(gate, stablehlo.OptimizationBarrierOp)
    outer = dict(zip(gate.operands, (early.operands[n] for n in numbers(gate)), strict=True))
    assert any(value.owner == late.operation for value in outer.values())
    # Without the barrier, what is computed again reads parameters only.
    first = next(op for op in ops if isinstance(op, stablehlo.TanhOp))
    read, waiting = set[ir.Value](), [*first.operands]
    while waiting:
        value = waiting.pop()
        if isinstance(value.owner, ir.Block):
            read.add(value)
        elif value.owner != gate.operation:
            waiting += value.owner.operands
    assert read
    assert {tuple(value.type.shape) for value in read} <= {(16, WIDE), (WIDE, 16)}


def numbers(op: ir.OpView) -> list[int]:
    """Those of the arguments of its block that are its operands."""
    return [ir.BlockArgument(value).arg_number for value in op.operands]


def test_what_crosses_between_blocks_is_kept() -> None:
    module = remade(step_text())
    kept = [tuple(result.type.shape) for result in part(module, "forward").results]
    assert kept.count((64, 16)) >= BLOCKS - 1
    assert (64, WIDE) not in kept


@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_numbers_stay_the_same(num_layers: int) -> None:
    text = step_text()
    arguments = random_arguments(parse(text), 0)
    plain, again = (
        alpa.runtime.load(
            alpa.passes.run(text, f"alpa{{cluster=cpu:1x1 num-layers={num_layers} remat={remat}}}")
        )(*arguments)
        for remat in ("none", "layer")
    )
    for one, other in zip(plain, again, strict=True):
        np.testing.assert_array_equal(np.asarray(one), np.asarray(other))


def test_what_the_backward_part_returns_unchanged_is_made_again() -> None:
    module = parse("""
    func.func @main(%x: tensor<8xf32> {alpa.role = "batch"}) -> (tensor<f32>, tensor<8xf32>) {
      %0:3 = mpmd.named_computation<"layer_0"(0)> (%x) (%a: tensor<8xf32>) {
        %zero = stablehlo.constant dense<0.0> : tensor<f32>
        %double = stablehlo.add %a, %a : tensor<8xf32>
        %root = stablehlo.tanh %a : tensor<8xf32>
        %sum = stablehlo.reduce(%root init: %zero) applies stablehlo.add across dimensions = [0]
          : (tensor<8xf32>, tensor<f32>) -> tensor<f32>
        mpmd.return %double, %root, %sum : tensor<8xf32>, tensor<8xf32>, tensor<f32>
      } : (tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>, tensor<f32>)
      %1:2 = mpmd.named_computation<"layer_0"(1)> (%0#0, %0#1)
          (%a: tensor<8xf32>, %b: tensor<8xf32>) {
        %twice = stablehlo.multiply %b, %b : tensor<8xf32>
        mpmd.return %a, %twice : tensor<8xf32>, tensor<8xf32>
      } : (tensor<8xf32>, tensor<8xf32>) -> (tensor<8xf32>, tensor<8xf32>)
      %2 = stablehlo.add %1#0, %1#1 : tensor<8xf32>
      return %0#2, %2 : tensor<f32>, tensor<8xf32>
    }""")
    with module.context:
        rematerialise(main_function(module))
    assert module.operation.verify()
    ops = [op.operation.name for op in body(part(module, "backward")).operations]
    made = ["stablehlo.tanh", "stablehlo.multiply", "stablehlo.add"]
    assert ops == [*made, "mpmd.return"]


def random_module(seed: int) -> ir.Module:
    """Calls that read one or two earlier values, of many sizes."""
    rng = np.random.default_rng(seed)
    types, names = ["tensor<8xf32>"], ["%x"]
    lines: list[str] = []
    for n in range(9):
        read = [int(i) for i in rng.choice(len(names), 2)][: int(rng.integers(1, 3))]
        made = f"tensor<{int(rng.choice([1, 2, 8, 16]))}xf32>"
        values, given = ", ".join(names[i] for i in read), ", ".join(types[i] for i in read)
        lines.append(f"%v{n} = stablehlo.custom_call @f({values}) : ({given}) -> {made}")
        names.append(f"%v{n}")
        types.append(made)
    text = f"func.func public @main(%x: {types[0]}) -> {types[-1]} {{"
    text += "\n".join(lines) + f"\nreturn {names[-1]} : {types[-1]}}}"
    return parse(text)


def bytes_of(graph: Graph, after: Sequence[int], wanted: set[int], weight: float) -> float:
    """What cuts behind some ops keep, and the largest segment, by definition."""
    made = range(graph.num_arguments, len(graph.values))
    kept = {
        v for v in made if any(graph.producer[v] <= o < u for o in after for u in graph.users[v])
    }
    segments_held = [0] * (len(after) + 1)
    for v in wanted - kept:
        segments_held[sum(o < graph.producer[v] for o in after)] += graph.bytes[v]
    return weight * sum(graph.bytes[v] for v in kept) + max(segments_held)


@pytest.mark.parametrize("weight", [0.5, 2])
@pytest.mark.parametrize("seed", range(20))
def test_no_cuts_at_narrow_places_take_less(seed: int, weight: float) -> None:
    module = random_module(seed)
    graph = Graph.of(body(main_function(module)))
    again = list(range(len(graph.ops)))
    rng = np.random.default_rng(seed)
    wanted = {int(v) for v in rng.choice(range(graph.num_arguments, len(graph.values)), 6)}
    cuts = segments.least_memory(graph, again, wanted, weight)

    def crossing(o: int) -> int:
        made = range(graph.num_arguments, len(graph.values))
        reads = (v for v in made if any(graph.producer[v] <= o < u for u in graph.users[v]))
        return sum(graph.bytes[v] for v in reads)

    across = [0, *map(crossing, again)]
    narrow = [o for o in again[:-1] if across[o] > across[o + 1] <= across[o + 2]]
    every = chain.from_iterable(combinations(narrow, n) for n in range(len(narrow) + 1))
    least = min(bytes_of(graph, after, wanted, weight) for after in every)
    assert bytes_of(graph, cuts.after, wanted, weight) == least
    assert cuts.kept == {
        v
        for v in range(graph.num_arguments, len(graph.values))
        if any(graph.producer[v] <= o < u for o in cuts.after for u in graph.users[v])
    }
