"""Few bytes or few collectives: which is faster depends on what a collective's start costs.

One MoE layer of a decoder, with one token of each of 128 sequences in 8 groups, on 8 devices whose
memory makes them split the experts. Tokens and sums are on all devices, as tensor-parallel
attention leaves and reads them. With GShard's masks (Lepikhin et al., 2020, algorithm 1) there are
two ways. Each device may add up what its own experts say of all tokens, and one all-reduce adds up
these sums. Or an all-to-all gives each device what all experts say of one group, and an all-gather
puts the groups' sums together: fewer bytes in twice as many collectives.
"""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from alpa import passes
from alpa.dialects import main_function, parse
from alpa.dialects.plan import read_solver_reports
from alpa.passes.plan.report import PlanReport, StageReport
from alpa.runtime.compare_programs import compare_programs

GROUPS, TOKENS, EXPERTS, WIDTH, HIDDEN = 8, 16, 8, 2048, 256
CAPACITY = 2 * TOKENS // EXPERTS
WEIGHTS = 2 * 4 * EXPERTS * WIDTH * HIDDEN
"""bytes of all experts"""

CLUSTER = f"""
hosts = 1
devices_per_host = 8
[device]
name = "device"
memory = "{WEIGHTS // 3}B"
peak_flops = {{{{ f32 = 20e12 }}}}
memory_bandwidth = 1e12
[intra_host]
bandwidth = 25e9
latency = {{latency}}
[intra_host.collectives]
all-reduce.8 = {{{{ alpha = {{latency}}, beta = {25e9 * 8 / 7 / 2} }}}}
all-gather.8 = {{{{ alpha = {{latency}}, beta = {25e9 * 8 / 7} }}}}
reduce-scatter.8 = {{{{ alpha = {{latency}}, beta = {25e9 * 8 / 7} }}}}
all-to-all.8 = {{{{ alpha = {{latency}}, beta = {25e9 * 8 / 7} }}}}
[inter_host]
bandwidth = 5e9
latency = 5e-5
"""


def layer(
    x: jax.Array, dispatch: jax.Array, combine: jax.Array, up: jax.Array, down: jax.Array
) -> jax.Array:
    """The experts' sums for tokens [G, S, D], with masks [G, S, E, C] of who sees which token."""
    tokens = jnp.einsum("gsd,gsec->gecd", x, dispatch)
    hidden = jax.nn.relu(jnp.einsum("gecd,edf->gecf", tokens, up))
    return jnp.einsum("gecd,gsec->gsd", jnp.einsum("gecf,efd->gecd", hidden, down), combine)


def program() -> str:
    mask = (GROUPS, TOKENS, EXPERTS, CAPACITY)
    shapes = (
        (GROUPS, TOKENS, WIDTH), mask, mask, (EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH),
    )  # fmt: skip
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:8])
    whole = NamedSharding(mesh, PartitionSpec())
    free = [None] * 4
    jitted = jax.jit(layer, in_shardings=(whole, *free), out_shardings=whole)
    return jitted.lower(*arguments).as_text()


def planned(latency: float, folder: Path) -> StageReport:
    """The only stage of a plan that is proven, and computes what the program computes."""
    cluster = folder / "cluster.toml"
    cluster.write_text(CLUSTER.format(latency=latency), encoding="utf-8")
    module = passes.run(program(), f"alpa{{cluster={cluster}}}")
    (report,) = read_solver_reports(main_function(module))
    assert report.status == "optimal"
    with module.context:
        (stage,) = PlanReport.of(module).stages
    assert not compare_programs(parse(program()), module).is_fault
    return stage


SENT = 7 / 8
"""of what a device holds, in a collective of eight"""
SUMS = 4 * GROUPS * TOKENS * WIDTH
"""bytes of the layer's result"""
SAID = 4 * GROUPS * EXPERTS * CAPACITY * WIDTH
"""bytes of what all experts say of all tokens"""


@pytest.mark.parametrize(
    ("latency", "collectives", "sent"),
    [(1e-6, 2, SENT * (SAID / 8 + SUMS)), (50e-6, 1, 2 * SENT * SUMS)],
)
def test_the_cheaper_of_two_strategies_flips_with_the_latency(
    latency: float, collectives: int, sent: float, tmp_path: Path
) -> None:
    """Bytes and collectives that a device sends, by hand, are what the plan's table says."""
    stage = planned(latency, tmp_path)
    assert stage.num_collectives == collectives
    assert stage.sent_bytes == sent
