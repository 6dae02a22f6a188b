"""Plans of unsharded programs against an expert's shardings, both as XLA compiles them."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from alpa import passes
from alpa.dialects import ir, main_function, parse, separate
from alpa.dialects.plan import read_solver_reports
from alpa.runtime.pjrt import compile_module
from alpa.runtime.truth import truth

DEVICES = 2
CLUSTER = """
hosts = 1
devices_per_host = 2
[device]
name = "H100"
memory = "{memory}B"
peak_flops = {{ f32 = 60e12 }}
memory_bandwidth = 3.35e12
[intra_host]
bandwidth = 450e9
latency = 2e-6
[inter_host]
bandwidth = 50e9
latency = 5e-6
"""
WHOLE, ROWS, COLUMNS = PartitionSpec(), PartitionSpec("m", None), PartitionSpec(None, "m")


def gated(x, gate, up, down):
    """Llama's MLP, gate and up split by columns, down by rows: one all-reduce at the end."""
    return (jax.nn.silu(x @ gate) * (x @ up)) @ down


def attention(x, q, k, v, out):
    """Heads are split: q, k and v by columns, out by rows."""

    def heads(y):
        return y.reshape(*y.shape[:2], 8, 64).transpose(0, 2, 1, 3)

    scores = jax.nn.softmax(heads(x @ q) @ heads(x @ k).transpose(0, 1, 3, 2))
    return (scores @ heads(x @ v)).transpose(0, 2, 1, 3).reshape(x.shape) @ out


def of(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


PROGRAMS = {
    "mlp": (
        gated,
        (of(1, 1024, 512), of(512, 2048), of(512, 2048), of(2048, 512)),
        (WHOLE, COLUMNS, COLUMNS, ROWS),
    ),
    "attention": (
        attention,
        (of(2, 128, 512), *[of(512, 512)] * 4),
        (WHOLE, COLUMNS, COLUMNS, COLUMNS, ROWS),
    ),
}


@dataclass(frozen=True)
class Compiled:
    """The work of one device: the bytes that it sends and holds, and its FLOPs."""

    sent: float
    peak: int
    flops: float

    @classmethod
    def of(cls, module: ir.Module) -> Compiled:
        devices = jax.devices()[:DEVICES]
        real = truth(module, devices)
        analysis = compile_module(module, devices, []).executable.cost_analysis()
        flops = (analysis[0] if isinstance(analysis, list) else analysis)["flops"]
        return cls(sum(c.sent for c in real.collectives), real.peak, flops)


def planned(text: str, memory: int, tmp_path) -> tuple[Compiled, int]:
    """A plan as XLA compiles it, and the bytes per device that it was solved with."""
    cluster = tmp_path / "cluster.toml"
    cluster.write_text(CLUSTER.format(memory=memory))
    module = passes.run(text, f"alpa{{cluster={cluster} num-layers=1}},export-stages")
    (report,) = read_solver_reports(main_function(module))
    (nested,) = (op for op in module.body.operations if op.operation.name == "builtin.module")
    return Compiled.of(separate(nested)), report.peak_bytes


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_plan_costs_no_more_than_the_expert(name, tmp_path):
    function, arguments, specs = PROGRAMS[name]
    mesh = jax.make_mesh(
        (DEVICES,), ("m",), axis_types=(AxisType.Auto,), devices=jax.devices()[:DEVICES]
    )
    shardings = [NamedSharding(mesh, spec) for spec in specs]
    by_expert = jax.jit(function, in_shardings=shardings).lower(*arguments).as_text()
    unsharded = jax.jit(function).lower(*arguments).as_text()
    expert = Compiled.of(parse(by_expert))
    assert expert.sent > 0
    free, peak = planned(unsharded, 2**35, tmp_path)
    assert free.peak <= peak
    assert free.sent <= expert.sent
    assert free.flops <= expert.flops * 1.01
    # With the memory of the expert's plan, the plan is no worse in any figure.
    tight, peak = planned(unsharded, expert.peak, tmp_path)
    assert tight.peak <= peak <= expert.peak
    assert tight.sent <= expert.sent
    assert tight.flops <= expert.flops * 1.01
