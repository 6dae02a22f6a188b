"""The inputs to break: programs, plans, clusters, roles, and a training step with checkpoints.

The training step has two layers on two meshes of two devices, and a state with several arrays of
one shape, which could be confused with one another.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

import alpa

Kind = Literal["program", "plan", "cluster", "roles"]

DEVICES = 4
SAVED = (1, 2)
"""the steps of the checkpoints"""
_SPLIT = re.compile(r"^// -----.*$", re.MULTILINE)

PROGRAM = """\
func.func public @main(%w: tensor<4x4xf32>, %x: tensor<2x4xf32>) -> tensor<2x4xf32> {
  %0 = stablehlo.dot_general %x, %w, contracting_dims = [1] x [0]
    : (tensor<2x4xf32>, tensor<4x4xf32>) -> tensor<2x4xf32>
  return %0 : tensor<2x4xf32>
}
"""
_CLUSTER = """\
hosts = 2
devices_per_host = 4
[device]
name = "X"
memory = "16GiB"
peak_flops = { f16 = 125e12, f32 = 15.7e12 }
memory_bandwidth = 900e9
[intra_host]
bandwidth = 150e9
latency = 5e-6
[inter_host]
bandwidth = 3.125e9
latency = 20e-6
"""
_ROLES = """\
[arguments]
"0" = "constant"
1 = { role = "batch", batch_dim = 0 }
[results]
"0" = "concat:0"
"""


@dataclass(frozen=True, kw_only=True)
class Seed:
    """A text to break, and its kind."""

    name: str
    text: str
    kind: Kind


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts, and a folder with checkpoints of the training step and of another one."""

    seeds: tuple[Seed, ...]
    checkpoints: Path

    def of(self, kind: Kind) -> list[Seed]:
        return [seed for seed in self.seeds if seed.kind == kind]


def read_seeds(paths: Sequence[Path]) -> list[Seed]:
    """Reads the texts of files, and of `.mlir` and `.toml` files under folders; adds one per kind.

    Raises:
        OSError, UnicodeDecodeError: one cannot be read.
    """
    files: list[Path] = []
    for path in paths:
        inside = [*path.rglob("*.mlir"), *path.rglob("*.toml")] if path.is_dir() else [path]
        files += sorted(inside)
    found = [
        Seed(name="a program", text=PROGRAM, kind="program"),
        Seed(name="a cluster", text=_CLUSTER, kind="cluster"),
        Seed(name="roles", text=_ROLES, kind="roles"),
    ]
    for file in files:
        text = file.read_text(encoding="utf-8")
        if file.suffix == ".toml":
            kind: Kind = "roles" if "[arguments]" in text else "cluster"
            found.append(Seed(name=file.name, text=text, kind=kind))
            continue
        for part in _SPLIT.split(text):
            found.append(Seed(name=file.name, text=part, kind="program"))
            if "mpmd.topology" in part:
                found.append(Seed(name=file.name, text=part, kind="plan"))
    return found


def make(folder: Path) -> None:
    """Writes the training step's plan and checkpoints into a folder.

    Call it in a process of its own: JAX and tensorstore start threads.
    """
    step = training_step()
    step.prepare(init(1), batch()).plan.save(folder / "plan.mlir")
    for number in SAVED:
        alpa.save(folder / "checkpoints", number, init(number))
        alpa.save(folder / "another", number, {"x": jnp.ones((4, 4)) * number})


def training_step(plan: Path | None = None) -> Any:
    """The parallelised training step, from a saved plan if there is one."""
    return alpa.parallelize(
        _train_step,
        cluster="cpu:2x2",
        mesh_shape="1x2",
        inter="equal-layers",
        donate_argnums=0,
        plan=plan,
    )


def init(seed: int) -> dict[str, Any]:
    """A state."""
    keys = jax.random.split(jax.random.key(seed))
    params = [{"w": jax.random.normal(key, (4, 4))} for key in keys]
    velocity = jax.tree.map(lambda w: seed * jnp.ones_like(w), params)
    return {"params": params, "velocity": velocity, "count": seed, "key": jax.random.key(seed)}


def batch() -> dict[str, np.ndarray]:
    """The arguments of the step besides its state."""
    return {"x": np.ones((8, 4), np.float32), "y": np.ones((8, 4), np.float32)}


def _train_step(state: Any, batch: Any) -> Any:
    def loss_fn(params: Any) -> Any:
        x = jnp.tanh(batch["x"] @ params[0]["w"])
        alpa.mark_layer_boundary()
        return jnp.mean((x @ params[1]["w"] - batch["y"]) ** 2)

    loss, grads = alpa.value_and_grad(loss_fn)(state["params"])
    velocity = jax.tree.map(lambda v, g: 0.9 * v + g, state["velocity"], grads)
    params = jax.tree.map(lambda p, v: p - 0.1 * v, state["params"], velocity)
    key, _ = jax.random.split(state["key"])
    return {
        "params": params,
        "velocity": velocity,
        "count": state["count"] + 1,
        "key": key,
    }, loss
