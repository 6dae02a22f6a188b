"""Run by `test_mesh_processes.py`, once for each process of a mesh of two processes."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import jax
import numpy as np
from jax._src import xla_bridge
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from alpa.dialects import parse
from alpa.runtime.compile_cache import CompileCache
from alpa.runtime.pjrt import compile_module
from alpa.runtime.workers.cluster import Post
from alpa.runtime.workers.mesh_processes import join_mesh

SUM = """
module {
  sdy.mesh @m = <["a"=4]>
  func.func public @main(%x: tensor<8xf32> {sdy.sharding = #sdy.sharding<@m, [{"a"}]>})
      -> (tensor<f32> {sdy.sharding = #sdy.sharding<@m, []>}) {
    %zero = stablehlo.constant dense<0.0> : tensor<f32>
    %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0]
      : (tensor<8xf32>, tensor<f32>) -> tensor<f32>
    return %0 : tensor<f32>
  }
}
"""


def main(rank: int, coordinator: str, file: Path) -> None:
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", 2)
    devices = ((0, 1), (2, 3))[rank]
    post = Post(
        rank=rank, mesh="mesh_0", host=rank, devices=devices, process=rank, processes=2, core=0
    )  # fmt: skip
    join_mesh(post, "cpu", coordinator, 60)
    mesh = Mesh(np.array(jax.devices()), ("a",), axis_types=(AxisType.Auto,))
    results = [((), NamedSharding(mesh, PartitionSpec()))]
    if rank == 0:
        cache = CompileCache(directory=file.with_name("cache"))
        for _ in range(2):  # What is read can be given to the other process, too.
            compiled = compile_module(parse(SUM), jax.devices(), results, cache=cache)
        assert compiled.read_from is not None
        unfinished = file.with_suffix(".part")
        unfinished.write_bytes(compiled.serialised())
        unfinished.rename(file)
    else:
        deadline = time.monotonic() + 60
        while not file.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        given = file.read_bytes()
        compiled = compile_module(parse(SUM), jax.devices(), results, executable=given)
    x = np.arange(8, dtype=np.float32)
    sharding = NamedSharding(mesh, PartitionSpec("a"))
    array = jax.make_array_from_callback(x.shape, sharding, lambda at: x[at])
    (total,) = compiled([array])
    found = {
        "devices": len(jax.devices()),
        "local": len(jax.local_devices()),
        "visible": xla_bridge.CUDA_VISIBLE_DEVICES.value,
        "total": float(total.addressable_data(0)),
    }
    sys.stdout.write(f"{json.dumps(found)}\n")
    sys.stdout.flush()
    os._exit(0)  # JAX's farewell of one process waits for the other


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
