"""A custom call that is planned as sharded runs on shards, whether XLA can split it or not."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import alpa.passes
import alpa.runtime
from alpa.dialects import body, ir, parse, sdy, stablehlo, walk
from alpa.tools.check_plan import check

PIPELINE = "alpa{cluster=cpu:1x4 num-layers=1}"


def test_a_batch_of_matrices_is_factored_shard_by_shard():
    matrices = np.eye(16, dtype=np.float32) + np.zeros((64, 1, 1), np.float32)
    matrices += np.random.default_rng(0).random((64, 1, 1), np.float32)

    def function(x: Any) -> Any:
        return jnp.sin(jnp.linalg.cholesky(x))

    # With this attribute XLA would split the call itself; other custom calls lack it.
    text = re.sub(
        r"mhlo.frontend_attributes = {num_batch_dims[^}]*}, ",
        "",
        jax.jit(function).lower(matrices).as_text(),
    )
    assert "num_batch_dims" not in text
    planned = alpa.passes.run(text, f"{PIPELINE},export-stages")
    (result,) = alpa.runtime.load(str(planned), executor="local")(matrices)
    np.testing.assert_allclose(result, function(matrices), rtol=1e-5, atol=1e-6)
    (stage,) = check(parse(str(planned)), jax.devices())
    assert stage.real.collectives == ()
    (nested,) = (op for op in planned.body.operations if op.operation.name == "builtin.module")
    shapes = [
        list(op.results[0].type.shape)
        for op in walk(body(nested))
        if isinstance(op, stablehlo.CustomCallOp)
    ]
    assert shapes[0] == [16, 16, 16]


@pytest.mark.parametrize("name", ["eigh", "qr", "svd"])
def test_a_routine_whose_rule_was_lost_runs_on_shards(name: str) -> None:
    """A dump of HLO keeps the targets of calls, and no attributes of Shardy."""
    matrices = np.random.default_rng(0).normal(size=(64, 8, 8)).astype(np.float32)

    def function(x: Any) -> Any:
        values = {
            "eigh": lambda x: jnp.linalg.eigh(x)[0],
            "qr": lambda x: jnp.abs(jnp.linalg.qr(x)[1]),
            "svd": lambda x: jnp.linalg.svd(x)[1],
        }
        return jnp.sin(values[name](x))

    text = jax.jit(function).lower(matrices).as_text()
    text = re.sub(r"mhlo.frontend_attributes = {num_batch_dims[^}]*}, ", "", text)
    text, rules = re.subn(r", sdy.sharding_rule = #sdy.op_sharding_rule<[^>]*->[^>]*>", "", text)
    assert rules > 0
    planned = alpa.passes.run(text, f"{PIPELINE},export-stages")
    (result,) = alpa.runtime.load(str(planned), executor="local")(matrices)
    np.testing.assert_allclose(result, function(matrices), rtol=1e-4, atol=1e-5)
    calls = [op for op in walk(planned.body) if isinstance(op, stablehlo.CustomCallOp)]
    shapes = [list(op.results[0].type.shape) for op in calls if "lapack" in str(op)]
    assert [16, 8, 8] in shapes


def test_a_call_that_is_not_sharded_stays():
    text = """
      func.func public @main(%x: tensor<8x8xf32>) -> tensor<8x8xf32> {
        %0 = stablehlo.custom_call @kernel(%x) {sdy.sharding_rule =
            #sdy.op_sharding_rule<([i, j])->([k, l]) {i=8, j=8, k=8, l=8}, custom>}
          : (tensor<8x8xf32>) -> tensor<8x8xf32>
        return %0 : tensor<8x8xf32>
      }"""
    planned = alpa.passes.run(text, f"{PIPELINE},export-stages")
    (stage,) = (op for op in planned.body.operations if op.operation.name == "builtin.module")
    ops = list(walk(body(stage)))
    assert not any(isinstance(op, sdy.ManualComputationOp) for op in ops)
    (call,) = (op for op in ops if isinstance(op, stablehlo.CustomCallOp))
    assert call.call_target_name == ir.StringAttr.get("kernel", planned.context)


def test_custom_partitioning_runs_the_program_of_a_shard():
    shapes: list[tuple[int, ...]] = []

    @custom_partitioning
    def twice(x: jax.Array) -> jax.Array:
        return 2 * x

    def local(x: jax.Array) -> jax.Array:
        shapes.append(x.shape)
        return 2 * x

    twice.def_partition(
        partition=lambda mesh, given, _: (mesh, local, given[0].sharding, (given[0].sharding,)),
        sharding_rule="i j -> i j",
    )
    devices = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    step = jax.jit(twice, in_shardings=NamedSharding(devices, PartitionSpec("x")))
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    planned = alpa.passes.run(step.lower(x).as_text(), PIPELINE)
    (result,) = alpa.runtime.load(str(planned), executor="local")(x)
    np.testing.assert_array_equal(result, 2 * x)
    assert shapes == [(2, 8)]
    unknown = re.sub('backend_config = "[0-9]+"', 'backend_config = "0"', str(planned))
    with pytest.raises(jax.errors.JaxRuntimeError) as raised:
        alpa.runtime.load(unknown, executor="local")
    assert "runs only in the process that lowered it" in raised.value.__notes__[-1]
