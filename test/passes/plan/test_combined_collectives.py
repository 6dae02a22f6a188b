"""Collectives that XLA for GPUs joins, by its rule, and in a plan."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from alpa import passes
from alpa.dialects import ir
from alpa.passes.plan.combined_collectives import combined_counts
from alpa.passes.plan.predicted_collectives import Collective, Placed
from alpa.passes.plan.report import PlanReport
from alpa.runtime.ahead_of_time import compilation
from alpa.runtime.ahead_of_time.verification import verify_plan

MIB = 2**20


def gather(mib: int, axis: str = "x", *, joins: bool = True, waits_for: int = 0) -> Placed:
    one = Collective(kind="all-gather", axes=(axis,), devices=8, bytes=mib * MIB, count=1)
    return Placed(one, ("all-gather", axis) if joins else None, waits_for)


@pytest.mark.parametrize(
    ("collectives", "left"),
    [
        ([gather(4)] * 7, 1),
        ([gather(4)] * 8, 2),
        ([gather(40)] * 3, 3),
        ([gather(16), gather(16), gather(12)], 2),
        ([gather(16), gather(12), gather(16)], 2),
        ([gather(16), gather(20), gather(12)], 3),  # in order: the last would fit into the first
        ([gather(4), gather(4, "y"), gather(4), gather(4, "y")], 2),
        ([gather(4, joins=False)] * 5, 5),
        # The third waits for the first, the fourth only for the second.
        ([gather(4), gather(4), gather(4, waits_for=0b1), gather(4, waits_for=0b10)], 2),
        ([gather(4), gather(4), gather(4, waits_for=0b1), gather(4, waits_for=0b100)], 3),
        ([gather(4), gather(4, "y"), gather(4, waits_for=0b10)], 2),
    ],
)
def test_results_of_30_mib_are_joined_in_order(collectives: list[Placed], left: int) -> None:
    assert combined_counts(collectives) == {"all-gather": left}


def test_of_a_reduce_scatter_the_result_counts_not_the_operand() -> None:
    one = Collective(kind="reduce-scatter", axes=("x",), devices=8, bytes=80 * MIB, count=1)
    assert combined_counts([Placed(one, ("x",))] * 6) == {"reduce-scatter": 2}


def test_a_loop_runs_a_collective_as_often_as_it_turns() -> None:
    one = Collective(kind="all-reduce", axes=("x",), devices=8, bytes=4, count=6)
    assert combined_counts([Placed(one, ("x",)), Placed(one, ("x",))]) == {"all-reduce": 6}


LAYERS, WIDTH = 8, 256


def planned(cluster: str, intra: str) -> ir.Module:
    """A step of gradient descent on a chain of layers, one mesh and one micro-batch."""

    def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        def loss(weights: list[jax.Array]) -> jax.Array:
            h = x
            for w in weights:
                h = jnp.tanh(h @ w)
            return jnp.mean(h**2)

        value, gradients = jax.value_and_grad(loss)(weights)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((1024, WIDTH), jnp.float32)
    text = jax.jit(step, donate_argnums=(0,)).lower(weights, x).as_text()
    options = f"cluster={cluster} num-layers=1 num-stages=1 mesh-rank=1 intra={intra}"
    return passes.run(text, f"alpa{{{options}}}")


def numbers(cluster: str, intra: str) -> tuple[int | None, int | None]:
    """The collectives of a plan, and how many are left of them."""
    (stage,) = PlanReport.of(planned(cluster, intra)).stages
    return stage.num_collectives, stage.num_combined


def test_on_gpus_gathers_of_weights_and_sums_of_gradients_are_joined() -> None:
    # Weights are gathered forward and, but for the first, backward; the loss has a sum.
    assert numbers("h100:1x8", "zero3") == (3 * LAYERS, 4)
    # All gradients have one sum, the loss of the forward fragment another one.
    assert numbers("h100:1x8", "data-parallel") == (LAYERS + 1, 2)


def test_of_virtual_and_ideal_devices_each_collective_is_alone() -> None:
    assert numbers("cpu:1x8", "data-parallel") == (LAYERS + 1, LAYERS + 1)
    assert numbers("h100:1x8,ideal", "data-parallel") == (LAYERS + 1, LAYERS + 1)


@pytest.mark.skipif(compilation.missing_packages() != [], reason="needs the extra gpu-aot")
@pytest.mark.parametrize("intra", ["zero2", "zero3", "data-parallel"])
def test_xla_for_gpus_makes_as_many(intra: str) -> None:
    found = verify_plan(planned("h100:1x8", intra)).modules
    pairs = [pair for module in found for pair in module.counts.values()]
    assert pairs
    assert all(predicted == real for predicted, real in pairs)
