"""A program's own collectives are read as axes of the mesh, and run as XLA runs them."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import alpa.passes
from alpa.dialects import ir, parse, sdy, walk
from alpa.passes.cost.cluster import Cluster
from alpa.passes.cost.collectives import LogicalMesh
from alpa.passes.sharding.manual import written_collectives

SIZES = (2, 2, 2)
NAMES = ("x", "y", "z")


def logical() -> LogicalMesh:
    return LogicalMesh.of(Cluster.parse("cpu:1x8"), 1, 8, SIZES, NAMES)


def lowered(local, out: PartitionSpec) -> str:
    mesh = jax.make_mesh(SIZES, NAMES, axis_types=(AxisType.Auto,) * 3)
    spec = PartitionSpec(NAMES)
    function = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=out, check_vma=False)
    return jax.jit(function).lower(np.ones((64, 8), np.float32)).as_text()


def manual(module: ir.Module) -> sdy.ManualComputationOp:
    (op,) = (op for op in walk(module.body) if isinstance(op, sdy.ManualComputationOp))
    return op


# A shard has 8 x 8 floats, 256 bytes.
@pytest.mark.parametrize(
    ("local", "out", "kind", "axes", "size"),
    [
        (lambda x: jax.lax.psum(x, "y"), ("x", "z"), "all-reduce", (1,), 256),
        (lambda x: jax.lax.psum(x, ("x", "z")), ("y",), "all-reduce", (0, 2), 256),
        (lambda x: jax.lax.all_gather(x, "z"), ("x", "y"), "all-gather", (2,), 512),
        (
            lambda x: jax.lax.psum_scatter(x, ("y", "z"), tiled=True),
            ("x",),
            "reduce-scatter",
            (1, 2),
            256,
        ),
        (
            lambda x: jax.lax.all_to_all(x, "x", 1, 0, tiled=True),
            NAMES,
            "all-to-all",
            (0,),
            256,
        ),
        (
            lambda x: jax.lax.ppermute(x, "y", [(0, 1), (1, 0)]),
            NAMES,
            "collective-permute",
            (1,),
            256,
        ),
    ],
)
def test_groups_are_axes(local, out, kind, axes, size):
    module = parse(lowered(local, PartitionSpec(out)))
    (found,) = written_collectives(manual(module), logical())
    assert (found.kind, found.axes, found.bytes, found.times) == (kind, axes, size, 1)
    assert found.seconds(logical()) > 0


def test_a_loop_counts_as_often_as_it_runs():
    def local(x):
        return jax.lax.fori_loop(0, 5, lambda _, y: jax.lax.psum(y, "x") / 2, x)

    module = alpa.passes.run(lowered(local, PartitionSpec(NAMES)), "simplify-trivial-ops")
    (found,) = written_collectives(manual(module), logical())
    assert found.times == 5


def test_groups_that_are_no_axes():
    text = """
      module {
        sdy.mesh @m = <["x"=2, "y"=2, "z"=2]>
        func.func public @main(%x: tensor<8xf32>) -> tensor<8xf32> {
          %0 = sdy.manual_computation(%x) in_shardings=[<@m, [{"x"}]>]
              out_shardings=[<@m, [{"x"}]>] manual_axes={"x", "y", "z"} (%a: tensor<4xf32>) {
            %1 = "stablehlo.all_reduce"(%a) <{
                replica_groups = dense<[[0, 3], [1, 2], [4, 7], [5, 6]]> : tensor<4x2xi64>}> ({
              ^bb0(%p: tensor<f32>, %q: tensor<f32>):
                %s = stablehlo.add %p, %q : tensor<f32>
                stablehlo.return %s : tensor<f32>
            }) : (tensor<4xf32>) -> tensor<4xf32>
            sdy.return %1 : tensor<4xf32>
          } : (tensor<8xf32>) -> tensor<8xf32>
          return %0 : tensor<8xf32>
        }
      }"""
    with pytest.raises(ir.MLIRError, match=r"groups \[\[0, 3\].* are not the devices along axes"):
        alpa.passes.run(text, "alpa{cluster=cpu:1x8 num-layers=1}")
