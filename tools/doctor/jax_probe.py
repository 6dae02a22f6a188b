"""Prints the devices that JAX sees as JSON, then the seconds in which Alpa plans and runs a step.

`alpa doctor` runs it in a process of its own: JAX may crash there, and frees the GPU at the end.
"""

from __future__ import annotations

import json
import time

import jax
import jax.numpy as jnp
import numpy as np

import alpa
from alpa.tools.alpa_calibrate import nearest_preset


def main() -> None:
    """Runs the probe; fails if the step gives a wrong result."""
    devices = jax.devices()
    kinds = [device.device_kind for device in devices]
    print(json.dumps({"platform": devices[0].platform, "kinds": kinds}), flush=True)
    begin = time.perf_counter()
    cluster = f"{nearest_preset(devices[0])}:1x1"
    matrix = np.arange(16.0, dtype=np.float32).reshape(4, 4)
    step = alpa.parallelize(jnp.matmul, cluster=cluster, devices=devices[:1])
    np.testing.assert_allclose(step(matrix, matrix), matrix @ matrix, rtol=1e-6)
    print(json.dumps({"cluster": cluster, "seconds": time.perf_counter() - begin}), flush=True)


if __name__ == "__main__":
    main()
